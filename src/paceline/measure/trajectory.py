"""Measures the checkpoints of training runs on the same target-generated text.

Paper: Goel et al. 2024, section 3: tau and MBSU at gamma 3 and 5 over checkpoints, compared with
the initial draft, on tasks similar to the training text and on others.
"""

# B batch, T positions, D hidden, V vocabulary
from __future__ import annotations

import json
import os
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import torch
from pydantic import Field, ValidationError, model_validator

from paceline.config import HomePath, Options, StrictModel, describe, fields_of, read_json
from paceline.core.sampling import SamplingParams
from paceline.data import CorpusConfig, read_prompts
from paceline.data.input_checks import InputChecks, checked
from paceline.errors import UnsupportedModelError, UsageError
from paceline.measure.acceptance import PairTexts, score_texts
from paceline.measure.measurement import ScoredTexts
from paceline.measure.pair import load_beside, sample_texts
from paceline.measure.prompt_checks import check_task
from paceline.models import load_model, prepare_for_decoding
from paceline.models.contract import decoder_contexts, decoder_prompt_of, pad
from paceline.models.loading import fingerprint, tokenizer_of
from paceline.progress import silent
from paceline.records import (
    RunDirectory,
    append_jsonl,
    atomic_write_text,
    read_jsonl,
)
from paceline.results.figures import FIGURES
from paceline.results.row import Row, Source, as_values, rounded
from paceline.tasks import TaskChoice
from paceline.tasks.base import ExamplePrompts, example_prompts
from paceline.train.checkpoint import saved_model

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from paceline.core.bootstrap import Interval
    from paceline.models import HfModel
    from paceline.models.contract import Model, Tokenizer
    from paceline.progress import Progress
    from paceline.results.row import Label

    Case = tuple[str, SamplingParams]  # a task, and how to sample from it
    Key = tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]

START = "start"
"""Label of an initial draft."""
_LOOSE = SamplingParams(temperature=0.6, top_p=0.9)
_MOST_BYTES = 2 * 10**9  # of hidden states


class Task(CorpusConfig):
    """Prompts, and their maximum length; None: `max_prompt_tokens` of the configuration."""

    max_prompt_tokens: int | None = Field(default=None, ge=1)


class TrajectoryConfig(StrictModel):
    """Configuration of `trajectory`.

    Attributes:
        target: Target model: directory, .gguf file or hub name.
        runs: Run directories of `pretrain` or `align`, in the order of training. The initial draft,
            the checkpoints and the final draft of each run are measured.
        tasks: Prompts by task name; include a task that differs from the training text.
        scored_tasks: Tasks with a metric by name. Their examples are prompts too, of any length,
            and each draft's own answers to them are scored.
        samplings: Sampling parameters to measure with.
        gammas: Numbers of draft tokens per block, for tau and MBSU.
        num_prompts: Maximum number of prompts per task, after `skip_prompts`.
        output: Output directory; resumes if it exists.
    """

    target: str = Field(min_length=1)
    runs: Annotated[tuple[HomePath, ...], Options(run="")] = Field(min_length=1)
    tasks: dict[str, Task] = Field(default_factory=dict)
    scored_tasks: dict[str, TaskChoice] = Field(default_factory=dict)
    samplings: tuple[SamplingParams, ...] = Field(
        default=(SamplingParams(temperature=0), _LOOSE), min_length=1
    )
    gammas: tuple[Annotated[int, Field(ge=1)], ...] = Field(default=(3, 5), min_length=1)
    num_prompts: int = Field(default=32, ge=1)
    skip_prompts: int = Field(default=0, ge=0)
    max_prompt_tokens: int = Field(default=64, ge=1)
    max_new_tokens: int = Field(default=64, ge=1)
    batch_size: int = Field(default=32, ge=1)
    seed: int = 0
    output: HomePath

    @model_validator(mode="after")
    def _names_tasks_once(self) -> TrajectoryConfig:
        if not self.tasks and not self.scored_tasks:
            raise ValueError("there is nothing to measure on; name tasks or scored_tasks")
        if twice := self.tasks.keys() & self.scored_tasks.keys():
            raise ValueError(f"tasks and scored_tasks both have {min(twice)}; rename one")
        return self

    def check(self, checks: InputChecks) -> None:
        """Check the inputs; raises UsageError."""
        for run in names_of(self.runs):
            list(checkpoints_of(run))
        checks.model("target", self.target)
        for name, task in self.tasks.items():
            checks.text(name, task)
        for name, task in self.scored_tasks.items():
            check_task(checks, name, task, self.skip_prompts + self.num_prompts, self.seed)
        checks.output(self.output)


