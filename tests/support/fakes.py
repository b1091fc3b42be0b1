"""Models whose next-token distribution is a table, for exact results, and a policy of a user.

Shape suffixes: B batch, N new tokens, O order, V vocabulary, W width of the widest row.
"""

from collections.abc import Sequence
from typing import Any

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor

from paceline.core.rule_base import STRICT
from paceline.decode.draft_policies import DraftPolicy
from paceline.models.contract import ModelSession


class TableModel:
    """A model whose next-token probabilities depend on the last `order` tokens; float64.

    Args:
        table: Probabilities (rows sum to 1), [V**order, V]; the row for the context (a, b) is
            `a * V + b`. Tokens before the start of the text count as token 0.
        eos_token_ids: Tokens that end a text.
        max_length: Context length, None for no limit.

    Attributes:
        num_passes: Forward passes so far, over all sessions.
    """

    tokenizer: Any = None
    decoder_prompt = max_source_length = source_vocab_size = forced_eos = None
    mask_token: int | None = None

    def __init__(
        self,
        table: Tensor,
        *,
        eos_token_ids: tuple[int, ...] = (),
        max_length: int | None = None,
    ) -> None:
        self._log_probs = table.to(torch.float64).log()
        self.vocab_size = table.shape[-1]
        self.order = 0
        while self.vocab_size**self.order < len(table):
            self.order += 1
        assert len(table) == self.vocab_size**self.order, "a table has V**order rows"
        self._powers = self.vocab_size ** torch.arange(self.order - 1, -1, -1)
        self.eos_token_ids = eos_token_ids
        self.max_length = max_length
        self.num_parameters = 1
        self.num_passes = 0

    @classmethod
    def random(
        cls,
        vocab_size: int,
        order: int = 1,
        *,
        seed: int = 0,
        spread: float = 1.0,
        eos_token_ids: tuple[int, ...] = (),
        max_length: int | None = None,
    ) -> "TableModel":
        """Softmax of normal logits with standard deviation `spread`; no probability is zero."""
        rng = torch.Generator().manual_seed(seed)
        logits = torch.randn(vocab_size**order, vocab_size, generator=rng, dtype=torch.float64)
        table = (spread * logits).softmax(-1)
        return cls(table, eos_token_ids=eos_token_ids, max_length=max_length)

    def log_probs(self, context: Sequence[int]) -> Tensor:
        """log p(next | context), [V] float64; -inf where the table holds 0."""
        last = (0,) * self.order + tuple(context)
        last = last[len(last) - self.order :]
        row = 0
        for token in last:
            row = row * self.vocab_size + token
        return self._log_probs[row]

    def start_session(self) -> "TableSession":
        return TableSession(self)

    def look_up(self, contexts: Tensor) -> Tensor:
        """log p(next | context) for many contexts at once, [..., order] -> [..., V] float64."""
        return self._log_probs[(contexts * self._powers).sum(-1)]


class TableSession(ModelSession):
    """A session that keeps all rows in one tensor, so that tests can decode hundreds at once."""

    def __init__(self, model: TableModel) -> None:
        super().__init__(model.vocab_size, model.max_length)
        self.model = model
        self._history_BW = torch.zeros(0, 0, dtype=torch.int64)

    @property
    def rows(self) -> list[list[int]]:
        order, histories = self.model.order, self._history_BW.tolist()
        return [
            row[order : order + length] for row, length in zip(histories, self.lengths, strict=True)
        ]

    def _keep(self, rows: Sequence[Sequence[int]]) -> None:
        """Column `order` holds each row's first token; the tokens before the text are 0."""
        width = max(map(len, rows))
        before = [0] * self.model.order
        padded = [before + [int(token) for token in row] + [0] * (width - len(row)) for row in rows]
        self._history_BW = torch.tensor(padded)

    def _prefill(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        self._keep(tokens)
        return self._logits_at([len(row) - 1 for row in tokens], 1)[:, 0]

    def _extend(self, tokens_BN: Tensor) -> Tensor:
        order, (batch, count) = self.model.order, tokens_BN.shape
        columns = order + max(self.lengths) + count
        rows, width = self._history_BW.shape  # no rows in an empty session
        if rows < batch or width < columns:
            history_BW = torch.zeros(batch, 2 * columns, dtype=torch.int64)
            history_BW[:rows, :width] = self._history_BW
            self._history_BW = history_BW
        if _all_equal(self.lengths):
            start = order + self.lengths[0]
            self._history_BW[:, start : start + count] = tokens_BN
        else:
            columns_BN = order + torch.tensor(self.lengths)[:, None] + torch.arange(count)
            self._history_BW.scatter_(1, columns_BN, tokens_BN.cpu())
        return self._logits_at(self.lengths, count)

    def _rollback(self, counts: Sequence[int]) -> None:
        """Tokens beyond `lengths` are never read, and the next tokens overwrite them."""

    def _refill(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> Tensor:
        fresh = TableSession(self.model)
        logits_RV = fresh.prefill(prompts)
        histories = self.rows
        for row, prompt in zip(rows, prompts, strict=True):
            histories[row] = list(prompt)
        self._keep(histories)
        return logits_RV

    def _keep_rows(self, rows: Sequence[int]) -> None:
        self._history_BW = self._history_BW[list(rows)]

    def _logits_at(self, first_B: Sequence[int], count: int) -> Tensor:
        """Logits after `count` tokens of each row, from position first_B[b] on, [B, N, V].

        The oldest token that they depend on is in column first_B[b] + 1.
        """
        self.model.num_passes += 1
        order = self.model.order
        if _all_equal(first_B):
            begin = first_B[0] + 1
            read_BW = self._history_BW[:, begin : begin + order + count - 1]
            return self.model.look_up(read_BW.unfold(1, order, 1))
        window_NO = torch.arange(count)[:, None] + torch.arange(order)
        columns_BNO = torch.tensor(first_B)[:, None, None] + 1 + window_NO
        tokens_BNO = self._history_BW.gather(1, columns_BNO.flatten(1)).view(columns_BNO.shape)
        return self.model.look_up(tokens_BNO)


def _all_equal(values: Sequence[int]) -> bool:
    return values.count(values[0]) == len(values)


@dataclass(frozen=True, config=STRICT)
class Cautious(DraftPolicy):
    """Drafts `least` tokens once fewer than `share` of those examined so far were accepted."""

    share: float
    least: int = 1

    def length(self, num_accepted: int, num_examined: int, most: int) -> int:
        return most if num_accepted >= self.share * num_examined else min(self.least, most)
