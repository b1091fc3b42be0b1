"""A text during generation (token budget, random streams, blocks so far), and its results.

Each text has its own random streams, and each block takes a fixed number of values from them.
The result depends on the other texts of the batch by rounding only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from paceline.core.sampling import as_list
from paceline.core.stats import DecodeStats
from paceline.errors import UsageError, shorten
from paceline.rng import named_generator

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

_UNIFORMS_PER_DRAW = 64

StopReason = Literal["eos", "length", "context"]
"""A stop token, `max_new_tokens`, or the model's context length."""

Source = Literal["prefill", "accepted", "recovered", "bonus", "kept", "deferred"]
"""Where a token came from. `prefill` is the target's pass over the prompt, which gives the first
token if the rule is lossless or there is no draft. In cascades, which do not verify tokens, `kept`
is a token of the draft and `deferred` one of the target."""


@dataclass(frozen=True, repr=False)
class Generation:
    """A finished text: its new tokens (including a stop token), stop reason and counts."""

    tokens: list[int]
    stop_reason: StopReason
    stats: DecodeStats

    def __repr__(self) -> str:
        return summary(self, self.tokens)


def summary(found: Generation, content: object = None) -> str:
    """One line on a generation: counts, stop reason, and the beginning of its content."""
    parts = [f"{len(found.tokens)} tokens", f"stopped by {found.stop_reason}"]
    if found.stats.num_target_calls:
        parts.append(f"{found.stats.block_efficiency:.2f} tokens per target call")
    shown = "" if content is None else f": {shorten(repr(content))}"
    return f"<{type(found).__name__} of {', '.join(parts)}{shown}>"


@dataclass(frozen=True)
class Block:
    """The tokens that one draft-verify round adds to a text, with their sources.

    Attributes:
        num_drafted: Drafted tokens of the block, including those after a stop token.
        num_accepted_behind_stop: Accepted tokens after a stop token; they are not part of the text.
        rejected: The drafted token that the recovered one replaces, and those behind it, which the
            rule did not examine.
    """

    tokens: tuple[int, ...]
    sources: tuple[Source, ...]
    num_drafted: int
    num_accepted_behind_stop: int = 0
    rejected: tuple[int, ...] = ()


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


class Text:
    """A prompt, and the `tokens` generated so far.

    Attributes:
        prompt: The model's input.
        context: The decoder's tokens before the first new one: the prompt of a decoder-only model.
        blocks: What added the tokens.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        budget: int,
        stops: Collection[int],
        seed: int,
        *,
        cut: bool,
        context: Sequence[int],
        forced_eos: int | None = None,
    ) -> None:
        self.prompt = list(prompt)
        self.context = list(context)
        self.tokens: list[int] = []
        self.stop_reason: StopReason | None = None
        self._budget = budget
        self._stops = stops
        self._cut = cut
        self._forced_eos = forced_eos
        self.num_accepted = 0
        self.num_examined = 0
        self.blocks: list[Block] = []
        self.drafting = _Uniforms(seed, "draft")
        self.accepting = _Uniforms(seed, "accept")
        self._choosing = _Uniforms(seed, "choose")

    @property
    def remaining(self) -> int:
        return self._budget - len(self.tokens)

    @property
    def decoded(self) -> int:
        """Number of decoder tokens."""
        return len(self.context) + len(self.tokens)

    def newest(self, count: int) -> list[int]:
        if count <= len(self.tokens):
            return self.tokens[len(self.tokens) - count :]
        return (self.context + self.tokens)[-count:]

    def draw_choice(self) -> float:
        return self._choosing.take(1)[0]

    def add_first(self, token: int) -> Block:
        """Append the token sampled from the target's pass over the prompt."""
        self.blocks.append(Block(*self._append([(token, "prefill")]), num_drafted=0))
        return self.blocks[-1]

    def add_block(self, drafted: Sequence[int], num_accepted: int, last: int) -> Block:
        """Append accepted tokens and the one after them, up to a stop token or the budget.

        `last` is a bonus token if all drafted tokens were accepted, else a recovered token.
        """
        new: list[tuple[int, Source]] = [(token, "accepted") for token in drafted[:num_accepted]]
        new.append((last, "bonus" if num_accepted == len(drafted) else "recovered"))
        tokens, sources = self._append(new)
        num_kept = sources.count("accepted")
        self.num_accepted += num_kept
        self.num_examined += len(sources) - sources.count("bonus")
        rejected = tuple(drafted[num_accepted:]) if "recovered" in sources else ()
        behind_stop = num_accepted - num_kept
        self.blocks.append(Block(tokens, sources, len(drafted), behind_stop, rejected))
        return self.blocks[-1]

    def add_unverified(self, kept: Sequence[int], last: int | None) -> Block:
        """As `add_block`, with tokens of the draft and the target that are not verified."""
        new: list[tuple[int, Source]] = [(token, "kept") for token in kept]
        if last is not None:
            new.append((last, "deferred"))
        self.blocks.append(Block(*self._append(new), len(kept)))
        return self.blocks[-1]

    def forced(self, count: int = 0) -> int | None:
        """The token that must follow `count` tokens after the newest, or None."""
        return self._forced_eos if self.remaining - count == 1 and not self._cut else None

    def ends_within(self, tokens: Sequence[int]) -> bool:
        """True if appending these tokens ends the text."""
        return len(tokens) >= self.remaining or any(token in self._stops for token in tokens)

    def finish(self) -> Generation:
        assert self.stop_reason is not None, "the text has not ended"
        return Generation(self.tokens, self.stop_reason, count_blocks(self.blocks))

    def _append(
        self, new: Sequence[tuple[int, Source]]
    ) -> tuple[tuple[int, ...], tuple[Source, ...]]:
        """Append tokens until the text ends; returns those appended, and their sources."""
        new = list(new)
        for count, (token, source) in enumerate(new, 1):
            forced = self.forced()
            if forced is not None:
                token = forced
                new[count - 1] = (token, source)
            self.tokens.append(token)
            if token in self._stops:
                self.stop_reason = "eos"
            elif self.remaining == 0:
                self.stop_reason = "context" if self._cut else "length"
            if self.stop_reason:
                new = new[:count]
                break
        tokens, sources = zip(*new, strict=True)
        return tokens, sources


class _Uniforms:
    """A random stream of numbers in [0, 1)."""

    def __init__(self, seed: int, name: str) -> None:
        self._rng = named_generator(seed, name)
        self._drawn: list[float] = []

    def take(self, count: int) -> list[float]:
        while len(self._drawn) < count:
            # float32 would misrepresent the probability of tokens rarer than 2^-24
            new = torch.rand(_UNIFORMS_PER_DRAW, generator=self._rng, dtype=torch.float64)
            self._drawn += as_list(new)
        taken, self._drawn = self._drawn[:count], self._drawn[count:]
        return taken


def at_least_one(name: str, value: int) -> None:
    """Raise UsageError if a number is smaller."""
    if value < 1:
        raise UsageError(f"{name} must be 1 or more, got {value}")
