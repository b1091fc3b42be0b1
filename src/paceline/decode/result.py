"""Results of decoding: finished generations, and the blocks they consist of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from paceline.core.stats import DecodeStats

if TYPE_CHECKING:
    from collections.abc import Sequence

StopReason = Literal["eos", "length", "context"]
"""A stop token, `max_new_tokens`, or the model's context length."""

Source = Literal["prefill", "accepted", "recovered", "bonus", "kept", "deferred"]
"""Where a token came from. `prefill` is the target's pass over the prompt, which gives the first
token if the rule is lossless or there is no draft. In cascades, which do not verify tokens, `kept`
is a token of the draft and `deferred` one of the target."""


@dataclass(frozen=True)
class Generation:
    """A finished text: its new tokens (including a stop token), stop reason and counts."""

    tokens: list[int]
    stop_reason: StopReason
    stats: DecodeStats


@dataclass(frozen=True)
class Block:
    """The tokens that one draft-verify round adds to a text, with their sources.

    Attributes:
        num_drafted: Drafted tokens of the block, including those after a stop token.
        num_accepted_behind_stop: Accepted tokens after a stop token; they are not part of the text.
    """

    tokens: tuple[int, ...]
    sources: tuple[Source, ...]
    num_drafted: int
    num_accepted_behind_stop: int = 0


def count_blocks(blocks: Sequence[Block]) -> DecodeStats:
    """Count tokens by source, and blocks by number of accepted tokens."""
    target_blocks = [block for block in blocks if block.sources[-1] not in ("prefill", "kept")]
    accepted = [block.sources.count("accepted") for block in target_blocks]
    sources = [source for block in blocks for source in block.sources]
    return DecodeStats(
        num_blocks=len(target_blocks),
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
