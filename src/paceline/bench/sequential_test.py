"""Bound and result of `tune`, and tests whether settings meet the bound, one after another.

The tests use examples that did not select the settings. Their order is fixed before: by decreasing
certainty that a setting meets the bound, each faster (or of higher quality) than those before it.
Testing stops at the first setting that fails, and the last one that passed is chosen. So a setting
that misses the bound is chosen only if the first such setting passes its test, with probability at
most 1 - confidence, whatever the number of tests. This is fixed-sequence testing (Angelopoulos et
al. 2021, "Learn then Test", section 3).
"""

# N examples, R resamples
from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar

import torch
from pydantic import Field, field_validator, model_validator

from paceline.bench.answers import key_of
from paceline.bench.workbench import RuleChoice, expand_all
from paceline.config import Options, StrictModel
from paceline.core.bootstrap import LEAST_UNITS, ratio_interval, ratio_of_ratios_interval
from paceline.core.rules import DEFAULT_RULES
from paceline.core.sampling import SamplingParams
from paceline.data.input_checks import InputChecks, note
from paceline.decode.strategies import Autoregressive, DecodingConfig
from paceline.engines.kinds import KINDS, EngineKind, RuleServer
from paceline.measure.engine_costs import WithCosts
from paceline.measure.pair import ModelsConfig
from paceline.measure.prompt_checks import check_costs, check_task
from paceline.records import RunDirectory
from paceline.results.frontier import is_lossless, measure, with_target_scores
from paceline.results.row import Row
from paceline.rng import named_generator
from paceline.tasks import TaskChoice

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from paceline.core.bootstrap import Interval
    from paceline.results.frontier import Frontier

Step = Literal["choosing", "confirming"]
Setting = TypeVar("Setting")

_NOT_MET = "no"
LEAST_CONFIRMED = LEAST_UNITS
"""With fewer examples, the coverage of intervals is below their confidence."""