class Checkpoint(NamedTuple):
    """A draft at some step of a training run: the initial one, a checkpoint or the final one.

    Attributes:
        run: The run directory.
        label: `start`, `step N` or `end`.
        step: Number of optimizer steps of the run.
        elapsed_s: Seconds that the steps took.
        path: The model directory.
        fingerprint: Of the model's files; differs if the run is repeated.
        start: Fingerprint of the run's initial draft.
    """

    run: Path
    label: str
    step: int
    elapsed_s: float
    path: Path
    fingerprint: str
    start: str

    @property
    def is_start(self) -> bool:
        """Whether it is the initial draft."""
        return self.label == START

    @property
    def identity(self) -> tuple[str, str, str]:
        """What tells it from other drafts; runs share an initial draft."""
        return "" if self.is_start else str(self.run), self.label, self.fingerprint


def names_of(runs: Sequence[Path]) -> dict[Path, str]:
    """The names of the runs: their directories without the parents that all of them share.

    Raises:
        UsageError: a run is named twice.
    """
    known: dict[Path, Path] = {}
    for run in runs:
        place = run.resolve()
        if place in known:
            raise UsageError(f"{known[place]} and {run} are the same run; leave one out")
        known[place] = run
    if len(runs) == 1:
        return {run: run.name for run in runs}
    shared = os.path.commonpath([run.absolute() for run in runs])
    return {run: run.absolute().relative_to(shared).as_posix() for run in runs}


def checkpoints_of(path: Path) -> Iterator[Checkpoint]:
    """The drafts of one run: the initial one, the checkpoints, the final one.

    Raises:
        UsageError: `path` is not a training run, or its initial draft has changed.
    """
    run = RunDirectory(path)
    manifest = run.read_manifest()
    if manifest is None:
        raise UsageError(f"{path} is not a run directory; give one from pretrain or align")
    config = manifest["config"]
    start = config.get("draft") or config.get("model")
    initial = path / "start" if not isinstance(start, str) else Path(start)
    result = run.read_result()
    if start is None or (result is not None and "num_steps" not in result):
        raise UsageError(f"{path} is not a training run; give one from pretrain or align")

    begun = fingerprint(initial)

    def at(label: str, step: int, elapsed_s: float, model: Path) -> Checkpoint:
        return Checkpoint(path, label, step, elapsed_s, model, fingerprint(model), begun)

    inputs = manifest.get("inputs", {})
    if begun != inputs.get("draft", inputs.get("model", begun)):
        raise UsageError(
            f"the initial draft of {path} at {initial} has changed since the run; restore it, or "
            "leave the run out"
        )
    yield Checkpoint(path, START, 0, 0.0, initial, begun, begun)
    last = result["num_steps"] if result is not None else -1
    for checkpoint in sorted(run.checkpoints.glob("step-*")):
        state = read_json(checkpoint / "state.json")
        if state["step"] != last:
            label = f"step {state['step']}"
            yield at(label, state["step"], state["elapsed_s"], saved_model(checkpoint))
    if result is not None:
        final = path / ("draft" if "draft" in result else "model")
        yield at("end", last, result["elapsed_s"], final)


