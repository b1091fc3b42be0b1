"""Register the C library as a backend of core, for float32 tensors on the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.backend import Backend, register
from paceline.core.drafted import Verdict
from paceline.native import sampling_kernels
from paceline.native.rule_form import native_rule
from paceline.native.sampling_kernels import can_draw
from paceline.native.verification_kernels import judge

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.core.drafted import Drafted, Uniforms
    from paceline.core.rule_base import Rule

_FEW_ENTRIES = 1 << 19  # for more, PyTorch's multi-threaded argmax is faster


class NativeBackend(Backend):
    """Runs operations in C; compiles the library on first use."""

    def softmax(self, logits: Tensor, temperature: float) -> Tensor | None:
        rows = logits.contiguous()
        return sampling_kernels.softmax(rows, temperature) if can_draw(rows) else None

    def keep_top_p(self, probs: Tensor, top_p: float) -> Tensor | None:
        """In place, without sorting the vocabulary."""
        return probs if can_draw(probs) and sampling_kernels.keep_top_p(probs, top_p) else None

    def likeliest(self, logits: Tensor) -> Tensor | None:
        """For few rows, where PyTorch uses one thread."""
        few = logits.numel() <= _FEW_ENTRIES and can_draw(logits)
        return sampling_kernels.best_tokens(logits) if few else None

    def sample(self, probs_BV: Tensor, uniforms_B: Tensor) -> Tensor | None:
        return sampling_kernels.draw_tokens(probs_BV, uniforms_B) if can_draw(probs_BV) else None

    def verify(
        self,
        drafted: Drafted,
        num_drafted_B: Tensor,
        target_BHV: Tensor,
        rule: Rule,
        uniforms: Uniforms,
        target_raw_BHV: Tensor | None,
    ) -> Verdict | None:
        form = native_rule(rule)
        tensors = (target_BHV, drafted.probs_BPV, target_raw_BHV, drafted.raw_BPV)
        if form is None or not can_draw(*(part for part in tensors if part is not None)):
            return None
        counts_B, next_B = judge(form, drafted, num_drafted_B, target_BHV, uniforms, target_raw_BHV)
        return Verdict(counts_B, next_B, counts_B == num_drafted_B)


def use_native_backend() -> None:
    """Register the C library as core's backend."""
    register(NativeBackend())
