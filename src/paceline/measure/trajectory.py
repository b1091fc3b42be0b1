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
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import torch
from pydantic import Field, ValidationError, model_validator

from paceline.config import Options, StrictModel, describe, read_json
from paceline.core.bootstrap import ratio_of_ratios_interval
from paceline.core.sampling import SamplingParams
from paceline.core.speed import mbsu
from paceline.data import CorpusConfig, read_prompts
from paceline.data.input_checks import InputChecks, checked
from paceline.errors import UnsupportedModelError, UsageError
from paceline.measure.acceptance import budgets_of, score_texts
from paceline.measure.measurement import ScoredTexts
from paceline.measure.pair import after_skipped, load_beside, sample_texts
from paceline.measure.prompt_checks import check_task
from paceline.measure.results import IntervalRow
from paceline.models import load_model, prepare_for_decoding
from paceline.models.contract import decoder_contexts, decoder_prompt_of, pad
from paceline.models.loading import fingerprint, tokenizer_of
from paceline.places import PathPart
from paceline.progress import silent
from paceline.records import (
    SCHEMA_VERSION,
    RunDirectory,
    append_jsonl,
    atomic_write_text,
    read_jsonl,
)
from paceline.rng import named_generator
from paceline.tasks import TaskChoice
from paceline.tasks.base import ExamplePrompts, example_prompts
from paceline.train.checkpoint import saved_model

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import Tensor

    from paceline.measure.pair import Writing
    from paceline.models import HfModel
    from paceline.models.contract import Model, Tokenizer
    from paceline.progress import Progress
    from paceline.tasks.base import ExamplePrompts

    Case = tuple[str, SamplingParams]  # a task, and how to sample from it
    Key = tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]

_LOOSE = SamplingParams(temperature=0.6, top_p=0.9)
_START = "start"
_MOST_BYTES = 2 * 10**9  # of hidden states


class Task(CorpusConfig):
    """Prompts, and their maximum length; None: `max_prompt_tokens` of the configuration."""

    max_prompt_tokens: int | None = Field(default=None, ge=1)


class TrajectoryConfig(StrictModel):
    """Configuration of `trajectory`.

    Attributes:
        target: Target model: directory, .gguf file or hub name.
        runs: Run directories of `pretrain`, `align` or `sweep`, in the order of training. The
            initial draft, the checkpoints and the final draft of each run are measured.
        tasks: Prompts by task name; include a task that differs from the training text.
        scored_tasks: Tasks with a metric by name. Their examples are prompts too, of any length,
            and each draft's own answers to them are scored.
        samplings: Sampling parameters to measure with.
        gammas: Numbers of draft tokens per block, for tau and MBSU.
        num_prompts: Maximum number of prompts per task, after `skip_prompts`.
        output: Output directory; resumes if it exists.
    """

    target: str = Field(min_length=1)
    runs: Annotated[tuple[Path, ...], Options(run="")] = Field(min_length=1)
    tasks: dict[PathPart, Task] = Field(default_factory=dict)
    scored_tasks: dict[PathPart, TaskChoice] = Field(default_factory=dict)
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
    output: Path

    @model_validator(mode="after")
    def _names_tasks_once(self) -> TrajectoryConfig:
        if not self.tasks and not self.scored_tasks:
            raise ValueError("there is nothing to measure on; name tasks or scored_tasks")
        if twice := self.tasks.keys() & self.scored_tasks.keys():
            raise ValueError(f"tasks and scored_tasks both have {min(twice)}; rename one")
        return self

    def check(self) -> InputChecks:
        """Check the inputs; raises UsageError."""
        checks = InputChecks()
        for run in all_runs(self.runs):
            list(checkpoints_of(run))
        checks.model("target", self.target)
        for name, task in self.tasks.items():
            checks.text(name, task)
        for name, task in self.scored_tasks.items():
            check_task(checks, name, task, self.skip_prompts + self.num_prompts, self.seed)
        checks.output(self.output)
        return checks

    def writing(self, sampling: SamplingParams) -> Writing:
        """How texts are written."""
        return _Writing(sampling, self.max_new_tokens, self.batch_size, self.seed)


class _Writing(NamedTuple):
    sampling: SamplingParams
    max_new_tokens: int
    batch_size: int
    seed: int


