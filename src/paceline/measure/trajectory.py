"""Measures the checkpoints of training runs on the same target-generated text.

Paper: Goel et al. 2024, section 3: tau and MBSU at gamma 3 and 5 over checkpoints, compared with
the initial draft, on tasks similar to the training text and on others.
"""

# B batch, T positions
from __future__ import annotations

import json
import os
from contextlib import suppress
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

from pydantic import Field, model_validator

from paceline.config import HomePath, Options, StrictModel, fields_of, read_json
from paceline.core.sampling import SamplingParams, as_list
from paceline.data import CorpusConfig, read_records
from paceline.data.collate import collate
from paceline.data.input_checks import InputChecks, checked
from paceline.data.prompts import ChatOrRaw, corpus_fingerprint
from paceline.data.sources import rows_of
from paceline.data.tokens import asked, encode_prompts
from paceline.errors import UnsupportedModelError, UsageError
from paceline.measure.acceptance import PairTexts, rows_of_texts, score_texts
from paceline.measure.pair import check_task, load_beside, sample_texts
from paceline.models import load_model, prepare_for_decoding
from paceline.models.loading import fingerprint, tokenizer_of
from paceline.places import PathPart
from paceline.progress import silent
from paceline.records import RunDirectory, append_jsonl, atomic_write_text
from paceline.results.figures import FIGURES
from paceline.results.row import Row, Source, as_values, read_rows
from paceline.tasks import TaskChoice
from paceline.tasks.base import ExamplePrompts, example_prompts
from paceline.train.checkpoint import saved_model

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from paceline.core.bootstrap import Interval
    from paceline.measure.acceptance import ForcedLogits
    from paceline.models import HfModel
    from paceline.models.contract import Model, Tokenizer
    from paceline.progress import Progress
    from paceline.results.row import Label

    Case = tuple[str, SamplingParams]  # a task, and how to sample from it
    Key = tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]

