"""Optimizers and learning-rate schedules.

A schedule is a function of progress in [0, 1], the larger of the spent fractions of the step budget
and the time budget.
"""

# R rows, C columns of a matrix
from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from pydantic import Field

from paceline.config import StrictModel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor, nn

# Ours: at this floor torch's Adafactor divides 0 by 0; that of transformers decays otherwise.
_EPSILON_1 = 1e-30  # added to squared gradients
_EPSILON_2 = 1e-3  # minimum RMS of a weight, for the relative step size
_CLIP = 1.0  # maximum RMS of an update
_DECAY = -0.8  # beta2 of step t is 1 - t^-0.8

Fraction = Annotated[float, Field(ge=0, le=1)]


class Constant(StrictModel):
    """Constant learning rate."""

    kind: Literal["constant"] = "constant"


class Linear(StrictModel):
    """Linear decay to `final_fraction` of the learning rate."""

    kind: Literal["linear"] = "linear"
    final_fraction: Fraction = 0.0


class Cosine(StrictModel):
    """Cosine decay to `final_fraction` of the learning rate."""

    kind: Literal["cosine"] = "cosine"
    final_fraction: Fraction = 0.0


class CoolDown(StrictModel):
    """Constant until `begin`, then cosine decay. Paper: Zhou et al. 2023, Table B.1."""

    kind: Literal["cool_down"] = "cool_down"
    begin: float = Field(default=0.5, ge=0, lt=1)
    final_fraction: Fraction = 0.1


Schedule = Annotated[Constant | Linear | Cosine | CoolDown, Field(discriminator="kind")]


class Warmup(StrictModel):
    """Linear warm-up from 0, multiplied with the schedule.

    Attributes:
        warmup_fraction: Length of the warm-up, as a fraction of the run.
        warmup_steps: Length of the warm-up in steps; overrides warmup_fraction.
    """

    warmup_fraction: Fraction = 5_000 / 300_000
    warmup_steps: int | None = Field(default=None, ge=0)


class Adafactor(Warmup):
    """Adafactor (Shazeer and Stern 2018); the learning rate is relative to the weights' RMS.

    Attributes:
        floor: `paper` adds 1e-30 to squared gradients, as Shazeer and Stern do. `torch` clamps the
            rows' mean square to at least 1.2e-7, as `torch.optim.Adafactor` does. Gradients with an
            RMS below 3.5e-4 then give updates of the same RMS, regardless of earlier gradients.

    Paper: Zhou et al. 2023, Table B.1. Differs: the warm-up is 1/60 of the run instead of 5,000
    steps, which is the same for the paper's 300,000 steps.
    """

    kind: Literal["adafactor"] = "adafactor"
    floor: Literal["paper", "torch"] = "paper"
    learning_rate: float = Field(default=3e-4, gt=0, allow_inf_nan=False)
    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    schedule: Schedule = CoolDown()


class AdamW(Warmup):
    """AdamW; weight decay applies to matrices, not to norms and biases.

    Attributes:
        offload: Keep the moments in main memory and compute the update there, which takes 8 bytes
            less per weight on a GPU, and longer.
    """

    kind: Literal["adamw"] = "adamw"
    learning_rate: float = Field(default=1e-3, gt=0, allow_inf_nan=False)
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    schedule: Schedule = Cosine(final_fraction=0.1)
    offload: bool = False


Optimizer = Annotated[Adafactor | AdamW, Field(discriminator="kind")]


