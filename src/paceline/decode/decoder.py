"""Base class of all decoders, and the slots of a batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor

from paceline.core.sampling import (
    SamplingParams,
    apply_repetition_penalty,
    as_list,
    likeliest,
    sample,
    seen_tokens,
    to_probs,
)
from paceline.decode.text import Text, at_least_one
from paceline.decode.text_prompts import as_tokens, is_text, pieces_of, with_text
from paceline.errors import ContextLengthError, PromptError, UsageError
from paceline.models.admission.trial import check_finite
from paceline.models.contract import decoder_contexts

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from paceline.decode.text import Block, Generation
    from paceline.decode.text_prompts import Chat, Piece, TextGeneration
    from paceline.models.contract import Model, ModelSession


class Decoder(ABC):
    """A target with sampling parameters; subclasses implement `blocks`.

    Attributes:
        verifies_first: True if a text's first token comes from its first block. If False, the first
            token is sampled from the target's pass over the prompt.
        forces_eos: Whether a text that reaches `max_new_tokens` ends with the target's
            `forced_eos`. Set it to False where texts must be samples of the target's distribution.
    """

    verifies_first = False
    forces_eos = True

    def __init__(self, target: Model, sampling: SamplingParams | None = None) -> None:
        self.target = target
        self.sampling = sampling or SamplingParams()
        self.vocab_size = target.vocab_size

    @overload
    def generate(  # pyright: ignore[reportOverlappingOverload] - a text is a sequence of texts
        self, prompts: str | Chat, *options: Any, **named: Any
    ) -> TextGeneration: ...

    @overload
    def generate(
        self, prompts: Sequence[str] | Sequence[Chat], *options: Any, **named: Any
    ) -> list[TextGeneration]: ...

    @overload
    def generate(
        self, prompts: Sequence[Sequence[int]], *options: Any, **named: Any
    ) -> list[Generation]: ...

    def generate(
        self,
        prompts: Any,
        max_new_tokens: int = 128,
        seed: int | Sequence[int] = 0,
        eos_token_ids: Sequence[int] | None = None,
        batch_size: int | None = None,
    ) -> Any:
        """Continue each prompt; returns one generation per prompt, in order.

        A text depends only on its own prompt and seed (in float32), not on the batch.

        Args:
            prompts: Texts, chats (lists of messages with `role` and `content`) or lists of token
                ids without padding. A single text or chat gives a generation, not a list.
            max_new_tokens: Maximum number of new tokens per text.
            seed: One seed per prompt; an integer s gives prompt i the seed s + i.
            eos_token_ids: Stop tokens; None uses the target's, an empty list disables them.
            batch_size: Texts generated at a time (continuous batching); None for all of them.

        Raises:
            UsageError: an empty prompt, a budget below 1, a prompt longer than the context, a text
                or a chat for a target without a tokenizer, or a chat that its template refuses.
        """
        if batch_size is not None:
            at_least_one("batch_size", batch_size)
        if isinstance(prompts, Mapping):
            raise PromptError(
                "prompts must be a list of texts, chats or lists of token ids; put a message into "
                "a list, or pass input_ids of a tokenizer's result"
            )
        single = is_text(prompts)
        given: list[Any] = [prompts] if single else list(prompts)
        texts = self._start(given, max_new_tokens, seed, eos_token_ids)
        for _ in self.blocks(texts, batch_size):
            pass
        found = [self._finished(*each) for each in zip(given, texts, strict=True)]
        return found[0] if single else found

    def _finished(self, prompt: Any, text: Text) -> Generation:
        tokenizer = self.target.tokenizer
        if tokenizer is None or not is_text(prompt):
            return text.finish()
        return with_text(text, tokenizer)

    @overload
    def stream(self, prompt: str | Chat, *options: Any, **named: Any) -> Iterator[Piece]: ...

    @overload
    def stream(self, prompt: Sequence[int], *options: Any, **named: Any) -> Iterator[Block]: ...

    def stream(
        self,
        prompt: Any,
        max_new_tokens: int = 128,
        seed: int = 0,
        eos_token_ids: Sequence[int] | None = None,
    ) -> Any:
        """Continue one prompt; the tokens are those of `generate`.

        Yields:
            The text of each token with its source, if the prompt is a text or a chat; each block,
            if it is a list of token ids.

        Raises:
            UsageError: as `generate`, on the call itself, not at the first block.
        """
        texts = self._start([prompt], max_new_tokens, seed, eos_token_ids)
        blocks = (block for _, block in self.blocks(texts))
        tokenizer = self.target.tokenizer
        if tokenizer is None or not is_text(prompt):
            return blocks
        return pieces_of(blocks, tokenizer, texts[0].context)

    def remaining_context(self, prompt: Sequence[int]) -> int | None:
        """New tokens that fit after this prompt; None if the model sets no limit."""
        limit = self.target.max_length
        return None if limit is None else limit - len(decoder_contexts(self.target, [prompt])[0])

    @property
    def context_in_words(self) -> str:
        """The maximum text length, if there is one, as a phrase for messages."""
        return f"the context holds {self.target.max_length} tokens"

    def _start(
        self,
        prompts: Sequence[Any],
        max_new_tokens: int,
        seed: int | Sequence[int],
        eos_token_ids: Sequence[int] | None,
    ) -> list[Text]:
        if not prompts:
            raise PromptError("got no prompt; give at least one list of token ids")
        at_least_one("max_new_tokens", max_new_tokens)
        seeds = range(seed, seed + len(prompts)) if isinstance(seed, int) else list(seed)
        if len(seeds) != len(prompts):
            raise UsageError(f"got {len(seeds)} seeds for {len(prompts)} prompts; give one each")
        stops = self.target.eos_token_ids if eos_token_ids is None else eos_token_ids
        texts: list[Text] = []
        for row, (prompt, row_seed) in enumerate(zip(prompts, seeds, strict=True)):
            name = f"prompt {row}" if len(prompts) > 1 else "the prompt"
            tokens = as_tokens(prompt, self.target, name)
            fitting = self._fitting(tokens, name)
            budget = max_new_tokens if fitting is None else min(max_new_tokens, fitting)
            texts.append(
                Text(
                    *(tokens, budget, frozenset(map(int, stops)), row_seed),
                    cut=budget < max_new_tokens,
                    context=decoder_contexts(self.target, [tokens])[0],
                    forced_eos=self.target.forced_eos if self.forces_eos else None,
                )
            )
        return texts

    def _fitting(self, prompt: Sequence[int], name: str) -> int | None:
        """New tokens that fit after this prompt; raises if it cannot be used."""
        if not prompt:
            raise PromptError(f"{name} is empty; every prompt needs at least one token")
        vocab_size = (
            least_of(model.source_vocab_size for model in self._models()) or self.vocab_size
        )
        if not 0 <= min(prompt) <= max(prompt) < vocab_size:
            raise PromptError(
                f"{name} has token ids from {min(prompt)} to {max(prompt)}, the vocabulary goes "
                f"from 0 to {vocab_size - 1}; encode it with the target's tokenizer"
            )
        advice = "shorten the prompt, or set max_prompt_tokens where there is one"
        longest = self.target.max_source_length
        if longest is not None and len(prompt) > longest:
            raise ContextLengthError(
                f"{name} has {len(prompt):,} tokens and the encoder holds {longest}; {advice}"
            )
        remaining = self.remaining_context(prompt)
        if remaining is not None and remaining < 1:
            held = self.context_in_words
            raise ContextLengthError(f"{name} has {len(prompt):,} tokens and {held}; {advice}")
        return remaining

    def _models(self) -> tuple[Model, ...]:
        """The models that process prompts."""
        return (self.target,)

    def _drafts(self, text: Text) -> bool:
        """Whether the draft has room for a block; else the target goes on alone."""
        return True

    def _for_draft(self, texts: Sequence[Text]) -> list[list[int]]:
        """What the draft's session reads before the first block; any token if it has no room."""
        return [text.prompt if self._drafts(text) else text.prompt[:1] for text in texts]

    @abstractmethod
    def blocks(
        self, texts: Sequence[Text], batch_size: int | None = None
    ) -> Iterator[tuple[Text, Block]]:
        """Generate until all texts have ended; yields each block with its text."""

    def _begin(
        self, slots: BatchSlots, target: ModelSession, *others: ModelSession
    ) -> Iterator[tuple[Text, Block]]:
        """Prefill the first batch of prompts."""
        prompts = [text.prompt for text in slots.texts]
        logits = [target.prefill(prompts)]
        logits += [session.prefill(self._for_draft(slots.texts)) for session in others]
        rows = range(len(prompts))
        yield from self._first_tokens(logits, rows, slots.texts, target, *others)

    def _refill(
        self, slots: BatchSlots, target: ModelSession, *others: ModelSession
    ) -> Iterator[tuple[Text, Block]]:
        """Prefill waiting texts in the slots of finished ones; remove slots that stay empty."""
        while finished := slots.finished():
            rows, texts = slots.fill(finished)
            if not texts:
                if live := slots.drop_finished():
                    for session in (target, *others):
                        session.keep_rows(live)
                return
            prompts = [text.prompt for text in texts]
            logits = [target.refill(rows, prompts)]
            logits += [session.refill(rows, self._for_draft(texts)) for session in others]
            yield from self._first_tokens(logits, rows, texts, target, *others)

    def _first_tokens(
        self,
        logits: Sequence[Tensor],
        rows: Sequence[int],
        texts: Sequence[Text],
        *sessions: ModelSession,
    ) -> Iterator[tuple[Text, Block]]:
        models = [model for model in self._models() if hasattr(model, "hf")]
        check_finite(models, [(text.prompt, text.tokens) for text in texts], *logits)
        if self.verifies_first:
            for session in sessions:  # a block processes the last token of the prompt itself
                session.rollback([int(row in rows) for row in range(len(session.lengths))])
            return
        tokens = as_list(self._next_tokens(logits[0], texts))
        for text, token in zip(texts, tokens, strict=True):
            yield text, text.add_first(token)

    def _start_session(self, model: Model) -> ModelSession:
        session = model.start_session()
        session.vocab_size = self.vocab_size  # the models may be padded to different widths
        return session

    def _next_tokens(self, logits_BV: Tensor, texts: Sequence[Text]) -> Tensor:
        """Sample one token per text from the target's logits, [B]."""
        logits_BV = self._penalized(logits_BV, self._seen(texts))
        if self.sampling.greedy:
            return likeliest(logits_BV)
        uniforms_B = torch.tensor([text.draw_choice() for text in texts], dtype=torch.float64)
        return sample(to_probs(logits_BV, self.sampling), uniforms_B)

    def _seen(self, texts: Sequence[Text]) -> Tensor | None:
        """Mask of the tokens that occur in each text, [B, V]; None without a repetition penalty."""
        if self.sampling.repetition_penalty == 1:
            return None
        return seen_tokens([text.context + text.tokens for text in texts], self.vocab_size)

    def _penalized(self, logits_BV: Tensor, seen_BV: Tensor | None) -> Tensor:
        if seen_BV is None:
            return logits_BV
        penalty = self.sampling.repetition_penalty
        return apply_repetition_penalty(logits_BV, seen_BV.to(logits_BV.device), penalty)