class Checkpoint(StrictModel):
    """A draft at some step of a training run: the initial one, a checkpoint or the final one.

    Attributes:
        run: The run directory.
        label: `start`, `step N` or `end`.
        step: Number of optimizer steps of the run.
        elapsed_s: Seconds that the steps took.
        path: The model directory.
        fingerprint: Of the model's files; differs if the run is repeated.
    """

    run: Path
    label: str
    step: int
    elapsed_s: float
    path: Path
    fingerprint: str

    @property
    def is_start(self) -> bool:
        """Whether it is the initial draft."""
        return self.label == _START

    @property
    def identity(self) -> tuple[str, str, str]:
        """What tells it from other drafts, also of a run that was repeated in its place."""
        return str(self.run), self.label, self.fingerprint


def all_runs(paths: Iterable[Path]) -> list[Path]:
    """The runs themselves, and those of sweeps that did not diverge, in the order given.

    Raises:
        UsageError: a run is named twice.
    """
    runs = [run for path in paths for run in _runs_of(path)]
    known: dict[Path, Path] = {}
    for run in runs:
        place = run.resolve()
        if place in known:
            raise UsageError(f"{known[place]} and {run} are the same run; leave one out")
        known[place] = run
    return runs


def short_names(runs: set[Path]) -> dict[Path, str]:
    """The directories without the parents that all of them share."""
    if len(runs) == 1:
        return {run: run.name for run in runs}
    shared = os.path.commonpath([run.absolute() for run in runs])
    return {run: run.absolute().relative_to(shared).as_posix() for run in runs}


def _runs_of(path: Path) -> list[Path]:
    if not (path / "sweep.json").exists():
        return [path]
    cells = read_json(path / "sweep.json")
    return [
        path / cell["row"] / cell["column"] / f"seed-{cell['seed']}"
        for cell in cells
        if "diverged" not in cell
    ]


def checkpoints_of(path: Path) -> Iterator[Checkpoint]:
    """The drafts of one run: the initial one, the checkpoints, the final one.

    Raises:
        UsageError: `path` is not a training run, or its initial draft has changed.
    """
    run = RunDirectory(path)
    manifest = run.read_manifest()
    if manifest is None:
        raise UsageError(
            f"{path} is not a run directory; give one from pretrain or align, or a finished sweep"
        )
    config = manifest["config"]
    start = config.get("draft") or config.get("model")
    initial = path / "start" if not isinstance(start, str) else Path(start)
    result = run.read_result()
    if start is None or (result is not None and "num_steps" not in result):
        raise UsageError(f"{path} is not a training run; give one from pretrain or align")

    def at(label: str, step: int, elapsed_s: float, model: Path) -> Checkpoint:
        return Checkpoint(
            run=path,
            label=label,
            step=step,
            elapsed_s=elapsed_s,
            path=model,
            fingerprint=fingerprint(model),
        )

    first = at(_START, 0, 0.0, initial)
    inputs = manifest.get("inputs", {})
    if first.fingerprint != inputs.get("draft", inputs.get("model", first.fingerprint)):
        raise UsageError(
            f"the initial draft of {path} at {initial} has changed since the run; restore it, or "
            "leave the run out"
        )
    yield first
    last = result["num_steps"] if result is not None else -1
    for checkpoint in sorted(run.checkpoints.glob("step-*")):
        state = read_json(checkpoint / "state.json")
        if state["step"] != last:
            label = f"step {state['step']}"
            yield at(label, state["step"], state["elapsed_s"], saved_model(checkpoint))
    if result is not None:
        final = path / ("draft" if "draft" in result else "model")
        yield at("end", last, result["elapsed_s"], final)


class TextFigures(StrictModel):
    """Figures of each text, in the order of the prompts; ratios of their sums give those of a row.

    Attributes:
        tokens: Number of tokens.
        acceptance: Sum of 1 - TVD over the tokens.
        agreement: Number of tokens where both models have the same most likely token.
        emitted: Tokens that count for tau, by gamma; `blocks`: the expected number of blocks.
        score: Score of the draft's own answer; empty unless the task is one of `scored_tasks`.
    """

    tokens: tuple[int, ...]
    acceptance: tuple[float, ...]
    agreement: tuple[float, ...]
    emitted: dict[int, tuple[float, ...]]
    blocks: dict[int, tuple[float, ...]]
    score: tuple[float, ...] = ()


