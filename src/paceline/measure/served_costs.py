"""Times an engine's steps: single tokens without a draft, and blocks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import torch
from pydantic import Field

from paceline.config import StrictModel
from paceline.core.bootstrap import Interval, median_interval
from paceline.errors import EngineError
from paceline.measure.engine_costs import StepCost
from paceline.measure.results import IntervalRow

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.engines.contract import Engine, Request, Together
    from paceline.measure.starts import Starts
    from paceline.progress import Progress

_Count = Annotated[int, Field(ge=1)]
_MIN_ROUNDS = 6  # a median of fewer has no 95% interval
_SHORTENING = 8  # tokens of a long answer / tokens of a short one
_REQUESTS_PER_SLOT = 3  # several requests per batch slot keep the batch full most of the time


class WriteCosts(StrictModel):
    """Engine steps to time.

    Attributes:
        file: Output file, for `measure --costs` and `tune --costs`.
        gammas: Numbers of drafted tokens per block; the engine is started `starts` times for each.
        batch_sizes: Numbers of concurrent requests.
        num_rounds: Number of timings of each gamma and batch size, divided among the starts.
    """

    file: Path
    gammas: tuple[_Count, ...] = Field(default=(1, 3, 6), min_length=1)
    batch_sizes: tuple[_Count, ...] = Field(default=(1,), min_length=1)
    num_rounds: int = Field(default=12, ge=_MIN_ROUNDS)


class _Round(NamedTuple):
    """Difference between long and short answers, summed over requests."""

    seconds: float
    steps: int
    drafted: int


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
        self._num_starts, self._name = num_starts, ""
        self._rounds: dict[tuple[int, int], list[list[_Round]]] = {}  # by gamma, batch size; start

    @property
    def gammas(self) -> list[int]:
        """The gammas to time, ascending."""
        return sorted(set(self._config.gammas))

    def time(self, engines: Mapping[int, Engine], start: int = 0) -> None:
        """Time the steps of running engines, interleaved, in the rounds of this start.

        `engines`: by gamma; 0 without a draft.

        Raises:
            EngineError: An engine did not answer, drafts fewer tokens, or its texts are too short.
        """
        numbers = range(start, self._config.num_rounds, self._num_starts)
        for batch_size in sorted(set(self._config.batch_sizes)):
            rounds: dict[int, list[_Round]] = {gamma: [] for gamma in engines}
            for number in numbers:
                for gamma, engine in engines.items():
                    rounds[gamma].append(self._round(engine, gamma, batch_size, number))
                gammas = "/".join(map(str, engines))
                stage = f"timing steps (gamma {gammas}, batch size {batch_size})"
                self._progress(stage, number + 1, self._config.num_rounds)
            for gamma, found in rounds.items():
                self._name = engines[gamma].name
                _check(self._name, gamma, found)
                self._rounds.setdefault((gamma, batch_size), []).append(found)

    def logs(self) -> dict[int, list[list[float]]]:
        """By gamma, for each batch size: logarithm of the median seconds per step of each start."""
        found: dict[int, list[list[float]]] = {}
        for (gamma, _), starts in sorted(self._rounds.items()):
            found.setdefault(gamma, []).append([math.log(_median(one)) for one in starts])
        return found

    def costs(self, starts: Starts) -> list[StepCost]:
        """Seconds per step by gamma and batch size: geometric mean over starts of the median.

        The interval is that of the median of all rounds, each divided by its start's median, with
        the variation between starts.

        Raises:
            EngineError: Too few rounds have steps, or the machine is busy.
        """
        return [
            _cost(self._name, gamma, batch_size, rounds, starts)
            for (gamma, batch_size), rounds in sorted(self._rounds.items())
        ]

    def _round(self, engine: Engine, gamma: int, batch_size: int, number: int) -> _Round:
        count = batch_size * (_REQUESTS_PER_SLOT if batch_size > 1 else 1)
        indices = range(number * count, (number + 1) * count)
        full = [self._requests[index % len(self._requests)] for index in indices]
        shortened = [_shortened(request) for request in full]
        # fills the prefix cache of servers that have one
        engine.serve_together(shortened, batch_size)
        long, short = (engine.serve_together(batch, batch_size) for batch in (full, shortened))
        drafted = 0 if long.blocks is None else long.blocks.num_drafted
        drafted -= 0 if short.blocks is None else short.blocks.num_drafted
        return _Round(
            sum(long.seconds) - sum(short.seconds),
            _num_steps(long, gamma) - _num_steps(short, gamma),
            drafted,
        )


def _check(name: str, gamma: int, rounds: Sequence[_Round]) -> None:
    """Raise EngineError if these rounds of one start tell no cost."""
    steps = sum(one.steps for one in rounds)
    drafted = sum(one.drafted for one in rounds)
    if gamma and 2 * drafted < gamma * steps:  # blocks at ends of texts may be shorter
        raise EngineError(
            f"{name} drafted {drafted / max(steps, 1):.1f} tokens per block where {gamma} were "
            "requested; check that engine.options do not limit drafts and texts do not end early"
        )
    usable = _seconds(rounds)
    if not usable or median_interval(torch.tensor(usable)).value <= 0:
        raise _untimed(name, gamma)


def _untimed(name: str, gamma: int) -> EngineError:
    return EngineError(
        f"cannot time steps of {name} at gamma {gamma}: texts end early, or the machine is busy; "
        "raise max_new_tokens, use other prompts, or stop other programs"
    )


def _seconds(rounds: Sequence[_Round]) -> list[float]:
    """Seconds per step of the rounds that have steps."""
    return [one.seconds / one.steps for one in rounds if one.steps > 0]


def _median(rounds: Sequence[_Round]) -> float:
    return median_interval(torch.tensor(_seconds(rounds))).value


def _cost(
    name: str, gamma: int, batch_size: int, rounds: Sequence[Sequence[_Round]], starts: Starts
) -> StepCost:
    by_start = [_median(one) for one in rounds]
    relative = [
        seconds / middle
        for one, middle in zip(rounds, by_start, strict=True)
        for seconds in _seconds(one)
    ]
    around = median_interval(torch.tensor(relative))
    if len(relative) < _MIN_ROUNDS or around.low <= 0:
        raise _untimed(name, gamma)
    value = math.prod(by_start) ** (1 / len(by_start))
    within = Interval(value, value * min(around.low, 1.0), value * max(around.high, 1.0))
    return StepCost(
        gamma=gamma,
        batch_size=batch_size,
        seconds=IntervalRow.of(starts.widen(within, 1)),
        seconds_by_start=by_start,
        num_steps=sum(round_.steps for one in rounds for round_ in one),
    )


def _shortened(request: Request) -> Request:
    return request._replace(max_new_tokens=max(2, request.max_new_tokens // _SHORTENING))


def _num_steps(answers: Together, gamma: int) -> int:
    if not gamma:
        return sum(map(len, answers.tokens))
    return 0 if answers.blocks is None else answers.blocks.num_blocks


def mean_context(requests: Sequence[Request]) -> float:
    """Mean number of tokens before a timed step, if every text has its full length."""
    middles = [
        len(one.prompt) + (_shortened(one).max_new_tokens + one.max_new_tokens) / 2
        for one in requests
    ]
    return sum(middles) / len(middles)
