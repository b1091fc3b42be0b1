"""Adafactor as in its paper, which adds 1e-30 to each squared gradient.

`torch.optim.Adafactor` instead clamps the rows' mean square to at least 1.2e-7 (the float32
epsilon). Mean squares of gradients are usually much smaller. The second moment is then
underestimated, and every update is clipped to an RMS of 1 regardless of earlier gradients.

Paper: Shazeer and Stern 2018, algorithms 4 and 5. Differs: the caller sets the step size (rho_t is
the learning rate); weight decay is decoupled, as in torch.
"""

# R rows, C columns of a matrix
from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

_EPSILON_1 = 1e-30  # added to squared gradients
_EPSILON_2 = 1e-3  # minimum RMS of a weight, for the relative step size
_CLIP = 1.0  # maximum RMS of an update
_DECAY = -0.8  # beta2 of step t is 1 - t^-0.8


class PaperAdafactor(torch.optim.Optimizer):
    """Step sizes relative to the weight's RMS; matrices have factored second moments."""

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
