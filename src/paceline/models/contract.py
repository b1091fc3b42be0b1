"""The seam between decoding and models: a batch of texts under construction, and what holds them.

A session reads tokens, forgets the last ones, begins rows anew and lets them leave. It knows nothing
of drawing, judging or stopping, but may take a whole block that it can serve faster. Rows of a batch
may keep different numbers of tokens.

Texts come and go as lists, as decoders keep them; tensors are what a device holds.

Shape suffixes: B batch, N new tokens, V vocabulary (logits over it).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NamedTuple, Protocol

from paceline.errors import ContextLengthError, PromptError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from paceline.core.block import DrawRequest, Judgement, JudgeRequest
    from paceline.core.drafted import Drafted


class ModelSession(ABC):
    """Texts that a model has read, and its memory of them.

    Whatever was extended and rolled back, the next logits equal those of a fresh session that reads
    only the tokens that were kept.

    Attributes:
        lengths: The tokens that each row holds; empty before the first call.
        vocab_size: Width of the logits. A decoder narrows it to what two models share.
    """

    lengths: list[int]

    def __init__(self, vocab_size: int, max_length: int | None) -> None:
        self.vocab_size = vocab_size
        self.max_length = max_length
        self.lengths = []

    def prefill(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        """Read one prompt a row into an empty session.

        Returns:
            Logits after each row's last token, [B, V].

        Raises:
            PromptError: No prompt, or an empty one.
            ContextLengthError: A prompt is longer than the model's context.
        """
        assert not self.lengths, "prefill starts a session; extend continues one"
        self._check_prompts(tokens)
        logits_BV = self._prefill(tokens)
        self.lengths = [len(row) for row in tokens]
        return self._named(logits_BV)

    def extend(self, tokens_BN: Tensor) -> Tensor:
        """Append the same number of tokens, at least one, to every row.

        Returns:
            Logits after each of the new tokens, [B, N, V].

        Raises:
            ContextLengthError: A row would grow beyond the model's context.
        """
        lengths = self._longer(*tokens_BN.shape)
        logits_BNV = self._extend(tokens_BN)
        self.lengths = lengths
        return self._named(logits_BNV)

    def take_draw(self, request: DrawRequest) -> Drafted | None:
        """Serve the whole request faster than by `extend`; None: the session is as before.

        Raises:
            ContextLengthError: As `extend`.
        """
        return None

    def take_judge(self, request: JudgeRequest) -> Judgement | None:
        """As `take_draw`, for drafted tokens to be judged."""
        return None

    def rollback(self, counts: Sequence[int]) -> None:
        """Forget the last counts[b] tokens of row b; a row may become empty."""
        pairs = list(zip(self.lengths, counts, strict=True))
        assert all(0 <= count <= length for length, count in pairs), (
            f"cannot forget {counts} of {self.lengths} tokens"
        )
        if any(counts):
            self._rollback(counts)
            self.lengths = [length - count for length, count in pairs]

    def refill(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> Tensor:
        """Let these rows forget their texts and read prompts instead, one each.

        Returns:
            Logits after each prompt's last token, [R, V].

        Raises:
            PromptError: An empty prompt.
            ContextLengthError: A prompt is longer than the model's context.
        """
        assert len(rows) == len(set(rows)) == len(prompts), "a prompt a row"
        self._check_prompts(prompts)
        logits_RV = self._refill(rows, prompts)
        self.lengths = list(self.lengths)
        for row, prompt in zip(rows, prompts, strict=True):
            self.lengths[row] = len(prompt)
        return self._named(logits_RV)

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order; the others leave the session."""
        assert len(rows) > 0, "a session without rows is over: drop it instead"
        self._keep_rows(rows)
        self.lengths = [self.lengths[row] for row in rows]

    def _longer(self, batch: int, count: int) -> list[int]:
        """The lengths after so many tokens more, checked; an empty session gets its rows."""
        assert count >= 1, "a session reads at least one token a row"
        self.lengths = self.lengths or [0] * batch
        assert batch == len(self.lengths), f"{batch} rows of tokens, {len(self.lengths)} in session"
        lengths = [length + count for length in self.lengths]
        self._check_room(lengths)
        return lengths

    def _named(self, logits: Tensor) -> Tensor:
        """Logits of the tokens that can be named."""
        return logits if logits.shape[-1] == self.vocab_size else logits[..., : self.vocab_size]

    def _check_prompts(self, prompts: Sequence[Sequence[int]]) -> None:
        lengths = [len(prompt) for prompt in prompts]
        if not lengths or min(lengths) == 0:
            raise PromptError(
                "got an empty prompt; every prompt needs at least one token, for example the "
                "beginning-of-text token"
            )
        self._check_room(lengths)

    def _check_room(self, lengths: Sequence[int]) -> None:
        longest = max(lengths)
        if self.max_length is not None and longest > self.max_length:
            raise ContextLengthError(
                f"got a text of {longest} tokens, but the model's context holds {self.max_length}; "
                "shorten the prompt or ask for fewer new tokens"
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
    """What decoding asks of a model.

    Attributes:
        tokenizer: Its tokenizer; None where there is none.
        vocab_size: Tokens that the tokenizer can name; logits have this width, padding is cut off.
        max_length: Longest text the model can read, or None if there is no limit.
        eos_token_ids: Tokens that end a text; may be empty.
        num_parameters: Distinct weights (tied ones count once).
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

    def start_session(self) -> ModelSession:
        """Begin an empty session."""
        ...


class Batch(Protocol):
    """Texts to read at once, padded on the right.

    Attributes:
        tokens_BT: Their tokens.
        attention_BT: 1 = token, 0 = padding; None where no row is padded.
    """

    @property
    def tokens_BT(self) -> Tensor: ...

    @property
    def attention_BT(self) -> Tensor | None: ...


class Texts(NamedTuple):
    """A batch of texts and nothing else."""

    tokens_BT: Tensor
    attention_BT: Tensor | None = None


class TrainableModel(Model, Protocol):
    """What training and scoring by hidden states ask of a model, besides decoding with it.

    Attributes:
        device: Where its weights are.
        dtype: Of its weights.
        head_weight: Output projection, [V, D], padding rows included.
        head_bias: [V], or None.
        draft_vocabulary: The tokens that it may propose, likeliest first, [K]; None for all.
    """

    @property
    def draft_vocabulary(self) -> Tensor | None: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def head_weight(self) -> Tensor: ...

    @property
    def head_bias(self) -> Tensor | None: ...

    def hidden(self, batch: Batch) -> Tensor:
        """Hidden states after the final norm, [B, T, D]. Differentiable."""
        ...
