"""The training loop: text, optimizer step, metrics and checkpoints, until the budget is spent."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch

from paceline.data.replay import WritingClock
from paceline.errors import DivergedError, EngineError, PromptError, StoppedError
from paceline.records import append_jsonl
from paceline.train.guard import LossGuard, StopRequest
from paceline.train.optim import learning_rate

if TYPE_CHECKING:
    from collections.abc import Callable

    from accelerate import Accelerator

    from paceline.data.sources import BatchSource, TextBatch, TextStream
    from paceline.models.hf.base import HfModel
    from paceline.progress import Progress
    from paceline.records import RunDirectory
    from paceline.train.checkpoint import CheckpointStore, TrainingState
    from paceline.train.settings import TrainSettings
    from paceline.train.step import Stepper, StepPlan

Figures = dict[str, float]


class Evaluator(Protocol):
    """Evaluates the model on held-out text; `headline` is the figure shown in the progress."""

    headline: str

    def evaluate(self, draft: HfModel) -> Figures:
        """Figures of the current model."""
        ...


@dataclass(frozen=True)
class Parts:
    """Components of the training loop."""

    config: TrainSettings
    accelerator: Accelerator
    stepper: Stepper
    source: BatchSource
    stream: TextStream
    run: RunDirectory
    store: CheckpointStore
    stored_dtype: torch.dtype | None  # of the saved model; None: as trained
    plan: Callable[[float, int], StepPlan]  # of position in [0, 1] and number of examples drawn
    evaluator: Evaluator | None  # only in the main process
    evaluate_every: int | None  # steps; None: no evaluation during training
    progress: Progress
    writing: WritingClock = field(default_factory=WritingClock)  # updated by the source


class TrainingLoop:
    """Runs steps from a state until the budget is spent.

    With a time budget, each step advances the schedule by the step's share of the remaining time.
    Time spent on generating text does not advance it. The schedule therefore has no jumps and still
    ends with the budget.
    """

    def __init__(self, parts: Parts, state: TrainingState) -> None:
        self.parts = parts
        self.config = parts.config
        self.state = state
        self.guard = LossGuard(parts.config.max_loss_ratio, state.recent_losses, state.phase)
        self.saved = parts.store.latest()
        self._clock = 0.0  # monotonic time at elapsed_s = 0
        self._moved = 0.0  # monotonic time of the last schedule update
        self._rate = 0.0
        self._last_save_s = state.elapsed_s
        parts.stream.num_drawn = state.num_drawn
        # a larger time budget moves a resumed run back in its schedule
        state.time_position = min(state.time_position, self._time_spent())

    def run(self) -> None:
        """Train until the budget is spent, then save.

        Raises:
            TrainingError: the loss is not finite or exploded.
            StoppedError: a signal stopped the run; the state is saved.
            StorageError: a checkpoint could not be written.
        """
        self._clock = time.monotonic() - self.state.elapsed_s
        with StopRequest() as request:
            while not self._finished():
                self._advance()
                stopped = self._agree(stopped=request.asked)
                every = self.parts.evaluate_every
                if every is not None and self.state.step % every == 0 and not self._finished():
                    self.evaluate()
                if stopped or self._finished() or self._save_is_due():
                    self._save(always=stopped or self._finished())
                if stopped:
                    raise StoppedError(
                        f"stopped after step {self.state.step} on request; the state is saved in "
                        f"{self.saved}; resume the run to continue"
                    )

    def _advance(self) -> None:
        started = time.monotonic()
        self.state.step += 1
        plan = self.parts.plan(self._position(), self.parts.stream.num_drawn)
        batch = self._next_batch()
        self._moved = time.monotonic()
        figures = self.parts.stepper.step(batch.rows, self._rate_of_step, plan)
        self.state.num_drawn = self.parts.stream.num_drawn
        self._move_schedule()
        self._write(
            {
                "step": self.state.step,
                "loss": figures.loss,
                "learning_rate": self._rate,
                "gradient_norm": figures.gradient_norm,
                "num_tokens": figures.num_tokens,
                "chunk_tokens": figures.chunk_tokens,
                "tokens_per_s": round(figures.num_tokens / (self._moved - started), 1),
                "origin": batch.origin,
                "elapsed_s": round(self.state.elapsed_s, 3),
            }
        )
        self.guard.check(self.state.step, figures, self.saved, phase=plan.phase)
        self._report(f"loss {figures.loss:.3f}")

    def _next_batch(self) -> TextBatch:
        """The step's text; on an error in it or of its servers, the state is saved first."""
        try:
            return self.parts.source.next_batch(self._seconds_left())
        except (PromptError, EngineError) as error:
            self.state.step -= 1
            if self.parts.accelerator.num_processes > 1 or not self.state.step:
                raise
            self._save(always=True)
            cure = "correct the text" if isinstance(error, PromptError) else "start the server"
            raise type(error)(
                f"{error}; the state after step {self.state.step} is saved: {cure} and resume the "
                "run"
            ) from None

    def _rate_of_step(self) -> float:
        """The learning rate at the end of the step, called when its gradient is computed.

        With a time budget, the duration of the step is not known earlier. The position at its start
        would give the first step a rate of 0.
        """
        self._move_schedule()
        if self.config.max_seconds:
            self._agree(stopped=False)
        self._rate = learning_rate(self.config.optimizer, self.state.step, self._position())
        return self._rate

    def _move_schedule(self) -> None:
        """Update the elapsed time and, with a time budget, the schedule."""
        now = time.monotonic()
        self.state.elapsed_s = now - self._clock
        passed_s, left_s = now - self._moved, self._seconds_left()
        if self.config.max_seconds and passed_s > 0:
            self.state.time_position += (
                (1 - self.state.time_position) * passed_s / (left_s + passed_s)
            )
        self._moved = now

    def _seconds_left(self) -> float:
        if not self.config.max_seconds:
            return math.inf
        return max(0.0, self.config.max_seconds - self.state.elapsed_s)

    def _position(self) -> float:
        """Position of the schedule in [0, 1], including the current step."""
        return min(1.0, max(self._steps_done(), self.state.time_position))

    def _spent(self) -> float:
        """Spent fraction of the budget that ends first, in [0, 1]."""
        return min(1.0, max(self._steps_done(), self._time_spent()))

    def _steps_done(self) -> float:
        return self.state.step / self.config.num_steps if self.config.num_steps else 0.0

    def _time_spent(self) -> float:
        return self.state.elapsed_s / self.config.max_seconds if self.config.max_seconds else 0.0

    def _finished(self) -> bool:
        return self._spent() >= 1

    def _agree(self, *, stopped: bool) -> bool:
        """Synchronise clock, schedule position and stop request over processes."""
        if self.parts.accelerator.num_processes == 1:
            return stopped
        state = self.state
        local = torch.tensor([[state.elapsed_s, state.time_position, float(stopped)]])
        gathered = self.parts.accelerator.gather(local.to(self.parts.accelerator.device))
        assert isinstance(gathered, torch.Tensor)
        state.elapsed_s, state.time_position, asked = gathered.amax(0).tolist()
        return asked > 0

    def evaluate(self) -> Figures | None:
        """Evaluate the current model on the main process while the others wait."""
        figures = None
        if self.parts.evaluator is not None:
            figures = self.parts.evaluator.evaluate(self.parts.stepper.draft)
            self._write({"step": self.state.step, "evaluation": figures})
            name = self.parts.evaluator.headline
            self._report(f"held-out {name.replace('_', ' ')} {figures[name]:.3f}")
        self.parts.accelerator.wait_for_everyone()
        return figures

    def _save_is_due(self) -> bool:
        settings = self.config.checkpoints
        by_step = settings.every_steps and self.state.step % settings.every_steps == 0
        by_time = settings.every_seconds and (
            self.state.elapsed_s - self._last_save_s >= settings.every_seconds
        )
        return bool(by_step or by_time)

    def _save(self, *, always: bool = False) -> None:
        """Save a checkpoint, unless a recent step was bad and `always` is False."""
        self._last_save_s = self.state.elapsed_s
        if not (self.guard.calm or always):
            return
        if not self.parts.stepper.is_finite():
            raise DivergedError(
                f"weights of the draft are not finite after step {self.state.step}; the last good "
                f"checkpoint is {self.saved}; restart with a smaller optimizer.learning_rate"
            )
        draft, optimizer = self.parts.stepper.whole()
        if self.parts.accelerator.is_main_process:
            self.state.recent_losses, self.state.phase = list(self.guard.recent), self.guard.phase
            self.state.writing_s = self.parts.writing.seconds
            self.parts.store.save(draft, optimizer, self.state)
        self.parts.accelerator.wait_for_everyone()
        self.saved = self.parts.store.latest()

    def _write(self, row: dict[str, object]) -> None:
        if self.parts.accelerator.is_main_process:
            append_jsonl(self.parts.run.metrics, row)

    def _report(self, note: str) -> None:
        self.parts.progress("training", self._spent(), 1.0, note)
