"""verification.c on tensors: float32 probabilities on a CPU, one row of them behind the other.

Shape suffixes: B batch, G gamma, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.native.compilation import compiled


def can_draw(*probs: Tensor) -> bool:
    """Are these distributions that the library reads, and is there a library?"""
    plain = all(
        part.dtype == torch.float32 and part.device.type == "cpu" and part.is_contiguous()
        for part in probs
    )
    return plain and compiled() is not None


def best_tokens(logits: Tensor) -> Tensor:
    """The first of the largest logits, [..., V] -> [...]."""
    tokens = torch.empty(logits.shape[:-1], dtype=torch.int64)
    library = compiled()
    assert library is not None, "ask can_draw first"
    library.best_tokens(logits.data_ptr(), tokens.numel(), logits.shape[-1], tokens.data_ptr())
    return tokens


def draw_tokens(probs_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """One token a row by inverse CDF, [B]."""
    batch, vocab_size = probs_BV.shape
    uniforms_B = uniforms_B.double().contiguous()
    tokens_B = torch.empty(batch, dtype=torch.int64)
    library = compiled()
    assert library is not None, "ask can_draw first"
    library.draw_tokens(
        probs_BV.data_ptr(),
        uniforms_B.data_ptr(),
        batch,
        vocab_size,
        torch.get_num_threads(),
        tokens_B.data_ptr(),
    )
    _check_mass(tokens_B)
    return tokens_B


def judge_lossless(
    drafted_BG: Tensor,
    num_drafted_B: Tensor,
    draft_probs_BGV: Tensor,
    target_probs_BHV: Tensor,
    accept_uniforms_BG: Tensor,
    next_uniforms_B: Tensor,
) -> tuple[Tensor, Tensor]:
    """Per row: drafted tokens kept, and the token that follows them."""
    batch, gamma = drafted_BG.shape
    num_accepted_B = torch.empty(batch, dtype=torch.int64)
    next_tokens_B = torch.empty(batch, dtype=torch.int64)
    given = [drafted_BG.contiguous(), num_drafted_B.contiguous(), draft_probs_BGV, target_probs_BHV]
    uniforms = [accept_uniforms_BG.double().contiguous(), next_uniforms_B.double().contiguous()]
    sizes = (batch, gamma, target_probs_BHV.shape[-1])
    library = compiled()
    assert library is not None, "ask can_draw first"
    library.judge_lossless(
        *(part.data_ptr() for part in given),
        *sizes,
        *(part.data_ptr() for part in uniforms),
        torch.get_num_threads(),
        num_accepted_B.data_ptr(),
        next_tokens_B.data_ptr(),
    )
    _check_mass(next_tokens_B)
    return num_accepted_B, next_tokens_B


def _check_mass(tokens_B: Tensor) -> None:
    assert min(tokens_B.tolist(), default=0) >= 0, "a distribution has no mass, or is not a number"
