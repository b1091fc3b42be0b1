"""Choose rule, threshold and block length for a quality floor or a latency budget.

    1  the target alone answers the examples to choose on
    2  one teacher-forced pass over its answers predicts every candidate's speed and how unlikely the
       target finds its tokens; those that another one beats at both are dropped, and some of the
       rest proposed
    3  the proposed ones are measured; so is lossless decoding
    4  the best of them is measured again on other examples, then the next best, until one is
       confirmed there: with several tries on the same examples luck has several chances, so that
       `confidence` of the resamples have to agree

Lossless decoding has the target's quality by proof. Above temperature 0 its answers are other samples
than the target's own, so a measured difference is luck: a floor relative to the target is met by it.

The first three steps are a bench in `choosing/`, the last one another in `confirming/`, so that a
stopped run goes on.
"""

from __future__ import annotations

from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from paceline.bench.frontier import Frontier
from paceline.bench.grid import RuleChoice, expand_all
from paceline.bench.prediction import predict
from paceline.bench.runner import read_rows, run_cells, unfinished
from paceline.bench.workbench import BenchConfig, bench_context, prepare
from paceline.config import StrictModel, to_yaml
from paceline.core.rules import Lossless
from paceline.core.sampling import SamplingParams
from paceline.decode.strategies import Autoregressive, DecodingConfig, Speculative
from paceline.errors import NotReachedError, UsageError
from paceline.measure.frontier import DEFAULT_RULES
from paceline.measure.pair import ModelsConfig, load_models
from paceline.measure.results import IntervalRow
from paceline.progress import Progress, silent
from paceline.records import RunDirectory, atomic_write_text
from paceline.tasks import TaskChoice

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from paceline.bench.prediction import Prediction
    from paceline.bench.schema import ResultRow
    from paceline.bench.workbench import Workbench
    from paceline.measure.pair import Pair

_FILE = "decoding.yaml"
Step = Literal["choosing", "confirming"]
_STEPS: tuple[Step, Step] = ("choosing", "confirming")


class TuneConfig(ModelsConfig):
    """What is wanted, of which models, on which task; exactly one of the three bounds.

    Attributes:
        quality_floor: Least mean score, as part of the target's own.
        absolute_quality: Least mean score.
        max_latency: Most seconds a token, as part of the target's own.
        output: The run directory; `decoding.yaml` in it is for `decode --config`.
        sampling: How tokens will be drawn.
        rules: Candidates; a setting that is a list stands for one rule of each.
        num_speculative_tokens: Block lengths that are considered.
        num_candidates: How many are measured beside lossless decoding.
        num_examples: To choose on.
        num_confirmed: Others, to confirm on.
        num_timed: Of either, those that the target alone is timed on, too; None: all.
        confidence: The part of the resamples that has to meet the bound, too, for a candidate to be
            among the first tried and to be confirmed.
    """

    task: TaskChoice
    output: Path
    quality_floor: float | None = Field(default=None, gt=0)
    absolute_quality: float | None = Field(default=None, gt=0, le=1)
    max_latency: float | None = Field(default=None, gt=0)
    sampling: SamplingParams = SamplingParams()
    rules: tuple[RuleChoice, ...] = Field(default=DEFAULT_RULES, min_length=1)
    num_speculative_tokens: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        default=(1, 2, 3, 4, 6), min_length=1
    )
    num_candidates: int = Field(default=8, ge=1)
    num_examples: int = Field(default=64, ge=2)
    num_confirmed: int = Field(default=64, ge=2)
    num_timed: int | None = Field(default=None, ge=1)
    confidence: float = Field(default=0.8, ge=0, le=1)

    @field_validator("rules", mode="before")
    @classmethod
    def _one_of_each(cls, value: Any) -> Any:
        return expand_all(value)

    @model_validator(mode="after")
    def _one_bound(self) -> TuneConfig:
        given = [self.quality_floor, self.absolute_quality, self.max_latency]
        if sum(bound is not None for bound in given) != 1:
            raise ValueError(
                "give exactly one of quality_floor, absolute_quality and max_latency, such as "
                "quality_floor 0.98"
            )
        return self


class Tried(StrictModel):
    """A candidate with what was measured of it.

    Attributes:
        examples: Those to choose on, or those to confirm on.
        quality: Mean score; `relative_quality` as part of the target's; None without a metric.
        speedup: Seconds a token of the target alone / of this, whole requests.
        met: Whether the figures meet the bound; when confirming, `confidence` of the resamples, too.
            Of lossless decoding and a floor of no more than the target's own quality, always.
    """

    decoding: DecodingConfig
    examples: Step
    quality: IntervalRow | None
    relative_quality: IntervalRow | None
    speedup: IntervalRow
    met: bool


class FailedCell(StrictModel):
    """A candidate that could not be measured, and why."""

    decoding: DecodingConfig
    error: str


class Tuned(StrictModel):
    """The setting that was confirmed, and all that was measured on the way."""

    schema_version: Literal[1] = 1
    chosen: Tried
    tried: tuple[Tried, ...]
    failed: tuple[FailedCell, ...]
    config: TuneConfig


