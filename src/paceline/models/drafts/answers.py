"""Samples answers from an encoder-decoder, to rank its parts and tokens on."""

# V vocabulary
from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.models.hf.base import HfModel

_LONGEST = 128  # tokens of an answer


@torch.inference_mode()
def sampled_answer(
    target: HfModel, source: Sequence[int], rng: torch.Generator
) -> tuple[Tensor, list[int]]:
    """The logits before each token of an answer, [N, V], and the tokens."""
    session = target.start_session()
    logits_1V = session.prefill([source[: target.max_source_length]])
    logits, answer = [logits_1V], list[int]()
    while True:
        probs_V = logits[-1][0].float().softmax(-1).cpu()
        answer.append(int(torch.multinomial(probs_V, 1, generator=rng)))
        longest = min(_LONGEST, (target.max_length or _LONGEST) - len(target.decoder_prompt or ()))
        if answer[-1] in target.eos_token_ids or len(answer) >= longest:
            return torch.cat(logits), answer
        logits.append(session.extend(torch.tensor([answer[-1:]]))[:, -1])