def trajectory(config: TrajectoryConfig, progress: Progress = silent) -> list[Row]:
    """Measure every draft of the runs on the same texts.

    Rows are appended to `output/rows.jsonl`; what is there is not measured again. A row is one
    draft on one task under one sampling at one gamma; its units are the numbers of the prompts.
    Runs that begin with the same draft share its rows, which have no setting `draft`.

    Raises:
        UsageError: a run has no manifest, or a model or prompt cannot be used.
    """
    checked(config)
    names = names_of(config.runs)
    drafts = [draft for path in names for draft in checkpoints_of(path)]
    inputs = {"target_fingerprint": fingerprint(config.target)}
    for name, task in config.scored_tasks.items():
        inputs[f"task {name}"] = str(sorted(task.versions().items()))
    run = RunDirectory(config.output)
    file = config.output / "rows.jsonl"
    begun = file.exists() or any(config.output.glob("texts/*.json"))
    run.check(config, begun=begun, resume=True, may_change={"output", "runs"}, inputs=inputs)
    with run.alone():
        rows = _read_rows(file)
        scorer = _Scorer(config, progress)
        run.write_manifest(config, **inputs)  # only after the target and the prompts were read
        scorer.sample()
        source = Source.here("paceline trajectory", fingerprints=inputs, sizes=scorer.sizes)
        several = len({draft.start for draft in drafts}) > 1
        for number, draft in enumerate(drafts):
            named = {"draft": names[draft.run]}
            if draft.is_start:
                named = {"draft": f"start of {draft.run.name}"} if several else {}
            own = [row for row in rows if _identity(row) == draft.identity]
            for case in scorer.cases:
                known = {row.setting.get("gamma") for row in own if _is_case(row, case)}
                if min(config.gammas) not in known:
                    for row in scorer.rows(draft, named, case, source):
                        if row.setting.get("gamma") not in known:
                            append_jsonl(file, as_values(row))
                            rows.append(row)
            progress("drafts", number + 1, len(drafts), draft.label)
    order = {draft.identity: number for number, draft in reversed(list(enumerate(drafts)))}
    rows = [row for row in rows if _identity(row) in order]
    return sorted(rows, key=lambda row: order[_identity(row)])


def _identity(row: Row) -> tuple[str, str, str]:
    """That of the checkpoint."""
    label = str(row.setting["label"])
    run = "" if label == START else row.source.run
    return run, label, row.source.fingerprints["draft"]


def _is_case(row: Row, case: Case) -> bool:
    task, sampling = case
    return row.has(task=task) and all(
        row.setting.get(key) == sampling.setting.get(key) for key in fields_of(SamplingParams)
    )


def _read_rows(file: Path) -> list[Row]:
    try:
        return [Row.model_validate(row) for row in read_jsonl(file)]
    except ValidationError as error:
        raise UsageError(
            f"{file} has a row that is not of a trajectory: {describe(error)}; use another output, "
            "or remove the file to measure again"
        ) from None


