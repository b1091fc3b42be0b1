"""The training loop: text, optimizer step, metrics and checkpoints, until the budget is spent.

`LossGuard` ends a run that diverges, and `StopRequest` one that gets a signal.
"""

from __future__ import annotations

import math
import signal
import statistics
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from paceline.errors import StoppedError, TrainingError
from paceline.models.loading import load_model
from paceline.records import append_jsonl, read_jsonl
from paceline.train.checkpoint import read_optimizer, read_state, rewind_metrics, saved_model
from paceline.train.lora import merged
from paceline.train.optim import learning_rate
from paceline.train.tracking import track

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from paceline.data.sources import BatchSource, ExampleStream, PackedText
    from paceline.models.hf.base import HfModel
    from paceline.train.checkpoint import CheckpointStore
    from paceline.train.loss import StepPlan
    from paceline.train.run import TrainingRun
    from paceline.train.step import StepFigures, Stepper

    Plan = Callable[[float, int], StepPlan]
    """The plan of a step at a position of the run in [0, 1], and a number of examples drawn."""

_WINDOW = 50  # steps of the running median
_SETTLED = 20  # minimum number of losses for a median
_NEGLIGIBLE = 1e-3  # nats; a smaller median is rounding, or a draft that equals its target
_PATIENCE = 3  # consecutive bad steps, so that one outlier batch does not end the run

Figures = dict[str, float]


class Evaluator(Protocol):
    """Evaluates the model on held-out text; `headline` is the figure shown in the progress."""

    headline: str

    def evaluate(self, model: HfModel) -> Figures:
        """Figures of the current model."""
        ...


class TrainingText(NamedTuple):
    """Where the text comes from, and the stream whose position is its state in a checkpoint."""

    source: BatchSource
    stream: ExampleStream | PackedText


class TrainingLoop:
    """Runs steps from a state until the budget is spent.

    With a time budget, each step advances the schedule by the step's share of the remaining time.
    Time spent on generating text does not advance it. The schedule therefore has no jumps and still
    ends with the budget.
    """

    def __init__(
        self,
        run: TrainingRun,
        store: CheckpointStore,
        stepper: Stepper,
        text: TrainingText,
        plan: Plan,
        *,
        evaluator: Evaluator | None,
        evaluate_every: int | None,
    ) -> None:
        """Continue from the latest checkpoint in `store`, if there is one.

        `evaluator` is for the main process only. `evaluate_every` is the number of steps between
        evaluations; None: no evaluation during training.
        """
        self.run = run
        self.config = run.config
        self.store = store
        self.stepper = stepper
        self.text = text
        self.plan = plan
        self.evaluator = evaluator
        self.evaluate_every = evaluate_every
        self.saved = store.latest()
        self.state = state = read_state(self.saved)
        self.guard = LossGuard(self.config.max_loss_ratio, state.recent_losses, state.phase)
        self._clock = 0.0  # monotonic time at elapsed_s = 0
        self._moved = 0.0  # monotonic time of the last schedule update
        self._rate = 0.0
        self._last_save_s = state.elapsed_s
        if self.saved is not None:
            stepper.optimizer.load_state_dict(read_optimizer(self.saved))
        text.stream.num_drawn = state.num_drawn
        # a larger time budget moves a resumed run back in its schedule
        state.time_position = min(state.time_position, self._time_spent())
        if run.is_main:
            rewind_metrics(run.directory, -1 if self.saved is None else state.step)

    def figures_before(self) -> Figures | None:
        """Figures of the untrained model: measured, or read from the metrics of a resumed run."""
        if self.state.step == 0:
            return self.evaluate()
        rows = [row for row in read_jsonl(self.run.directory.metrics) if row["step"] == 0]
        return rows[0]["evaluation"] if rows else None

    def run_steps(self) -> None:
        """Train until the budget is spent, then save."""
        self._clock = time.monotonic() - self.state.elapsed_s
        with StopRequest() as request:
            while not self._finished():
                self._advance()
                stopped = self._agree(stopped=request.asked)
                every = self.evaluate_every
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
        plan = self.plan(self._position(), self.text.stream.num_drawn)
        batch = self.text.source.next_batch(self._seconds_left())
        self._moved = time.monotonic()
        figures = self.stepper.step(batch.rows, self._rate_of_step, plan)
        self.state.num_drawn = self.text.stream.num_drawn
        self._move_schedule()
        self._write(
            {
                "step": self.state.step,
                **_finite({"loss": figures.loss, "gradient_norm": figures.gradient_norm}),
                "learning_rate": self._rate,
                "num_tokens": figures.num_tokens,
                "chunk_tokens": figures.chunk_tokens,
                "tokens_per_s": round(figures.num_tokens / (self._moved - started), 1),
                "origin": batch.origin,
                "elapsed_s": round(self.state.elapsed_s, 3),
            }
        )
        self.guard.check(self.state.step, figures, self.saved, phase=plan.phase)
        self._report(f"loss {figures.loss:.3f}")

    def _rate_of_step(self) -> float:
        """The learning rate at the end of the step, called when its gradient is computed.

        With a time budget, the duration of the step is not known earlier. The position at its start
        would give the first step a rate of 0.
        """
        self._move_schedule()
        if self.config.max_seconds:
            self._agree(stopped=False)
        self._rate = learning_rate(self.config.optimizer, self._position())
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
        if self.run.accelerator.num_processes == 1:
            return stopped
        state = self.state
        local = torch.tensor([[state.elapsed_s, state.time_position, float(stopped)]])
        gathered = self.run.accelerator.gather(local.to(self.run.accelerator.device))
        assert isinstance(gathered, torch.Tensor)
        state.elapsed_s, state.time_position, asked = gathered.amax(0).tolist()
        return asked > 0

    def evaluate(self) -> Figures | None:
        """Evaluate the current model on the main process while the others wait."""
        figures = None
        if self.evaluator is not None:
            figures = self.evaluator.evaluate(merged(self.stepper.model))
            self._write({"step": self.state.step, "evaluation": _finite(figures)})
            name = self.evaluator.headline
            self._report(f"held-out {name.replace('_', ' ')} {figures[name]:.3f}")
        self.run.accelerator.wait_for_everyone()
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
        if not self.stepper.is_finite():
            raise _failure(f"the weights are not finite after step {self.state.step}", self.saved)
        if self.run.is_main:
            self.state.recent_losses, self.state.phase = list(self.guard.recent), self.guard.phase
            optimizer = self.stepper.optimizer.state_dict()
            self.store.save(self.stepper.model, optimizer, self.state)
        self.run.accelerator.wait_for_everyone()
        self.saved = self.store.latest()

    def _write(self, row: dict[str, object]) -> None:
        if self.run.is_main:
            append_jsonl(self.run.directory.metrics, row)
            track(self.run.accelerator, row)

    def _report(self, note: str) -> None:
        self.run.progress("training", self._spent(), 1.0, note)


