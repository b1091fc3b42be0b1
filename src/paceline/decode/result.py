"""What decoding hands back: finished generations, and blocks as they are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from paceline.core.stats import DecodeStats

StopReason = Literal["eos", "length", "context"]
"""A stop token; `max_new_tokens`; the end of the model's context."""

Source = Literal["prefill", "accepted", "recovered", "bonus"]
"""Where a token came from. `prefill`: the target's pass over the prompt, the text's first token."""


@dataclass(frozen=True)
class Generation:
    """One finished text: the new tokens (a stop token included), why it ended, what it took."""

    tokens: list[int]
    stop_reason: StopReason
    stats: DecodeStats


@dataclass(frozen=True)
class Block:
    """The tokens that one target pass gave to one text, each with its source."""

    tokens: tuple[int, ...]
    sources: tuple[Source, ...]
    num_drafted: int
