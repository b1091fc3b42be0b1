"""Compare a compiled library with PyTorch on a few numbers when it is loaded.

models/admission compares forward passes with transformers.

Shape suffixes: N rows, G gamma, V vocabulary.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from paceline.native.structures import Block, DivergenceKind, Losses, Term

if TYPE_CHECKING:
    from torch import Tensor

_ROWS, _VOCAB = 3, 19  # whole vectors of 8 or 16 and a remainder
_TOLERANCE = 1e-4


def fault_of(library: ctypes.CDLL) -> str | None:
    """The first check that fails; None if the library agrees with PyTorch."""
    rng = torch.Generator().manual_seed(0)
    logits_NV, others_NV = (2 * torch.randn(_ROWS, _VOCAB, generator=rng) for _ in "pq")
    checks = {
        "softmax": _softmax_agrees(library, logits_NV),
        "sampling": _sampling_agrees(library, logits_NV),
        "verification": _verification_agrees(library, logits_NV, others_NV),
        "divergences": _divergences_agree(library, logits_NV, others_NV),
    }
    return next((name for name, agrees in checks.items() if not agrees), None)


def _softmax_agrees(library: ctypes.CDLL, logits_NV: Tensor) -> bool:
    got_NV = torch.empty_like(logits_NV)
    library.softmax(logits_NV.data_ptr(), _ROWS, _VOCAB, _VOCAB, 0.7, 1, got_NV.data_ptr())
    return torch.allclose(got_NV, (logits_NV / 0.7).softmax(-1), rtol=0, atol=_TOLERANCE)


def _sampling_agrees(library: ctypes.CDLL, logits_NV: Tensor) -> bool:
    """Greedy tokens, and draws with uniforms in the middle of those tokens' mass."""
    probs_NV = logits_NV.softmax(-1)
    wanted_N = probs_NV.argmax(-1)
    middles_NV = probs_NV.double().cumsum(-1) - probs_NV.double() / 2
    uniforms_N = middles_NV.gather(-1, wanted_N[:, None])[:, 0].contiguous()
    best_N, drawn_N = torch.full((2, _ROWS), -1)
    library.best_tokens(logits_NV.data_ptr(), _ROWS, _VOCAB, _VOCAB, best_N.data_ptr())
    probs, uniforms = probs_NV.data_ptr(), uniforms_N.data_ptr()
    library.draw_tokens(probs, uniforms, _ROWS, _VOCAB, 1, drawn_N.data_ptr())
    return torch.equal(best_N, wanted_N) and torch.equal(drawn_N, wanted_N)


def _verification_agrees(library: ctypes.CDLL, logits_NV: Tensor, others_NV: Tensor) -> bool:
    """A lossless block of two tokens: the first is accepted, the second rejected and recovered."""
    p_NV, q_NV = logits_NV.softmax(-1), others_NV.softmax(-1)
    excess_NV = (p_NV - q_NV).clamp(min=0).double()
    accepted, rejected = int(excess_NV[0].argmax()), int((q_NV - p_NV)[1].argmax())
    ratio = float(p_NV[1, rejected] / q_NV[1, rejected])
    recovered = int(excess_NV[1].argmax())
    shares_V = excess_NV[1] / excess_NV[1].sum()
    drafted_G = torch.tensor([accepted, rejected])
    accept_G = torch.tensor([0.5, (1 + ratio) / 2], dtype=torch.float64)
    middle = float(shares_V[: recovered + 1].sum() - shares_V[recovered] / 2)
    next_1 = torch.tensor([middle], dtype=torch.float64)
    num_drafted_1 = torch.tensor([2])
    num_accepted_1, next_tokens_1 = torch.full((2, 1), -1)
    block = Block(1, 2, 2, _VOCAB)
    block.drafted, block.num_drafted = drafted_G.data_ptr(), num_drafted_1.data_ptr()
    block.draft, block.target = q_NV.data_ptr(), p_NV.data_ptr()
    block.accept_uniforms, block.next_uniforms = accept_G.data_ptr(), next_1.data_ptr()
    block.num_accepted, block.next_tokens = num_accepted_1.data_ptr(), next_tokens_1.data_ptr()
    library.verify(ctypes.byref(block), 1)
    return (int(num_accepted_1), int(next_tokens_1)) == (1, recovered)


def _divergences_agree(library: ctypes.CDLL, logits_NV: Tensor, others_NV: Tensor) -> bool:
    """Forward KL and its slope, q - p."""
    p_NV, q_NV = logits_NV.softmax(-1), others_NV.softmax(-1)
    wanted_N = (p_NV * (p_NV.log() - q_NV.log())).sum(-1)
    slopes_NV, losses_N = others_NV.clone(), torch.empty(_ROWS)
    labels_N, weights_N = torch.zeros(_ROWS, dtype=torch.int64), torch.ones(_ROWS)
    terms = (Term * 1)(Term(DivergenceKind.FORWARD_KL, 1.0, 0.0))
    losses = Losses(
        terms=ctypes.addressof(terms),
        num_terms=1,
        rows=_ROWS,
        vocab=_VOCAB,
        bytes=4,
        target=logits_NV.data_ptr(),
        draft=slopes_NV.data_ptr(),
        labels=labels_N.data_ptr(),
        weights=weights_N.data_ptr(),
        losses=losses_N.data_ptr(),
    )
    library.losses_and_slopes(ctypes.byref(losses), 1)
    return torch.allclose(losses_N, wanted_N, rtol=0, atol=_TOLERANCE) and torch.allclose(
        slopes_NV, q_NV - p_NV, rtol=0, atol=_TOLERANCE
    )
