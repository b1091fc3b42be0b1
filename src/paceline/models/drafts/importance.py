"""Measures which parts of a model matter, with hooks on its modules.

Shape suffixes: N tokens, D hidden, P parts, S size of a part.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable


class HiddenMeter:
    """Sums the absolute values of the norms' outputs, by hidden channel."""

    def __init__(self, norms: Iterable[Any]) -> None:
        self._norms = list(norms)
        self.total_D = torch.zeros(len(self._norms[0].weight))

    def attach(self) -> list[Any]:
        return [norm.register_forward_hook(self._add) for norm in self._norms]

    def _add(self, _module: nn.Module, _inputs: Any, output: Tensor) -> None:
        self.total_D += output.float().abs().flatten(0, -2).sum(0).cpu()


class PartMeter:
    """Sums the norms of what each part of a linear layer's input adds to its output.

    Parts are heads, or inner channels if `size` is 1.
    """

    def __init__(self, linear: Any, size: int) -> None:
        self._linear = linear
        weight = linear.weight.detach().float()
        self._size = size
        self._weight_PSD = weight.T.reshape(-1, size, weight.shape[0])
        self._norms_P = weight.norm(dim=0) if size == 1 else None
        self.total_P = torch.zeros(len(self._weight_PSD))

    def attach(self) -> list[Any]:
        return [self._linear.register_forward_pre_hook(self._add)]

    def _add(self, _module: nn.Module, inputs: tuple[Tensor]) -> None:
        if self._norms_P is not None:
            self.total_P += (inputs[0].float().flatten(0, -2).abs().sum(0) * self._norms_P).cpu()
            return
        parts_NPS = inputs[0].float().reshape(-1, len(self.total_P), self._size)
        added_NPD = torch.einsum("nps,psd->npd", parts_NPS, self._weight_PSD)
        self.total_P += added_NPD.norm(dim=-1).sum(0).cpu()


@contextlib.contextmanager
def attached(meters: Iterable[HiddenMeter | PartMeter]) -> Generator[None]:
    """Within this context, the meters count what the model computes."""
    handles = [handle for meter in meters for handle in meter.attach()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def best(importance_P: Tensor, count: int) -> Tensor:
    """Indices of the most important parts, ascending."""
    return importance_P.argsort(descending=True, stable=True)[:count].sort().values


def channels_of(heads: Tensor, size: int) -> Tensor:
    """Indices of the channels of these heads."""
    return (heads[:, None] * size + torch.arange(size)).flatten()


def fill(new: Any, old: Any, rows: Tensor, columns: Tensor, scale: float = 1) -> None:
    """Copy these rows and columns of a linear layer, multiplied by `scale`."""
    new.weight.copy_(old.weight[rows][:, columns] * scale)
    if old.bias is not None:
        new.bias.copy_(old.bias[rows])
