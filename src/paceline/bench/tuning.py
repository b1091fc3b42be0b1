"""Configuration and result of `tune`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from paceline.bench.workbench import RuleChoice, expand_all
from paceline.config import HomePath, Options, Result, StrictModel
from paceline.core.bootstrap import LEAST_UNITS
from paceline.core.rules import DEFAULT_RULES
from paceline.core.sampling import SamplingParams
from paceline.data.input_checks import InputChecks, note
from paceline.decode.strategies import DecodingConfig
from paceline.engines.kinds import KINDS, RuleServer
from paceline.measure.engine_costs import WithCosts
from paceline.measure.pair import ModelsConfig
from paceline.measure.prompt_checks import check_costs, check_task
from paceline.records import RunDirectory
from paceline.results.frontier import measure
from paceline.results.row import Row
from paceline.tasks import TaskChoice

if TYPE_CHECKING:
    from paceline.core.bootstrap import Interval
    from paceline.engines.contract import Engine

Step = Literal["choosing", "confirming"]

NOT_MET = "no"
"""Value of the setting `met` of a row whose bound is not met."""
LEAST_CONFIRMED = LEAST_UNITS
"""With fewer examples, the coverage of intervals is below their confidence."""


class TuneConfig(WithCosts, ModelsConfig):
    """Configuration of `tune`, with exactly one of the three bounds.

    Attributes:
        quality_floor: Minimum mean score, relative to the target's.
        absolute_quality: Minimum mean score.
        max_latency: Maximum seconds per token, relative to the target's.
        output: Run directory; resumes if it exists. Its `decoding.yaml` is for `decode --config`.
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
    output: HomePath
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
    def server(self) -> type[Engine] | None:
        """The engine that serves the setting; None: Paceline's decoder."""
        return KINDS.get(self.served_by)

    def check(self, checks: InputChecks) -> None:
        """Check the inputs, and note why few settings can be confirmed; raises UsageError."""
        if self.shortage is not None:
            note(self.shortage)
        RunDirectory(self.output).check_kind(self)
        checks.device(self.device)
        check_costs(checks, self, self.block_lengths)
        count = self.num_examples + self.num_confirmed
        check_task(checks, "task", self.task, count, self.seed)
        checks.pair(self.target, self.draft)
        checks.output(self.output)

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
        return self.row.setting["met"] != NOT_MET

    @property
    def lower_limit(self) -> float | None:
        """Lower confidence limit of the bounded figure; None if no test is needed."""
        return self.row.totals.get("lower_limit")

    def measure(self, figure: str) -> Interval:
        """A figure with its interval; NaN if it is unknown."""
        return measure(figure, self.row)


class FailedCell(StrictModel):
    """A candidate that failed, with the error."""

    decoding: DecodingConfig
    error: str


class Tuned(Result):
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

    @property
    def summary(self) -> str:
        """The chosen setting, and the guarantee."""
        return f"{self.chosen.row.setting}; {self.statement}"

    def rows(self, examples: Step) -> list[Row]:
        """The result rows of the settings that were measured on these examples."""
        return [one.row for one in self.tried if one.row.has(examples=examples)]
