"""Call the C library on tensors: sampling, the lossless rule, losses.

Shape suffixes: B batch, G gamma, H verified positions (G + 1), P draft positions (at least G),
C tokens of a chunk, V vocabulary.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.core.backend import Backend
from paceline.core.sampling import as_list
from paceline.native.library import compiled, library
from paceline.native.structures import Block, Losses, Term

if TYPE_CHECKING:
    from collections.abc import Sequence

_FEW_ENTRIES = 1 << 19  # for more, PyTorch's multi-threaded argmax is faster

NO_MASS = "a distribution sums to 0 or contains NaN"


def can_draw(*probs: Tensor) -> bool:
    """True if the library is available and can read these tensors."""
    for part in probs:
        if part.dtype != torch.float32 or part.device.type != "cpu" or not part.is_contiguous():
            return False
    return compiled() is not None


def _check_mass(tokens_B: Tensor) -> None:
    """Raise AssertionError if the library returned -1, its code for a row without mass."""
    assert min(as_list(tokens_B.flatten()), default=0) >= 0, NO_MASS


def check_shapes(block: Block, draft_BPV: Tensor) -> None:
    """Check that the library reads within the draft's tensor."""
    batch, places, vocab_size = draft_BPV.shape
    assert places >= block.gamma, f"the rule needs the draft at {block.gamma} positions"
    assert vocab_size == block.vocab, "target and draft need the same vocabulary"
    assert batch == block.batch, "every row needs draft distributions"


def can_differentiate(logits: Tensor) -> bool:
    """True if the library is available and can read these logits."""
    known = logits.dtype in (torch.float32, torch.bfloat16)
    return known and logits.device.type == "cpu" and compiled() is not None


def losses_and_slopes(
    terms: Sequence[Term],
    target_logits_CV: Tensor | None,
    draft_logits_CV: Tensor,
    labels_C: Tensor,
    weights_C: Tensor,
    normalisers_C: Tensor | None = None,
) -> Tensor:
    """The weighted sum of the terms for each token, float32, [C].

    The draft's logits are overwritten with the gradients of the losses times `weights_C`.

    `normalisers_C`: if the logits are a subset of the target's, the log-sum-exp of all of them. TVD
    and negative log acceptance then use the target's probabilities over the whole vocabulary; other
    terms renormalise over the subset.
    """
    rows, vocab_size = draft_logits_CV.shape
    assert draft_logits_CV.is_contiguous(), "written in place"
    if target_logits_CV is not None:
        target_logits_CV = target_logits_CV.to(draft_logits_CV.dtype).contiguous()
        assert target_logits_CV.shape == draft_logits_CV.shape, "one vocabulary"
    labels_C = labels_C.contiguous()
    weights_C = weights_C.float().contiguous()
    if normalisers_C is not None:
        normalisers_C = normalisers_C.float().contiguous()
    losses_C = torch.empty(rows)
    array = (Term * len(terms))(*terms)
    losses = Losses(
        ctypes.addressof(array),
        len(terms),
        rows,
        vocab_size,
        draft_logits_CV.element_size(),
        None if target_logits_CV is None else target_logits_CV.data_ptr(),
        draft_logits_CV.data_ptr(),
        labels_C.data_ptr(),
        weights_C.data_ptr(),
        None if normalisers_C is None else normalisers_C.data_ptr(),
        losses_C.data_ptr(),
    )
    if not library().losses_and_slopes(ctypes.byref(losses), torch.get_num_threads()):
        raise MemoryError("no memory for the losses of a chunk; use smaller chunk_tokens")
    return losses_C


class NativeBackend(Backend):
    """Core's operations in C, for float32 tensors on the CPU; compiles the library on first use."""

    def softmax(self, logits: Tensor, temperature: float) -> Tensor | None:
        logits = logits.contiguous()
        if not can_draw(logits):
            return None
        probs = torch.empty_like(logits)
        width, threads = logits.shape[-1], torch.get_num_threads()
        rows, source = logits.numel() // width, logits.data_ptr()
        library().softmax(source, rows, width, width, temperature, threads, probs.data_ptr())
        return probs

    def keep_top_p(self, probs: Tensor, top_p: float) -> Tensor | None:
        """In place, without sorting the vocabulary."""
        if not can_draw(probs):
            return None
        width = probs.shape[-1]
        rows, threads = probs.numel() // width, torch.get_num_threads()
        had_memory = library().keep_top_p(probs.data_ptr(), rows, width, top_p, threads)
        return probs if had_memory else None

    def likeliest(self, logits: Tensor) -> Tensor | None:
        """For few rows, where PyTorch uses one thread."""
        if logits.numel() > _FEW_ENTRIES or not can_draw(logits):
            return None
        tokens = torch.empty(logits.shape[:-1], dtype=torch.int64)
        width = logits.shape[-1]
        library().best_tokens(logits.data_ptr(), tokens.numel(), width, width, tokens.data_ptr())
        return tokens

    def sample(self, probs_BV: Tensor, uniforms_B: Tensor) -> Tensor | None:
        if not can_draw(probs_BV):
            return None
        batch, vocab_size = probs_BV.shape
        uniforms_B = uniforms_B.double().contiguous()
        tokens_B = torch.empty(batch, dtype=torch.int64)
        probs, uniforms, threads = (
            probs_BV.data_ptr(),
            uniforms_B.data_ptr(),
            torch.get_num_threads(),
        )
        library().draw_tokens(probs, uniforms, batch, vocab_size, threads, tokens_B.data_ptr())
        _check_mass(tokens_B)
        return tokens_B

    def verify_lossless(
        self,
        target_BHV: Tensor,
        draft_BPV: Tensor,
        drafted_BG: Tensor,
        num_drafted_B: Tensor,
        uniforms: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor] | None:
        if not can_draw(target_BHV, draft_BPV):
            return None
        batch, gamma = drafted_BG.shape
        num_accepted_B, next_tokens_B = (torch.empty(batch, dtype=torch.int64) for _ in range(2))
        drafted_BG, num_drafted_B = drafted_BG.contiguous(), num_drafted_B.contiguous()
        accept_BG, next_B = (numbers.double().contiguous() for numbers in uniforms)
        block = Block(
            batch=batch,
            gamma=gamma,
            places=draft_BPV.shape[1],
            vocab=target_BHV.shape[2],
            drafted=drafted_BG.data_ptr(),
            num_drafted=num_drafted_B.data_ptr(),
            draft=draft_BPV.data_ptr(),
            target=target_BHV.data_ptr(),
            accept_uniforms=accept_BG.data_ptr(),
            next_uniforms=next_B.data_ptr(),
            num_accepted=num_accepted_B.data_ptr(),
            next_tokens=next_tokens_B.data_ptr(),
        )
        check_shapes(block, draft_BPV)
        library().verify(ctypes.byref(block), torch.get_num_threads())
        _check_mass(next_tokens_B)
        return num_accepted_B, next_tokens_B
