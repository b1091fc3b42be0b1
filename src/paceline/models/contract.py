"""Interfaces between decoding and models: models, and sessions that hold a batch of texts.

A session processes tokens, rolls back the last ones, refills rows and removes rows. It does not
sample, verify or stop, but it may serve a whole block if it has a faster implementation. Rows may
differ in length. Prompts are passed as lists, logits are returned as tensors.

The prompt of a decoder-only model is the beginning of its text. The prompt of an encoder-decoder is
its encoder input (source); the text of its decoder begins with `decoder_prompt`. Lengths always
count decoder tokens.

Shape suffixes: B batch, N new tokens, T text, S source, V vocabulary (logits over it).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, TypeAlias

import torch
from torch.nn.utils.rnn import pad_sequence

from paceline.errors import ContextLengthError, PromptError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    Tokenizer: TypeAlias = PreTrainedTokenizerBase

    from paceline.core.block import Drafted, DrawRequest, Verified, VerifyRequest


class ModelSession(ABC):
    """A batch of texts that a model has processed, with its cache.

    After any sequence of calls, logits equal those of a new session that processes the kept tokens.

    Attributes:
        lengths: Number of decoder tokens per row; empty before the first call.
        vocab_size: Width of the logits. A decoder reduces it to the vocabulary two models share.
    """

    lengths: list[int]

    def __init__(self, vocab_size: int, max_length: int | None) -> None:
        self.vocab_size = vocab_size
        self.max_length = max_length
        self.lengths = []

    def prefill(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        """Process one prompt per row in an empty session; logits after each prompt, [B, V]."""
        assert not self.lengths, "prefill starts a session; extend continues one"
        self._check_prompts(tokens)
        logits_BV = self._prefill(tokens)
        self.lengths = self._lengths_after(tokens)
        return self._without_padding(logits_BV)

    def extend(self, tokens_BN: Tensor) -> Tensor:
        """Append the same number of tokens to every row; logits after each token, [B, N, V]."""
        lengths = self._extended_lengths(*tokens_BN.shape)
        logits_BNV = self._extend(tokens_BN)
        self.lengths = lengths
        return self._without_padding(logits_BNV)

    def take_draw(self, request: DrawRequest) -> Drafted | None:
        """Serve the whole request if the session can do so faster; else return None, unchanged."""
        return None

    def take_verify(self, request: VerifyRequest) -> Verified | None:
        """As `take_draw`, for a request to verify drafted tokens."""
        return None

    def rollback(self, counts: Sequence[int]) -> None:
        """Remove the last counts[b] tokens of row b; a row may become empty."""
        pairs = list(zip(self.lengths, counts, strict=True))
        assert all(0 <= count <= length for length, count in pairs), (
            f"cannot roll back {counts} of {self.lengths} tokens"
        )
        if any(counts):
            self._rollback(counts)
            self.lengths = [length - count for length, count in pairs]

    def refill(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> Tensor:
        """Replace the texts of these rows by prompts; logits after each prompt, [R, V]."""
        assert len(rows) == len(set(rows)) == len(prompts), "one prompt per row"
        self._check_prompts(prompts)
        logits_RV = self._refill(rows, prompts)
        self.lengths = list(self.lengths)
        for row, length in zip(rows, self._lengths_after(prompts), strict=True):
            self.lengths[row] = length
        return self._without_padding(logits_RV)

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order."""
        assert len(rows) > 0, "a session needs at least one row: drop the session instead"
        self._keep_rows(rows)
        self.lengths = [self.lengths[row] for row in rows]

    def _extended_lengths(self, batch: int, count: int) -> list[int]:
        """The validated lengths after `count` more tokens; sets the rows of an empty session."""
        assert count >= 1, "a session processes at least one token per row"
        self.lengths = self.lengths or [0] * batch
        assert batch == len(self.lengths), f"{batch} rows of tokens, {len(self.lengths)} in session"
        lengths = [length + count for length in self.lengths]
        self._check_room(lengths)
        return lengths

    def _without_padding(self, logits: Tensor) -> Tensor:
        return logits if logits.shape[-1] == self.vocab_size else logits[..., : self.vocab_size]

    def _lengths_after(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        """The lengths of rows that hold only these prompts."""
        return [len(prompt) for prompt in prompts]

    def _check_prompts(self, prompts: Sequence[Sequence[int]]) -> None:
        if not prompts or not all(len(prompt) for prompt in prompts):
            raise PromptError(
                "got an empty prompt; every prompt needs at least one token, for example the "
                "beginning-of-text token"
            )
        self._check_room(self._lengths_after(prompts))

    def _check_room(self, lengths: Sequence[int]) -> None:
        longest = max(lengths)
        if self.max_length is not None and longest > self.max_length:
            raise ContextLengthError(
                f"got a text of {longest} tokens, but the model's context holds {self.max_length}; "
                "shorten the prompt or request fewer new tokens"
            )

    @abstractmethod
    def _prefill(self, tokens: Sequence[Sequence[int]]) -> Tensor: ...

    @abstractmethod
    def _extend(self, tokens_BN: Tensor) -> Tensor: ...

    @abstractmethod
    def _rollback(self, counts: Sequence[int]) -> None: ...

    @abstractmethod
    def _refill(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> Tensor: ...

    @abstractmethod
    def _keep_rows(self, rows: Sequence[int]) -> None: ...


class Model(Protocol):
    """The model interface that decoding uses.

    Attributes:
        vocab_size: Tokens of the tokenizer and width of the logits, without padding.
        max_length: Context length in tokens, or None if there is no limit.
        eos_token_ids: Tokens that end a text; may be empty.
        num_parameters: Distinct weights: tied ones count once, and packed 4-bit ones singly.
        decoder_prompt: Tokens that every text of a decoder begins with, which are not part of a
            generation; None for a decoder-only model.
        max_source_length: Maximum number of encoder tokens; None: no limit, or no encoder.
        source_vocab_size: Encoder tokens are below it; None: no encoder.
        forced_eos: Token that replaces the last one of a text of `max_new_tokens`, or None.
        mask_token: Token that stands for those that a parallel draft has not read yet; None: the
            model drafts token by token.
    """

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_length(self) -> int | None: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    @property
    def num_parameters(self) -> int: ...

    @property
    def decoder_prompt(self) -> tuple[int, ...] | None: ...

    @property
    def max_source_length(self) -> int | None: ...

    @property
    def source_vocab_size(self) -> int | None: ...

    @property
    def forced_eos(self) -> int | None: ...

    @property
    def mask_token(self) -> int | None: ...

    def start_session(self) -> ModelSession: ...


def decoder_contexts(model: Model, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """The decoder's tokens before the first new one, for each prompt."""
    start = model.decoder_prompt
    return [list(prompt if start is None else start) for prompt in prompts]


class Batch(Protocol):
    """A batch of texts, padded on the right.

    Attributes:
        tokens_BT: Token ids; of the decoder for an encoder-decoder.
        attention_BT: 1 = token, 0 = padding; None if no row is padded.
        source: Encoder inputs, a batch of its own; None for a decoder-only model.
    """

    @property
    def tokens_BT(self) -> Tensor: ...

    @property
    def attention_BT(self) -> Tensor | None: ...

    @property
    def source(self) -> Batch | None: ...


class Texts(NamedTuple):
    """The plain implementation of `Batch`."""

    tokens_BT: Tensor
    attention_BT: Tensor | None = None
    source: Batch | None = None

    def to(self, device: torch.device) -> Texts:
        attention = None if self.attention_BT is None else self.attention_BT.to(device)
        return Texts(self.tokens_BT.to(device), attention, self.source)


def pad(rows: Sequence[Sequence[int]], side: Literal["left", "right"] = "right") -> Texts:
    """Texts padded on one side; no mask if none is shorter than the longest."""
    given = [torch.tensor(list(row), dtype=torch.int64) for row in rows]
    tokens_BT, attention_BT = (
        pad_sequence(parts, batch_first=True, padding_side=side)
        for parts in (given, [torch.ones_like(row) for row in given])
    )
    return Texts(tokens_BT, None if bool(attention_BT.all()) else attention_BT)
