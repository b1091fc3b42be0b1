"""Completions sampled from a model, for training text and held-out text.

Not the decoder that users time: no stopping reasons, no streaming, no counts.
"""

# B rows still being written, N new tokens, V vocabulary
from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.core.block import DrawPlan, DrawRequest
from paceline.core.lists import as_list
from paceline.core.sampling import (
    SamplingParams,
    apply_repetition_penalty,
    sample,
    seen_tokens,
    to_probs,
)
from paceline.decode.block import draw
from paceline.progress import silent

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from paceline.models.contract import Model
    from paceline.progress import Progress


def sample_completions(
    model: Model,
    prompts: Sequence[Sequence[int]],
    uniforms_BN: Tensor,
    *,
    sampling: SamplingParams | None = None,
    eos_token_ids: Collection[int] | None = None,
    progress: Progress = silent,
) -> list[list[int]]:
    """Continue every prompt by at most N tokens; a token that ends the text is kept as the last.

    Row b draws with its own uniforms and no others, so its text does not depend on the rows beside
    it. Rows that end leave the batch.

    Shapes: uniforms [B, N] in [0, 1) -> B lists of 1 to N tokens.
    """
    sampling = sampling or SamplingParams()
    ends = set(model.eos_token_ids if eos_token_ids is None else eos_token_ids)
    completions: list[list[int]] = [[] for _ in prompts]
    session = model.start_session()
    logits_BV = session.prefill(prompts)
    seen_BV = None
    if sampling.repetition_penalty != 1:
        seen_BV = seen_tokens(prompts, logits_BV.shape[-1]).to(logits_BV.device)
        logits_BV = apply_repetition_penalty(logits_BV, seen_BV, sampling.repetition_penalty)
    tokens = as_list(sample(to_probs(logits_BV, sampling), uniforms_BN[:, 0]))
    writing = list(range(len(prompts)))
    num_new = uniforms_BN.shape[1]
    for position in range(1, num_new + 1):
        for row, token in zip(writing, tokens, strict=True):
            completions[row].append(token)
        progress("writing text", position, num_new)
        kept = [index for index, token in enumerate(tokens) if token not in ends]
        if position == num_new or not kept:
            break
        if seen_BV is not None:
            seen_BV.scatter_(1, torch.tensor(tokens, device=seen_BV.device)[:, None], value=True)
        if len(kept) < len(tokens):
            session.keep_rows(kept)
            writing, tokens = ([some[index] for index in kept] for some in (writing, tokens))
            seen_BV = None if seen_BV is None else seen_BV[torch.tensor(kept)]
        uniforms = as_list(uniforms_BN[writing, position, None])
        newest = [[token] for token in tokens]
        drawn = draw(session, DrawRequest(newest, DrawPlan(1, sampling), uniforms, seen_BV))
        tokens = as_list(drawn.tokens_BG[:, 0])
    return completions
