"""Learned or sinusoidal positions of rows that differ in length.

Some decoders (BART, Marian, M2M100 and their relatives) compute one row of positions from the
length of the cache and take none. Relative positions (T5) need no change, because rows are
right-aligned.

Shape suffixes: B batch, N new tokens.
"""

from __future__ import annotations

import contextlib
import inspect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from torch import Tensor, nn
    from transformers import PreTrainedModel


def takes_positions(hf: PreTrainedModel) -> bool:
    """Whether the model has an argument `position_ids`."""
    forwards: list[Callable[..., Any]] = [hf.forward, hf.base_model.forward]
    return any("position_ids" in inspect.signature(each).parameters for each in forwards)


@contextlib.contextmanager
def at_positions(decoder: nn.Module, positions_BN: Tensor) -> Generator[None]:
    """Within this context, the learned or sinusoidal positions of a decoder are these."""
    table: Any = getattr(decoder, "embed_positions", None)
    if table is None:
        yield
        return
    hooks = _argument_hooks if _has_argument(table) else _output_hooks
    handles = hooks(table, positions_BN)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _has_argument(table: nn.Module) -> bool:
    return "position_ids" in inspect.signature(table.forward).parameters


def _argument_hooks(table: nn.Module, positions_BN: Tensor) -> list[Any]:
    def place(_table: nn.Module, inputs: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return inputs, {**named, "position_ids": positions_BN.flatten()}

    def unflatten(_table: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        return output.view(*positions_BN.shape, -1)

    return [
        table.register_forward_pre_hook(place, with_kwargs=True),
        table.register_forward_hook(unflatten),
    ]


def _output_hooks(table: Any, positions_BN: Tensor) -> list[Any]:
    """For tables of M2M100's kind, whose first position follows that of the padding token."""

    def replace(_table: nn.Module, _inputs: Any, _output: Tensor) -> Tensor:
        rows = positions_BN.flatten() + table.padding_idx + 1
        return table.weights.index_select(0, rows).view(*positions_BN.shape, -1)

    return [table.register_forward_hook(replace)]
