"""Timing an engine's steps: of the target alone, and of blocks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import torch
from pydantic import Field

from paceline.config import StrictModel
from paceline.core.bootstrap import median_interval
from paceline.errors import EngineError
from paceline.measure.engine_costs import StepCost
from paceline.measure.results import IntervalRow

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.engines.contract import Engine, Request, Together
    from paceline.progress import Progress

_Count = Annotated[int, Field(ge=1)]
_LEAST_ROUNDS = 6  # a median of fewer has no 95% interval
_SHORT = 8  # a short answer has this part of a long one's tokens
_TURNS = 3  # requests that follow each other in a place of the batch, so that it is full most of the time


class WriteCosts(StrictModel):
    """Which steps of an engine to time.

    Attributes:
        file: Where `save_costs` writes the costs, for `measure --costs` and `tune --costs`.
        gammas: Tokens per block; the engine is started once for each.
        batch_sizes: Requests served at the same time.
        num_rounds: Of each gamma and batch size.
    """

    file: Path
    gammas: tuple[_Count, ...] = Field(default=(1, 3, 6), min_length=1)
    batch_sizes: tuple[_Count, ...] = Field(default=(1,), min_length=1)
    num_rounds: int = Field(default=12, ge=_LEAST_ROUNDS)


class _Round(NamedTuple):
    """What longer answers take beyond shorter ones, summed over requests."""

    seconds: float
    steps: int
    drafted: int


class StepTimer:
    """Seconds of an engine's steps, from answers of two lengths to the same prompts.

    What the longer answer takes beyond the shorter one is steps alone: reading the prompt and sending
    the answer are in both.
    """

    def __init__(self, config: WriteCosts, requests: Sequence[Request], progress: Progress) -> None:
        self._config, self._requests, self._progress = config, requests, progress
        self.steps: list[StepCost] = []

    @property
    def gammas(self) -> list[int]:
        """Those whose blocks are timed, ascending."""
        return sorted(set(self._config.gammas))

    def time(self, engines: Mapping[int, Engine]) -> None:
        """Time the steps of running engines by the tokens that each drafts, 0: none; in turns.

        Raises:
            EngineError: One did not answer, does not draft so many tokens, or its texts are too short
                for a step.
        """
        for batch_size in sorted(set(self._config.batch_sizes)):
            rounds: dict[int, list[_Round]] = {gamma: [] for gamma in engines}
            for number in range(self._config.num_rounds):
                for gamma, engine in engines.items():
                    rounds[gamma].append(self._round(engine, gamma, batch_size, number))
                names = "/".join(map(str, engines))
                what = f"timing steps (gamma {names}, batch size {batch_size})"
                self._progress(what, number + 1, self._config.num_rounds)
            for gamma, found in rounds.items():
                self.steps.append(_cost(engines[gamma].name, gamma, batch_size, found))

    def _round(self, engine: Engine, gamma: int, batch_size: int, number: int) -> _Round:
        count = batch_size * (_TURNS if batch_size > 1 else 1)
        places = [number * count + place for place in range(count)]
        some = [self._requests[place % len(self._requests)] for place in places]
        begun = [_begun(request) for request in some]
        # a server that keeps prompts has read these before it is timed, on every server alike
        engine.serve_together(begun, batch_size)
        long, short = (engine.serve_together(asked, batch_size) for asked in (some, begun))
        drafted = 0 if long.blocks is None else long.blocks.num_drafted
        drafted -= 0 if short.blocks is None else short.blocks.num_drafted
        return _Round(
            sum(long.seconds) - sum(short.seconds),
            _num_steps(long, gamma) - _num_steps(short, gamma),
            drafted,
        )


def _cost(name: str, gamma: int, batch_size: int, rounds: Sequence[_Round]) -> StepCost:
    steps = sum(one.steps for one in rounds)
    drafted = sum(one.drafted for one in rounds)
    if gamma and 2 * drafted < gamma * steps:  # ends of texts leave some blocks shorter
        raise EngineError(
            f"{name} drafted {drafted / max(steps, 1):.1f} tokens per block where {gamma} were asked for; "
            "engine.options may limit its drafts, or its texts end early"
        )
    usable = [one for one in rounds if one.steps > 0]
    if len(usable) >= _LEAST_ROUNDS:
        found = median_interval(torch.tensor([one.seconds / one.steps for one in usable]))
        if found.low > 0:
            row = IntervalRow.of(found)
            return StepCost(gamma=gamma, batch_size=batch_size, seconds=row, num_steps=steps)
    raise EngineError(
        f"steps of {name} could not be timed at gamma {gamma}: its texts end early, or the machine is "
        "busy; raise max_new_tokens, use other prompts, or stop other programs"
    )


def _begun(request: Request) -> Request:
    return request._replace(max_new_tokens=max(2, request.max_new_tokens // _SHORT))


def _num_steps(answers: Together, gamma: int) -> int:
    """Each request's steps: blocks, or the tokens of a target that decodes alone."""
    if not gamma:
        return sum(map(len, answers.tokens))
    return 0 if answers.blocks is None else answers.blocks.num_blocks


def mean_context(requests: Sequence[Request]) -> float:
    """Tokens before a step that is timed, on average, if every text has its full length."""
    begun = [_begun(request).max_new_tokens for request in requests]
    middles = [
        len(request.prompt) + (first + request.max_new_tokens) / 2
        for request, first in zip(requests, begun, strict=True)
    ]
    return sum(middles) / len(middles)
