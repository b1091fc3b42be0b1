"""Stops training on divergence or on a signal."""

from __future__ import annotations

import math
import signal
import statistics
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

from paceline.errors import DivergedError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from paceline.train.step import StepFigures

_WINDOW = 50  # steps of the running median
_SETTLED = 20  # minimum number of losses for a median
_PATIENCE = 3  # consecutive bad steps, so that one outlier batch does not end the run


class LossGuard:
    """Ends a run whose loss or gradient is not finite, or whose loss explodes.

    A loss is compared with the median of recent losses of its phase, because objectives differ in
    scale. While a second objective is blended in, the loss grows at most linearly in the steps of
    the phase and stays below twice that median.
    """

    def __init__(self, max_ratio: float, recent: Iterable[float] = (), phase: int = 0) -> None:
        self.max_ratio = max_ratio
        self.recent = deque(recent, maxlen=_WINDOW)
        self.phase = phase
        self.num_high = 0
        self.num_bad_gradients = 0

    @property
    def calm(self) -> bool:
        """True if the state is worth saving."""
        return self.num_high == 0 and self.num_bad_gradients == 0

    def check(self, step: int, figures: StepFigures, saved: Path | None, *, phase: int = 0) -> None:
        """Check one step; `saved` is the last good checkpoint.

        Raises:
            DivergedError: training diverged; the message names the last good checkpoint.
        """
        if not math.isfinite(figures.loss):
            raise _failure(f"the loss became {figures.loss} at step {step}", saved)
        bad = not math.isfinite(figures.gradient_norm)
        self.num_bad_gradients = self.num_bad_gradients + 1 if bad else 0
        if self.num_bad_gradients >= _PATIENCE:
            raise _failure(
                f"the gradient was not finite in {_PATIENCE} steps, up to step {step}", saved
            )
        if phase != self.phase:
            self.phase = phase
            self.recent.clear()
        median = statistics.median(self.recent) if len(self.recent) >= _SETTLED else math.inf
        high = figures.loss > self.max_ratio * median
        self.num_high = self.num_high + 1 if high else 0
        if self.num_high >= _PATIENCE:
            raise _failure(
                f"the loss exploded: {figures.loss:.4g} at step {step}, median {median:.4g}", saved
            )
        if not high:
            self.recent.append(figures.loss)


def _failure(what: str, saved: Path | None) -> DivergedError:
    where = f"the last good checkpoint is {saved}" if saved else "no checkpoint was saved yet"
    remedy = "restart from it" if saved else "restart"
    return DivergedError(f"{what}; {where}; {remedy} with a smaller optimizer.learning_rate")


class StopRequest:
    """Defers SIGINT and SIGTERM to the end of a step; a second signal interrupts immediately."""

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        # only the main thread can install signal handlers
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, *_: object) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
