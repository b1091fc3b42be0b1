"""Timing an engine's steps: of the target alone, and of blocks."""

# R rounds
from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
from pydantic import Field

from paceline.config import StrictModel
from paceline.core.bootstrap import median_interval
from paceline.errors import EngineError
from paceline.measure.engine_costs import StepCost
from paceline.measure.results import IntervalRow

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.engines.contract import Engine, Request, Together
    from paceline.progress import Progress

_Count = Annotated[int, Field(ge=1)]
_LEAST_ROUNDS = 2
_SHORT = 8  # a short answer has this part of a long one's tokens


class CostsConfig(StrictModel):
    """Which steps of an engine to time.

    Attributes:
        file: Where their costs go, for `measure --costs` and `tune --costs`.
        gammas: Tokens per block; the engine is started once for each.
        batch_sizes: Requests served at the same time.
        num_rounds: Of each gamma and batch size.
    """

    file: Path
    gammas: tuple[_Count, ...] = Field(default=(1, 3, 6), min_length=1)
    batch_sizes: tuple[_Count, ...] = Field(default=(1,), min_length=1)
    num_rounds: int = Field(default=12, ge=2)


class StepTimer:
    """Seconds of an engine's steps, from answers of two lengths to the same prompts.

    What the longer answer takes beyond the shorter one is steps alone: reading the prompt and sending
    the answer are in both.
    """

    def __init__(
        self, config: CostsConfig, requests: Sequence[Request], progress: Progress
    ) -> None:
        self._config, self._requests, self._progress = config, requests, progress
        self.steps: list[StepCost] = []

    @property
    def gammas(self) -> list[int]:
        """Those whose blocks are timed, ascending."""
        return sorted(set(self._config.gammas))

    def time(self, engine: Engine, gamma: int) -> None:
        """Time the steps of a running engine that drafts so many tokens; 0: it does not draft.

        Raises:
            EngineError: It did not answer, or its texts are too short for a step.
        """
        for batch_size in sorted(set(self._config.batch_sizes)):
            self._round(engine, gamma, batch_size, 0)  # warms up
            seconds: list[float] = []
            steps: list[int] = []
            for number in range(self._config.num_rounds):
                passed, count = self._round(engine, gamma, batch_size, number)
                if passed > 0 and count > 0:  # else the machine was busy, or the texts ended
                    seconds.append(passed)
                    steps.append(count)
                what = f"timing steps (gamma {gamma}, batch size {batch_size})"
                self._progress(what, number + 1, self._config.num_rounds)
            if len(steps) < _LEAST_ROUNDS:
                raise EngineError(
                    f"steps of {engine.name} could not be timed: its texts end early, or the machine is "
                    "busy; raise max_new_tokens, or use other prompts"
                )
            # a median: a round in which the machine did something else says nothing
            found = median_interval(torch.tensor(seconds) / torch.tensor(steps))
            row = IntervalRow.of(found)
            self.steps.append(
                StepCost(gamma=gamma, batch_size=batch_size, seconds=row, num_steps=sum(steps))
            )

    def _round(self, engine: Engine, gamma: int, batch_size: int, number: int) -> tuple[float, int]:
        """Seconds and steps that longer answers take beyond shorter ones, summed over requests."""
        places = [number * batch_size + place for place in range(batch_size)]
        some = [self._requests[place % len(self._requests)] for place in places]
        whole = engine.serve_together(some)
        if gamma and (whole.blocks is None or not whole.blocks.num_drafted):
            raise EngineError(f"{engine.name} stopped drafting while its steps were timed")
        begun = engine.serve_together([_begun(request) for request in some])
        return sum(whole.seconds) - sum(begun.seconds), _num_steps(whole, gamma) - _num_steps(
            begun, gamma
        )


def _begun(request: Request) -> Request:
    return request._replace(max_new_tokens=max(2, request.max_new_tokens // _SHORT))


def _num_steps(answers: Together, gamma: int) -> int:
    """Each request's steps: blocks, or the tokens of a target that decodes alone."""
    if not gamma:
        return sum(map(len, answers.tokens))
    return 0 if answers.blocks is None else answers.blocks.num_blocks


def mean_context(requests: Sequence[Request]) -> float:
    """Tokens before a step that is timed, on average."""
    begun = [_begun(request).max_new_tokens for request in requests]
    middles = [
        len(request.prompt) + (first + request.max_new_tokens) / 2
        for request, first in zip(requests, begun, strict=True)
    ]
    return sum(middles) / len(middles)