START = "start"
"""Label of an initial draft."""
_LOOSE = SamplingParams(temperature=0.6, top_p=0.9)


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
        chat: Ask texts as messages of the user, as in `measure`.
        num_prompts: Maximum number of prompts per task.
        output: Output directory; resumes if it exists.
    """

    target: str = Field(min_length=1)
    runs: Annotated[tuple[HomePath, ...], Options(run="")] = Field(min_length=1)
    tasks: dict[PathPart, Task] = Field(default_factory=dict)
    scored_tasks: dict[PathPart, TaskChoice] = Field(default_factory=dict)
    samplings: tuple[SamplingParams, ...] = Field(
        default=(SamplingParams(temperature=0), _LOOSE), min_length=1
    )
    gammas: tuple[Annotated[int, Field(ge=1)], ...] = Field(default=(3, 5), min_length=1)
    chat: ChatOrRaw = None
    num_prompts: int = Field(default=32, ge=1)
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
        for run in self.runs:
            list(checkpoints_of(run))
        checks.model("target", self.target)
        for name, task in self.tasks.items():
            checks.text(name, task)
        for name, task in self.scored_tasks.items():
            check_task(checks, name, task, self.num_prompts, self.seed)
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
    """The names of the runs: their directories without the parents that all of them share."""
    if len(runs) == 1:
        return {run: run.name for run in runs}
    shared = os.path.commonpath([run.absolute() for run in runs])
    return {run: run.absolute().relative_to(shared).as_posix() for run in runs}


def checkpoints_of(path: Path) -> Iterator[Checkpoint]:
    """The drafts of one run: the initial one, the checkpoints, the final one."""
    run = RunDirectory(path)
    config, result = (run.read_manifest() or {}).get("config", {}), run.read_result()
    start = config.get("draft") or config.get("model")
    if start is None or (result is not None and "num_steps" not in result):
        raise UsageError(f"{path} is not a training run; give one from pretrain or align")
    initial = Path(start) if isinstance(start, str) else path / "start"
    begun = fingerprint(initial)

    def at(label: str, step: int, elapsed_s: float, model: Path) -> Checkpoint:
        return Checkpoint(path, label, step, elapsed_s, model, fingerprint(model), begun)

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
    Runs that begin with the same draft share its rows; if all do, these have no setting `draft`.

    Raises:
        UsageError: a run has no manifest, or a model or prompt cannot be used.
    """
    checked(config)
    names = names_of(config.runs)
    drafts = [draft for path in names for draft in checkpoints_of(path)]
    inputs = {"target_fingerprint": fingerprint(config.target)}
    inputs |= {f"tasks.{name}": corpus_fingerprint(task) for name, task in config.tasks.items()}
    for name, task in config.scored_tasks.items():
        inputs[f"task {name}"] = str(sorted(task.versions().items()))
    run = RunDirectory(config.output)
    file = config.output / "rows.jsonl"
    begun = file.exists() or any(config.output.glob("texts/*.json"))
    run.check(config, begun=begun, resume=True, may_change={"output", "runs"}, inputs=inputs)
    with run.alone():
        rows = read_rows(file) if file.exists() else []
        scorer = _Scorer(config, progress)
        run.write_manifest(config, **inputs)  # only after the target and the prompts were read
        scorer.sample()
        source = Source.here("paceline trajectory", fingerprints=inputs)
        several = len({draft.start for draft in drafts}) > 1
        for number, draft in enumerate(drafts):
            named = {"draft": names[draft.run]}
            if draft.is_start:
                named = {"draft": f"start of {names[draft.run]}"} if several else {}
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
            task: encode_prompts(
                asked(read_records(corpus.first(config.num_prompts)), tokenizer, config.chat),
                tokenizer,
                max_tokens=corpus.max_prompt_tokens or config.max_prompt_tokens,
                encoder=encoder,
            )
            for task, corpus in config.tasks.items()
        }
        self._scored = _scored_examples(config, tokenizer, encoder=encoder)
        self._prompts |= {task: examples.prompts for task, examples in self._scored.items()}
        self.cases = [(task, sampling) for task in self._prompts for sampling in config.samplings]
        self._texts: dict[Case, tuple[list[list[int]], list[list[int]]]] = {}
        self._target_logits = None
        with suppress(UnsupportedModelError):
            self._target_logits = kept_logits(self._target)
        self._draft = lru_cache(maxsize=1)(partial(load_beside, self._target))
        self._prepared = lru_cache(maxsize=1)(self._prepare)

    def sample(self) -> None:
        """Prompts and the target's texts of each case, from the output directory if they exist."""
        config, writer = self._config, cache(lambda: prepare_for_decoding(self._target))
        for case in self.cases:
            task, sampling = case
            file = config.output / "texts" / f"{task} {sampling.name}.json"
            if not file.exists():
                prompts = self._prompts[task]
                texts = sample_texts(writer(), prompts, config, sampling, self._progress)
                atomic_write_text(file, json.dumps({"prompts": prompts, "completions": texts}))
            kept = json.loads(file.read_text("utf-8"))
            self._texts[case] = kept["prompts"], kept["completions"]

    def _prepare(self, path: Path) -> HfModel:
        return prepare_for_decoding(self._draft(path))

    def rows(
        self, draft: Checkpoint, named: Mapping[str, Label], case: Case, source: Source
    ) -> Iterator[Row]:
        """A row per gamma, the smallest last; `named`: settings of the draft."""
        config, (task, sampling) = self._config, case
        prompts, completions = self._texts[case]
        model, most = self._draft(draft.path), config.max_new_tokens
        given = self._target, model, prompts, completions, sampling
        texts = PairTexts(*given, max_new_tokens=most, gamma=max(config.gammas))
        scores = score_texts(texts, target_logits=self._target_logits, with_cross_entropy=True)
        setting: dict[str, Label] = {"task": task, **named, "label": draft.label}
        if not draft.is_start:
            setting["step"] = draft.step
        size = model.num_parameters
        setting["parameter_ratio"] = round(size / self._target.num_parameters, 6)
        changes = {
            "run": str(draft.run),
            "fingerprints": source.fingerprints
            | {"draft": draft.fingerprint, "start": draft.start},
            "sizes": {"target": self._target.num_parameters, "draft": size},
        }
        _, *blocks = rows_of_texts(
            texts,
            scores,
            config.gammas,
            population=f"prompts of {task}",
            units=tuple(range(len(prompts))),
            setting=setting | sampling.setting,
            totals={"elapsed_s": draft.elapsed_s},
            source=source.model_copy(update=changes),
        )
        own: dict[str, tuple[float, ...]] = {}
        if task in self._scored:
            writer = self._prepared(draft.path)
            own["score"] = own_scores(writer, self._scored[task], config, sampling)
        yield from (row.extended(own) for row in reversed(blocks))


