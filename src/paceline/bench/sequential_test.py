"""Configuration of `tune`; its bound, and tests whether settings meet it, one after another.

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
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import torch
from pydantic import Field, field_validator, model_validator

from paceline.bench.workbench import RuleChoice, expand_all
from paceline.config import HomePath, Options, StrictModel
from paceline.core.bootstrap import LEAST_UNITS, Interval, product_interval, ratio_interval
from paceline.core.rules import DEFAULT_RULES
from paceline.core.sampling import SamplingParams
from paceline.decode.strategies import DecodingConfig
from paceline.engines.kinds import KINDS, RuleServer
from paceline.measure.engine_costs import WithCosts
from paceline.measure.pair import ModelsConfig, check_task, show_example
from paceline.records import RunDirectory
from paceline.results.figures import at_confidence
from paceline.results.frontier import is_lossless, measure, with_target_scores
from paceline.results.row import Row
from paceline.tasks import TaskChoice

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from paceline.data.input_checks import InputChecks
    from paceline.engines.contract import Engine
    from paceline.measure.engine_costs import EngineCosts
    from paceline.results.frontier import Frontier

    Worth = tuple[float, bool, float]
    """Sort key: value, then settings with a draft, then speed."""

Setting = TypeVar("Setting")
Step = Literal["choosing", "confirming"]
NOT_MET = "no"
"""Value of the setting `met` of a row whose bound is not met."""


class TuneConfig(WithCosts, ModelsConfig):
    """Configuration of `tune`, with one of the two bounds.

    Attributes:
        quality_floor: Minimum mean score, relative to the target's.
        max_latency: Maximum seconds per token, relative to the target's.
        output: Run directory; resumes if it exists. Its `decoding.yaml` is for `decode --config`.
        sampling: Sampling parameters.
        rules: Candidate rules, such as [lossless, {rule: lossy, alpha: [0.2, 0.4]}]: lenient has
            kind and epsilon, lossy alpha and beta, bild threshold, all others alpha. With `costs`,
            the default is lossless decoding alone, since engines have no other rule.
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
    output: HomePath
    quality_floor: Annotated[float | None, Options()] = Field(default=None, gt=0)
    max_latency: Annotated[float | None, Options()] = Field(default=None, gt=0)
    sampling: Annotated[SamplingParams, Options("temperature")] = SamplingParams()
    rules: Annotated[tuple[RuleChoice, ...], Options()] = DEFAULT_RULES
    num_speculative_tokens: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        default=(1, 2, 3, 4, 6), min_length=1
    )
    served_by: Annotated[RuleServer, Options(for_="")] = "paceline"
    num_candidates: int = Field(default=8, ge=1)
    num_examples: Annotated[int, Options()] = Field(default=64, ge=2)
    num_confirmed: Annotated[int, Options()] = Field(default=128, ge=LEAST_UNITS)
    num_timed: int | None = Field(default=None, ge=1)
    confidence: float = Field(default=0.8, gt=0.5, lt=1)

    @field_validator("rules", mode="before")
    @classmethod
    def _one_of_each(cls, value: Any) -> Any:
        return expand_all(value)

    @model_validator(mode="after")
    def _one_bound(self) -> TuneConfig:
        if (self.quality_floor is None) == (self.max_latency is None):
            raise ValueError(
                "set exactly one of quality_floor and max_latency, such as quality_floor 0.98"
            )
        timed = self.num_timed
        if self.max_latency is not None and timed is not None and timed < LEAST_UNITS:
            raise ValueError(
                f"num_timed is {timed}, but max_latency needs at least {LEAST_UNITS} timed "
                "examples; raise num_timed"
            )
        return self

    @property
    def server(self) -> type[Engine] | None:
        """The engine that serves the setting; None: Paceline's decoder."""
        return KINDS.get(self.served_by)

    def check(self, checks: InputChecks) -> None:
        RunDirectory(self.output).check_kind(self)
        checks.device(self.device)
        self.check_costs(checks, self.block_lengths)
        count = self.num_examples + self.num_confirmed
        counted = f"--num-examples {self.num_examples} + --num-confirmed {self.num_confirmed}"
        first, *_ = check_task(checks, "task", self.task, count, self.seed, counted)
        target, *_ = checks.pair(self.target, self.draft)
        show_example(checks, self.task, first, target)
        checks.output(self.output)

    @property
    def block_lengths(self) -> tuple[int, ...]:
        """The values of `num_speculative_tokens` that fit into an answer."""
        most = max(1, self.max_new_tokens - 1)
        return tuple(gamma for gamma in self.num_speculative_tokens if gamma <= most)

    @property
    def bound(self) -> str:
        """The bound in words."""
        if self.quality_floor is not None:
            return f"a quality of at least {self.quality_floor:g} times the target's"
        return f"a time per token of at most {self.max_latency:g} times the target's"


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
        return self.row.setting["met"] != NOT_MET

    @property
    def lower_limit(self) -> float | None:
        """Lower confidence limit of the bounded figure; None if no test is needed."""
        return self.row.totals.get("lower_limit")

    def measure(self, figure: str) -> Interval:
        """A figure with its interval; NaN if it is unknown."""
        return measure(figure, self.row)


