"""What every way of decoding has in common: requests in, blocks and generations out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.core.lists import as_list
from paceline.core.sampling import (
    SamplingParams,
    apply_repetition_penalty,
    likeliest,
    sample,
    seen_tokens,
    to_probs,
)
from paceline.decode.text import start_texts
from paceline.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline.decode.result import Block, Generation
    from paceline.decode.text import Text
    from paceline.models.contract import Model, ModelSession


class Decoder(ABC):
    """A target and a way to shape its distributions; subclasses say how blocks are made.

    Attributes:
        judges_first: Whether the first block makes a text's first token. If not, the first token is
            the target's own, from its pass over the prompt.
    """

    judges_first = False

    def __init__(self, target: Model, sampling: SamplingParams) -> None:
        self.target = target
        self.sampling = sampling
        self.vocab_size = target.vocab_size

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int = 128,
        seed: int | Sequence[int] = 0,
        eos_token_ids: Sequence[int] | None = None,
        batch_size: int | None = None,
    ) -> list[Generation]:
        """Continue each prompt; one generation a prompt, in order.

        A row's text depends on its own prompt and seed alone (in float32). Row i of an integer
        seed s has the seed s + i; a list gives each row its own. `eos_token_ids` None: the
        target's; an empty list: never stop early. `batch_size`: texts that are written at a time,
        a waiting one taking the place of each that ends; None: all of them.

        Raises:
            UsageError: an empty prompt, a budget below 1, a prompt longer than the context.
        """
        if batch_size is not None and batch_size < 1:
            raise UsageError(f"batch_size must be 1 or more, got {batch_size}")
        texts = self._start(prompts, max_new_tokens, seed, eos_token_ids)
        for _ in self.blocks(texts, batch_size):
            pass
        return [text.finish() for text in texts]

    def stream(
        self,
        prompt: Sequence[int],
        max_new_tokens: int = 128,
        seed: int = 0,
        eos_token_ids: Sequence[int] | None = None,
    ) -> Iterator[Block]:
        """Continue one prompt, yielding each block as it is made: the tokens of `generate`.

        Raises:
            UsageError: as `generate`, here and not at the first block.
        """
        texts = self._start([prompt], max_new_tokens, seed, eos_token_ids)
        return (block for _, block in self.blocks(texts))

    def room(self, prompt: Sequence[int]) -> int | None:
        """New tokens that fit behind this prompt; None where the model sets no limit."""
        limit = self._usable_length()
        return None if limit is None else limit - len(prompt)

    def context_in_words(self) -> str:
        """How long texts may get, for messages."""
        limit = self._usable_length()
        if limit is None:
            return "the context has no limit"
        free = "".join(
            f", without the {n} that a block keeps free" for n in [self._kept_free()] if n
        )
        return f"the context holds {limit} tokens{free}"

    def _start(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        seed: int | Sequence[int],
        eos_token_ids: Sequence[int] | None,
    ) -> list[Text]:
        stops = self.target.eos_token_ids if eos_token_ids is None else eos_token_ids
        return start_texts(
            prompts,
            max_new_tokens=max_new_tokens,
            seed=seed,
            stops=frozenset(stops),
            max_length=self._usable_length(),
            context=self.context_in_words(),
            vocab_size=self.vocab_size,
        )

    def _usable_length(self) -> int | None:
        """Longest text, prompt included, that this way of decoding can reach."""
        return self.target.max_length

    def _kept_free(self) -> int:
        """Tokens of the context that no text can use."""
        return 0

    @abstractmethod
    def blocks(
        self, texts: Sequence[Text], batch_size: int | None = None
    ) -> Iterator[tuple[Text, Block]]:
        """Work on the texts until all have ended, yielding each block with its text.

        `batch_size`: how many at a time, see `generate`.
        """

    def _begin(
        self, seats: Seats, target: ModelSession, *others: ModelSession
    ) -> Iterator[tuple[Text, Block]]:
        """Read the first prompts; see `judges_first` for what the target's pass gives."""
        prompts = [text.context for text in seats.texts]
        logits_BV = target.prefill(prompts)
        for session in others:
            session.prefill(prompts)
        if self.judges_first:
            _give_back_one(range(len(prompts)), target, *others)
        else:
            yield from self._first_tokens(logits_BV, seats.texts)

    def _reseat(
        self, seats: Seats, target: ModelSession, *others: ModelSession
    ) -> Iterator[tuple[Text, Block]]:
        """Give the places of texts that have ended to waiting ones, and take away what is left over."""
        while ended := seats.ended():
            rows, texts = seats.admit(ended)
            if not texts:
                if live := seats.leave():
                    for session in (target, *others):
                        session.keep_rows(live)
                return
            prompts = [text.context for text in texts]
            logits_RV = target.refill(rows, prompts)
            for session in others:
                session.refill(rows, prompts)
            if self.judges_first:
                _give_back_one(rows, target, *others)
            else:
                yield from self._first_tokens(logits_RV, texts)

    def _first_tokens(
        self, logits_BV: Tensor, texts: Sequence[Text]
    ) -> Iterator[tuple[Text, Block]]:
        tokens = as_list(self._next_tokens(logits_BV, texts))
        for text, token in zip(texts, tokens, strict=True):
            yield text, text.add_first(token)

    def _start_session(self, model: Model) -> ModelSession:
        """A session that knows the tokens which all models here share."""
        session = model.start_session()
        # one of the models may give logits for padding that the other does not have
        session.vocab_size = self.vocab_size
        return session

    def _next_tokens(self, logits_BV: Tensor, texts: Sequence[Text]) -> Tensor:
        """One token of the target's own a text, [B]."""
        seen_BV = self._seen(texts)
        if seen_BV is not None:
            penalty = self.sampling.repetition_penalty
            logits_BV = apply_repetition_penalty(logits_BV, seen_BV.to(logits_BV.device), penalty)
        if self.sampling.greedy:
            return likeliest(logits_BV)
        uniforms_B = torch.tensor([text.draw_choice() for text in texts], dtype=torch.float64)
        return sample(to_probs(logits_BV, self.sampling), uniforms_B)

    def _seen(self, texts: Sequence[Text]) -> Tensor | None:
        """Which tokens each text holds, [B, V]; None where no penalty asks."""
        if self.sampling.repetition_penalty == 1:
            return None
        return seen_tokens([text.context + text.tokens for text in texts], self.vocab_size)


