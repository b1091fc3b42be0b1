"""Costs of an engine's steps: `measure --engine` times and writes them, `--costs` reads them."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING, Annotated, Literal

import torch
from pydantic import Field, model_validator

from paceline.config import HomePath, StrictModel, read_result
from paceline.core.bootstrap import Interval, median_interval, student_quantile
from paceline.engines.contract import BlockCounts, DraftSampling
from paceline.engines.kinds import KINDS, EngineName
from paceline.errors import EngineError, UsageError
from paceline.measure.latency import PassCosts
from paceline.measure.pair import ModelsConfig, Pair, load_models
from paceline.progress import Progress, silent

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from paceline.core.sampling import SamplingParams
    from paceline.data.input_checks import InputChecks
    from paceline.engines.contract import Engine, Request
    from paceline.models import HfModel

_WRITER = "paceline measure --engine NAME --write-costs FILE"
_Count = Annotated[int, Field(ge=1)]
_LEAST_STARTS = 3  # for an interval over starts
_MIN_ROUNDS = 6  # a median of fewer has no 95% interval
_SHORTENING = 8  # tokens of a long answer / tokens of a short one
_REQUESTS_PER_SLOT = 3  # several requests per batch slot keep the batch full most of the time


class WithCosts(ModelsConfig):
    """Models, for commands that use the costs of an engine instead of timing Paceline's decoder.

    Attributes:
        costs: File from `measure --engine --write-costs`; drafts are sampled as in that engine.
            None: time Paceline's decoder.
        concurrency: Number of requests that the engine serves concurrently.
    """

    costs: HomePath | None = None
    concurrency: int = Field(default=1, ge=1)

    @model_validator(mode="after")
    def _concurrency_of_an_engine(self) -> WithCosts:
        if self.costs is None and self.concurrency != 1:
            raise ValueError(
                "concurrency needs the costs of an engine; Paceline's decoder is timed with one "
                "request at a time; set costs, or leave concurrency at 1"
            )
        return self

    def check_costs(self, checks: InputChecks, gammas: Sequence[int]) -> None:
        """Check that the costs of an engine, if there are any, are of some of these gammas."""
        if self.costs is not None:
            costs = read_costs(self.costs)
            costs.usable(gammas, self.concurrency)
            checks.lines.append(f"costs: {self.costs}, of {costs}")


def words_of_starts(number: int) -> str:
    """Remark on the intervals of seconds of servers that were started this many times each."""
    if number < _LEAST_STARTS:
        return "variation between starts of a server is not in the intervals of seconds"
    return f"intervals of seconds are over {number} starts"


def over_starts(within: Interval, by_start: Sequence[float]) -> Interval:
    """The interval of a positive quantity over starts, by Student's t of the logarithms.

    Args:
        within: The value, and its interval within a start: the result with fewer than 3 starts.
        by_start: The quantity of each start.
    """
    if len(by_start) < _LEAST_STARTS:
        return within
    logs, value = [math.log(one) for one in by_start], within.value
    error = statistics.stdev(logs) / len(logs) ** 0.5
    factor = math.exp(student_quantile(0.95, len(logs) - 1) * error)
    return Interval(value, value / factor, value * factor)


class StepCost(StrictModel):
    """Seconds of one step.

    Attributes:
        gamma: Drafted tokens per block; 0: no draft, one token per step.
        batch_size: Number of concurrent requests.
        seconds: Of one step for the whole batch, with its interval: median over rounds, geometric
            mean over starts.
        seconds_by_start: Median of each start.
    """

    gamma: int = Field(ge=0)
    batch_size: int = Field(ge=1)
    seconds: Interval
    seconds_by_start: list[float]


class EngineCosts(StrictModel):
    """Seconds of an engine's steps with one pair of models.

    Attributes:
        drafting: How the engine samples draft tokens.
        drafts_in_full: The last block of a text drafts gamma tokens, too, beyond its end.
        full_vocabulary: The draft proposes from the full vocabulary.
        parallel: The draft proposes a block in one pass.
        steps: One entry per gamma and batch size.
        starts: Number of starts of each server.
        served: The configuration of the measurement.
    """

    schema_version: Literal[2] = 2
    engine: EngineName
    engine_version: str
    drafting: DraftSampling
    drafts_in_full: bool
    full_vocabulary: bool
    parallel: bool = False
    target_parameters: int = Field(ge=1)
    draft_parameters: int = Field(ge=1)
    steps: list[StepCost] = Field(min_length=2)
    starts: int = Field(default=1, ge=1)
    served: dict[str, object]
    environment: dict[str, object]

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
        return KINDS[self.engine].proposals(self.drafting, sampling)

    def step_costs(self, gammas: Sequence[int], batch_size: int) -> PassCosts:
        """The costs of timed gammas at a timed batch size."""
        return PassCosts.of_blocks(
            self._step(0, batch_size).seconds.value,
            {gamma: self._step(gamma, batch_size).seconds.value for gamma in gammas},
            engine=str(self),
            drafts_in_full=self.drafts_in_full,
            errors={gamma: self._error(gamma, batch_size) for gamma in gammas},
        )

    def _error(self, gamma: int, batch_size: int) -> Interval:
        """Relative error of block / plain step: 1 with its interval."""
        block, plain = self._step(gamma, batch_size), self._step(0, batch_size)
        low = block.seconds.low / block.seconds.value * plain.seconds.value / plain.seconds.high
        high = block.seconds.high / block.seconds.value * plain.seconds.value / plain.seconds.low
        pairs = zip(block.seconds_by_start, plain.seconds_by_start, strict=True)
        return over_starts(Interval(1.0, low, high), [a / b for a, b in pairs])

    def usable(self, gammas: Sequence[int], batch_size: int) -> tuple[int, ...]:
        """The gammas that were timed."""
        if batch_size not in self.batch_sizes:
            raise UsageError(
                f"costs were measured at batch sizes {', '.join(map(str, self.batch_sizes))}, not "
                f"{batch_size}; change concurrency, or measure with other write_costs.batch_sizes"
            )
        usable = tuple(gamma for gamma in gammas if gamma in self.gammas)
        if not usable:
            raise UsageError(
                f"costs were measured for {', '.join(map(str, self.gammas))} drafted tokens per "
                f"block, for none of {list(gammas)}; change gammas, or measure with other "
                "write_costs.gammas"
            )
        return usable

    def _step(self, gamma: int, batch_size: int) -> StepCost:
        wanted = gamma, batch_size
        return next(step for step in self.steps if (step.gamma, step.batch_size) == wanted)


def read_costs(path: Path) -> EngineCosts:
    """Read a file that `measure --engine --write-costs` wrote; raises ConfigError."""
    return read_result(EngineCosts, path, _WRITER)


def load_models_of(
    config: WithCosts,
    costs: EngineCosts | None,
    progress: Progress = silent,
    target: HfModel | None = None,
) -> Pair:
    """Load both models, as the engine uses them if there are `costs`.

    `target`: the target of another pair, loaded before.
    """
    full = costs is not None and costs.full_vocabulary
    if costs is not None:
        at_once = config.parallel and costs.parallel
        config = config.model_copy(update={"parallel": at_once})
    pair = load_models(config, progress, target, full_vocabulary=full)
    if costs is None:
        return pair
    if costs.parallel and pair.draft.mask_token is None:
        raise UsageError(
            f"{config.costs} has costs of a draft that proposes a block in one pass, and "
            f"{config.draft} drafts token by token; measure the costs with it"
        )
    measured = costs.target_parameters, costs.draft_parameters
    sizes = pair.target.num_parameters, pair.draft.num_parameters
    if measured != sizes:
        raise UsageError(
            f"{config.costs} was measured with {measured[0]:,} and {measured[1]:,} parameters "
            f"(target and draft), these models have {sizes[0]:,} and {sizes[1]:,}; measure their "
            "costs with --engine and --write-costs"
        )
    return pair


class WriteCosts(StrictModel):
    """Engine steps to time.

    Attributes:
        file: Output file, for `measure --costs` and `tune --costs`.
        gammas: Numbers of drafted tokens per block; the engine is started `starts` times for each.
        batch_sizes: Numbers of concurrent requests.
        num_rounds: Number of timings of each gamma and batch size, divided among the starts.
    """

    file: HomePath
    gammas: tuple[_Count, ...] = Field(default=(1, 3, 6), min_length=1)
    batch_sizes: tuple[_Count, ...] = Field(default=(1,), min_length=1)
    num_rounds: int = Field(default=12, ge=_MIN_ROUNDS)


def _no_steps(gamma: int) -> EngineError:
    return EngineError(
        f"cannot time the engine's steps at gamma {gamma}: texts end early, or the machine is "
        "busy; raise max_new_tokens, use other prompts, or stop other programs"
    )


def _cost(gamma: int, batch_size: int, by_start: Sequence[Sequence[float]]) -> StepCost:
    """The cost of a step, from the seconds per step of the rounds of each start."""
    medians = [statistics.median(rounds) if rounds else 0.0 for rounds in by_start]
    if min(medians) <= 0:
        raise _no_steps(gamma)
    pairs = zip(by_start, medians, strict=True)
    relative = [seconds / median for rounds, median in pairs for seconds in rounds]
    around = median_interval(torch.tensor(relative))
    if len(relative) < _MIN_ROUNDS or around.low <= 0:
        raise _no_steps(gamma)
    value = math.prod(medians) ** (1 / len(medians))
    within = Interval(value, value * min(around.low, 1.0), value * max(around.high, 1.0))
    return StepCost(
        gamma=gamma,
        batch_size=batch_size,
        seconds=over_starts(within, medians),
        seconds_by_start=medians,
    )


class StepTimer:
    """Times an engine's steps, from answers of two lengths to the same prompts.

    The difference in time contains only steps, since both include the prefill and the transfer.
    """

    def __init__(
        self,
        config: WriteCosts,
        requests: Sequence[Request],
        progress: Progress,
        num_starts: int = 1,
    ) -> None:
        self._config, self._requests, self._progress = config, requests, progress
        self._num_starts = num_starts
        self._seconds: dict[tuple[int, int], list[list[float]]] = {}

    @property
    def gammas(self) -> list[int]:
        """The gammas to time, ascending."""
        return sorted(set(self._config.gammas))

    def time(self, engines: Mapping[int, Engine], start: int = 0) -> None:
        """Time the steps of running engines, interleaved, in the rounds of this start.

        `engines`: by gamma; 0 without a draft.
        """
        num_rounds = self._config.num_rounds
        for batch_size in sorted(set(self._config.batch_sizes)):
            for gamma in engines:
                self._seconds.setdefault((gamma, batch_size), []).append([])
            for number in range(start, num_rounds, self._num_starts):
                for gamma, engine in engines.items():
                    seconds, steps = self._round(engine, gamma, batch_size, number)
                    if steps > 0:
                        self._seconds[gamma, batch_size][-1].append(seconds / steps)
                gammas = "/".join(map(str, engines))
                stage = f"timing steps (gamma {gammas}, batch size {batch_size})"
                self._progress(stage, number + 1, num_rounds)

    def costs(self) -> list[StepCost]:
        """Seconds per step by gamma and batch size: geometric mean over starts of the median.

        The interval is over at least 3 starts. With fewer it is that of the median of all rounds,
        each divided by its start's median.
        """
        return [_cost(*key, by_start) for key, by_start in sorted(self._seconds.items())]

    def _round(self, engine: Engine, gamma: int, batch_size: int, number: int) -> tuple[float, int]:
        """Seconds and steps of long answers less those of short ones, summed over requests."""
        count = batch_size * (_REQUESTS_PER_SLOT if batch_size > 1 else 1)
        indices = range(number * count, (number + 1) * count)
        full = [self._requests[index % len(self._requests)] for index in indices]
        shortened = [
            request._replace(max_new_tokens=max(2, request.max_new_tokens // _SHORTENING))
            for request in full
        ]
        # fills the prefix cache of servers that have one
        engine.serve_together(shortened, batch_size)
        long, short = (engine.serve_together(batch, batch_size) for batch in (full, shortened))
        steps = [
            (one.blocks or BlockCounts()).num_blocks if gamma else len(one.tokens)
            for one in (long, short)
        ]
        return long.seconds - short.seconds, steps[0] - steps[1]