class _Scorer:
    """Scores drafts on the texts of each case; the target processes the texts once.

    Only the last draft is kept in memory.

    Attributes:
        cases: Each task with each sampling.
    """

    def __init__(self, config: TrajectoryConfig, progress: Progress) -> None:
        self._config, self._progress = config, progress
        self._target = load_model(config.target)
        tokenizer = tokenizer_of(self._target, config.target)
        encoder = self._target.decoder_prompt is not None
        self._prompts = {
            task: _prompts(config, corpus, tokenizer, encoder=encoder)
            for task, corpus in config.tasks.items()
        }
        self._scored = _scored_examples(config, tokenizer, encoder=encoder)
        self._prompts |= {task: examples.prompts for task, examples in self._scored.items()}
        self.cases = [(task, sampling) for task in self._prompts for sampling in config.samplings]
        self._texts: dict[Case, tuple[list[list[int]], list[list[int]]]] = {}
        self._target_logits = KeptStates.of(self._target)
        self._draft = lru_cache(maxsize=1)(self._load_draft)
        self._prepared = lru_cache(maxsize=1)(self._prepare)

    @property
    def sizes(self) -> dict[str, int]:
        """Number of parameters of the target."""
        return {"target": self._target.num_parameters}

    def sample(self) -> None:
        """Prompts and the target's texts of each case, from the output directory if they exist."""
        config, writer = self._config, cache(lambda: prepare_for_decoding(self._target))
        for case in self.cases:
            task, sampling = case
            file = config.output / "texts" / f"{task} {sampling.name}.json"
            if not file.exists():
                texts: list[list[int]] = []
                prompts, skipped = self._prompts[task], config.skip_prompts
                how = config, sampling, texts, self._progress
                sample_texts(writer(), prompts, *how, skipped=skipped)
                written = {"prompts": prompts, "completions": texts}
                atomic_write_text(file, json.dumps(written))
            kept = json.loads(file.read_text("utf-8"))
            self._texts[case] = kept["prompts"], kept["completions"]

    def _load_draft(self, path: Path) -> HfModel:
        return load_beside(self._target, path)

    def _prepare(self, path: Path) -> HfModel:
        return prepare_for_decoding(self._draft(path))

    def _scores(self, draft: Checkpoint, case: Case) -> ScoredTexts:
        prompts, completions = self._texts[case]
        most = self._config.max_new_tokens
        pair = self._target, self._draft(draft.path)
        texts = PairTexts(*pair, prompts, completions, case[1], max_new_tokens=most)
        kept = self._target_logits
        scores = score_texts(texts, target_logits=kept, with_cross_entropy=True)
        return ScoredTexts.of(texts, scores)

    def rows(
        self, draft: Checkpoint, named: Mapping[str, Label], case: Case, source: Source
    ) -> Iterator[Row]:
        """A row per gamma, the smallest last; `named`: settings of the draft."""
        config, (task, sampling) = self._config, case
        scored = self._scores(draft, case)
        size = self._draft(draft.path).num_parameters
        sums = {name: rounded(part_B) for name, part_B in scored.sums.items()}
        if task in self._scored:
            writer = self._prepared(draft.path)
            sums["score"] = own_scores(writer, self._scored[task], config, sampling)
        setting: dict[str, Label] = {"task": task, **named, "label": draft.label}
        if not draft.is_start:
            setting["step"] = draft.step
        setting["parameter_ratio"] = round(size / self._target.num_parameters, 6)
        marks = source.fingerprints | {"draft": draft.fingerprint, "start": draft.start}
        row = Row(
            population=f"prompts of {task}",
            units=tuple(config.skip_prompts + number for number in range(len(scored.length_B))),
            setting=setting | sampling.setting,
            sums=sums,
            totals={"elapsed_s": draft.elapsed_s},
            source=source.model_copy(
                update={
                    "run": str(draft.run),
                    "fingerprints": marks,
                    "sizes": source.sizes | {"draft": size},
                }
            ),
        )
        for gamma in sorted(scored.usable_gammas(config.gammas), reverse=True):
            blocks = scored.sums_of_blocks(gamma)
            more = {name: rounded(count_B) for name, count_B in blocks.items()}
            of_gamma = {"setting": row.setting | {"gamma": gamma}, "sums": sums | more}
            yield row.model_copy(update=of_gamma)


def _prompts(
    config: TrajectoryConfig, corpus: Task, tokenizer: Tokenizer, *, encoder: bool
) -> list[list[int]]:
    longest = corpus.max_prompt_tokens or config.max_prompt_tokens
    skipped = config.skip_prompts
    corpus = corpus.first(skipped + config.num_prompts)
    prompts = read_prompts(corpus, tokenizer, max_tokens=longest, encoder=encoder)
    if skipped >= len(prompts):
        raise UsageError(
            f"{corpus.path} has {len(prompts):,} prompts and skip_prompts is {skipped:,}; lower it"
        )
    return prompts[skipped:]


