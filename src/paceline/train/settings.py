"""What every kind of training is told: its budget, its steps, its optimiser, its checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from paceline.config import StrictModel
from paceline.core.reduction import Mean
from paceline.train.optim import Adafactor, Optimizer


class Checkpoints(StrictModel):
    """How often the state of training is saved, whichever comes first; and how many are kept."""

    every_steps: int | None = Field(default=None, ge=1)
    every_seconds: float | None = Field(default=120.0, gt=0)
    keep: int = Field(default=2, ge=1)


class TrainSettings(StrictModel):
    """One run of training.

    Attributes:
        output: The run directory.
        mean: Mean over sequences of their means (the paper's), or over tokens.
        num_steps: Budget in optimiser steps; with it alone a run is deterministic.
        max_seconds: Budget in seconds of training; set-up and the evaluations before and after do not
            count. The schedule follows whichever budget is nearer its end.
        batch_size: Sequences of an optimiser step, over all processes and accumulation.
        gradient_accumulation_steps: Parts that a step is cut into, to save memory; the result is
            the same.
        max_gradient_norm: Longer gradients are shortened to this; None: never.
        max_loss_ratio: A loss above so many times its running median, several steps in a row, ends
            the run.
        chunk_tokens: Tokens whose logits exist at a time.
        shard: Models whose weights are dealt out over the processes instead of copied to each.
        precision: Of passes; weights and sums are float32. `auto` times products of the model's shapes
            in float32 and in bfloat16 when the run begins, and keeps the faster for the whole run.
        device: `auto` takes the accelerator if there is one.
    """

    output: Path
    mean: Mean = "sequence"
    optimizer: Optimizer = Adafactor()
    num_steps: int | None = Field(default=None, ge=1)
    max_seconds: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    batch_size: int = Field(default=32, ge=1)
    gradient_accumulation_steps: int = Field(default=1, ge=1)
    max_gradient_norm: float | None = Field(default=1.0, gt=0, allow_inf_nan=False)
    max_loss_ratio: float = Field(default=10.0, gt=1)
    chunk_tokens: int = Field(default=256, ge=1)
    shard: tuple[Literal["draft", "target"], ...] = ()
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    device: Literal["auto", "cpu"] = "auto"
    seed: int = 0
    checkpoints: Checkpoints = Checkpoints()

    @model_validator(mode="after")
    def _ends_and_divides(self) -> TrainSettings:
        if self.num_steps is None and self.max_seconds is None:
            raise ValueError("num_steps or max_seconds is needed, or training never ends")
        if self.batch_size % self.gradient_accumulation_steps:
            raise ValueError(
                f"batch_size {self.batch_size} cannot be cut into gradient_accumulation_steps "
                f"{self.gradient_accumulation_steps} equal parts; change one of them"
            )
        if "draft" in self.shard and isinstance(self.optimizer, Adafactor):
            raise ValueError(
                "a draft that is sharded needs optimizer.kind adamw: adafactor looks at whole matrices"
            )
        warmup = self.optimizer.warmup_steps
        if warmup is not None and self.num_steps is not None and warmup > self.num_steps:
            raise ValueError(
                f"optimizer.warmup_steps {warmup} is more than num_steps {self.num_steps}; "
                "lower it, or use warmup_fraction"
            )
        return self
