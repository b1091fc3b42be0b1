"""What an engine's steps cost: a file that `measure --engine` writes and `measure --costs` reads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from paceline.config import StrictModel, read_result
from paceline.engines.commands import DraftSampling, EngineName
from paceline.engines.draft_sampling import proposals_of
from paceline.errors import UsageError
from paceline.measure.latency import PassCosts
from paceline.measure.results import IntervalRow

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.core.sampling import SamplingParams

_WRITER = "paceline measure --engine NAME --write-costs FILE"


class WithCosts(StrictModel):
    """Settings of commands that take an engine's costs in place of timing Paceline's decoder.

    Attributes:
        costs: A file that `measure --engine --write-costs` wrote. Drafts are then drawn as that engine
            draws them, from all tokens unless the engine knows the draft's list. None: time our decoder.
        concurrency: Requests that the engine serves at the same time.
    """

    costs: Path | None = None
    concurrency: int = Field(default=1, ge=1)

    @model_validator(mode="after")
    def _concurrency_of_an_engine(self) -> WithCosts:
        if self.costs is None and self.concurrency != 1:
            raise ValueError(
                "concurrency is of an engine whose costs are given; Paceline times one request at a time"
            )
        return self


class StepCost(StrictModel):
    """Seconds of one step.

    Attributes:
        gamma: Tokens drafted per block; 0: the target alone, whose step gives one token.
        batch_size: Requests served at the same time.
        seconds: Of a step, all of its requests included: the median of rounds, and its interval.
        num_steps: How many were timed, each request's counted apart.
    """

    gamma: int = Field(ge=0)
    batch_size: int = Field(ge=1)
    seconds: IntervalRow
    num_steps: int


class EngineCosts(StrictModel):
    """Seconds of an engine's steps with one pair of models.

    Attributes:
        drafting: How the engine drew its drafts.
        drafts_in_full: Its last block drafts as many tokens as the others, beyond the end of the text.
        full_vocabulary: It drafted from all tokens, whatever list the draft has.
        mean_context: Mean number of tokens before a step.
        steps: By gamma and batch size.
        served: The configuration of the measurement.
    """

    schema_version: Literal[1] = 1
    engine: EngineName
    engine_version: str
    drafting: DraftSampling
    drafts_in_full: bool
    full_vocabulary: bool
    target_parameters: int
    draft_parameters: int
    mean_context: float
    steps: list[StepCost]
    served: dict[str, object]
    environment: dict[str, object]

    def __str__(self) -> str:
        return f"{self.engine} {self.engine_version}".strip()

    @property
    def batch_sizes(self) -> list[int]:
        """Those that were timed, ascending."""
        return sorted({step.batch_size for step in self.steps})

    @property
    def gammas(self) -> list[int]:
        """Those that were timed, ascending."""
        return sorted({step.gamma for step in self.steps} - {0})

    def proposals(self, sampling: SamplingParams) -> SamplingParams:
        """How the engine draws the drafts of a request."""
        return proposals_of(self.engine, self.drafting, sampling)

    def block_s(self, gamma: int, batch_size: int, drafted: float | None = None) -> float:
        """Seconds of a block, 0: of a step without a draft; interpolated between measured gammas.

        Args:
            gamma: Of those that `usable` leaves, or 0.
            batch_size: One of those that were timed.
            drafted: Mean tokens that blocks drafted; None: gamma. A block is taken to be linear in
                that, for engines that shorten the last block of a text.
        """
        whole = self._block_s(gamma, batch_size)
        if drafted is None or self.drafts_in_full or not gamma:
            return whole
        plain = self._seconds(0, batch_size)
        return plain + (whole - plain) * drafted / gamma

    def pass_costs(self, gammas: Sequence[int], batch_size: int) -> PassCosts:
        """As the formulas for speed take them.

        An engine tells the seconds of a block, not which of them are the draft's. So a block is a
        target pass of one token and the rest is the draft's: the c for which tau / (c gamma + 1) is the
        engine's own speedup. Between two measured gammas a block's seconds are interpolated.

        Args:
            gammas: Of those that `usable` leaves.
            batch_size: One of those that were timed.
        """
        plain_s = self._seconds(0, batch_size)
        block_s = {gamma: self._block_s(gamma, batch_size) for gamma in gammas}
        drafting_s = {gamma: max(seconds - plain_s, 0.0) for gamma, seconds in block_s.items()}
        least = min(gammas)
        return PassCosts(
            target_pass_s=plain_s,
            draft_pass_s=drafting_s[least] / least,
            drafting_s=drafting_s,
            judging_s={gamma: block_s[gamma] - drafting_s[gamma] for gamma in gammas},
        )

    def error_of_block(self, gamma: int, batch_size: int) -> tuple[float, float]:
        """How far off block / plain step may be, as factors: 0.95 and 1.06, say."""
        near = min(self.gammas, key=lambda one: abs(one - gamma))
        block, plain = (self._step(one, batch_size).seconds for one in (near, 0))
        low = block.low / block.value * plain.value / plain.high
        high = block.high / block.value * plain.value / plain.low
        return low, high

    def usable(self, gammas: Sequence[int], batch_size: int) -> tuple[int, ...]:
        """Those of the gammas that were measured, or lie between two that were.

        Raises:
            UsageError: There is none, or the batch size was not measured.
        """
        if batch_size not in self.batch_sizes:
            raise UsageError(
                f"the costs were measured at batch sizes {', '.join(map(str, self.batch_sizes))}, not "
                f"{batch_size}; set concurrency to one of these, or write_costs.batch_sizes when measuring"
            )
        least, most = self.gammas[0], self.gammas[-1]
        found = tuple(gamma for gamma in gammas if least <= gamma <= most)
        if not found:
            raise UsageError(
                f"the costs were measured for {least} to {most} tokens per block, and none of "
                f"{list(gammas)} is within that; ask for others, or set write_costs.gammas when measuring"
            )
        return found

    def _block_s(self, gamma: int, batch_size: int) -> float:
        if not gamma:
            return self._seconds(0, batch_size)
        known = self.gammas
        above = next(one for one in known if one >= gamma)
        if above == gamma:
            return self._seconds(gamma, batch_size)
        below = max(one for one in known if one < gamma)
        low, high = (self._seconds(one, batch_size) for one in (below, above))
        return low + (high - low) * (gamma - below) / (above - below)

    def _seconds(self, gamma: int, batch_size: int) -> float:
        return self._step(gamma, batch_size).seconds.value

    def _step(self, gamma: int, batch_size: int) -> StepCost:
        wanted = (gamma, batch_size)
        return next(step for step in self.steps if (step.gamma, step.batch_size) == wanted)


def read_costs(path: Path) -> EngineCosts:
    """A file that `measure --engine --write-costs` wrote.

    Raises:
        ConfigError: It cannot be read, or is something else.
        UsageError: Part of it is missing.
    """
    found = read_result(EngineCosts, path, _WRITER)
    complete = {(0, size) for size in found.batch_sizes}
    complete |= {(gamma, size) for gamma in found.gammas for size in found.batch_sizes}
    if not found.gammas or complete != {(one.gamma, one.batch_size) for one in found.steps}:
        raise UsageError(
            f"{path} lacks the costs of some gamma or batch size; write it again with `{_WRITER}`"
        )
    return found


def check_sizes(
    costs: EngineCosts, path: Path, target_parameters: int, draft_parameters: int
) -> None:
    """Are the costs of models of these sizes?

    Raises:
        UsageError: They are not.
    """
    measured = costs.target_parameters, costs.draft_parameters
    if measured != (target_parameters, draft_parameters):
        raise UsageError(
            f"{path} was measured with {measured[0]:,} and {measured[1]:,} parameters, target and "
            f"draft; these have {target_parameters:,} and {draft_parameters:,}; measure their costs with "
            "--engine and --write-costs"
        )