def shared_context(*models: Model) -> int | None:
    """The shortest context of these models; None if none has a limit."""
    return least_of(model.max_length for model in models)


def fits_draft(draft: Model, text: Text, count: int) -> bool:
    """Whether a draft can process a text and `count` more tokens."""
    limit, source_limit = draft.max_length, draft.max_source_length
    reads = source_limit is None or len(text.prompt) <= source_limit
    return reads and (limit is None or text.decoded + count <= limit)


def least_of(limits: Iterable[int | None]) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)


class BatchSlots:
    """The rows of a batch (`texts`, empty once all have ended), and the texts that wait."""

    def __init__(self, texts: Sequence[Text], count: int | None) -> None:
        self._waiting = list(texts)[::-1]
        self.texts = self._next(len(texts) if count is None else count)

    def finished(self) -> list[int]:
        """Rows whose text has ended."""
        return [row for row, text in enumerate(self.texts) if text.stop_reason is not None]

    def fill(self, rows: Sequence[int]) -> tuple[list[int], list[Text]]:
        """Put waiting texts into these rows; returns the rows filled and their new texts."""
        texts = self._next(len(rows))
        for row, text in zip(rows, texts, strict=False):
            self.texts[row] = text
        return list(rows[: len(texts)]), texts

    def drop_finished(self) -> list[int]:
        """Remove rows whose text has ended; returns the indices of the others."""
        live = [row for row, text in enumerate(self.texts) if text.stop_reason is None]
        self.texts = [self.texts[row] for row in live]
        return live

    def _next(self, count: int) -> list[Text]:
        return [self._waiting.pop() for _ in range(min(count, len(self._waiting)))]
