"""verification.c on tensors that `can_draw` allows.

Shape suffixes: B batch, G gamma, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.native.compilation import compiled
from paceline.native.sampling import check_mass


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
    check_mass(next_tokens_B)
    return num_accepted_B, next_tokens_B