class Bound:
    """The bound of a configuration, and the order of the settings that meet it.

    Attributes:
        figure: Name of the bounded figure.
        least: Its minimum.
    """

    def __init__(self, config: TuneConfig, costs: EngineCosts | None = None) -> None:
        self.config, self._costs = config, costs
        self.figure, self.least = "relative_quality", config.quality_floor or 0.0
        if config.max_latency is not None:
            self.figure, self.least = "speedup", 1 / config.max_latency

    def met(self, frontier: Frontier, row: Row) -> Tensor:
        """Whether the row meets the bound, in the data and in each resample, [1 + R]."""
        return frontier.resampled(self.figure, row) >= self.least

    def is_proven(self, frontier: Frontier, row: Row) -> bool:
        """True if the row needs no test: lossless decoding has the target's quality by proof."""
        if self.least > 1:
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

        def certainty(row: Row) -> tuple[float, Worth]:
            share = float(self.met(frontier, row)[1:].float().mean())
            return share, self._worth(frontier, row)

        order = [max(proven, key=lambda row: self._worth(frontier, row))] if proven else []
        for row in sorted(others, key=certainty, reverse=True):
            if not order or self._worth(frontier, row) > self._worth(frontier, order[-1]):
                order.append(row)
        return order

    def lower_limit(self, frontier: Frontier, row: Row) -> float:
        """The lower confidence limit of the bounded figure.

        A speedup in an engine has the errors of its counts and of the engine's costs.

        For quality, adds one example with the target's best score and score 0 for the setting.
        Otherwise, a setting that loses 1 answer in 100 would have a perfect score and an interval
        of width 0 on most sets of 50 examples.
        """
        confidence = 2 * self.config.confidence - 1
        (over_N, under_N), *rest = frontier.columns(self.figure, row)
        if rest:
            counted = ratio_interval((over_N, under_N), *rest, confidence=confidence)
            if self._costs is None:
                return counted.low
            return product_interval(counted, self._error_of_speed(row, self._costs)).low
        over_N = torch.cat([over_N, over_N.new_zeros(1)])
        under_N = torch.cat([under_N, under_N.amax(keepdim=True)])
        return ratio_interval((over_N, under_N), confidence=confidence).low

    def _error_of_speed(self, row: Row, costs: EngineCosts) -> Interval:
        """1 with the relative error that the costs give the speedup.

        The costs chose among the block lengths, too, so the error rate is divided by their number.
        """
        gamma, config = int(row.setting["gamma"]), self.config
        drafted, calls = (sum(filter(None, row.sums[name])) for name in ("drafted", "calls"))
        confidence = 1 - 2 * (1 - config.confidence) / len(config.num_speculative_tokens)
        steps, mean = costs.step_costs([gamma], config.concurrency), drafted / max(calls, 1)
        bounds = steps.bounds_of_cost(gamma, mean)
        assert bounds is not None, "costs of engines have bounds"
        slow, fast = (steps.block_cost(gamma, mean) / bound for bound in reversed(bounds))
        return at_confidence(Interval(1.0, slow, fast), confidence)

    def tried(
        self, frontier: Frontier, row: Row, decoding: DecodingConfig, examples: Step
    ) -> Tried:
        """The row with the target's scores, and whether it meets the bound."""
        words, totals = "yes" if self.met(frontier, row)[0] else NOT_MET, {}
        if examples == "confirming" and self.is_proven(frontier, row):
            words = words if words == NOT_MET else "by proof"
        elif examples == "confirming":
            totals["lower_limit"] = limit = self.lower_limit(frontier, row)
            words = "yes" if limit >= self.least else NOT_MET
        scored = with_target_scores(row, frontier.target).only(frontier.target.units)
        return Tried(
            decoding=decoding, row=scored.extended({}, totals, examples=examples, met=words)
        )

    def _worth(self, frontier: Frontier, row: Row) -> Worth:
        speed = frontier.value("speedup", row)
        if self.figure != "speedup":
            return speed, row is not frontier.target, speed
        quality = frontier.value("relative_quality", row)
        quality = 0.0 if math.isnan(quality) else quality
        return quality, row is not frontier.target, speed


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


def statement(config: TuneConfig, tests: Sequence[Tried]) -> str:
    """The number of tests, and the probability of choosing a setting that misses the bound."""
    count = sum(tried.lower_limit is not None for tried in tests)
    chosen = [tried for tried in tests if tried.met][-1]
    most = ", the most certain first," if count > 1 else ""
    proof = "" if chosen.lower_limit is not None else " The chosen setting meets it by proof."
    if not count:
        return f"bound: {config.bound}.{proof}"
    end = "and met it" if tests[-1].met else "until one failed"
    return (
        f"bound: {config.bound}.{proof} {count} {'setting was' if count == 1 else 'settings were'} "
        f"tested on {config.num_confirmed} examples that did not choose it{most} {end}. At most "
        f"{100 * (1 - config.confidence):.3g}% of runs of tune choose a setting that misses its "
        "bound (--confidence)."
    )
