"""Samples completions from a model for training and held-out text.

Unlike the decoders in `paceline.decode`, it returns no stop reasons and no statistics, and it does
not apply `forced_eos`, because a forced token is not a sample of the model's distribution.
"""

# B unfinished rows, N new tokens, V vocabulary
from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.core.block import DrawPlan, DrawRequest
from paceline.core.sampling import (
    SamplingParams,
    apply_repetition_penalty,
    as_list,
    sample,
    seen_tokens,
    to_probs,
)
from paceline.decode.block import draw
from paceline.models.contract import decoder_contexts
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
    """Sample up to N new tokens for each prompt; the completion includes the end-of-text token.

    Row b uses only row b of the uniforms, so its text does not depend on the rest of the batch.
    Finished rows are removed from the batch.

    Shapes: uniforms [B, N] in [0, 1) -> B lists of 1 to N tokens.
    """
    sampling = sampling or SamplingParams()
    ends = set(model.eos_token_ids if eos_token_ids is None else eos_token_ids)
    completions: list[list[int]] = [[] for _ in prompts]
    session = model.start_session()
    logits_BV = session.prefill(prompts)
    seen_BV = None
    if sampling.repetition_penalty != 1:
        contexts = decoder_contexts(model, prompts)
        seen_BV = seen_tokens(contexts, logits_BV.shape[-1]).to(logits_BV.device)
        logits_BV = apply_repetition_penalty(logits_BV, seen_BV, sampling.repetition_penalty)
    tokens = as_list(sample(to_probs(logits_BV, sampling), uniforms_BN[:, 0]))
    unfinished = list(range(len(prompts)))
    num_new = uniforms_BN.shape[1]
    for position in range(1, num_new + 1):
        for row, token in zip(unfinished, tokens, strict=True):
            completions[row].append(token)
        progress("generating text", position, num_new)
        kept = [index for index, token in enumerate(tokens) if token not in ends]
        if position == num_new or not kept:
            break
        if seen_BV is not None:
            seen_BV.scatter_(1, torch.tensor(tokens, device=seen_BV.device)[:, None], value=True)
        if len(kept) < len(tokens):
            session.keep_rows(kept)
            unfinished, tokens = ([x[index] for index in kept] for x in (unfinished, tokens))
            seen_BV = None if seen_BV is None else seen_BV[torch.tensor(kept)]
        uniforms = as_list(uniforms_BN[unfinished, position, None])
        newest = [[token] for token in tokens]
        drawn = draw(session, DrawRequest(newest, DrawPlan(1, sampling), uniforms, seen_BV))
        tokens = as_list(drawn.tokens_BG[:, 0])
    return completions