def tune(config: TuneConfig, progress: Progress = silent) -> Tuned:
    """Choose a setting and write it to `decoding.yaml`.

    Raises:
        UsageError: a model or the task cannot be used, or a floor is asked for without a metric.
        NotReachedError: nothing that was measured meets the bound on the examples to confirm on.
    """
    if config.max_latency is None and config.task.metric is None:
        raise UsageError(
            f"task {config.task.task} has no metric, so no quality floor can be met; give max_latency, "
            "or a task with a metric such as arithmetic"
        )
    run = RunDirectory(config.output)
    run.check_kind(config)
    with run.alone():
        return _tune(config, run, progress)


def _tune(config: TuneConfig, run: RunDirectory, progress: Progress) -> Tuned:
    bound = Bound(config)
    pair = cache(lambda: load_models(config))
    choosing, confirming = (_Examples(config, name, pair, progress) for name in _STEPS)
    candidates = propose(choosing, config)
    run.write_manifest(config)  # not before models and task have turned out to be there
    for stale in (run.path / _FILE, run.result):  # of another bound, perhaps
        stale.unlink(missing_ok=True)
    on_hand = choosing.measure(candidates)
    tried = [bound.tried(on_hand, row, "choosing") for row in on_hand.rows]
    for decoding in bound.ranked(on_hand):
        confirmed = confirming.measure([decoding])
        row = next((row for row in confirmed.rows if row.decoding == decoding), None)
        if row is None:  # it failed here
            continue
        tried.append(bound.tried(confirmed, row, "confirming"))
        if tried[-1].met:
            failed = (*choosing.failed, *confirming.failed)
            found = Tuned(chosen=tried[-1], tried=tuple(tried), failed=failed, config=config)
            atomic_write_text(run.path / _FILE, to_yaml(decoding))
            run.write_result(found.model_dump(mode="json"))
            return found
    failed = len(choosing.failed) + len(confirming.failed)
    beside = f" ({failed} more failed, see results.jsonl)" if failed else ""
    raise NotReachedError(
        f"none of {len(tried)} measurements{beside} meets {bound}; {bound.nearest(tried)}; loosen the "
        "bound, or align the draft further"
    )


class _Examples:
    """The examples of one step, and what was measured on them, in a bench of their own."""

    def __init__(
        self, config: TuneConfig, name: Step, pair: Callable[[], Pair], progress: Progress
    ) -> None:
        self.alone = DecodingConfig(strategy=Autoregressive(), sampling=config.sampling)
        self.failed: list[FailedCell] = []
        self._wants_quality = config.quality_floor is not None
        self._setting = _bench_of(config, name)
        self._context = bench_context(self._setting)
        self._pair = pair
        self.progress = progress

    @cached_property
    def work(self) -> Workbench:
        """Models and examples, loaded when something is to be run."""
        return prepare(self._setting, self.progress, self._pair())

    def rows(self, cells: Sequence[DecodingConfig]) -> list[ResultRow]:
        """Rows of these cells and the target alone; what is there already is not run again.

        Raises:
            UsageError: the target alone cannot answer these examples.
        """
        folder, cells = self._setting.output, [self.alone, *cells]
        missing = unfinished(cells, self._context, read_rows(folder, self._context))
        if missing:
            run_cells(self.work, missing, folder, progress=self.progress)
        found = [row for row in read_rows(folder, self._context) if row.decoding in cells]
        for row in found:
            if row.status == "failed" and row.decoding == self.alone:
                raise UsageError(f"the target alone could not answer the examples: {row.error}")
        return found

    def measure(self, cells: Sequence[DecodingConfig]) -> Frontier:
        """The cells beside the target alone; those that failed are kept in `failed`.

        Raises:
            NotReachedError: a part of the target's quality is asked for, and that is 0.
        """
        rows = self.rows(cells)
        self.failed += [
            FailedCell(decoding=row.decoding, error=row.error or "no reason recorded")
            for row in rows
            if row.status == "failed"
        ]
        found = Frontier([row for row in rows if row.status == "done"], self._setting.seed)
        if self._wants_quality and not found.quality(found.target).value:
            raise NotReachedError(
                "the target itself scores 0 on these examples, and every part of that is met by "
                "anything; give more examples, another task, or max_latency"
            )
        return found


def propose(choosing: _Examples, config: TuneConfig) -> list[DecodingConfig]:
    """Candidates worth measuring: lossless, and those that no other beats at speed and surprisal.

    Each rule comes with its fastest block length; of more candidates than are wanted, some at even
    steps along the surprisal, both ends among them.
    """
    rows = choosing.rows([])
    cells = [
        DecodingConfig(
            strategy=Speculative(rule=rule, num_speculative_tokens=gamma), sampling=config.sampling
        )
        for rule in (Lossless(), *config.rules)
        for gamma in config.num_speculative_tokens
    ]
    predictions = predict(choosing.work, rows, cells, choosing.progress)
    best: dict[str, tuple[Prediction, DecodingConfig]] = {}
    for cell, one in zip(cells, predictions, strict=True):
        assert isinstance(cell.strategy, Speculative)
        name = repr(cell.strategy.rule)
        if name not in best or one.predicted_speedup > best[name][0].predicted_speedup:
            best[name] = (one, cell)
    _, lossless = best[repr(Lossless())]
    others = [cell for cell in undominated(list(best.values())) if cell != lossless]
    return [lossless, *spread(others, config.num_candidates)]


