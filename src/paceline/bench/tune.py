"""Choose rule, threshold and block length for a quality floor or a latency budget.

    1  the target alone answers the examples to choose on
    2  one teacher-forced pass over its answers predicts every candidate's speed and its distance to
       the target; those that another one beats at both are dropped, and some of the rest proposed
    3  the proposed ones are measured; so is lossless decoding, which needs no proof
    4  the best of them is measured again on examples that nobody has seen, then the next best, until
       one is confirmed there

The first three steps are a bench in `choosing/`, the last one another in `confirming/`, so that a
stopped run goes on.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from paceline.bench.frontier import Frontier
from paceline.bench.grid import RuleChoice, expand_all
from paceline.bench.prediction import predict, rows_of_the_target
from paceline.bench.runner import read_rows, run_cells
from paceline.bench.workbench import BenchConfig, bench_context, cell_key, prepare
from paceline.config import StrictModel, to_yaml
from paceline.core.rules import Lossless
from paceline.core.sampling import SamplingParams
from paceline.decode.strategies import Autoregressive, DecodingConfig, Speculative
from paceline.errors import NotReachedError, UsageError
from paceline.measure.frontier import DEFAULT_RULES
from paceline.measure.pair import ModelsConfig
from paceline.measure.results import IntervalRow
from paceline.progress import Progress, silent
from paceline.records import RunDirectory, atomic_write_text
from paceline.tasks import TaskChoice

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from paceline.bench.prediction import Prediction
    from paceline.bench.schema import ResultRow

_FILE = "decoding.yaml"


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
        confidence: A candidate comes first if at least this part of the resamples meets the bound.
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
        examples: "choosing" or "confirming".
        quality: Mean score; `relative_quality` as part of the target's; None without a metric.
        speedup: Seconds a token of the target alone / of this, whole requests.
        met: Whether the figures themselves, not their intervals, meet the bound.
    """

    decoding: DecodingConfig
    examples: Literal["choosing", "confirming"]
    quality: IntervalRow | None
    relative_quality: IntervalRow | None
    speedup: IntervalRow
    met: bool


class Tuned(StrictModel):
    """The setting that was confirmed, and all that was measured on the way."""

    schema_version: Literal[1] = 1
    chosen: Tried
    tried: tuple[Tried, ...]
    config: TuneConfig


def tune(config: TuneConfig, progress: Progress = silent) -> Tuned:
    """Choose a setting and write it to `decoding.yaml`.

    Raises:
        UsageError: a model or the task cannot be used, or a floor is asked for without a metric.
        NotReachedError: nothing that was measured meets the bound on unseen examples.
    """
    if config.max_latency is None and config.task.metric is None:
        raise UsageError(
            f"task {config.task.task} has no metric, so no quality floor can be met; give max_latency, "
            "or a task with a metric such as arithmetic"
        )
    run = RunDirectory(config.output)
    run.write_manifest(config)
    bound = _Bound(config)
    choosing = _bench_of(config, "choosing")
    candidates = propose(choosing, config, progress)
    on_hand = _measure(choosing, candidates, progress)
    tried = [bound.tried(on_hand, row, "choosing") for row in on_hand.rows]
    for decoding in bound.ranked(on_hand):
        confirmed = _measure(_bench_of(config, "confirming"), [decoding], progress)
        row = next(row for row in confirmed.rows if row.decoding == decoding)
        tried.append(bound.tried(confirmed, row, "confirming"))
        if tried[-1].met:
            found = Tuned(chosen=tried[-1], tried=tuple(tried), config=config)
            atomic_write_text(run.path / _FILE, to_yaml(decoding))
            run.write_result(found.model_dump(mode="json"))
            return found
    raise NotReachedError(
        f"none of {len(tried)} measurements meets {bound}; {bound.nearest(tried)}; loosen the bound, "
        "or align the draft further"
    )


