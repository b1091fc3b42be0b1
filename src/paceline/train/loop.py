"""The training loop: take text, make a step, keep watch, until a budget is spent."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch

from paceline.data.replay import WritingClock
from paceline.errors import DivergedError, PromptError, StoppedError
from paceline.records import append_jsonl
from paceline.train.guard import LossGuard, StopRequest
from paceline.train.optim import learning_rate

if TYPE_CHECKING:
    from collections.abc import Callable

    from accelerate import Accelerator

    from paceline.data.sources import BatchSource, TextBatch, TextStream
    from paceline.models.hf.causal import CausalModel
    from paceline.progress import Progress
    from paceline.records import RunDirectory
    from paceline.train.checkpoint import CheckpointStore, TrainingState
    from paceline.train.settings import TrainSettings
    from paceline.train.step import Stepper, StepPlan

Figures = dict[str, float]


class Evaluator(Protocol):
    """Judges the model on held-out text."""

    headline: str
    """The figure that progress shows."""

    def evaluate(self, draft: CausalModel) -> Figures:
        """The model's figures as it is now."""
        ...


@dataclass(frozen=True)
class Parts:
    """What the loop runs on. Only the main process has an evaluator.

    Attributes:
        plan: A step's objective, by how far the run is (in [0, 1]) and how many examples it drew.
        stored_dtype: Of the saved model; None: as it is trained.
        evaluate_every: Steps from one evaluation to the next; None: none on the way.
        writing: What a source that writes rounds of text reads and sets.
    """

    config: TrainSettings
    accelerator: Accelerator
    stepper: Stepper
    source: BatchSource
    stream: TextStream
    run: RunDirectory
    store: CheckpointStore
    stored_dtype: torch.dtype | None
    plan: Callable[[float, int], StepPlan]
    evaluator: Evaluator | None
    evaluate_every: int | None
    progress: Progress
    writing: WritingClock = field(default_factory=WritingClock)


class TrainingLoop:
    """Steps from a state to the end of the budget.

    Under a budget of seconds the schedule moves with the seconds that steps take, never while text
    is written: a step moves it by the step's share of the time that is left. So it has no jumps,
    and still ends with the budget.
    """

    def __init__(self, parts: Parts, state: TrainingState) -> None:
        self.parts = parts
        self.config = parts.config
        self.state = state
        self.guard = LossGuard(parts.config.max_loss_ratio, state.recent_losses, state.phase)
        self.saved = parts.store.latest()
        self._clock = 0.0  # when the run's seconds began
        self._moved = 0.0  # when the schedule was moved last
        self._rate = 0.0
        self._last_save_s = state.elapsed_s
        parts.stream.num_drawn = state.num_drawn
        # A run that is given more time goes back in its schedule.
        state.time_position = min(state.time_position, self._time_spent())

    def run(self) -> None:
        """Train until the budget is spent, then save.

        Raises:
            TrainingError: the loss is not finite or exploded.
            StoppedError: somebody asked to stop; the state is saved.
            StorageError: a checkpoint could not be written.
        """
        self._clock = time.monotonic() - self.state.elapsed_s
        with StopRequest() as request:
            while not self._finished():
                self._advance()
                stopped = self._agree(stopped=request.asked)
                if not self._finished():
                    self._evaluate_if_due()
                if stopped or self._finished() or self._save_is_due():
                    self._save(always=stopped or self._finished())
                if stopped:
                    raise StoppedError(
                        f"stopped after step {self.state.step} as asked; the state is saved in "
                        f"{self.saved}; resume the run to go on"
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
                "tokens_per_s": round(figures.num_tokens / (self._moved - started), 1),
                "origin": batch.origin,
                "elapsed_s": round(self.state.elapsed_s, 3),
            }
        )
        self.guard.check(self.state.step, figures, self.saved, phase=plan.phase)
        self._report(f"loss {figures.loss:.3f}")

    def _next_batch(self) -> TextBatch:
        """The step's text; where that cannot be read, the steps so far are saved first."""
        try:
            return self.parts.source.next_batch(self._seconds_left())
        except PromptError as error:
            self.state.step -= 1
            if self.parts.accelerator.num_processes > 1 or not self.state.step:
                raise
            self._save(always=True)
            raise PromptError(
                f"{error}; the state after step {self.state.step} is saved: mend the text, and resume"
            ) from None

    def _rate_of_step(self) -> float:
        """The step's learning rate, asked for when its gradient is there.

        How far a step moves a schedule of seconds is not known before. A rate by the position at which
        the step began would be 0 for the first one.
        """
        self._move_schedule()
        if self.config.max_seconds:
            self._agree(stopped=False)
        self._rate = learning_rate(self.config.optimizer, self.state.step, self._position())
        return self._rate

    def _move_schedule(self) -> None:
        """Read the clock; under a budget of seconds, move the schedule by what passed of the step."""
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
        """How far the schedule is, the step at hand included, in [0, 1]."""
        return min(1.0, max(self._steps_done(), self.state.time_position))

    def _spent(self) -> float:
        """The part of the nearer budget that is spent, in [0, 1]."""
        return min(1.0, max(self._steps_done(), self._time_spent()))

    def _steps_done(self) -> float:
        return self.state.step / self.config.num_steps if self.config.num_steps else 0.0

    def _time_spent(self) -> float:
        return self.state.elapsed_s / self.config.max_seconds if self.config.max_seconds else 0.0

    def _finished(self) -> bool:
        return self._spent() >= 1

    def _agree(self, *, stopped: bool) -> bool:
        """Let all processes read one clock, be at one place of the schedule and stop together."""
        if self.parts.accelerator.num_processes == 1:
            return stopped
        state = self.state
        mine = torch.tensor([[state.elapsed_s, state.time_position, float(stopped)]])
        everyone = self.parts.accelerator.gather(mine.to(self.parts.accelerator.device))
        assert isinstance(everyone, torch.Tensor)
        state.elapsed_s, state.time_position, asked = everyone.amax(0).tolist()
        return asked > 0

    def _evaluate_if_due(self) -> None:
        every = self.parts.evaluate_every
        if every is not None and self.state.step % every == 0:
            self.evaluate()

    def evaluate(self) -> Figures | None:
        """Figures of the draft as it is now, on the main process; the others wait."""
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
        """A checkpoint of a state worth coming back to."""
        self._last_save_s = self.state.elapsed_s
        if not (self.guard.calm or always):
            return
        if not self.parts.stepper.is_finite():
            raise DivergedError(
                f"weights of the draft are not finite after step {self.state.step}; the last good "
                f"checkpoint is {self.saved}; start again with a smaller optimizer.learning_rate"
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
