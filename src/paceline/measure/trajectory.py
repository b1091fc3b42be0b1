"""Measures the checkpoints of training runs on the same target-generated text.

Paper: Goel et al. 2024, section 3: tau and MBSU at gamma 3 and 5 over checkpoints, compared with
the initial draft, on tasks similar to the training text and on others.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import torch
from pydantic import Field, model_validator

from paceline.config import Options, StrictModel
from paceline.core.bootstrap import ratio_interval, ratio_of_ratios_interval
from paceline.core.bounded_means import bounded_mean_interval
from paceline.core.sampling import SamplingParams
from paceline.core.speed import mbsu
from paceline.data import CorpusConfig, read_prompts
from paceline.data.input_checks import InputChecks, checked
from paceline.measure.acceptance import budgets_of, score_texts
from paceline.measure.kept_states import KeptStates
from paceline.measure.measurement import usable_gammas
from paceline.measure.own_answers import own_scores, scored_examples
from paceline.measure.pair import after_skipped, sample_texts
from paceline.measure.prompt_checks import check_task
from paceline.measure.results import IntervalRow
from paceline.measure.training_stops import Stop, all_runs, stops_of
from paceline.models import load_model, prepare_for_decoding
from paceline.models.compatibility import check_same_vocabulary
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

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from paceline.measure.acceptance import TextScores
    from paceline.models import HfModel
    from paceline.progress import Progress
    from paceline.tasks.base import ExamplePrompts

    Case = tuple[str, SamplingParams]  # a task, and how to sample from it
    Texts = tuple[list[list[int]], list[list[int]]]  # prompts and completions

_LOOSE = SamplingParams(temperature=0.6, top_p=0.9)


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
            list(stops_of(run))
        checks.model("target", self.target)
        for name, task in self.tasks.items():
            checks.text(name, task)
        for name, task in self.scored_tasks.items():
            check_task(checks, name, task, self.skip_prompts + self.num_prompts, self.seed)
        checks.output(self.output)
        return checks


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
    stop: Stop
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
    stops = [stop for path in all_runs(config.runs) for stop in stops_of(path)]
    inputs = {"target_fingerprint": fingerprint(config.target)}
    for name, task in config.scored_tasks.items():
        inputs[f"task {name}"] = str(sorted(task.versions().items()))
    run = RunDirectory(config.output)
    begun = (config.output / "rows.jsonl").exists() or any(config.output.glob("texts/*.json"))
    run.check(config, begun=begun, resume=True, may_change={"output", "runs"}, inputs=inputs)
    with run.alone():
        return _measure(config, stops, run, inputs, progress)


def _measure(
    config: TrajectoryConfig,
    stops: Sequence[Stop],
    run: RunDirectory,
    inputs: dict[str, str],
    progress: Progress,
) -> list[TrajectoryRow]:
    file = config.output / "rows.jsonl"
    # earlier versions define block efficiency differently; their rows are measured again
    known_rows = (row for row in read_jsonl(file) if row.get("schema_version") == SCHEMA_VERSION)
    rows = [TrajectoryRow.model_validate(row) for row in known_rows]
    known = {(*row.stop.identity, row.task, row.sampling) for row in rows}
    target = load_model(config.target)
    tokenizer = tokenizer_of(target, config.target)
    prompts = {task: _prompts(config, task, target) for task in config.tasks}
    scored = scored_examples(
        config.scored_tasks,
        tokenizer,
        config.num_prompts,
        skip=config.skip_prompts,
        seed=config.seed,
        encoder=target.decoder_prompt is not None,
    )
    prompts |= {task: examples.prompts for task, examples in scored.items()}
    run.write_manifest(config, **inputs)
    cases = [(task, sampling) for task in prompts for sampling in config.samplings]
    # prepared only if a text is missing
    writer = functools.cache(functools.partial(prepare_for_decoding, target))
    texts = {case: _texts(writer, prompts[case[0]], config, case, progress) for case in cases}
    del writer
    scorer = _Scorer(target, texts, scored, config)
    initial = {stop.run: stop for stop in stops if stop.is_start}
    for number, stop in enumerate(stops):
        for case in cases:
            if (*stop.identity, *case) in known:
                continue
            row = _row(scorer, stop, initial[stop.run], case, config)
            append_jsonl(file, row.model_dump(mode="json"))
            rows.append(row)
        progress("drafts", number + 1, len(stops), stop.label)
    order = {stop.identity: number for number, stop in enumerate(stops)}
    rows = [row for row in rows if row.stop.identity in order]
    return sorted(rows, key=lambda row: order[row.stop.identity])


class _Scorer:
    """Scores drafts on the texts of each case; the target processes the texts once.

    Scores of initial drafts are kept, since runs share them and later drafts are compared with
    them.
    """

    def __init__(
        self,
        target: HfModel,
        texts: dict[Case, Texts],
        scored: dict[str, ExamplePrompts],
        config: TrajectoryConfig,
    ) -> None:
        self.target = target
        self.texts = texts
        self._scored, self._config = scored, config
        self._own: dict[tuple[str, Case], tuple[float, ...]] = {}
        self._target_logits = KeptStates.of(target)
        self._draft: tuple[Path, HfModel] | None = None
        self._writer: tuple[Path, HfModel] | None = None
        self._kept: dict[tuple[str, Case], TextScores] = {}

    def draft(self, stop: Stop) -> HfModel:
        """The draft; only the last one is kept in memory."""
        if self._draft is None or self._draft[0] != stop.path:
            draft = load_model(stop.path, dtype=self.target.dtype)
            check_same_vocabulary(self.target, draft)
            self._draft = stop.path, draft
        return self._draft[1]

    def _prepared(self, stop: Stop) -> HfModel:
        """The draft prepared for decoding; likewise."""
        if self._writer is None or self._writer[0] != stop.path:
            self._writer = stop.path, prepare_for_decoding(self.draft(stop))
        return self._writer[1]

    def scores(self, stop: Stop, case: Case) -> TextScores:
        kept = self._kept.get((stop.fingerprint, case))
        if kept is not None:
            return kept
        given = self.target, self.draft(stop), *self.texts[case], case[1], silent
        found = score_texts(*given, target_logits=self._target_logits)
        if stop.is_start:
            self._kept[stop.fingerprint, case] = found
        return found

    def own(self, stop: Stop, case: Case) -> tuple[float, ...]:
        """Scores of the draft's own answers; none without a metric."""
        examples = self._scored.get(case[0])
        if examples is None:
            return ()
        key = stop.fingerprint, case
        if key not in self._own:
            writing = _writing(self._config, case[1])
            skipped = self._config.skip_prompts
            self._own[key] = own_scores(self._prepared(stop), examples, writing, skipped=skipped)
        return self._own[key]


