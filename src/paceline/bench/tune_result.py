"""What `tune` is asked for, and what it found."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from paceline.bench.grid import RuleChoice, expand_all
from paceline.config import StrictModel
from paceline.core.bootstrap import LEAST_UNITS
from paceline.core.sampling import SamplingParams
from paceline.decode.strategies import DecodingConfig
from paceline.measure.engine_costs import WithCosts
from paceline.measure.pair import ModelsConfig
from paceline.measure.predicted_frontier import DEFAULT_RULES
from paceline.measure.results import IntervalRow
from paceline.tasks import TaskChoice

Step = Literal["choosing", "confirming"]

LEAST_CONFIRMED = LEAST_UNITS
"""With fewer examples an interval does not hold the truth as often as it says."""


class TuneConfig(WithCosts, ModelsConfig):
    """What is wanted, of which models, on which task; exactly one of the three bounds.

    Attributes:
        quality_floor: Least mean score, as part of the target's own.
        absolute_quality: Least mean score.
        max_latency: Most seconds a token, as part of the target's own.
        output: The run directory; `decoding.yaml` in it is for `decode --config`.
        sampling: How tokens will be drawn.
        rules: Candidates; a setting that is a list stands for one rule of each. With `costs`, lossless
            decoding alone unless rules are given, since engines have no other rule.
        num_speculative_tokens: Block lengths that are considered.
        num_candidates: How many are measured beside lossless decoding.
        num_examples: To choose on.
        num_confirmed: Others, to confirm on.
        num_timed: Of either, those that the target alone is timed on, too; None: all.
        confidence: How sure the bound is to hold for the chosen setting. The chance that a run
            chooses a setting that misses the bound is at most 1 - confidence, whatever the number of
            settings that are tested.
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
    num_confirmed: int = Field(default=128, ge=LEAST_CONFIRMED)
    num_timed: int | None = Field(default=None, ge=1)
    confidence: float = Field(default=0.8, gt=0.5, lt=1)

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
        timed = self.num_timed
        if self.max_latency is not None and timed is not None and timed < LEAST_CONFIRMED:
            raise ValueError(
                f"num_timed is {timed}; max_latency is confirmed on timed examples and needs at "
                f"least {LEAST_CONFIRMED}"
            )
        return self

    @property
    def block_lengths(self) -> tuple[int, ...]:
        """Those of the tokens per block that an answer has room for."""
        most = max(1, self.max_new_tokens - 1)
        return tuple(gamma for gamma in self.num_speculative_tokens if gamma <= most)

    @property
    def least_confirmed(self) -> int | None:
        """Examples below which a setting as good as the target fails a quality floor's test.

        A setting that answers right with probability f still answers N examples of N right with
        probability f^N, so N right answers show more than f only if f^N <= 1 - confidence. None:
        there is no such number, since the bound is none on quality or is the target's own quality or
        more.
        """
        floor = self.quality_floor or self.absolute_quality
        if floor is None or floor >= 1:
            return None
        return math.ceil(math.log(1 - self.confidence) / math.log(floor))

    @property
    def shortage(self) -> str | None:
        """Why hardly any setting can be confirmed, in one line; None: nothing speaks against it."""
        floor = self.quality_floor or self.absolute_quality
        if floor is not None and floor >= 1:
            return (
                f"a quality floor of {floor:g} is confirmed only for lossless decoding and for "
                "settings that answer better than the target; a floor of 0.98 admits more"
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
    """A candidate with what was measured of it.

    Attributes:
        examples: Those to choose on, or those to confirm on.
        quality: Mean score; `relative_quality` as part of the target's; None without a metric.
        speedup: Seconds a token of the target alone / of this, whole requests.
        lower_limit: When confirming: the lower confidence limit of the bounded figure (quality,
            relative quality, or speedup), at the configuration's confidence. None where nothing has
            to be tested: lossless decoding has the target's quality by proof.
        met: When choosing: whether the figures meet the bound. When confirming: whether the lower
            limit does, or the proof.
    """

    decoding: DecodingConfig
    examples: Step
    quality: IntervalRow | None
    relative_quality: IntervalRow | None
    speedup: IntervalRow
    lower_limit: float | None = None
    met: bool


class FailedCell(StrictModel):
    """A candidate that could not be measured, and why."""

    decoding: DecodingConfig
    error: str


class Tuned(StrictModel):
    """The setting that was confirmed, and all that was measured on the way.

    Attributes:
        num_tests: Settings that were tested on the confirming examples; those that need no test are
            not counted.
        statement: What the confirmation says, in words.
    """

    schema_version: Literal[1] = 1
    chosen: Tried
    tried: tuple[Tried, ...]
    failed: tuple[FailedCell, ...]
    num_tests: int
    statement: str
    config: TuneConfig
