"""Backends of core for tests that compare the C library with PyTorch."""

from typing import Any

from paceline.core.backend import Backend
from paceline.native.kernels import NativeBackend

PYTORCH = Backend()
"""Leaves everything to PyTorch."""


class VerifiesInPyTorch(NativeBackend):
    """The C library for probabilities and drawing alone."""

    def verify_lossless(self, *_args: Any, **_named: Any) -> None:
        return None