def undominated(
    candidates: Sequence[tuple[Prediction, DecodingConfig]],
) -> list[DecodingConfig]:
    """Those that none of smaller surprisal is as fast as, from the least surprising on."""
    order = sorted(candidates, key=lambda c: (c[0].predicted_surprisal, -c[0].predicted_speedup))
    kept: list[DecodingConfig] = []
    fastest = 0.0
    for prediction, decoding in order:
        if prediction.predicted_speedup > fastest:
            fastest = prediction.predicted_speedup
            kept.append(decoding)
    return kept


def spread(candidates: Sequence[DecodingConfig], count: int) -> list[DecodingConfig]:
    """So many of them at even steps, the first and the last among them where there are two."""
    if count >= len(candidates):
        return list(candidates)
    if count == 1:
        return [candidates[0]]
    last = len(candidates) - 1
    return [candidates[round(number * last / (count - 1))] for number in range(count)]


class Bound:
    """What is asked of a setting, and which of those that meet it is better."""

    def __init__(self, config: TuneConfig) -> None:
        self.config = config

    def __str__(self) -> str:
        config = self.config
        if config.quality_floor is not None:
            return f"a quality of {config.quality_floor:g} of the target's"
        if config.absolute_quality is not None:
            return f"a quality of {config.absolute_quality:g}"
        return f"{config.max_latency:g} of the target's latency"

    def met(self, frontier: Frontier, row: ResultRow) -> Tensor:
        """In the data, and in each resample, [1 + R]."""
        at, config = frontier.rows.index(row), self.config
        if config.quality_floor is not None:
            return frontier.granted_CR[at] >= config.quality_floor
        if config.absolute_quality is not None:
            return frontier.quality_CR[at] >= config.absolute_quality
        assert config.max_latency is not None, "the configuration has one bound"
        return frontier.speed_CR[at] >= 1 / config.max_latency

    def surely_met(self, frontier: Frontier, row: ResultRow) -> bool:
        """In as many of the resamples as `confidence` says."""
        met_R = self.met(frontier, row)[1:]
        return float(met_R.float().mean()) >= self.config.confidence

    def ranked(self, frontier: Frontier) -> list[DecodingConfig]:
        """Those that surely meet it first, then those that do in the data; the better ones first.

        Of two as good, the faster one, and the target alone last of all.
        """
        if self.config.max_latency is None:
            better_C = frontier.speed_CR[:, 0]
        else:
            better_C = frontier.granted_CR[:, 0].nan_to_num(0)
        found: list[tuple[tuple[bool, float, bool, float], DecodingConfig]] = []
        for at, row in enumerate(frontier.rows):
            if self.met(frontier, row)[0]:
                place = (
                    self.surely_met(frontier, row),
                    float(better_C[at]),
                    row is not frontier.target,
                    float(frontier.speed_CR[at, 0]),
                )
                found.append((place, row.decoding))
        return [decoding for _, decoding in sorted(found, key=lambda f: f[0], reverse=True)]

    def tried(self, frontier: Frontier, row: ResultRow, examples: Step) -> Tried:
        """The row's figures."""
        has_metric = row.metric is not None
        met = bool(self.met(frontier, row)[0])
        if examples == "confirming":
            met = met and self.surely_met(frontier, row)
        return Tried(
            decoding=row.decoding,
            examples=examples,
            quality=IntervalRow.of(frontier.quality(row)) if has_metric else None,
            relative_quality=IntervalRow.of(frontier.relative_quality(row)) if has_metric else None,
            speedup=IntervalRow.of(frontier.speedup(row)),
            met=met,
        )

    def nearest(self, tried: Sequence[Tried]) -> str:
        """How near the measurements came."""
        fastest = max(one.speedup.value for one in tried)
        if self.config.max_latency is not None:
            return f"the fastest took {1 / fastest:.3f}"
        drafted = [one for one in tried if not isinstance(one.decoding.strategy, Autoregressive)]
        is_part = self.config.quality_floor is not None
        scores = [one.relative_quality if is_part else one.quality for one in drafted or tried]
        best = max(score.value for score in scores if score is not None)
        return f"the best scored {best:.3f}" + (" of it" if is_part else "")


def _bench_of(config: TuneConfig, name: Step) -> BenchConfig:
    choosing = name == "choosing"
    shared = {key: getattr(config, key) for key in ModelsConfig.model_fields}
    return BenchConfig(
        **shared,
        task=config.task,
        output=config.output / name,
        num_examples=config.num_examples if choosing else config.num_confirmed,
        skip_examples=0 if choosing else config.num_examples,
        num_timed=config.num_timed,
    )
