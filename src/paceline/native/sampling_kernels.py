"""Call sampling.c on contiguous float32 CPU tensors.

Shape suffixes: B batch, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.native.checked import compiled, library

NO_MASS = "a distribution sums to 0 or contains NaN"


def can_draw(*probs: Tensor) -> bool:
    """True if the library is available and can read these tensors."""
    for part in probs:
        if part.dtype != torch.float32 or part.device.type != "cpu" or not part.is_contiguous():
            return False
    return compiled() is not None


def best_tokens(logits: Tensor) -> Tensor:
    """The first of the largest logits, [..., V] -> [...]."""
    tokens = torch.empty(logits.shape[:-1], dtype=torch.int64)
    width = logits.shape[-1]
    library().best_tokens(logits.data_ptr(), tokens.numel(), width, width, tokens.data_ptr())
    return tokens


def draw_tokens(probs_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """One token per row by inverse CDF, [B]."""
    batch, vocab_size = probs_BV.shape
    uniforms_B = uniforms_B.double().contiguous()
    tokens_B = torch.empty(batch, dtype=torch.int64)
    probs, uniforms, threads = probs_BV.data_ptr(), uniforms_B.data_ptr(), torch.get_num_threads()
    library().draw_tokens(probs, uniforms, batch, vocab_size, threads, tokens_B.data_ptr())
    check_mass(tokens_B)
    return tokens_B


def softmax(logits: Tensor, temperature: float) -> Tensor:
    """Probabilities at a temperature above 0, [..., V]."""
    probs = torch.empty_like(logits)
    width, threads = logits.shape[-1], torch.get_num_threads()
    rows, source = logits.numel() // width, logits.data_ptr()
    library().softmax(source, rows, width, width, temperature, threads, probs.data_ptr())
    return probs


def keep_top_p(probs: Tensor, top_p: float) -> bool:
    """Apply top-p to each row in place, [..., V]; False if memory could not be allocated."""
    width = probs.shape[-1]
    rows, threads = probs.numel() // width, torch.get_num_threads()
    return bool(library().keep_top_p(probs.data_ptr(), rows, width, top_p, threads))


def check_mass(tokens_B: Tensor) -> None:
    """Raise AssertionError if the library returned -1, its code for a row without mass."""
    assert min(tokens_B.flatten().tolist(), default=0) >= 0, NO_MASS
