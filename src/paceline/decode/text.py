"""One text under construction: what was asked for, its random streams, what it has so far.

A text's streams are its own, and a block draws the same count of numbers from each whatever else
is in the batch. So a request gives one text, alone or in company.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paceline.core.lists import as_list
from paceline.decode.result import Block, Generation, count_blocks
from paceline.errors import ContextLengthError, PromptError, UsageError
from paceline.rng import named_generator

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from paceline.decode.result import Source, StopReason

_DRAWN_TOGETHER = 64


class Text:
    """A prompt and the tokens that followed it so far.

    Attributes:
        context: What the decoder reads before the first new token: in a decoder-only model, the prompt.
        tokens: The new tokens.
    """

    def __init__(
        self, prompt: Sequence[int], budget: int, stops: Collection[int], seed: int, *, cut: bool
    ) -> None:
        self.context = list(prompt)
        self.tokens: list[int] = []
        self.stop_reason: StopReason | None = None
        self._budget = budget
        self._stops = stops
        self._cut = cut
        self.num_accepted = 0
        self.num_examined = 0
        self._blocks: list[Block] = []
        self._drafting = _Uniforms(seed, "draft")
        self._accepting = _Uniforms(seed, "accept")
        self._choosing = _Uniforms(seed, "choose")

    @property
    def remaining(self) -> int:
        """Tokens still wanted."""
        return self._budget - len(self.tokens)

    @property
    def decoded(self) -> int:
        """Tokens that the decoder's session would hold if it had read all: its context and the new."""
        return len(self.context) + len(self.tokens)

    def newest(self, count: int) -> list[int]:
        """The last `count` tokens, of the context too where the text is that short."""
        if count <= len(self.tokens):
            return self.tokens[len(self.tokens) - count :]
        return (self.context + self.tokens)[-count:]

    def draw_draft(self, count: int) -> list[float]:
        """Uniforms for drafting."""
        return self._drafting.take(count)

    def draw_accept(self, count: int) -> list[float]:
        """Uniforms for accepting."""
        return self._accepting.take(count)

    def draw_choice(self) -> float:
        """One uniform for the token that the target adds itself."""
        return self._choosing.take(1)[0]

    def add_first(self, token: int) -> Block:
        """Take the token that the pass over the prompt gave."""
        self._append(token)
        self._blocks.append(Block((token,), ("prefill",), num_drafted=0))
        return self._blocks[-1]

    def add_block(self, accepted: Sequence[int], last: int, *, num_drafted: int) -> Block:
        """Take accepted tokens and the one after them, up to a stop token or the budget.

        The last token is a bonus if everything drafted was accepted, else a recovered one.
        """
        last_source: Source = "bonus" if len(accepted) == num_drafted else "recovered"
        sources: list[Source] = []
        for token in accepted:
            self._append(token)
            sources.append("accepted")
            if self.stop_reason:
                break
        else:
            self._append(last)
            sources.append(last_source)
        num_kept = sources.count("accepted")
        self.num_accepted += num_kept
        self.num_examined += len(sources) - sources.count("bonus")
        new = tuple(self.tokens[len(self.tokens) - len(sources) :])
        self._blocks.append(Block(new, tuple(sources), num_drafted, len(accepted) - num_kept))
        return self._blocks[-1]

    def add_unjudged(self, kept: Sequence[int], last: int | None) -> Block:
        """Take tokens of the draft as they are, and behind them the target's, if it was asked.

        Up to a stop token or the budget, as in `add_block`.
        """
        named: list[tuple[int, Source]] = [(token, "kept") for token in kept]
        if last is not None:
            named.append((last, "deferred"))
        taken: list[tuple[int, Source]] = []
        for token, source in named:
            self._append(token)
            taken.append((token, source))
            if self.stop_reason:
                break
        tokens, sources = zip(*taken, strict=True)
        self._blocks.append(Block(tokens, sources, len(kept)))
        return self._blocks[-1]

    def ends_within(self, tokens: Sequence[int]) -> bool:
        """Would these tokens, appended, end the text?"""
        return len(tokens) >= self.remaining or any(token in self._stops for token in tokens)

    def finish(self) -> Generation:
        """The finished text."""
        assert self.stop_reason is not None, "the text has not ended"
        return Generation(self.tokens, self.stop_reason, count_blocks(self._blocks))

    def _append(self, token: int) -> None:
        self.tokens.append(token)
        if token in self._stops:
            self.stop_reason = "eos"
        elif self.remaining == 0:
            self.stop_reason = "context" if self._cut else "length"


class _Uniforms:
    """A stream of numbers in [0, 1), drawn many at a time."""

    def __init__(self, seed: int, name: str) -> None:
        self._rng = named_generator(seed, name)
        self._drawn: list[float] = []

    def take(self, count: int) -> list[float]:
        while len(self._drawn) < count:
            # float64: in float32 a token rarer than 2^-24 could not be drawn at its own rate
            new = torch.rand(_DRAWN_TOGETHER, generator=self._rng, dtype=torch.float64)
            self._drawn += as_list(new)
        taken, self._drawn = self._drawn[:count], self._drawn[count:]
        return taken


def _name(row: int, prompts: Sequence[Sequence[int]]) -> str:
    return "the prompt" if len(prompts) == 1 else f"prompt {row}"


def start_texts(
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    seed: int | Sequence[int],
    stops: Collection[int],
    max_length: int | None,
    context: str,
    vocab_size: int,
) -> list[Text]:
    """Check what was asked for and open one text a prompt. `context` says `max_length` in words.

    Raises:
        UsageError: no prompt, a bad budget, or seeds that do not match the prompts.
        ContextLengthError: a prompt leaves no room for a token.
    """
    if not prompts:
        raise PromptError("got no prompt; give at least one list of token ids")
    if max_new_tokens < 1:
        raise UsageError(f"max_new_tokens must be 1 or more, got {max_new_tokens}")
    seeds = [seed + row for row in range(len(prompts))] if isinstance(seed, int) else list(seed)
    if len(seeds) != len(prompts):
        raise UsageError(f"got {len(seeds)} seeds for {len(prompts)} prompts; give one each")
    texts: list[Text] = []
    for row, (prompt, row_seed) in enumerate(zip(prompts, seeds, strict=True)):
        if not prompt:
            raise PromptError(f"prompt {row} is empty; every prompt needs at least one token")
        if not 0 <= min(prompt) <= max(prompt) < vocab_size:
            raise PromptError(
                f"prompt {row} has token ids from {min(prompt)} to {max(prompt)}, the vocabulary "
                f"goes from 0 to {vocab_size - 1}; encode it with the target's tokenizer"
            )
        room = max_new_tokens if max_length is None else max_length - len(prompt)
        if room < 1:
            raise ContextLengthError(
                f"{_name(row, prompts)} has {len(prompt):,} tokens and {context}; shorten the prompt, or "
                "set max_prompt_tokens where there is one"
            )
        budget = min(max_new_tokens, room)
        texts.append(Text(prompt, budget, stops, row_seed, cut=room < max_new_tokens))
    return texts
