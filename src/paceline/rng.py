"""Named random generators: one seed, an independent stream per name.

Drafting, acceptance and recovery must not share a stream: that would bias the samples. A request
draws the same numbers, batched or not.
"""

from __future__ import annotations

import hashlib

import torch


def named_generator(seed: int, *names: str | int) -> torch.Generator:
    """A CPU generator for this seed and these names, independent of those for other names."""
    key = "\x1f".join([str(seed), *(f"{type(name).__name__}:{name}" for name in names)])
    return torch.Generator().manual_seed(hashed(key))


def hashed(key: str) -> int:
    """A seed of 63 bits, as manual_seed takes a signed 64-bit integer.

    torch's CPU generator uses only 32 of them: two streams are equal with probability 1 in 4
    billion.
    """
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") >> 1