class TrajectoryRow(StrictModel):
    """One draft on one task under one sampling.

    `gain` is its tau divided by that of the run's initial draft, on the same texts, by gamma; empty
    for an initial draft. `quality` is the mean score of its own answers; None without a metric.
    """

    schema_version: Literal[1] = SCHEMA_VERSION
    stop: Checkpoint
    task: str
    sampling: SamplingParams
    num_texts: int
    num_tokens: int
    parameter_ratio: float
    expected_acceptance: IntervalRow
    block_efficiency: dict[int, IntervalRow]
    gain: dict[int, IntervalRow]
    mbsu: dict[int, float]
    quality: IntervalRow | None = None
    texts: TextFigures


def trajectory(config: TrajectoryConfig, progress: Progress = silent) -> list[TrajectoryRow]:
    """Measure every draft of the runs on the same texts.

    Rows are appended to `output/rows.jsonl`; existing rows are not measured again.

    Raises:
        UsageError: a run has no manifest, or a model or prompt cannot be used.
    """
    checked(config)
    drafts = [draft for path in all_runs(config.runs) for draft in checkpoints_of(path)]
    inputs = {"target_fingerprint": fingerprint(config.target)}
    for name, task in config.scored_tasks.items():
        inputs[f"task {name}"] = str(sorted(task.versions().items()))
    run = RunDirectory(config.output)
    file = config.output / "rows.jsonl"
    begun = file.exists() or any(config.output.glob("texts/*.json"))
    run.check(config, begun=begun, resume=True, may_change={"output", "runs"}, inputs=inputs)
    with run.alone():
        rows = _read_rows(file)
        known = {(*row.stop.identity, row.task, row.sampling) for row in rows}
        scorer = _Scorer(config, progress)
        run.write_manifest(config, **inputs)  # only after the target and the prompts were read
        scorer.sample()
        initial = {draft.run: draft for draft in drafts if draft.is_start}
        for number, draft in enumerate(drafts):
            for case in scorer.cases:
                if (*draft.identity, *case) not in known:
                    row = scorer.row(draft, initial[draft.run], case)
                    append_jsonl(file, row.model_dump(mode="json"))
                    rows.append(row)
            progress("drafts", number + 1, len(drafts), draft.label)
    order = {draft.identity: number for number, draft in enumerate(drafts)}
    rows = [row for row in rows if row.stop.identity in order]
    return sorted(rows, key=lambda row: order[row.stop.identity])


def _read_rows(file: Path) -> list[TrajectoryRow]:
    try:
        return [TrajectoryRow.model_validate(row) for row in read_jsonl(file)]
    except ValidationError as error:
        raise UsageError(
            f"{file} has a row that is not of a trajectory: {describe(error)}; use another output, "
            "or remove the file to measure again"
        ) from None


