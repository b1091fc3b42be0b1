"""verification.c on tensors that `can_draw` allows.

Shape suffixes: B batch, G gamma, H judged positions (G + 1), V vocabulary. The draft has P positions:
G, or one more.
"""

from __future__ import annotations

import ctypes
from enum import IntEnum, auto

import torch
from torch import Tensor

from paceline.native.compilation import compiled
from paceline.native.sampling import check_mass


class Kind(IntEnum):
    """Numbered as in rules.h."""

    LOSSLESS = 0
    LENIENT_LINEAR = auto()
    LENIENT_SQUARE = auto()
    LENIENT_EXPONENTIAL = auto()
    LOSSY = auto()
    LOSSY_TUNED = auto()
    BILD = auto()
    CHOW = auto()
    CHOW_LOG = auto()
    DIFF = auto()
    DIFF_LOG = auto()
    OPT = auto()
    OPT_LOG = auto()
    TOKEN_V1 = auto()
    TOKEN_V2 = auto()
    TOKEN_V3 = auto()


class NativeRule(ctypes.Structure):
    """A rule as rules.c reads it."""

    _fields_ = (("kind", ctypes.c_int64), ("alpha", ctypes.c_double), ("beta", ctypes.c_double))

    @property
    def needs_draft_at_bonus(self) -> bool:
        return self.kind >= Kind.LOSSY_TUNED


class Block(ctypes.Structure):
    """What is judged, and where the verdict goes; verification.h tells the shapes."""

    _fields_ = (
        ("rule", NativeRule),
        *((name, ctypes.c_int64) for name in ("batch", "gamma", "places", "vocab")),
        *((name, ctypes.c_void_p) for name in ("drafted", "num_drafted", "draft", "draft_raw")),
        *((name, ctypes.c_void_p) for name in ("target", "target_raw")),
        *((name, ctypes.c_void_p) for name in ("accept_uniforms", "next_uniforms", "room")),
        *((name, ctypes.c_void_p) for name in ("num_accepted", "next_tokens")),
    )


def judge(
    rule: NativeRule,
    drafted_BG: Tensor,
    num_drafted_B: Tensor,
    draft_probs_BPV: Tensor,
    target_probs_BHV: Tensor,
    accept_uniforms_BG: Tensor,
    next_uniforms_B: Tensor,
    target_raw_BHV: Tensor | None = None,
    draft_raw_BPV: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Per row: drafted tokens kept, and the token that follows them."""
    library = compiled()
    assert library is not None, "ask can_draw first"
    batch, gamma = drafted_BG.shape
    num_accepted_B, next_tokens_B = (torch.empty(batch, dtype=torch.int64) for _ in range(2))
    drafted_BG, num_drafted_B = drafted_BG.contiguous(), num_drafted_B.contiguous()
    accept_BG = accept_uniforms_BG.double().contiguous()
    next_B = next_uniforms_B.double().contiguous()
    room_BV = torch.empty(batch, target_probs_BHV.shape[2])
    block = Block(
        rule=rule,
        batch=batch,
        gamma=gamma,
        places=draft_probs_BPV.shape[1],
        vocab=target_probs_BHV.shape[2],
        drafted=drafted_BG.data_ptr(),
        num_drafted=num_drafted_B.data_ptr(),
        draft=draft_probs_BPV.data_ptr(),
        draft_raw=None if draft_raw_BPV is None else draft_raw_BPV.data_ptr(),
        target=target_probs_BHV.data_ptr(),
        target_raw=None if target_raw_BHV is None else target_raw_BHV.data_ptr(),
        accept_uniforms=accept_BG.data_ptr(),
        next_uniforms=next_B.data_ptr(),
        room=room_BV.data_ptr(),
        num_accepted=num_accepted_B.data_ptr(),
        next_tokens=next_tokens_B.data_ptr(),
    )
    check_shapes(block, draft_probs_BPV, draft_raw_BPV)
    library.judge(ctypes.byref(block), torch.get_num_threads())
    check_mass(next_tokens_B)
    return num_accepted_B, next_tokens_B


def check_shapes(block: Block, probs_BPV: Tensor, raw_BPV: Tensor | None) -> None:
    """The library looks at the draft where it is told to; is there something?"""
    batch, places, vocab_size = probs_BPV.shape
    needed = block.gamma + block.rule.needs_draft_at_bonus
    assert places >= needed, f"the rule needs the draft at {needed} positions"
    assert vocab_size == block.vocab, "the sessions know the same tokens"
    assert batch == block.batch, "a distribution a row"
    assert raw_BPV is None or raw_BPV.shape == probs_BPV.shape, "raw ones stand beside the others"
