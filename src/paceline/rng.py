"""Named random streams: one seed, many generators that never share a number.

A shared stream between drafting, accepting and recovering biases what is sampled; a name for each
use keeps them apart, and the same request draws the same numbers whatever runs beside it.
"""

from __future__ import annotations

import hashlib

import torch


def named_generator(seed: int, *names: str | int) -> torch.Generator:
    """A CPU generator for this seed and these names, independent of any other names."""
    key = "\x1f".join([str(seed), *(f"{type(name).__name__}:{name}" for name in names)])
    digest = hashlib.sha256(key.encode()).digest()
    # 63 bits, since manual_seed takes a signed 64-bit integer; of these torch's CPU generator keeps
    # 32, so two given streams are the same one with odds of 1 in 4 billion.
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
