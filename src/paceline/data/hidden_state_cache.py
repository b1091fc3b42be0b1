"""Caches the target's hidden states of fixed text, so that later epochs run only the draft."""

# N trained positions of a batch, T of a row, D hidden size
from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import torch

from paceline.data.collate import collate
from paceline.data.sources import FixedText, TextBatch
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.data.collate import Row
    from paceline.data.sources import ExampleStream
    from paceline.models.contract import TrainableModel

_GROUP_SIZE = 16  # texts per forward pass of the target


class ReadText:
    """Fixed text with the target's hidden states for its trained tokens.

    Texts of similar length form fixed groups. The hidden states of a text therefore do not depend
    on when it is drawn, and a resumed run computes the same losses.
    """

    def __init__(self, stream: ExampleStream, target: TrainableModel, limit_gb: float) -> None:
        """Check the size of the cache without filling it.

        Raises:
            ConfigError: the hidden states of all texts take more than `limit_gb`.
            PromptError: an example has no completion.
        """
        self.text = FixedText(stream)
        self.target = target
        lengths = [len(example.tokens) for example in stream.examples]
        self._order = sorted(range(len(lengths)), key=lengths.__getitem__)
        self._position = {example: index for index, example in enumerate(self._order)}
        self._rows: dict[int, Row] = {}
        rows = map(self.text.row, range(len(lengths)))
        num_states = sum(len(row.tokens) - row.trained_from for row in rows)
        needed_gb = num_states * target.head.weight_VD.shape[1] * target.dtype.itemsize / 1e9
        if needed_gb > limit_gb:
            raise ConfigError(
                f"data.keep_states_gb is {limit_gb:g}, but the target's hidden states of "
                f"{num_states:,} tokens take {needed_gb:.2f}; raise it, or unset it to compute "
                "them every time"
            )

    def next_batch(self, seconds_left: float = math.inf) -> TextBatch:
        """Rows of the next examples with their hidden states."""
        chosen = self.text.stream.take_indices()
        for example in chosen:
            if example not in self._rows:
                self._compute(self._position[example] // _GROUP_SIZE)
        return TextBatch([self._rows[example] for example in chosen], "fixed")

    def _compute(self, group: int) -> None:
        examples = self._order[group * _GROUP_SIZE : (group + 1) * _GROUP_SIZE]
        rows = [self.text.row(example) for example in examples]
        batch = collate(rows).to(self.target.device)
        with torch.no_grad():
            hidden_ND = self.target.hidden(batch)[batch.mask_BT]
        states = hidden_ND.split(batch.mask_BT.sum(-1).tolist())
        for example, row, states_TD in zip(examples, rows, states, strict=True):
            # A copy, since a view would keep the hidden states of the whole group in memory.
            kept_TD = states_TD.to("cpu", copy=True)
            self._rows[example] = dataclasses.replace(row, target_hidden_TD=kept_TD)
