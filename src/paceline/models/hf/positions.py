"""Masks and positions of right-aligned rows that differ in length.

Some decoders (BART, Marian, M2M100 and their relatives) compute one row of learned or sinusoidal
positions from the length of the cache and take none. Relative positions (T5) need no change,
because rows are right-aligned.

Shape suffixes: B batch, N new tokens, W cache width.
"""

from __future__ import annotations

import contextlib
import inspect
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from torch import Tensor, nn
    from transformers import PreTrainedModel


def mask_and_positions(ends_B: Tensor, tokens_BN: Tensor) -> dict[str, Tensor]:
    """`attention_mask` over the cache, [B, W], and `position_ids` of the new tokens, [B, N].

    `ends_B` are the lengths of the rows, new tokens included.
    """
    count, device = tokens_BN.shape[1], tokens_BN.device
    width = int(ends_B.max())
    mask_BW = torch.arange(width) >= (width - ends_B)[:, None]
    positions_BN = (ends_B[:, None] - count + torch.arange(count)).clamp(min=0)
    return {
        "attention_mask": mask_BW.to(device, torch.int64),
        "position_ids": positions_BN.to(device),
    }


def takes_positions(hf: PreTrainedModel) -> bool:
    """Whether the model has an argument for positions."""
    forwards: list[Callable[..., Any]] = [hf.forward, hf.base_model.forward]
    return any("position_ids" in inspect.signature(each).parameters for each in forwards)


@contextlib.contextmanager
def at_positions(decoder: nn.Module, positions_BN: Tensor) -> Generator[None]:
    """Within this context, the learned or sinusoidal positions of a decoder are these."""
    table: Any = getattr(decoder, "embed_positions", None)

    def take(_table: Any, inputs: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return inputs, {**named, "position_ids": positions_BN.flatten()}

    def unflatten(_table: Any, _inputs: Any, output: Tensor) -> Tensor:
        return output.view(*positions_BN.shape, -1)

    def from_start(_table: Any, inputs: Any, _named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return inputs[:1], {}  # without the length, which the table compares with its own

    def look_up(_table: Any, _inputs: Any, _output: Tensor) -> Tensor:
        """For tables of M2M100's kind, whose first position follows that of the padding token."""
        rows = positions_BN.flatten() + table.padding_idx + 1
        return table.weights.index_select(0, rows).view(*positions_BN.shape, -1)

    with contextlib.ExitStack() as hooks:
        if table is not None and "position_ids" in inspect.signature(table.forward).parameters:
            hooks.callback(table.register_forward_pre_hook(take, with_kwargs=True).remove)
            hooks.callback(table.register_forward_hook(unflatten).remove)
        elif table is not None:
            hooks.callback(table.register_forward_pre_hook(from_start, with_kwargs=True).remove)
            hooks.callback(table.register_forward_hook(look_up).remove)
        yield
