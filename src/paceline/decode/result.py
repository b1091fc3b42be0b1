"""What decoding hands back: finished generations, and blocks as they are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from paceline.core.stats import DecodeStats

if TYPE_CHECKING:
    from collections.abc import Sequence

StopReason = Literal["eos", "length", "context"]
"""A stop token; `max_new_tokens`; the end of the model's context."""

Source = Literal["prefill", "accepted", "recovered", "bonus", "kept", "deferred"]
"""Where a token came from. `prefill`: the target's pass over the prompt, the text's first token where
the rule is lossless or there is no draft. In cascades that do not judge, `kept`: the draft's own token; `deferred`: the target's."""


@dataclass(frozen=True)
class Generation:
    """One finished text: the new tokens (a stop token included), why it ended, what it took."""

    tokens: list[int]
    stop_reason: StopReason
    stats: DecodeStats


@dataclass(frozen=True)
class Block:
    """The tokens that one target pass, or the draft alone, gave to one text, each with its source.

    Attributes:
        num_drafted: All drafted tokens of the block, also those behind a stop token.
        num_accepted_behind_stop: How many of those the rule accepted.
    """

    tokens: tuple[int, ...]
    sources: tuple[Source, ...]
    num_drafted: int
    num_accepted_behind_stop: int = 0


def count_blocks(blocks: Sequence[Block]) -> DecodeStats:
    """What happened in the blocks of one text, or of many."""
    judged = [block for block in blocks if block.sources[-1] not in ("prefill", "kept")]
    accepted = [block.sources.count("accepted") for block in judged]
    sources = [source for block in blocks for source in block.sources]
    return DecodeStats(
        num_blocks=len(judged),
        num_drafted=sum(block.num_drafted for block in blocks),
        num_accepted=sum(accepted),
        num_recovered=sources.count("recovered"),
        num_bonus=sources.count("bonus"),
        num_prefill_tokens=sources.count("prefill"),
        num_kept=sources.count("kept"),
        num_deferred=sources.count("deferred"),
        num_accepted_behind_stop=sum(block.num_accepted_behind_stop for block in blocks),
        accepted_histogram=tuple(map(accepted.count, range(max(accepted, default=-1) + 1))),
    )
