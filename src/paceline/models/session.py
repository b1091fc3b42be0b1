"""The seam between decoding and models: a batch of texts under construction, and what holds them.

A session knows how to read tokens, to draw the next ones or judge drafted ones, to forget the last
ones, to begin rows anew and to let them leave. It does not know about stopping. Rows of a batch may keep different numbers of tokens.

Texts come and go as lists, as decoders keep them; tensors are what a device holds.

Shape suffixes: B batch, N new tokens, G drawn ones, H judged ones, V vocabulary (logits over it).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from paceline.core.lists import as_list
from paceline.errors import ContextLengthError, PromptError
from paceline.models.halves import Drawn, Wanted, draw_ahead, judge_block

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.core.rules import Rule
    from paceline.core.sampling import SamplingParams


class JudgeUniforms(NamedTuple):
    """Numbers in [0, 1): one a drafted token, and one a row for the token that follows."""

    accept: Sequence[Sequence[float]]
    next: Sequence[float]

    def tensors(self) -> tuple[Tensor, Tensor]:
        """[B, G] and [B], float64."""
        accept_BG = torch.tensor(self.accept, dtype=torch.float64)
        return accept_BG, torch.tensor(self.next, dtype=torch.float64)


class Judgement(NamedTuple):
    """Per row: drafted tokens kept, and the token that follows them."""

    num_accepted: list[int]
    next_tokens: list[int]


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

    def draw(
        self,
        tokens: Sequence[Sequence[int]],
        count: int,
        sampling: SamplingParams,
        uniforms: Sequence[Sequence[float]] | None = None,
        seen_BV: Tensor | None = None,
        *,
        behind_last: bool = False,
        raw: bool = False,
    ) -> Drawn:
        """Append tokens, then draw `count` (G) more a row, each but the last appended before the next.

        Args:
            tokens: The same number for every row, at least one.
            count: How many to draw.
            sampling: How the model's distributions are shaped.
            uniforms: Numbers in [0, 1) to draw with, G a row; None takes the likeliest tokens.
            seen_BV: Tokens that a repetition penalty falls on, these new ones included.
            behind_last: Read the last one, too, for the distribution behind it.
            raw: Give untempered distributions as well, where they differ.

        Raises:
            ContextLengthError: As `extend`.
        """
        uniforms_BG = None if uniforms is None else torch.tensor(uniforms, dtype=torch.float64)
        wanted = Wanted(count, sampling, behind_last, raw)
        return draw_ahead(
            lambda new_BN: self.extend(new_BN)[:, -1],
            torch.tensor(tokens),
            wanted,
            uniforms_BG,
            seen_BV,
        )

    def judge(
        self,
        newest: Sequence[int],
        drafted: Drawn,
        num_drafted: Sequence[int],
        rule: Rule,
        sampling: SamplingParams,
        uniforms: JudgeUniforms | None = None,
        seen_BV: Tensor | None = None,
    ) -> Judgement:
        """Append the newest token and the drafted ones, and say how many of these stay.

        Args:
            newest: The token of each row that no pass has read yet.
            drafted: Tokens [B, G] and, with `uniforms`, what they were drawn from.
            num_drafted: How many of the G each row drafted.
            rule: Decides what stays.
            sampling: How the model's distributions are shaped.
            uniforms: Numbers to draw with; None compares with the likeliest tokens, which is what
                an exact rule does at temperature 0.
            seen_BV: Tokens that a repetition penalty falls on, the newest ones included.

        Raises:
            ContextLengthError: As `extend`.
        """
        newest_B1 = torch.tensor(newest, device=drafted.tokens_BG.device)[:, None]
        logits_BHV = self.extend(torch.cat([newest_B1, drafted.tokens_BG], 1))
        verdict = judge_block(
            logits_BHV,
            drafted,
            torch.tensor(num_drafted),
            rule,
            sampling,
            None if uniforms is None else uniforms.tensors(),
            seen_BV,
        )
        return Judgement(as_list(verdict.num_accepted_B), as_list(verdict.next_tokens_B))

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