def _scored_examples(
    config: TrajectoryConfig, tokenizer: Tokenizer, *, encoder: bool
) -> dict[str, ExamplePrompts]:
    """The examples of each scored task, as prompts; raises UsageError."""
    examples: dict[str, ExamplePrompts] = {}
    count, skip, seed = config.num_prompts, config.skip_prompts, config.seed
    for name, task in config.scored_tasks.items():
        if task.metric is None:
            raise UsageError(f"the task {name} has no metric; move it to tasks, as {{path: FILE}}")
        examples[name] = example_prompts(
            task, tokenizer, count, skip=skip, seed=seed, encoder=encoder
        )
    return examples


def own_scores(
    draft: Model, examples: ExamplePrompts, config: TrajectoryConfig, sampling: SamplingParams
) -> tuple[float, ...]:
    """Score of the answer that the draft writes to each example without the target, 0 to 1.

    `draft`: prepared for decoding.

    Paper: Zhou et al. 2023, section 5.2, figure 5a: quality of drafts against block efficiency.
    """
    answers: list[list[int]] = []
    skipped = config.skip_prompts
    sample_texts(draft, examples.prompts, config, sampling, answers, skipped=skipped)
    scores = [examples.score(number, answer) for number, answer in enumerate(answers)]
    return tuple(round(score, 6) for score in scores if score is not None)


def draft_name(row: Row) -> str:
    """Name of a row's draft without its step."""
    return str(row.setting.get("draft", "initial draft")).replace("_", " ")


def gain_of(row: Row, rows: Sequence[Row]) -> Interval | None:
    """tau / that of the run's initial draft, on the same texts; None for an initial draft."""
    if row.has(label=START):
        return None
    same = {key: row.setting.get(key) for key in ("task", "gamma", *SamplingParams.model_fields)}
    start = next(
        other
        for other in rows
        if other.has(label=START)
        and other.source.fingerprints["draft"] == row.source.fingerprints["start"]
        and all(other.setting.get(key) == value for key, value in same.items())
    )
    return FIGURES["block_efficiency"].gain(row, start)


class KeptStates:
    """Logits of the target before each token of texts; see `acceptance.ForcedLogits`.

    Keeps hidden states of texts while many drafts are scored on these texts: the target's own pass
    is most of the work of scoring. Its head, a small part, runs again each time.
    """

    def __init__(self, target: HfModel, most_bytes: int = _MOST_BYTES) -> None:
        self.target = target
        self.head = target.head
        self._free = most_bytes
        self._kept: dict[Key, Tensor] = {}

    @classmethod
    def of(cls, target: HfModel) -> KeptStates | None:
        """None if the target's logits are an unknown function of its hidden states."""
        try:
            return cls(target)
        except UnsupportedModelError:
            return None

    def __call__(self, prompts: Sequence[Sequence[int]], tokens_BT: Tensor) -> Tensor:
        """Shapes: B prompts, tokens [B, T] -> [B, T, V]."""
        key = tuple(map(tuple, prompts)), tuple(tuple(map(int, tokens_T)) for tokens_T in tokens_BT)
        hidden_BTD = self._kept.get(key)
        if hidden_BTD is None:
            hidden_BTD = self._hidden(prompts, tokens_BT)
            size = hidden_BTD.nbytes
            if size <= self._free:
                self._free -= size
                self._kept[key] = hidden_BTD
        return self.head.logits(hidden_BTD)

    def _hidden(self, prompts: Sequence[Sequence[int]], tokens_BT: Tensor) -> Tensor:
        contexts = decoder_contexts(self.target, prompts)
        rows = [
            [*context, *map(int, tokens_T[:-1])]
            for context, tokens_T in zip(contexts, tokens_BT, strict=True)
        ]
        texts = pad(rows)
        if decoder_prompt_of(self.target) is not None:
            texts = texts._replace(source=pad(prompts).to(self.target.device))
        hidden_BTD = self.target.hidden(texts.to(self.target.device))
        first_B = torch.tensor([len(context) - 1 for context in contexts])
        places_BT = first_B[:, None] + torch.arange(tokens_BT.shape[1])
        index_BT1 = places_BT[..., None].to(hidden_BTD.device)
        return hidden_BTD.gather(1, index_BT1.expand(-1, -1, hidden_BTD.shape[-1]))
