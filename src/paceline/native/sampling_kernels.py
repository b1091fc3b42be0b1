"""sampling.c on tensors: float32 on a CPU, one row behind the other.

Shape suffixes: B batch, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.native.checked import compiled

NO_MASS = "a distribution has no mass, or is not a number"


def can_draw(*probs: Tensor) -> bool:
    """Are these rows that the library reads, and is there a library?"""
    for part in probs:
        if part.dtype != torch.float32 or part.device.type != "cpu" or not part.is_contiguous():
            return False
    return compiled() is not None


def best_tokens(logits: Tensor) -> Tensor:
    """The first of the largest logits, [..., V] -> [...]."""
    tokens = torch.empty(logits.shape[:-1], dtype=torch.int64)
    library = compiled()
    assert library is not None, "ask can_draw first"
    width = logits.shape[-1]
    library.best_tokens(logits.data_ptr(), tokens.numel(), width, width, tokens.data_ptr())
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
    check_mass(tokens_B)
    return tokens_B


def softmax(logits: Tensor, temperature: float) -> Tensor:
    """Probabilities at a temperature above 0, [..., V]."""
    probs = torch.empty_like(logits)
    library = compiled()
    assert library is not None, "ask can_draw first"
    width = logits.shape[-1]
    library.softmax(
        logits.data_ptr(),
        logits.numel() // width,
        width,
        width,
        temperature,
        torch.get_num_threads(),
        probs.data_ptr(),
    )
    return probs


def keep_top_p(probs: Tensor, top_p: float) -> bool:
    """The nucleus of each row takes its place, [..., V]; False: there was no memory to find it."""
    library = compiled()
    assert library is not None, "ask can_draw first"
    width = probs.shape[-1]
    rows, threads = probs.numel() // width, torch.get_num_threads()
    return bool(library.keep_top_p(probs.data_ptr(), rows, width, top_p, threads))


def check_mass(tokens_B: Tensor) -> None:
    """The library gives -1 where it could not draw."""
    assert min(tokens_B.flatten().tolist(), default=0) >= 0, NO_MASS
