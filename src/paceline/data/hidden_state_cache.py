"""Fixed text that the target has read: its hidden states are kept, so that it reads nothing twice.

The target does not change, so whatever it says of a text in one epoch it says in the next; what is
left of an alignment on given text is then the draft's own passes.
"""

# T trained positions, D hidden width
from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.data.collate import Row, collate
from paceline.data.sources import FixedText, TextBatch
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.data.sources import ExampleStream
    from paceline.models.contract import TrainableModel

_TOGETHER = 16  # texts that the target reads in one pass


class ReadText:
    """Texts of the corpus as they are, with the target's hidden states at their trained tokens.

    Texts of like length are read together, always the same ones, so that the states of a text do
    not hang on when it is drawn: a run that was stopped goes on with the same losses.
    """

    def __init__(self, stream: ExampleStream, target: TrainableModel, limit_gb: float) -> None:
        """`limit_gb` is what the states of all texts may come to.

        Raises:
            ConfigError: they come to more.
        """
        self.text = FixedText(stream)
        self.target = target
        lengths = [len(example.tokens) for example in stream.examples]
        self._order = sorted(range(len(lengths)), key=lengths.__getitem__)
        self._place = {example: place for place, example in enumerate(self._order)}
        self._rows: dict[int, Row] = {}
        self._check(limit_gb)

    def next_batch(self, seconds_left: float = math.inf) -> TextBatch:
        """Rows of the next examples, each with its states.

        Raises:
            PromptError: an example has no completion.
        """
        chosen = self.text.stream.take_indices()
        for example in chosen:
            if example not in self._rows:
                self._read(self._place[example] // _TOGETHER)
        return TextBatch([self._rows[example] for example in chosen], "fixed")

    def _read(self, group: int) -> None:
        """One pass of the target over a group of texts."""
        examples = self._order[group * _TOGETHER : (group + 1) * _TOGETHER]
        rows = [self.text.row(example) for example in examples]
        batch = collate(rows).to(self.target.device)
        with torch.no_grad():
            hidden_ND = self.target.hidden(batch)[batch.mask_BT]
        states = hidden_ND.split(batch.mask_BT.sum(-1).tolist())
        for example, row, states_TD in zip(examples, rows, states, strict=True):
            self._rows[example] = Row(row.tokens, row.trained_from, _kept(states_TD))

    def _check(self, limit_gb: float) -> None:
        rows = map(self.text.row, range(len(self._order)))
        num_states = sum(len(row.tokens) - row.trained_from for row in rows)
        width = self.target.head_weight.shape[1]
        needed_gb = num_states * width * self.target.dtype.itemsize / 1e9
        if needed_gb > limit_gb:
            raise ConfigError(
                f"data.keep_states_gb is {limit_gb:g}, and the target's states of {num_states:,} "
                f"tokens take {needed_gb:.2f}; raise it, or drop it to read texts anew every time"
            )


def _kept(states_TD: Tensor) -> Tensor:
    """In memory of its own: a part of the pass's would keep all of it."""
    return states_TD.to("cpu", copy=True)
