"""Configuration shared by all kinds of training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from paceline.config import StrictModel
from paceline.core.reduction import Mean
from paceline.data.input_checks import FLOAT32_BYTES
from paceline.train.optim import Adafactor, Optimizer

if TYPE_CHECKING:
    from paceline.data.input_checks import InputChecks
    from paceline.models.inspection import ModelFacts


class Checkpoints(StrictModel):
    """When to save checkpoints (whichever is due first), and how many to keep."""

    every_steps: int | None = Field(default=None, ge=1)
    every_seconds: float | None = Field(default=120.0, gt=0)
    keep: int = Field(default=2, ge=1)


class TrainSettings(StrictModel):
    """One training run.

    Attributes:
        output: Run directory.
        mean: `sequence`: mean over sequences of their means, as in the paper; `token`: over tokens.
        num_steps: Budget in optimizer steps. Without max_seconds, the run is deterministic.
        max_seconds: Budget in seconds, without set-up and the evaluations before and after. With
            both budgets, the schedule follows the one that ends first.
        batch_size: Sequences per optimizer step, over all processes and accumulation steps.
        gradient_accumulation_steps: Split each step into N parts to save memory; the result is the
            same.
        max_gradient_norm: Clip gradients to this norm; None: no clipping.
        max_loss_ratio: End the run if the loss exceeds its running median by this factor in several
            consecutive steps.
        chunk_tokens: Number of tokens whose logits are in memory at the same time. `auto`: on a GPU
            256 to 8192, as many as half of the free memory holds; else 256. The result is the same.
        shard: Models whose weights are sharded over processes instead of replicated.
        precision: Precision of forward and backward passes; weights and sums are float32. `auto`
            times both when the run begins and uses the faster one for the whole run.
        device: `auto` uses an accelerator if there is one.
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
    chunk_tokens: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    shard: tuple[Literal["draft", "target"], ...] = ()
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    device: Literal["auto", "cpu"] = "auto"
    seed: int = 0
    checkpoints: Checkpoints = Checkpoints()

    @model_validator(mode="after")
    def _consistent(self) -> TrainSettings:
        if self.num_steps is None and self.max_seconds is None:
            raise ValueError("got no budget; set num_steps or max_seconds")
        if self.batch_size % self.gradient_accumulation_steps:
            raise ValueError(
                f"batch_size {self.batch_size} is not a multiple of gradient_accumulation_steps "
                f"{self.gradient_accumulation_steps}; change one of them"
            )
        if "draft" in self.shard and isinstance(self.optimizer, Adafactor):
            raise ValueError(
                "a sharded draft needs optimizer.kind adamw, because adafactor needs whole matrices"
            )
        warmup = self.optimizer.warmup_steps
        if warmup is not None and self.num_steps is not None and warmup > self.num_steps:
            raise ValueError(
                f"optimizer.warmup_steps {warmup} is more than num_steps {self.num_steps}; "
                "lower it, or use warmup_fraction"
            )
        return self

    def check_output(self, checks: InputChecks, model: ModelFacts | None) -> None:
        """Check the disk space for the checkpoints of a model; raises StorageError."""
        moments = 2 if self.optimizer.kind == "adamw" else 0
        count = 0 if model is None else model.num_parameters
        copies = (self.checkpoints.keep + 1) * (1 + moments) + 1
        checks.output(self.output, FLOAT32_BYTES * count * copies)
