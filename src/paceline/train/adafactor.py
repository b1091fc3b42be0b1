"""Adafactor with the floor of its paper.

`torch.optim.Adafactor` bounds the rows' mean square from below by the precision of the weights,
1.2e-7. Mean squares of gradients are usually far smaller. The second moment is then too small, every
update is clipped to an RMS of 1, and how a gradient compares with earlier ones no longer shows. The
paper adds 1e-30 to each squared gradient instead.

Paper: Shazeer and Stern 2018, algorithms 4 and 5. Differs: the step size is the caller's (rho_t is the
learning rate); weight decay is decoupled, as in torch.
"""

# R rows, C columns of a matrix
from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

_EPSILON_1 = 1e-30  # added to squared gradients
_EPSILON_2 = 1e-3  # least RMS of a weight that steps are relative to
_CLIP = 1.0  # largest RMS of an update
_DECAY = -0.8  # beta2 of step t is 1 - t^-0.8


class PaperAdafactor(torch.optim.Optimizer):
    """Steps relative to the RMS of a weight; second moments of matrices kept by row and by column."""

    def __init__(self, params: Iterable[dict[str, Any]], lr: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert closure is None, "nothing here evaluates a loss twice"
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._step(weight, group["lr"], group["weight_decay"])

    def _step(self, weight: Tensor, rate: float, decay: float) -> None:
        state = self.state[weight]
        if not state:
            state["step"] = torch.tensor(0.0)
        state["step"] += 1
        share = float(state["step"]) ** _DECAY
        scale = rate * _rms(weight).clamp(min=_EPSILON_2)
        update = _normalised(weight.grad, state, share)
        update /= (_rms(update) / _CLIP).clamp(min=1)
        weight.mul_(1 - rate * decay).sub_(update.mul_(scale))


def _normalised(grad: Any, state: dict[str, Any], share: float) -> Tensor:
    """The gradient over the root of its second moment, which takes this gradient in by `share`."""
    squares = grad.square().add_(_EPSILON_1)
    if grad.ndim < 2:
        return grad * _moment(state, "variance", squares, share).rsqrt()
    rows_R1 = _moment(state, "row_var", squares.mean(-1, keepdim=True), share)
    columns_1C = _moment(state, "col_var", squares.mean(-2, keepdim=True), share)
    # R C / mean(R), factor by factor: the product of two floors is no float32
    rows_R1 = rows_R1 / rows_R1.mean(-2, keepdim=True)
    return torch.mul(grad, rows_R1.rsqrt(), out=squares).mul_(columns_1C.rsqrt())


def _moment(state: dict[str, Any], name: str, squares: Tensor, share: float) -> Tensor:
    """The running mean of `squares` under this name."""
    if name not in state:
        state[name] = torch.zeros_like(squares)
    return state[name].lerp_(squares, share)


def _rms(values: Tensor) -> Tensor:
    return values.square().mean().sqrt()