def _give_back_one(rows: Sequence[int], *sessions: ModelSession) -> None:
    """Forget the last token of these rows' prompts: a block begins by reading a text's newest token."""
    for session in sessions:
        session.rollback([int(row in rows) for row in range(len(session.lengths))])


class Seats:
    """The rows of a batch: texts that are being written, and others that wait for a place.

    Attributes:
        texts: Who sits where; nobody when all have ended.
    """

    def __init__(self, texts: Sequence[Text], count: int | None) -> None:
        self._waiting = list(texts)[::-1]
        self.texts = self._next(len(texts) if count is None else count)

    def ended(self) -> list[int]:
        """Places of texts that have ended."""
        return [row for row, text in enumerate(self.texts) if text.stop_reason is not None]

    def admit(self, rows: Sequence[int]) -> tuple[list[int], list[Text]]:
        """Seat waiting texts in these places: which were taken, and by whom."""
        texts = self._next(len(rows))
        for row, text in zip(rows, texts, strict=False):
            self.texts[row] = text
        return list(rows[: len(texts)]), texts

    def leave(self) -> list[int]:
        """Let those go who have ended; the places of the others."""
        live = [row for row, text in enumerate(self.texts) if text.stop_reason is None]
        self.texts = [self.texts[row] for row in live]
        return live

    def _next(self, count: int) -> list[Text]:
        return [self._waiting.pop() for _ in range(min(count, len(self._waiting)))]