class TuneConfig(WithCosts, ModelsConfig):
    """Configuration of `tune`, with exactly one of the three bounds.

    Attributes:
        quality_floor: Minimum mean score, relative to the target's.
        absolute_quality: Minimum mean score.
        max_latency: Maximum seconds per token, relative to the target's.
        output: Run directory; its `decoding.yaml` is for `decode --config`.
        sampling: Sampling parameters.
        rules: Candidate rules; lists of parameters are expanded. With `costs`, the default is
            lossless decoding alone, since engines have no other rule.
        num_speculative_tokens: Candidate block lengths (gamma).
        served_by: Decode the candidates as this serves them. vLLM takes first and bonus tokens from
            the target and drafts without top-k and top-p; cascades have no effect there at
            temperature 0, so they are no candidates. With the `costs` of vLLM, it is vllm.
        num_candidates: Number of candidates to measure, besides lossless decoding.
        num_examples: Number of examples for choosing.
        num_confirmed: Number of other examples, for confirming.
        num_timed: Number of examples, of either kind, on which speed is measured; None: all.
        confidence: A run chooses a setting that misses the bound with a probability of at most
            1 - confidence, whatever the number of tested settings.
    """

    task: TaskChoice
    output: Path
    quality_floor: float | None = Field(default=None, gt=0)
    absolute_quality: float | None = Field(default=None, gt=0, le=1)
    max_latency: float | None = Field(default=None, gt=0)
    sampling: Annotated[SamplingParams, Options("temperature")] = SamplingParams()
    rules: tuple[RuleChoice, ...] = Field(default=DEFAULT_RULES, min_length=1)
    num_speculative_tokens: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        default=(1, 2, 3, 4, 6), min_length=1
    )
    served_by: Annotated[RuleServer, Options(for_="")] = "paceline"
    num_candidates: int = Field(default=8, ge=1)
    num_examples: int = Field(default=64, ge=2)
    num_confirmed: int = Field(default=128, ge=LEAST_CONFIRMED)
    num_timed: int | None = Field(default=None, ge=1)
    confidence: float = Field(default=0.8, gt=0.5, lt=1)

    @field_validator("rules", mode="before")
    @classmethod
    def _one_of_each(cls, value: Any) -> Any:
        return expand_all(value)

    @model_validator(mode="after")
    def _one_bound(self) -> TuneConfig:
        bounds = [self.quality_floor, self.absolute_quality, self.max_latency]
        if sum(bound is not None for bound in bounds) != 1:
            raise ValueError(
                "set exactly one of quality_floor, absolute_quality and max_latency, such as "
                "quality_floor 0.98"
            )
        timed = self.num_timed
        if self.max_latency is not None and timed is not None and timed < LEAST_CONFIRMED:
            raise ValueError(
                f"num_timed is {timed}, but max_latency needs at least {LEAST_CONFIRMED} timed "
                "examples; raise num_timed"
            )
        return self

    @model_validator(mode="after")
    def _engines_have_no_such_penalty(self) -> TuneConfig:
        if self.server is not None and self.sampling.repetition_penalty != 1:
            raise ValueError(
                f"{self.server.title} applies a repetition penalty to the target alone, and "
                "Paceline's decoder to the draft, too; leave sampling.repetition_penalty out, or "
                "served_by"
            )
        return self

    @property
    def server(self) -> EngineKind | None:
        """The engine that serves the setting; None: Paceline's decoder."""
        return KINDS.get(self.served_by)

    def check(self) -> InputChecks:
        """Check the inputs, and note why few settings can be confirmed; raises UsageError."""
        if self.shortage is not None:
            note(self.shortage)
        RunDirectory(self.output).check_kind(self)
        checks = InputChecks()
        checks.device(self.device)
        check_costs(checks, self, self.block_lengths)
        checks.pair(self.target, self.draft)
        checks.drafting(self.target, self.draft)
        check_task(checks, "task", self.task, self.num_examples, self.seed)
        checks.output(self.output)
        return checks

    @property
    def block_lengths(self) -> tuple[int, ...]:
        """The values of `num_speculative_tokens` that fit into an answer."""
        most = max(1, self.max_new_tokens - 1)
        return tuple(gamma for gamma in self.num_speculative_tokens if gamma <= most)

    @property
    def least_confirmed(self) -> int | None:
        """Minimum number of examples to confirm a quality floor; None if there is none.

        A setting with a probability f of a correct answer answers N of N examples correctly with
        probability f^N, so N correct answers show a quality above f only if f^N <= 1 - confidence.
        """
        floor = self.quality_floor or self.absolute_quality
        if floor is None or floor >= 1:
            return None
        return math.ceil(math.log(1 - self.confidence) / math.log(floor))

    @property
    def shortage(self) -> str | None:
        """Why few settings can be confirmed, in one line; None if there is no such reason."""
        floor = self.quality_floor or self.absolute_quality
        if floor is not None and floor >= 1:
            return (
                f"a quality floor of {floor:g} can be confirmed only for lossless decoding and for "
                "settings that score higher than the target; lower the floor, e.g. to 0.98"
            )
        least = self.least_confirmed
        if least is None or self.num_confirmed >= least:
            return None
        return (
            f"num_confirmed is {self.num_confirmed}: to confirm a quality of {floor:g} at "
            f"confidence {self.confidence:g} takes at least {least} examples, even if every answer "
            "is as good as the target's; raise num_confirmed, or lower the floor or the confidence"
        )