class _Scorer:
    """Scores drafts on the texts of each case; the target processes the texts once.

    Scores of initial drafts are kept, since runs share them and later drafts are compared with
    them. Of other drafts, only the last one is kept in memory.

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
        self._initial_scores: dict[tuple[str, Case], ScoredTexts] = {}
        self._draft = lru_cache(maxsize=1)(self._load_draft)
        self._prepared = lru_cache(maxsize=1)(self._prepare)
        self._own: dict[tuple[str, Case], tuple[float, ...]] = {}

    def sample(self) -> None:
        """Prompts and the target's texts of each case, from the output directory if they exist."""
        config, writer = self._config, cache(lambda: prepare_for_decoding(self._target))
        for case in self.cases:
            task, sampling = case
            file = config.output / "texts" / f"{task} {sampling.name}.json"
            if not file.exists():
                texts: list[list[int]] = []
                prompts, writing = self._prompts[task], config.writing(sampling)
                skipped = config.skip_prompts
                sample_texts(writer(), prompts, writing, texts, self._progress, skipped=skipped)
                written = {"prompts": prompts, "completions": texts}
                atomic_write_text(file, json.dumps(written))
            kept = json.loads(file.read_text("utf-8"))
            self._texts[case] = kept["prompts"], kept["completions"]

    def _load_draft(self, path: Path) -> HfModel:
        return load_beside(self._target, path)

    def _prepare(self, path: Path) -> HfModel:
        return prepare_for_decoding(self._draft(path))

    def _scores(self, draft: Checkpoint, case: Case) -> ScoredTexts:
        known = self._initial_scores.get((draft.fingerprint, case))
        if known is not None:
            return known
        prompts, completions = self._texts[case]
        texts = self._target, self._draft(draft.path), prompts, completions
        scores = score_texts(*texts, case[1], silent, target_logits=self._target_logits)
        budget_B = budgets_of(self._target, prompts, self._config.max_new_tokens)
        scored = ScoredTexts(scores, scores.mask_BT.sum(-1), budget_B)
        if draft.is_start:
            self._initial_scores[draft.fingerprint, case] = scored
        return scored

    def _own_scores(self, draft: Checkpoint, case: Case) -> tuple[float, ...]:
        """Scores of the draft's own answers; none without a metric."""
        task, sampling = case
        if task not in self._scored:
            return ()
        key = draft.fingerprint, case
        if key not in self._own:
            writing, skipped = self._config.writing(sampling), self._config.skip_prompts
            writer = self._prepared(draft.path)
            self._own[key] = own_scores(writer, self._scored[task], writing, skipped=skipped)
        return self._own[key]

    def row(self, draft: Checkpoint, initial: Checkpoint, case: Case) -> TrajectoryRow:
        """Figures of a draft; `initial`: the initial draft of its run."""
        config, (task, sampling) = self._config, case
        before, scored = self._scores(initial, case), self._scores(draft, case)
        ratio = self._draft(draft.path).num_parameters / self._target.num_parameters
        gammas = scored.usable_gammas(config.gammas)
        counts = {gamma: scored.tokens_and_blocks(gamma) for gamma in gammas}

        def rng() -> torch.Generator:
            return named_generator(config.seed, "bootstrap")

        taus = {
            gamma: IntervalRow.of_ratio(*of_gamma, rng(), most=gamma + 1)
            for gamma, of_gamma in counts.items()
        }
        gains: dict[int, IntervalRow] = {}
        if not draft.is_start:
            for gamma, of_gamma in counts.items():
                both = of_gamma, before.tokens_and_blocks(gamma)
                gains[gamma] = IntervalRow.of(ratio_of_ratios_interval(*both, rng=rng()))
        own = self._own_scores(draft, case)
        return TrajectoryRow(
            stop=draft,
            task=task,
            sampling=sampling,
            num_texts=len(scored.length_B),
            num_tokens=int(scored.length_B.sum()),
            parameter_ratio=ratio,
            expected_acceptance=scored.mean(scored.scores.acceptance_BT, config.seed),
            block_efficiency=taus,
            gain=gains,
            mbsu={gamma: mbsu(tau.value, gamma, ratio) for gamma, tau in taus.items()},
            quality=IntervalRow.of_scores(own, config.seed),
            texts=TextFigures(
                tokens=tuple(map(int, scored.length_B)),
                acceptance=_rounded(scored.scores.acceptance_BT.sum(-1)),
                agreement=_rounded(scored.scores.agreement_BT.sum(-1)),
                emitted={gamma: _rounded(tokens_B) for gamma, (tokens_B, _) in counts.items()},
                blocks={gamma: _rounded(blocks_B) for gamma, (_, blocks_B) in counts.items()},
                score=own,
            ),
        )


def _rounded(values_B: Tensor) -> tuple[float, ...]:
    """Six decimals: rows are committed and read by people."""
    return tuple(round(float(value), 6) for value in values_B)


def _prompts(
    config: TrajectoryConfig, corpus: Task, tokenizer: Tokenizer, *, encoder: bool
) -> list[list[int]]:
    longest = corpus.max_prompt_tokens or config.max_prompt_tokens
    prompts = read_prompts(corpus, tokenizer, max_tokens=longest, encoder=encoder)
    return after_skipped(prompts, config.skip_prompts, corpus.path)[: config.num_prompts]


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
    draft: Model, examples: ExamplePrompts, writing: Writing, *, skipped: int = 0
) -> tuple[float, ...]:
    """Score of the answer that the draft writes to each example without the target, 0 to 1.

    `draft`: prepared for decoding. `skipped`: as in `sample_texts`.

    Paper: Zhou et al. 2023, section 5.2, figure 5a: quality of drafts against block efficiency.
    """
    answers: list[list[int]] = []
    sample_texts(draft, examples.prompts, writing, answers, skipped=skipped)
    scores = [examples.score(number, answer) for number, answer in enumerate(answers)]
    return tuple(round(score, 6) for score in scores if score is not None)


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
