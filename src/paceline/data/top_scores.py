"""Records the most likely tokens of a model before each token of its completions."""

# N positions of completions, K recorded tokens
from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paceline.core.fused import Head, chunks
from paceline.data.collate import collate
from paceline.data.prompts import TopTokens
from paceline.data.sources import rows_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.models.hf.base import HfModel

_CHUNK = 256  # positions per chunk of probabilities


@torch.no_grad()
def top_scores(
    model: HfModel,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    count: int,
    batch_size: int,
) -> list[TopTokens]:
    """The `count` most likely tokens before each completion token, at temperature 1.

    Cost: one forward pass over prompts and completions.
    """
    head = Head(model.head_weight, model.head_bias)
    rows = rows_of(model, prompts, completions)
    found: list[TopTokens] = []
    for first in range(0, len(rows), batch_size):
        part = rows[first : first + batch_size]
        batch = collate(part).to(model.device)
        hidden_ND = model.hidden(batch)[batch.mask_BT]
        tops = [
            head.log_probs(hidden_ND[chunk], model.vocab_size).topk(min(count, model.vocab_size))
            for chunk in chunks(len(hidden_ND), _CHUNK)
        ]
        log_probs_NK, tokens_NK = (torch.cat(values) for values in zip(*tops, strict=True))
        lengths = [len(row.tokens) - row.trained_from for row in part]
        for tokens, log_probs in zip(
            tokens_NK.split(lengths), log_probs_NK.split(lengths), strict=True
        ):
            found.append(TopTokens(tokens.tolist(), log_probs.tolist()))
    return found