class Tried(StrictModel):
    """A measured candidate.

    Attributes:
        row: The cell, with the target's score and seconds on the same examples. Its setting says
            `examples`: choosing or confirming, and `met`: whether the bound is. On the choosing
            examples the figure meets it, on the confirming ones its `lower_limit`, which is among
            the totals. That of lossless decoding and of the target alone is met by proof.
    """

    decoding: DecodingConfig
    row: Row

    @property
    def met(self) -> bool:
        """Whether the bound is met."""
        return self.row.setting["met"] != _NOT_MET

    @property
    def lower_limit(self) -> float | None:
        """Lower confidence limit of the bounded figure; None if no test is needed."""
        return self.row.totals.get("lower_limit")

    def measure(self, figure: str, seed: int = 0) -> Interval:
        """A figure with its interval; NaN if it is unknown."""
        return measure(figure, self.row, seed)


class FailedCell(StrictModel):
    """A candidate that failed, with the error."""

    decoding: DecodingConfig
    error: str


class Tuned(StrictModel):
    """The chosen setting, and all measurements.

    Attributes:
        tried: Those on the choosing examples, then those on the confirming ones, in order.
        num_tests: Number of settings tested on the confirming examples.
        statement: The guarantee of the tests, in words.
    """

    schema_version: Literal[1] = 1
    kind: Literal["tune"] = "tune"
    chosen: Tried
    tried: tuple[Tried, ...]
    failed: tuple[FailedCell, ...]
    num_tests: int
    statement: str
    config: TuneConfig

    def rows(self, examples: Step) -> list[Row]:
        """The result rows of the settings that were measured on these examples."""
        return [one.row for one in self.tried if one.row.has(examples=examples)]


class Bound:
    """The bound of a configuration, and the order of the settings that meet it.

    Attributes:
        figure: Name of the bounded figure.
        least: Its minimum.
    """

    def __init__(self, config: TuneConfig) -> None:
        self.config = config
        if config.max_latency is not None:
            self.figure, self.least = "speedup", 1 / config.max_latency
            self._words = f"{config.max_latency:g} of the target's latency"
        elif config.quality_floor is not None:
            self.figure, self.least = "relative_quality", config.quality_floor
            self._words = f"{config.quality_floor:g} of the target's quality"
        else:
            assert config.absolute_quality is not None, "the configuration has one bound"
            self.figure, self.least = "quality", config.absolute_quality
            self._words = f"a quality of {config.absolute_quality:g}"

    def __str__(self) -> str:
        return self._words

    def met(self, frontier: Frontier, row: Row) -> Tensor:
        """Whether the row meets the bound, in the data and in each resample, [1 + R]."""
        return frontier.resampled(self.figure, row) >= self.least

    def is_proven(self, frontier: Frontier, row: Row) -> bool:
        """True if the row needs no test: lossless decoding has the target's quality by proof."""
        if self.figure == "quality" or self.least > 1:
            return False
        lossless = self.figure == "relative_quality" and is_lossless(row)
        return row is frontier.target or lossless

    def test_order(self, frontier: Frontier) -> list[Row]:
        """The cells to test, in order, from the figures on the choosing examples.

        First the best setting that needs no test. Then settings that meet the bound in the data, by
        decreasing certainty, without those that are no better than the ones before them. At equal
        certainty, the better one comes first.
        """
        met = [row for row in frontier.rows if self.met(frontier, row)[0]]
        proven = [row for row in met if self.is_proven(frontier, row)]
        others = [row for row in met if not self.is_proven(frontier, row)]

        def certainty(row: Row) -> tuple[float, _Worth]:
            share = float(self.met(frontier, row)[1:].float().mean())
            return share, self._worth(frontier, row)

        order = [max(proven, key=lambda row: self._worth(frontier, row))] if proven else []
        for row in sorted(others, key=certainty, reverse=True):
            if not order or self._worth(frontier, row) > self._worth(frontier, order[-1]):
                order.append(row)
        return order

    def lower_limit(self, frontier: Frontier, row: Row) -> float:
        """The lower confidence limit of the bounded figure.

        For quality, adds one example with the target's best score and score 0 for the setting.
        Otherwise, a setting that loses 1 answer in 100 would have a perfect score and an interval
        of width 0 on most sets of 50 examples.
        """
        rng = named_generator(self.config.seed, "confirm", key_of(row))
        settings = {"rng": rng, "confidence": 2 * self.config.confidence - 1}
        (over_N, under_N), *rest = frontier.columns(self.figure, row)
        if rest:
            (tokens_N, seconds_N), *_ = rest
            pair = (over_N, under_N), (seconds_N, tokens_N)
            return ratio_of_ratios_interval(*pair, **settings).low
        over_N = torch.cat([over_N, over_N.new_zeros(1)])
        under_N = torch.cat([under_N, under_N.amax(keepdim=True)])
        return ratio_interval(over_N, under_N, **settings).low

    def tried(
        self, frontier: Frontier, row: Row, decoding: DecodingConfig, examples: Step
    ) -> Tried:
        """The row with the target's scores, and whether it meets the bound."""
        words, totals = "yes" if self.met(frontier, row)[0] else _NOT_MET, {}
        if examples == "confirming" and self.is_proven(frontier, row):
            words = words if words == _NOT_MET else "by proof"
        elif examples == "confirming":
            totals["lower_limit"] = limit = self.lower_limit(frontier, row)
            words = "yes" if limit >= self.least else _NOT_MET
        scored = with_target_scores(row, frontier.target).only(frontier.target.units)
        return Tried(
            decoding=decoding, row=scored.extended({}, totals, examples=examples, met=words)
        )

    def nearest(self, tried: Sequence[Tried]) -> str:
        """The figure that comes closest to the bound, as a phrase for messages."""
        alone = [one for one in tried if isinstance(one.decoding.strategy, Autoregressive)]
        drafted = [one for one in tried if one not in alone] or tried
        considered = tried if self.figure == "speedup" else drafted
        best = max(one.measure(self.figure).value for one in considered)
        if self.figure == "speedup":
            return f"the fastest took {1 / best:.3f}"
        return f"the best scored {best:.3f}" + (" of it" if self.figure != "quality" else "")

    def _worth(self, frontier: Frontier, row: Row) -> _Worth:
        speed = frontier.value("speedup", row)
        if self.figure != "speedup":
            return _Worth(speed, row is not frontier.target, speed)
        quality = frontier.value("relative_quality", row)
        quality = 0.0 if math.isnan(quality) else quality
        return _Worth(quality, row is not frontier.target, speed)


