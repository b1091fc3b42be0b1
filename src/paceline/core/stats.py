"""Counts of a decoding run; every rate is derived from them.

Counts add over blocks, rows and machines; rates do not.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields


@dataclass(frozen=True)
class DecodeStats:
    """What happened while decoding.

    A token counts once, by where it came from: the prefill pass (`num_prefill_tokens`: a text's first
    token, where no rule judges it), an accepted draft, a recovered token, a bonus token; where cascades keep or
    replace without judging, a kept draft or a deferred token. Drafted tokens behind a stop token count
    as drafted, as in vLLM, and those that the rule accepted there as `num_accepted_behind_stop`; they
    are in no other count.
    """

    num_blocks: int = 0
    """Target passes after the prefill; a plain autoregressive step is a block with no draft. What a
    draft wrote alone is none."""
    num_drafted: int = 0
    num_accepted: int = 0
    num_recovered: int = 0
    num_bonus: int = 0
    num_prefill_tokens: int = 0
    num_kept: int = 0
    """Of the draft, never judged."""
    num_deferred: int = 0
    """Of the target, because the draft was not good enough there."""
    accepted_histogram: tuple[int, ...] = field(default=())
    """How many blocks had 0, 1, 2 ... drafted tokens accepted."""
    num_accepted_behind_stop: int = 0
    """Drafted tokens that the rule accepted behind a stop token; they are not part of the text."""

    def __add__(self, other: DecodeStats) -> DecodeStats:
        totals: dict[str, int] = {}
        for entry in fields(self):
            if entry.name != "accepted_histogram":
                totals[entry.name] = getattr(self, entry.name) + getattr(other, entry.name)
        longer, shorter = self.accepted_histogram, other.accepted_histogram
        if len(longer) < len(shorter):
            longer, shorter = shorter, longer
        padded = shorter + (0,) * (len(longer) - len(shorter))
        histogram = tuple(a + b for a, b in zip(longer, padded, strict=True))
        return DecodeStats(**totals, accepted_histogram=histogram)

    @property
    def num_target_calls(self) -> int:
        """Target passes that judged a block (the prefill is not one)."""
        return self.num_blocks

    @property
    def num_emitted(self) -> int:
        """Tokens that blocks gave, all but the prefill's."""
        judged = self.num_accepted + self.num_recovered + self.num_bonus
        return judged + self.num_kept + self.num_deferred

    @property
    def num_examined(self) -> int:
        """Drafted tokens looked at, up to a stop token: accepted, and the first rejected of a block."""
        return self.num_accepted + self.num_recovered

    @property
    def acceptance_rate(self) -> float:
        """Accepted / examined; NaN if nothing was examined."""
        return _ratio(self.num_accepted, self.num_examined)

    @property
    def rejection_rate(self) -> float:
        """Rejected / examined; NaN if nothing was examined."""
        return _ratio(self.num_recovered, self.num_examined)

    @property
    def deferral_rate(self) -> float:
        """Target calls / tokens, the same for every way of decoding; NaN without a token."""
        return _ratio(self.num_target_calls, self.num_emitted)

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted / drafted, the number that vLLM reports; NaN if nothing was drafted.

        vLLM counts a block before it looks for stop tokens, so both counts include what was drafted
        behind one.
        """
        return _ratio(self.num_accepted + self.num_accepted_behind_stop, self.num_drafted)

    @property
    def block_efficiency(self) -> float:
        """Tokens per target call, bonus and recovered tokens included; NaN without a call."""
        return _ratio(self.num_emitted, self.num_target_calls)


def _ratio(numerator: int, denominator: int) -> float:
    return numerator / denominator if denominator else float("nan")
