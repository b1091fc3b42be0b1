"""Costs of an engine's steps, in a file that `measure --engine` writes and `--costs` reads."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from paceline.config import StrictModel, read_result
from paceline.core.bootstrap import Interval
from paceline.engines.commands import DraftSampling, EngineName, proposals_of
from paceline.errors import ConfigError, UsageError
from paceline.measure.latency import PassCosts
from paceline.measure.results import IntervalRow
from paceline.measure.starts import Starts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.core.sampling import SamplingParams

_WRITER = "paceline measure --engine NAME --write-costs FILE"


class WithCosts(StrictModel):
    """Settings of commands that use the costs of an engine instead of timing Paceline's decoder.

    Attributes:
        costs: File from `measure --engine --write-costs`; drafts are sampled as in that engine.
            None: time Paceline's decoder.
        concurrency: Number of requests that the engine serves concurrently.
    """

    costs: Path | None = None
    concurrency: int = Field(default=1, ge=1)

    @model_validator(mode="after")
    def _concurrency_of_an_engine(self) -> WithCosts:
        if self.costs is None and self.concurrency != 1:
            raise ValueError(
                "concurrency needs the costs of an engine; Paceline's decoder is timed with one "
                "request at a time; set costs, or leave concurrency at 1"
            )
        return self


class StepCost(StrictModel):
    """Seconds of one step.

    Attributes:
        gamma: Drafted tokens per block; 0: no draft, one token per step.
        batch_size: Number of concurrent requests.
        seconds: Of one step for the whole batch, with its interval: median over rounds, geometric
            mean over starts.
        seconds_by_start: Median of each start; empty in files of earlier versions.
        num_steps: Number of timed steps, summed over requests.
    """

    gamma: int = Field(ge=0)
    batch_size: int = Field(ge=1)
    seconds: IntervalRow
    seconds_by_start: list[float] = Field(default_factory=list[float])
    num_steps: int = Field(ge=0)

    @model_validator(mode="after")
    def _takes_time(self) -> StepCost:
        low, value, high = self.seconds.low, self.seconds.value, self.seconds.high
        if not (0 < value < math.inf and low <= value <= high):
            raise ValueError(
                f"seconds of gamma {self.gamma} at batch size {self.batch_size} are {value:g} "
                f"({low:g} to {high:g}); wanted a positive number within its interval"
            )
        return self


class EngineCosts(StrictModel):
    """Seconds of an engine's steps with one pair of models.

    Attributes:
        drafting: How the engine samples draft tokens.
        drafts_in_full: The last block of a text drafts gamma tokens, too, beyond its end.
        full_vocabulary: The draft proposes from the full vocabulary.
        mean_context: Mean number of tokens before a step.
        steps: One entry per gamma and batch size.
        starts: Starts of the engine; in files of earlier versions one.
        served: The configuration of the measurement.
    """

    schema_version: Literal[1] = 1
    engine: EngineName
    engine_version: str
    drafting: DraftSampling
    drafts_in_full: bool
    full_vocabulary: bool
    target_parameters: int = Field(ge=1)
    draft_parameters: int = Field(ge=1)
    mean_context: float = Field(ge=0, allow_inf_nan=False)
    steps: list[StepCost]
    starts: Starts = Starts()
    served: dict[str, object]
    environment: dict[str, object]

    @model_validator(mode="after")
    def _times_each_step_once(self) -> EngineCosts:
        timed = [(step.gamma, step.batch_size) for step in self.steps]
        for gamma, size in timed:
            if timed.count((gamma, size)) > 1:
                raise ValueError(
                    f"steps has gamma {gamma} at batch size {size} more than once; keep one"
                )
        return self

    def __str__(self) -> str:
        return f"{self.engine} {self.engine_version}".strip()

    @property
    def batch_sizes(self) -> list[int]:
        """The timed batch sizes, ascending."""
        return sorted({step.batch_size for step in self.steps})

    @property
    def gammas(self) -> list[int]:
        """The timed gammas, ascending."""
        return sorted({step.gamma for step in self.steps} - {0})

    def proposals(self, sampling: SamplingParams) -> SamplingParams:
        """The sampling parameters with which the engine drafts for a request."""
        return proposals_of(self.engine, self.drafting, sampling)

    def block_s(self, gamma: int, batch_size: int, drafted: float | None = None) -> float:
        """Seconds of a block, interpolated between timed gammas.

        Args:
            gamma: One of `usable`; 0: a step without a draft.
            batch_size: A timed batch size.
            drafted: Mean number of drafted tokens per block; None: gamma. The cost is linear in
                it if the engine shortens the last block of a text.
        """
        whole = self._block_s(gamma, batch_size)
        if drafted is None or self.drafts_in_full or not gamma:
            return whole
        plain = self._seconds(0, batch_size)
        return plain + (whole - plain) * drafted / gamma

    def pass_costs(self, gammas: Sequence[int], batch_size: int) -> PassCosts:
        """The costs of `usable` gammas at a timed batch size; see `costs_of_blocks`."""
        block_s = {gamma: self._block_s(gamma, batch_size) for gamma in gammas}
        return costs_of_blocks(self._seconds(0, batch_size), block_s)

    @property
    def remark(self) -> str:
        """What the intervals leave out; empty if the engine was started several times."""
        return "" if self.starts.freedom else self.starts.words

    def error_of_block(
        self, gamma: int, batch_size: int, confidence: float = 0.95
    ) -> tuple[float, float]:
        """Relative error of block / plain step as a lower and an upper factor, e.g. 0.95, 1.06.

        0 and infinity if a step has no interval.
        """
        near = min(self.gammas, key=lambda one: abs(one - gamma))
        steps = (self._step(one, batch_size).seconds for one in (near, 0))
        block, plain = (
            self.starts.at(Interval(one.value, one.low, one.high), confidence) for one in steps
        )
        if not (min(block.low, plain.low) > 0 and max(block.high, plain.high) < math.inf):
            return 0.0, math.inf
        low = block.low / block.value * plain.value / plain.high
        high = block.high / block.value * plain.value / plain.low
        return low, high

    def usable(self, gammas: Sequence[int], batch_size: int) -> tuple[int, ...]:
        """The gammas within the range of the timed ones.

        Raises:
            UsageError: No gamma is in the range, or the batch size was not timed.
        """
        if batch_size not in self.batch_sizes:
            raise UsageError(
                f"costs were measured at batch sizes {', '.join(map(str, self.batch_sizes))}, not "
                f"{batch_size}; change concurrency, or measure with other write_costs.batch_sizes"
            )
        least, most = self.gammas[0], self.gammas[-1]
        found = tuple(gamma for gamma in gammas if least <= gamma <= most)
        if not found:
            raise UsageError(
                f"costs were measured for {least} to {most} drafted tokens per block; none of "
                f"{list(gammas)} is within; change gammas, or measure with other write_costs.gammas"
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


def costs_of_blocks(plain_s: float, block_s: Mapping[int, float]) -> PassCosts:
    """Seconds of a plain step and of a block, by gamma, as inputs of the speedup formulas.

    Engines report the time of a block, but not the draft's part of it. So a block counts as one
    target pass over one token, and the rest as drafting: the c for which tau / (c gamma + 1) is the
    engine's speedup.
    """
    drafting_s = {gamma: max(seconds - plain_s, 0.0) for gamma, seconds in block_s.items()}
    least = min(block_s)
    return PassCosts(
        target_pass_s=plain_s,
        draft_pass_s=drafting_s[least] / least,
        drafting_s=drafting_s,
        judging_s={gamma: block_s[gamma] - drafting_s[gamma] for gamma in block_s},
    )


def read_costs(path: Path) -> EngineCosts:
    """Read a file that `measure --engine --write-costs` wrote.

    Raises:
        ConfigError: The file cannot be read or has another content.
        UsageError: Some gamma lacks the costs at some batch size.
    """
    found = read_result(EngineCosts, path, _WRITER)
    complete = {(gamma, size) for gamma in (0, *found.gammas) for size in found.batch_sizes}
    if not found.gammas or complete != {(one.gamma, one.batch_size) for one in found.steps}:
        raise UsageError(
            f"{path} lacks the costs of some gamma or batch size; write it again with `{_WRITER}`"
        )
    return found


def check_replaceable(path: Path) -> None:
    """Check that a file for costs is new, or has costs of before.

    Raises:
        UsageError: It has another content.
    """
    if path.exists():
        try:
            read_costs(path)
        except ConfigError:
            raise UsageError(
                f"{path} exists and holds no costs of an engine; name another file"
            ) from None


def check_sizes(
    costs: EngineCosts, path: Path, target_parameters: int, draft_parameters: int
) -> None:
    """Check that the costs belong to models of these sizes.

    Raises:
        UsageError: The sizes differ.
    """
    measured = costs.target_parameters, costs.draft_parameters
    if measured != (target_parameters, draft_parameters):
        raise UsageError(
            f"{path} was measured with {measured[0]:,} and {measured[1]:,} parameters (target and "
            f"draft), these models have {target_parameters:,} and {draft_parameters:,}; measure "
            "their costs with --engine and --write-costs"
        )
