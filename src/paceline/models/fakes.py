"""Models whose next-token distribution is a table, so that tests can compute everything exactly.

Not for users: no weights, no context window, float64 throughout.

Shape suffixes: B batch, N new tokens, V vocabulary.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paceline.models.session import ModelSession


class TableModel:
    """Next-token probabilities looked up by the last `order` tokens.

    Args:
        table: Probabilities (rows sum to 1). Either [V**order, V], where the row for the context
            (a, b) is `a * V + b`, or a function from the last `order` tokens to [V]. Tokens before
            the start of the text count as token 0.
        order: Needed for a function; a table's order follows from its shape.
        eos_token_ids: Tokens that end a text.
        max_length: Longest text, None for no limit.
        num_parameters: Any number; for speed figures.

    Attributes:
        num_passes: Calls of the model so far, over all its sessions.
    """

    def __init__(
        self,
        table: Tensor | Callable[[tuple[int, ...]], Tensor],
        *,
        order: int | None = None,
        eos_token_ids: tuple[int, ...] = (),
        max_length: int | None = None,
        num_parameters: int = 1,
    ) -> None:
        if isinstance(table, Tensor):
            self._log_probs = table.to(torch.float64).log()
            self.vocab_size = table.shape[-1]
            self.order = 0
            while self.vocab_size**self.order < len(table):
                self.order += 1
            assert len(table) == self.vocab_size**self.order, "a table has V**order rows"
            self._function = None
        else:
            assert order is not None, "a function needs its order"
            self.order = order
            self.vocab_size = len(table((0,) * order))
            self._function = table
        self.eos_token_ids = eos_token_ids
        self.max_length = max_length
        self.num_parameters = num_parameters
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
        """Softmax of normal logits with this standard deviation; no probability is zero."""
        rng = torch.Generator().manual_seed(seed)
        logits = torch.randn(vocab_size**order, vocab_size, generator=rng, dtype=torch.float64)
        table = (spread * logits).softmax(-1)
        return cls(table, eos_token_ids=eos_token_ids, max_length=max_length)

    def log_probs(self, context: Sequence[int]) -> Tensor:
        """log p(next | context), [V] float64; -inf where the table holds 0."""
        last = (0,) * self.order + tuple(context)
        last = last[len(last) - self.order :]
        if self._function is not None:
            return self._function(last).to(torch.float64).log()
        row = 0
        for token in last:
            row = row * self.vocab_size + token
        return self._log_probs[row]

    def start_session(self) -> "TableSession":
        return TableSession(self)


class TableSession(ModelSession):
    def __init__(self, model: TableModel) -> None:
        super().__init__(model.vocab_size, model.max_length)
        self.model = model
        self.rows: list[list[int]] = []

    def _prefill(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        self.model.num_passes += 1
        self.rows = [[int(token) for token in row] for row in tokens]
        return torch.stack([self.model.log_probs(row) for row in self.rows])

    def _extend(self, tokens_BN: Tensor) -> Tensor:
        self.model.num_passes += 1
        self.rows = self.rows or [[] for _ in tokens_BN]
        logits = []
        for row, new in zip(self.rows, tokens_BN.tolist(), strict=True):
            for token in new:
                row.append(token)
                logits.append(self.model.log_probs(row))
        return torch.stack(logits).view(*tokens_BN.shape, self.vocab_size)

    def _rollback(self, counts_B: Tensor) -> None:
        for row, count in zip(self.rows, counts_B.tolist(), strict=True):
            del row[len(row) - count :]

    def _keep_rows(self, rows: Tensor) -> None:
        self.rows = [list(self.rows[index]) for index in rows.tolist()]
