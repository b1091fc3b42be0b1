"""Float32 or bfloat16: the precision that "auto" chooses, by the device.

`PACELINE_PRECISION` overrides the choice; `dtype` and `precision` in a configuration override both.
"""

from __future__ import annotations

import os
from typing import Literal, NamedTuple

import torch

from paceline.errors import UsageError
from paceline.processor import level

VARIABLE = "PACELINE_PRECISION"
Precision = Literal["float32", "bfloat16"]


class Choice(NamedTuple):
    """A precision, and the reason for it as a phrase."""

    precision: Precision
    reason: str


def choose_precision(device: torch.device) -> Choice:
    """Bfloat16 on a CUDA device with native bfloat16 and on a processor with AMX, else float32.

    Without AMX, a processor's native bfloat16 is slower than float32.
    """
    override = overridden()
    if override is not None:
        return Choice(override, f"{VARIABLE} is set")
    if device.type == "cpu":
        native, name = level() == "amx", f"processor level {level()}"
    else:
        native = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        name = f"this {device.type} device"
    return Choice("bfloat16" if native else "float32", f"the faster precision of {name}")


def overridden() -> Precision | None:
    """The precision that `PACELINE_PRECISION` sets; raises a UsageError if it is invalid."""
    match os.environ.get(VARIABLE):
        case None | "":
            return None
        case "float32" | "bfloat16" as precision:
            return precision
        case other:
            raise UsageError(f"{VARIABLE} is {other!r}, wanted float32 or bfloat16")
