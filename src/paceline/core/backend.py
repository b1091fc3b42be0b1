"""Faster forms of a few operations, registered from above; core itself computes all in PyTorch.

A backend is offered an operation and takes it by returning its result, or leaves it by returning
None. It may round differently from PyTorch in the last bits, and must be the same mathematics.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator

    from torch import Tensor

    from paceline.core.drafted import Drafted, Uniforms, Verdict
    from paceline.core.rule_base import Rule


class Backend:
    """Takes nothing."""

    def softmax(self, logits: Tensor, temperature: float) -> Tensor | None:
        """Probabilities at a temperature above 0, float32. [..., V] -> [..., V]."""
        return None

    def keep_top_p(self, probs: Tensor, top_p: float) -> Tensor | None:
        """The nucleus of each row, renormalised; `probs` may be overwritten. [..., V] -> [..., V]."""
        return None

    def likeliest(self, logits: Tensor) -> Tensor | None:
        """The first of the largest logits. [..., V] -> [...]."""
        return None

    def sample(self, probs_BV: Tensor, uniforms_B: Tensor) -> Tensor | None:
        """One token a row by inverse CDF. -> [B]."""
        return None

    def verify(
        self,
        drafted: Drafted,
        num_drafted_B: Tensor,
        target_BHV: Tensor,
        rule: Rule,
        uniforms: Uniforms,
        target_raw_BHV: Tensor | None,
    ) -> Verdict | None:
        """See `core.verification.verify`."""
        return None


class _Registered:
    backend = Backend()


def register(backend: Backend) -> None:
    """Offer this backend every operation from now on, in place of the one before."""
    _Registered.backend = backend


def registered() -> Backend:
    """The backend that is asked."""
    return _Registered.backend


@contextlib.contextmanager
def using(backend: Backend) -> Generator[None]:
    """Another backend meanwhile: `Backend()` leaves everything to PyTorch."""
    before = registered()
    register(backend)
    try:
        yield
    finally:
        register(before)
