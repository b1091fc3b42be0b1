"""Records what a target says before each token of its completions, to distil from it later."""

# N positions of completions, K recorded tokens, D hidden size
from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from paceline.core.fused import chunks
from paceline.data.collate import collate
from paceline.data.prompts import TopTokens
from paceline.data.sources import rows_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.models.hf.base import HfModel

_CHUNK = 256  # positions per chunk of probabilities


class Recorded(NamedTuple):
    """Of one completion.

    Attributes:
        top: The most likely tokens before each token; None: not recorded.
        hidden: The hidden states that the head reads for each token, bfloat16 bytes in rows; None:
            not recorded.
    """

    top: TopTokens | None = None
    hidden: bytes | None = None


@torch.no_grad()
def record(
    model: HfModel,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    count: int,
    batch_size: int,
    *,
    hidden_states: bool,
) -> list[Recorded]:
    """The `count` most likely tokens before each completion token, at temperature 1.

    `hidden_states`: also the hidden states. Cost: one forward pass over prompts and completions.
    """
    rows = rows_of(model, prompts, completions)
    found: list[Recorded] = []
    for first in range(0, len(rows), batch_size):
        part = rows[first : first + batch_size]
        batch = collate(part).to(model.device)
        hidden_ND = model.hidden(batch)[batch.mask_BT]
        lengths = [len(row.tokens) - row.trained_from for row in part]
        tops = _top(model, hidden_ND, count, lengths) if count else [None] * len(part)
        states = [_as_bytes(each) if hidden_states else None for each in hidden_ND.split(lengths)]
        found += map(Recorded, tops, states)
    return found


def _top(model: HfModel, hidden_ND: Tensor, count: int, lengths: Sequence[int]) -> list[TopTokens]:
    tops = [
        model.head.log_probs(hidden_ND[chunk], model.vocab_size).topk(min(count, model.vocab_size))
        for chunk in chunks(len(hidden_ND), _CHUNK)
    ]
    log_probs_NK, tokens_NK = (torch.cat(values) for values in zip(*tops, strict=True))
    of_rows = zip(tokens_NK.split(list(lengths)), log_probs_NK.split(list(lengths)), strict=True)
    return [TopTokens(tokens.tolist(), log_probs.tolist()) for tokens, log_probs in of_rows]


def _as_bytes(hidden_TD: Tensor) -> bytes:
    return hidden_TD.to("cpu", torch.bfloat16).contiguous().view(torch.uint8).numpy().tobytes()
