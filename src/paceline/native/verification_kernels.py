"""Call verification.c on tensors that `can_draw` accepts.

Shape suffixes: B batch, G gamma, H verified positions (G + 1), P draft positions (G, or one more),
V vocabulary.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.native.checked import library
from paceline.native.sampling_kernels import check_mass
from paceline.native.structures import Block

if TYPE_CHECKING:
    from paceline.core.drafted import Drafted, Uniforms
    from paceline.native.structures import NativeRule


def judge(
    rule: NativeRule,
    drafted: Drafted,
    num_drafted_B: Tensor,
    target_BHV: Tensor,
    uniforms: Uniforms,
    target_raw_BHV: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Number of accepted tokens and next token per row. See `core.verification.verify`."""
    drafted_BG, draft_BPV, draft_raw_BPV = drafted
    assert draft_BPV is not None, "drawn tokens come with their distributions"
    batch, gamma = drafted_BG.shape
    num_accepted_B, next_tokens_B = (torch.empty(batch, dtype=torch.int64) for _ in range(2))
    drafted_BG, num_drafted_B = drafted_BG.contiguous(), num_drafted_B.contiguous()
    accept_BG, next_B = (numbers.double().contiguous() for numbers in uniforms)
    workspace_BV = torch.empty(batch, target_BHV.shape[2])
    block = Block(
        rule=rule,
        batch=batch,
        gamma=gamma,
        places=draft_BPV.shape[1],
        vocab=target_BHV.shape[2],
        drafted=drafted_BG.data_ptr(),
        num_drafted=num_drafted_B.data_ptr(),
        draft=draft_BPV.data_ptr(),
        draft_raw=None if draft_raw_BPV is None else draft_raw_BPV.data_ptr(),
        target=target_BHV.data_ptr(),
        target_raw=None if target_raw_BHV is None else target_raw_BHV.data_ptr(),
        accept_uniforms=accept_BG.data_ptr(),
        next_uniforms=next_B.data_ptr(),
        room=workspace_BV.data_ptr(),
        num_accepted=num_accepted_B.data_ptr(),
        next_tokens=next_tokens_B.data_ptr(),
    )
    check_shapes(block, draft_BPV, draft_raw_BPV)
    library().judge(ctypes.byref(block), torch.get_num_threads())
    check_mass(next_tokens_B)
    return num_accepted_B, next_tokens_B


def check_shapes(block: Block, probs_BPV: Tensor, raw_BPV: Tensor | None) -> None:
    """Check that the library reads within the draft's tensors."""
    batch, places, vocab_size = probs_BPV.shape
    needed = block.gamma + block.rule.needs_draft_at_bonus
    assert places >= needed, f"the rule needs the draft at {needed} positions"
    assert vocab_size == block.vocab, "target and draft need the same vocabulary"
    assert batch == block.batch, "every row needs draft distributions"
    assert raw_BPV is None or raw_BPV.shape == probs_BPV.shape, "raw_BPV needs probs_BPV's shape"