def _scored_examples(
    config: TrajectoryConfig, tokenizer: Tokenizer, *, encoder: bool
) -> dict[str, ExamplePrompts]:
    """The examples of each scored task, as prompts; raises UsageError."""
    examples: dict[str, ExamplePrompts] = {}
    for name, task in config.scored_tasks.items():
        if task.metric is None:
            raise UsageError(f"the task {name} has no metric; move it to tasks, as {{path: FILE}}")
        count, seed = config.num_prompts, config.seed
        examples[name] = example_prompts(task, tokenizer, count, seed=seed, encoder=encoder)
    return examples


def own_scores(
    draft: Model, examples: ExamplePrompts, config: TrajectoryConfig, sampling: SamplingParams
) -> tuple[float, ...]:
    """Score of the answer that the draft writes to each example without the target, 0 to 1.

    `draft`: prepared for decoding.

    Paper: Zhou et al. 2023, section 5.2, figure 5a: quality of drafts against block efficiency.
    """
    answers = sample_texts(draft, examples.prompts, config, sampling)
    scores = [examples.score(number, answer) for number, answer in enumerate(answers)]
    return tuple(round(score, 6) for score in scores if score is not None)


def draft_name(row: Row) -> str:
    """Name of a row's draft without its step."""
    return str(row.setting.get("draft", "initial draft")).replace("_", " ")


def gain_of(row: Row, rows: Sequence[Row]) -> Interval | None:
    """tau / that of the run's initial draft, on the same texts; None for an initial draft.

    Also None if the initial draft was trained on since.
    """
    if row.has(label=START):
        return None
    same = {key: row.setting.get(key) for key in ("task", "gamma", *SamplingParams.model_fields)}
    starts = [
        other
        for other in rows
        if other.has(label=START)
        and other.source.fingerprints["draft"] == row.source.fingerprints["start"]
        and all(other.setting.get(key) == value for key, value in same.items())
    ]
    return FIGURES["block_efficiency"].gain(row, starts[0]) if starts else None


def kept_logits(target: HfModel) -> ForcedLogits:
    """The target's logits before each token of texts, for `score_texts`.

    Keeps hidden states of texts while many drafts are scored on these texts: the target's own pass
    is most of the work of scoring. Its head, a small part, runs again each time.

    Raises:
        UnsupportedModelError: the logits are an unknown function of the states.
    """
    head = target.head
    kept: dict[Key, Tensor] = {}

    def logits(prompts: Sequence[Sequence[int]], tokens_BT: Tensor) -> Tensor:
        texts: list[list[int]] = as_list(tokens_BT)
        key = tuple(map(tuple, prompts)), tuple(tuple(text) for text in texts)
        if key not in kept:
            batch = collate(rows_of(target, prompts, texts)).to(target.device)
            kept[key] = target.hidden(batch)[batch.mask_BT].reshape(*tokens_BT.shape, -1)
        return head.logits(kept[key])

    return logits
