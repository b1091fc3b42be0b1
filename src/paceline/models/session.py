"""The seam between decoding and models: a batch of texts under construction, and what holds them.

A session knows how to read tokens, to forget the last ones and to let rows leave. It does not know
about sampling, drafts or stopping. Rows of a batch may keep different numbers of tokens.

Shape suffixes: B batch, N new tokens, V vocabulary (logits over it).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from paceline.errors import ContextLengthError, PromptError


class ModelSession(ABC):
    """Texts that a model has read, and its memory of them.

    Whatever was extended and rolled back, the next logits equal those of a fresh session that reads
    only the tokens that were kept.

    Attributes:
        lengths: The tokens that each row holds; empty before the first call.
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
        lengths = [len(row) for row in tokens]
        if not lengths or min(lengths) == 0:
            raise PromptError(
                "got an empty prompt; every prompt needs at least one token, for example the "
                "beginning-of-text token"
            )
        self._check_room(lengths)
        logits_BV = self._prefill(tokens)
        self.lengths = lengths
        return logits_BV

    def extend(self, tokens_BN: Tensor) -> Tensor:
        """Append the same number of tokens, at least one, to every row.

        Returns:
            Logits after each of the new tokens, [B, N, V].

        Raises:
            ContextLengthError: A row would grow beyond the model's context.
        """
        batch, count = tokens_BN.shape
        assert count >= 1, "extend needs a token for every row"
        if not self.lengths:
            self.lengths = [0] * batch
        assert batch == len(self.lengths), f"{batch} rows of tokens, {len(self.lengths)} in session"
        lengths = [length + count for length in self.lengths]
        self._check_room(lengths)
        logits_BNV = self._extend(tokens_BN)
        self.lengths = lengths
        return logits_BNV

    def rollback(self, counts: Sequence[int]) -> None:
        """Forget the last counts[b] tokens of row b; a row may become empty."""
        pairs = list(zip(self.lengths, counts, strict=True))
        assert all(0 <= count <= length for length, count in pairs), (
            f"cannot forget {counts} of {self.lengths} tokens"
        )
        if any(counts):
            self._rollback(counts)
            self.lengths = [length - count for length, count in pairs]

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order; the others leave the session."""
        assert len(rows) > 0, "a session without rows is over: drop it instead"
        self._keep_rows(rows)
        self.lengths = [self.lengths[row] for row in rows]

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
    def _keep_rows(self, rows: Sequence[int]) -> None: ...


class Model(Protocol):
    """What decoding asks of a model.

    Attributes:
        vocab_size: Tokens that the tokenizer can name; logits have this width, padding is cut off.
        max_length: Longest text the model can read, or None if there is no limit.
        eos_token_ids: Tokens that end a text; may be empty.
        num_parameters: Distinct weights (tied ones count once).
    """

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
