"""Interface for faster implementations of core operations; PyTorch is the default.

Each operation returns its result, or None to leave the work to PyTorch. Results may differ from
PyTorch's in the last bits only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class Backend:
    """The default backend: leaves every operation to PyTorch."""

    def softmax(self, logits: Tensor, temperature: float) -> Tensor | None:
        """Softmax at a temperature above 0, float32. [..., V] -> [..., V]."""
        return None

    def keep_top_p(self, probs: Tensor, top_p: float) -> Tensor | None:
        """Top-p filtering, renormalised; may overwrite `probs`. [..., V] -> [..., V]."""
        return None

    def likeliest(self, logits: Tensor) -> Tensor | None:
        """Index of the first maximum. [..., V] -> [...]."""
        return None

    def sample(self, probs_BV: Tensor, uniforms_B: Tensor) -> Tensor | None:
        """One token per row by inverse CDF. -> [B]."""
        return None

    def verify_lossless(
        self,
        target_BHV: Tensor,
        draft_BPV: Tensor,
        drafted_BG: Tensor,
        num_drafted_B: Tensor,
        uniforms: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor] | None:
        """`core.block.verify` for `Lossless`: numbers of accepted tokens, next tokens, [B] each."""
        return None


class _Registered:
    backend = Backend()


def register(backend: Backend) -> None:
    """Use this backend instead of the current one."""
    _Registered.backend = backend


def registered() -> Backend:
    return _Registered.backend