def build_optimizer(config: Optimizer, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The torch optimizer of the parameters that require gradients."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    match config:
        case Adafactor(floor="paper"):
            return PaperAdafactor(groups, lr=config.learning_rate)
        case Adafactor():
            return torch.optim.Adafactor(groups, lr=config.learning_rate)
        case AdamW():
            kind = OffloadedAdamW if config.offload else torch.optim.AdamW
            return kind(groups, lr=config.learning_rate, betas=config.betas, fused=True)


def learning_rate(config: Optimizer, step: int, progress: float) -> float:
    """The learning rate of step `step` (from 1), which ends at `progress` in (0, 1]."""
    if config.warmup_steps is not None:
        warmup = step / config.warmup_steps if config.warmup_steps else 1.0
    else:
        warmup = progress / config.warmup_fraction if config.warmup_fraction else 1.0
    return config.learning_rate * min(1.0, warmup) * _factor(config.schedule, progress)


def _factor(schedule: Schedule, progress: float) -> float:
    match schedule:
        case Constant():
            return 1.0
        case Linear(final_fraction=final):
            return 1.0 + progress * (final - 1.0)
        case Cosine(final_fraction=final):
            return _half_cosine(progress, final)
        case CoolDown(begin=begin, final_fraction=final):
            return _half_cosine(max(0.0, (progress - begin) / (1.0 - begin)), final)


def _half_cosine(progress: float, final: float) -> float:
    return final + (1.0 - final) * (1.0 + math.cos(math.pi * progress)) / 2.0


class OffloadedAdamW(torch.optim.AdamW):
    """AdamW of copies in main memory; `step` takes gradients there and brings the weights back.

    Its state is that of `torch.optim.AdamW`, so that either can continue from the other's. Weights
    must not be changed elsewhere.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], **settings: Any) -> None:
        self._pairs: list[tuple[Tensor, Tensor]] = []  # weight, its copy
        super().__init__(
            [group | {"params": [self._copied(p) for p in group["params"]]} for group in groups],
            **settings,
        )

    def _copied(self, weight: Tensor) -> Tensor:
        copied = torch.empty_like(weight, device="cpu", pin_memory=weight.is_cuda)
        self._pairs.append((weight, copied.copy_(weight.detach())))
        return copied

    @torch.no_grad()
    def step(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, closure: Callable[[], float] | None = None
    ) -> None:
        assert closure is None, "closures are not supported"
        for weight, copied in self._pairs:
            grad = weight.grad
            copied.grad = None if grad is None else grad.to("cpu", non_blocking=True)
        if any(weight.is_cuda for weight, _ in self._pairs):
            torch.cuda.synchronize()  # until the gradients have arrived
        super().step()
        for weight, copied in self._pairs:
            weight.copy_(copied, non_blocking=True)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Delete the gradients of the weights."""
        assert set_to_none, "no buffer is kept"
        for weight, _ in self._pairs:
            weight.grad = None


class PaperAdafactor(torch.optim.Optimizer):
    """Adafactor as in its paper: step sizes relative to the weight's RMS, factored second moments.

    1e-30 is added to each squared gradient. `torch.optim.Adafactor` instead clamps the rows' mean
    square to at least 1.2e-7 (the float32 epsilon). Mean squares of gradients are usually much
    smaller. The second moment is then underestimated, and every update is clipped to an RMS of 1
    regardless of earlier gradients.

    Paper: Shazeer and Stern 2018, algorithms 4 and 5. Differs: the caller sets the step size (rho_t
    is the learning rate); weight decay is decoupled, as in torch.
    """

    def __init__(self, params: Iterable[dict[str, Any]], lr: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.0})

    @torch.no_grad()
    def step(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, closure: Callable[[], float] | None = None
    ) -> None:
        assert closure is None, "closures are not supported"
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._step(weight, group["lr"], group["weight_decay"])

    def _step(self, weight: Tensor, rate: float, decay: float) -> None:
        state = self.state[weight]
        if not state:
            state["step"] = torch.tensor(0.0)
        state["step"] += 1
        new_weight = float(state["step"]) ** _DECAY
        scale = rate * _rms(weight).clamp(min=_EPSILON_2)
        update = _normalised(weight.grad, state, new_weight)
        update /= (_rms(update) / _CLIP).clamp(min=1)
        weight.mul_(1 - rate * decay).sub_(update.mul_(scale))


def _normalised(grad: Any, state: dict[str, Any], new_weight: float) -> Tensor:
    """Update the second moment, then divide the gradient by its square root."""
    squares = grad.square().add_(_EPSILON_1)
    if grad.ndim < 2:
        return grad * _moment(state, "variance", squares, new_weight).rsqrt()
    rows_R1 = _moment(state, "row_var", squares.mean(-1, keepdim=True), new_weight)
    columns_1C = _moment(state, "col_var", squares.mean(-2, keepdim=True), new_weight)
    # R C / mean(R) is not formed: the product of two small factors underflows in float32
    rows_R1 = rows_R1 / rows_R1.mean(-2, keepdim=True)
    return torch.mul(grad, rows_R1.rsqrt(), out=squares).mul_(columns_1C.rsqrt())


def _moment(state: dict[str, Any], name: str, squares: Tensor, new_weight: float) -> Tensor:
    if name not in state:
        state[name] = torch.zeros_like(squares)
    return state[name].lerp_(squares, new_weight)


def _rms(values: Tensor) -> Tensor:
    return values.square().mean().sqrt()