def _finite(figures: Figures) -> Figures:
    """Figures without NaN and infinity, which JSON does not have."""
    return {name: value for name, value in figures.items() if math.isfinite(value)}


def train(loop: TrainingLoop, *, product: str, stored_dtype: torch.dtype | None) -> None:
    """Evaluate, train and evaluate again; save the model as `product` in the run directory.

    `stored_dtype` is the data type of the saved weights; None: as trained.
    """
    run = loop.run
    before = loop.figures_before()
    loop.run_steps()
    if run.is_main:
        out = run.directory.path / product
        loop.store.save_model(loop.stepper.model, out, stored_dtype)
        loop.store.save_adapter(loop.stepper.model, run.directory.path)
        after = None
        if loop.evaluator is not None:
            run.progress("evaluating", 0, 1)
            saved = load_model(out, dtype="float32", device=str(run.accelerator.device))
            after = loop.evaluator.evaluate(saved)
            run.progress("evaluating", 1, 1)
        rows = [row for row in read_jsonl(run.directory.metrics) if "loss" in row]
        run.directory.write_result(
            {
                product: str(out),
                "num_steps": loop.state.step,
                "elapsed_s": round(loop.state.elapsed_s, 3),
                "num_tokens": sum(row["num_tokens"] for row in rows),
                "final_loss": rows[-1]["loss"],
                "before": before,
                "after": after,
            }
        )
        if after is not None:
            track(run.accelerator, {"step": loop.state.step, "evaluation": after})
    run.accelerator.wait_for_everyone()


class LossGuard:
    """Ends a run whose loss or gradient is not finite, or whose loss explodes.

    A loss is compared with the median of recent losses of its phase, because objectives differ in
    scale.
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
            TrainingError: training diverged; the message names the last good checkpoint.
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
        high = figures.loss > self.max_ratio * max(median, _NEGLIGIBLE)
        self.num_high = self.num_high + 1 if high else 0
        if self.num_high >= _PATIENCE:
            raise _failure(
                f"the loss exploded: {figures.loss:.4g} at step {step}, median {median:.4g}", saved
            )
        if not high:
            self.recent.append(figures.loss)


def _failure(what: str, saved: Path | None) -> TrainingError:
    where, remedy = "no checkpoint was saved yet", "restart"
    if saved is not None:
        where, remedy = f"the last good checkpoint is {saved_model(saved)}", "restart from it"
    return TrainingError(f"{what}; {where}; {remedy} with a smaller optimizer.learning_rate")


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