def _row(
    scorer: _Scorer, stop: Stop, initial: Stop, case: Case, config: TrajectoryConfig
) -> TrajectoryRow:
    task, sampling = case
    target = scorer.target
    before = scorer.scores(initial, case)
    scores = scorer.scores(stop, case)
    lengths_B = scores.mask_BT.sum(-1)
    ratio = scorer.draft(stop).num_parameters / target.num_parameters
    budget_B = budgets_of(target, scorer.texts[case][0], config.max_new_tokens)
    gammas = usable_gammas(config.gammas, int(lengths_B.max()), int(budget_B.max()))

    def interval(over_B: Tensor, under_B: Tensor, most: float) -> IntervalRow:
        rng = named_generator(config.seed, "bootstrap")
        return IntervalRow.of(ratio_interval(over_B, under_B, rng=rng, most=most))

    def gain(gamma: int) -> IntervalRow:
        both = [each.tokens_and_blocks(gamma, budget_B) for each in (scores, before)]
        rng = named_generator(config.seed, "bootstrap")
        return IntervalRow.of(ratio_of_ratios_interval(*both, rng=rng))

    def quality() -> IntervalRow:
        rng = named_generator(config.seed, "mean score")
        own_B = torch.tensor(own, dtype=torch.float64)
        return IntervalRow.of(bounded_mean_interval(own_B, rng=rng))

    taus = {
        gamma: interval(*scores.tokens_and_blocks(gamma, budget_B), gamma + 1) for gamma in gammas
    }
    first, own = stop.is_start, scorer.own(stop, case)
    return TrajectoryRow(
        stop=stop,
        task=task,
        sampling=sampling,
        num_texts=len(lengths_B),
        num_tokens=int(lengths_B.sum()),
        parameter_ratio=ratio,
        expected_acceptance=interval(scores.acceptance_BT.sum(-1), lengths_B, 1.0),
        block_efficiency=taus,
        gain={} if first else {gamma: gain(gamma) for gamma in gammas},
        mbsu={gamma: mbsu(tau.value, gamma, ratio) for gamma, tau in taus.items()},
        quality=quality() if own else None,
        texts=_figures(scores, gammas, budget_B).model_copy(update={"score": own}),
    )


def _figures(scores: TextScores, gammas: Sequence[int], budget_B: Tensor) -> TextFigures:
    counts = {gamma: scores.tokens_and_blocks(gamma, budget_B) for gamma in gammas}
    return TextFigures(
        tokens=tuple(int(count) for count in scores.mask_BT.sum(-1)),
        acceptance=_rounded(scores.acceptance_BT.sum(-1)),
        agreement=_rounded(scores.agreement_BT.sum(-1)),
        emitted={gamma: _rounded(tokens_B) for gamma, (tokens_B, _) in counts.items()},
        blocks={gamma: _rounded(blocks_B) for gamma, (_, blocks_B) in counts.items()},
    )


def _rounded(values_B: Tensor) -> tuple[float, ...]:
    """Six decimals: rows are committed and read by people."""
    return tuple(round(float(value), 6) for value in values_B)


def _prompts(config: TrajectoryConfig, task: str, target: HfModel) -> list[list[int]]:
    assert target.tokenizer is not None, "checked before"
    corpus = config.tasks[task]
    longest = corpus.max_prompt_tokens or config.max_prompt_tokens
    encoder = target.decoder_prompt is not None
    prompts = read_prompts(corpus, target.tokenizer, max_tokens=longest, encoder=encoder)
    return after_skipped(prompts, config.skip_prompts, corpus.path)[: config.num_prompts]


class _Writing(NamedTuple):
    sampling: SamplingParams
    max_new_tokens: int
    batch_size: int
    seed: int


def _writing(config: TrajectoryConfig, sampling: SamplingParams) -> _Writing:
    return _Writing(sampling, config.max_new_tokens, config.batch_size, config.seed)


def _texts(
    writer: Callable[[], HfModel],
    prompts: list[list[int]],
    config: TrajectoryConfig,
    case: Case,
    progress: Progress,
) -> Texts:
    """Prompts of a task and the target's completions, from the output directory if they exist."""
    task, sampling = case
    file = config.output / "texts" / f"{task} {name_of(sampling)}.json"
    if not file.exists():
        completions: list[list[int]] = []
        writing = _writing(config, sampling)
        sample_texts(writer(), prompts, writing, completions, progress, skipped=config.skip_prompts)
        atomic_write_text(file, json.dumps({"prompts": prompts, "completions": completions}))
    found = json.loads(file.read_text("utf-8"))
    return found["prompts"], found["completions"]


def name_of(sampling: SamplingParams) -> str:
    """Short name of sampling parameters, such as `t0.6 p0.9`."""
    return sampling.name