class _Worth(NamedTuple):
    """Sort key: value, then settings with a draft, then speed."""

    value: float
    is_drafted: bool
    speed: float


def confirm(order: Sequence[Setting], test: Callable[[Setting], Tried | None]) -> list[Tried]:
    """Test settings in order until one fails; the last one that passes is confirmed.

    Args:
        order: Must not depend on the confirming examples.
        test: Measures a setting on the confirming examples. None: the measurement failed, for a
            reason unrelated to the bound; the setting is skipped.
    """
    tests: list[Tried] = []
    for setting in order:
        tried = test(setting)
        if tried is None:
            continue
        tests.append(tried)
        if not tried.met:
            break
    return tests


def statement(bound: Bound, tests: Sequence[Tried]) -> str:
    """The number of tests, and the probability of choosing a setting that misses the bound."""
    confidence = bound.config.confidence
    counted = [tried for tried in tests if tried.lower_limit is not None]
    chosen = [tried for tried in tests if tried.met][-1]
    lines = [f"bound: {bound}."]
    if chosen.lower_limit is None:
        lines.append("The chosen setting meets it by proof.")
    if not counted:
        return " ".join([*lines, "No other setting measured better, so none was tested."])
    plural = "s were" if len(counted) > 1 else " was"
    lines.append(
        f"{len(counted)} setting{plural} tested on {bound.config.num_confirmed} other examples, in "
        f"order of certainty, each at confidence {confidence:g}, until one failed. Whatever the "
        f"number of tests, at most {1 - confidence:.0%} of such runs choose a setting that misses "
        "the bound."
    )
    return " ".join(lines)
