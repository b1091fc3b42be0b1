"""How this process treats memory that it has freed."""

import ctypes
import sys

# parameters of mallopt, as glibc's malloc.h numbers them
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4
_PAD_BYTES = 64 << 20


def keep_freed_memory() -> None:
    """Let large blocks be used again instead of going back to the system.

    By default glibc returns a freed block of logits at once, and the next one is paid for page by
    page: a twentieth of a training step's time on two cores. Elsewhere than glibc nothing happens.
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_MAX, 0)
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_TOP_PAD, _PAD_BYTES)