def propose(
    choosing: BenchConfig, config: TuneConfig, progress: Progress = silent
) -> list[DecodingConfig]:
    """Candidates worth measuring: lossless, and those that no other beats at both speed and distance.

    Each rule comes with its fastest block length; of more candidates than are wanted, some at even
    steps along the distance to the target, both ends among them.
    """
    alone = DecodingConfig(strategy=Autoregressive(), sampling=config.sampling)
    rows = _rows(choosing, [alone], progress)
    cells = [
        DecodingConfig(
            strategy=Speculative(rule=rule, num_speculative_tokens=gamma), sampling=config.sampling
        )
        for rule in (Lossless(), *config.rules)
        for gamma in config.num_speculative_tokens
    ]
    work = prepare(choosing, progress)
    predicted = {one.key: one for one in predict(work, rows_of_the_target(rows), cells, progress)}
    best: dict[str, tuple[Prediction, DecodingConfig]] = {}
    for cell in cells:
        assert isinstance(cell.strategy, Speculative)
        name, one = repr(cell.strategy.rule), predicted[work.key_of(cell)]
        if name not in best or one.predicted_speedup > best[name][0].predicted_speedup:
            best[name] = (one, cell)
    _, lossless = best.pop(repr(Lossless()))
    others = spread(undominated(list(best.values())), config.num_candidates)
    return [lossless, *others]


def undominated(
    candidates: Sequence[tuple[Prediction, DecodingConfig]],
) -> list[DecodingConfig]:
    """Those that none of smaller distance is as fast as, from the nearest to the farthest."""
    order = sorted(candidates, key=lambda c: (c[0].predicted_tvd, -c[0].predicted_speedup))
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


class _Bound:
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
            return frontier.relative_CR[at] >= config.quality_floor
        if config.absolute_quality is not None:
            return frontier.quality_CR[at] >= config.absolute_quality
        assert config.max_latency is not None, "the configuration has one bound"
        return frontier.speed_CR[at] >= 1 / config.max_latency

    def ranked(self, frontier: Frontier) -> list[DecodingConfig]:
        """Those that surely meet it first, then those that do in the data; the better ones first."""
        wanted = frontier.speed_CR if self.config.max_latency is None else frontier.quality_CR
        found: list[tuple[bool, float, DecodingConfig]] = []
        for at, row in enumerate(frontier.rows):
            met = self.met(frontier, row)
            if met[0]:
                sure = float(met[1:].float().mean()) >= self.config.confidence
                value = float(wanted[at, 0])
                found.append((sure, 0.0 if math.isnan(value) else value, row.decoding))
        return [decoding for *_, decoding in sorted(found, key=lambda f: f[:2], reverse=True)]

    def tried(
        self, frontier: Frontier, row: ResultRow, examples: Literal["choosing", "confirming"]
    ) -> Tried:
        """The row's figures."""
        has_metric = row.metric is not None
        return Tried(
            decoding=row.decoding,
            examples=examples,
            quality=IntervalRow.of(frontier.quality(row)) if has_metric else None,
            relative_quality=IntervalRow.of(frontier.relative_quality(row)) if has_metric else None,
            speedup=IntervalRow.of(frontier.speedup(row)),
            met=bool(self.met(frontier, row)[0]),
        )

    def nearest(self, tried: Sequence[Tried]) -> str:
        """How near the measurements came."""
        fastest = max(one.speedup.value for one in tried)
        if self.config.max_latency is not None:
            return f"the fastest took {1 / fastest:.3f}"
        best = max(one.quality.value for one in tried if one.quality is not None)
        return f"the best scored {best:.3f}"


def _bench_of(config: TuneConfig, name: Literal["choosing", "confirming"]) -> BenchConfig:
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


def _measure(
    setting: BenchConfig, candidates: Sequence[DecodingConfig], progress: Progress
) -> Frontier:
    """The candidates beside the target alone."""
    alone = DecodingConfig(strategy=Autoregressive(), sampling=candidates[0].sampling)
    rows = _rows(setting, [alone, *candidates], progress)
    return Frontier([row for row in rows if row.status == "done"], setting.seed)


def _rows(
    setting: BenchConfig, cells: Sequence[DecodingConfig], progress: Progress
) -> list[ResultRow]:
    """Rows of these cells; what is there already is not run again."""
    context = bench_context(setting)
    keys = [cell_key(context, cell) for cell in cells]
    done = {row.key for row in read_rows(setting.output, context) if row.status == "done"}
    missing = [cell for cell, key in zip(cells, keys, strict=True) if key not in done]
    if missing:
        run_cells(prepare(setting, progress), missing, setting.output, progress=progress)
    return [row for row in read_rows(setting.output, context) if row.key in keys]
