"""Generates training text with the target in large rounds and trains on each text several times.

The target's weights do not change during alignment. Its texts can be generated in advance, in
batches larger than a training step's, and its hidden states kept. Each further use of a text costs
only the draft's forward and backward pass.
"""

# R rows, W longest prompt, T trained positions, D hidden size
from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections import deque
from typing import TYPE_CHECKING

import torch
from pydantic import Field
from torch import Tensor

from paceline.config import StrictModel
from paceline.data.sources import (
    ExampleStream,
    Origins,
    TextBatch,
    rows_of,
    sample_completions,
)
from paceline.models.hf.base import recorded_hidden_states
from paceline.progress import silent
from paceline.rng import named_generator

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.core.sampling import SamplingParams
    from paceline.data.collate import TokenRow
    from paceline.data.sources import Shard
    from paceline.models.hf.base import HfModel
    from paceline.progress import Progress


_log = logging.getLogger(__name__)
_KEPT_ROUNDS = 8  # for reuse at the end of a run
_BATCH_ROWS = 64  # rows per generation batch; more are slower and need more memory for logits


class Rounds(StrictModel):
    """Text that the target generates in rounds.

    Attributes:
        rows: Texts per round, over all processes.
        uses: Number of times that each text is trained on.
        train_prompts: Also train on prompt tokens, whose hidden states are computed anyway.
    """

    rows: int = Field(default=128, ge=1)
    uses: int = Field(default=2, ge=1)
    train_prompts: bool = False


class TargetRounds:
    """Corpus prompts continued by the target, `rows` texts per round, each used `uses` times.

    The number of the target's batches so far determines the round and the position in it, and
    follows from the number of examples drawn. A resumed run generates its current round again, with
    the same texts, but not the earlier ones.
    """

    def __init__(
        self,
        stream: ExampleStream,
        model: HfModel,
        rounds: Rounds,
        *,
        sampling: SamplingParams,
        max_new_tokens: int,
        eos_token_ids: tuple[int, ...],
        shard: Shard,
        progress: Progress = silent,
        origins: Origins | None = None,
    ) -> None:
        """`origins`: of the batches of a mixture; None: all are the target's."""
        assert rounds.rows % stream.batch_size == 0, "a round consists of whole batches"
        self.stream = stream
        self.model = model
        self.rounds = rounds
        self.sampling = sampling
        self.max_new_tokens = max_new_tokens
        self.eos_token_ids = eos_token_ids
        self.progress = progress
        self._prompts = ExampleStream(stream.examples, rounds.rows, seed=stream.seed, shard=shard)
        self._origins = origins or Origins(stream, fixed_fraction=0, draft_fraction=0)
        self._size = len(range(stream.batch_size)[stream.mine])
        self._number = -1
        self._latest: deque[list[TokenRow]] = deque(maxlen=_KEPT_ROUNDS)
        self._writing_s = 0.0  # of the latest round

    def next_batch(self, seconds_left: float = math.inf) -> TextBatch:
        """Rows of the current round, reshuffled for each use.

        If the next round would take more than a third of the time left, the kept rounds are reused
        together: the last one alone would overfit.
        """
        batch = self._origins.num_of_target(self.stream.num_drawn)
        self.stream.num_drawn += self.stream.batch_size
        batches_per_use = self.rounds.rows // self.stream.batch_size
        batches_per_round = batches_per_use * self.rounds.uses
        number = batch // batches_per_round
        if number != self._number and (seconds_left >= 3 * self._writing_s or not self._latest):
            started = time.monotonic()
            self._latest.append(self._generate(number))
            self._number, self._writing_s = number, time.monotonic() - started
            if len(self._latest) == 1 and 3 * self._writing_s > seconds_left:
                _log.warning(
                    "the target wrote its %d texts for %.0f of the %.0f s that were left; raise "
                    "max_seconds, or lower target_rounds.rows or the lengths",
                    *(self.rounds.rows, self._writing_s, seconds_left),
                )
        offset = batch - self._number * batches_per_round
        if offset < batches_per_round:
            return self._batch(self._latest[-1], offset, "round order")
        rows = [row for round_ in self._latest for row in round_]
        return self._batch(rows, offset - batches_per_round, "order of latest rounds")

    def _batch(self, rows: Sequence[TokenRow], index: int, stream_name: str) -> TextBatch:
        """Batch `index` of repeated passes over these rows, each in a new order."""
        use, index = divmod(index, len(rows) // self._size)
        rng = named_generator(self.stream.seed, stream_name, self._number, use)
        order = torch.randperm(len(rows), generator=rng)
        chosen = order[index * self._size : (index + 1) * self._size]
        return TextBatch([rows[int(row)] for row in chosen], "target")

    def _generate(self, number: int) -> list[TokenRow]:
        """This process's share of the texts of a round."""
        self._prompts.num_drawn = number * self.rounds.rows
        prompts = [example.prompt for example in self._prompts.take_batch()]
        rng = named_generator(self.stream.seed, "target round", number)
        seeds = self.stream.my_seeds(self.rounds.rows, rng)
        rows: list[TokenRow] = []
        # a model that reads texts one by one records the states of each text for itself
        size = _BATCH_ROWS if self.model.sessions == "batch" else 1
        for start in range(0, len(prompts), size):
            part = slice(start, start + size)
            rows += self._generate_batch(prompts[part], seeds[part])
            self.progress("generating text", len(rows), len(prompts))
        return rows

    def _generate_batch(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int]
    ) -> list[TokenRow]:
        with recorded_hidden_states(self.model) as recorded:
            completions = sample_completions(
                self.model,
                prompts,
                seeds,
                self.max_new_tokens,
                sampling=self.sampling,
                eos_token_ids=self.eos_token_ids,
            )
        rows = rows_of(self.model, prompts, completions)
        starts = [1 if self.rounds.train_prompts else row.trained_from for row in rows]
        kept = [row.trained_from - start + 1 for row, start in zip(rows, starts, strict=True)]
        hidden = _states_by_row(recorded, completions, kept)
        return [
            dataclasses.replace(row, trained_from=start, target_hidden_TD=states_TD)
            for row, start, states_TD in zip(rows, starts, hidden, strict=True)
        ]


def _states_by_row(
    recorded: Sequence[Tensor], completions: Sequence[Sequence[int]], kept: Sequence[int]
) -> list[Tensor]:
    """The hidden states that predict each row's trained tokens, one [T, D] tensor per row.

    The first pass processes the left-padded prompts, [R, W, D]; the last kept[b] states of row b
    are needed. Pass t holds the rows whose completion has a token t, in order, [R, 1, D].
    """
    prompts_RWD, *passes = recorded
    states = [[prompts_RWD[row, -count:]] for row, count in enumerate(kept)]
    for position, states_R1D in enumerate(passes, start=1):
        unfinished = [row for row, text in enumerate(completions) if len(text) > position]
        for row, state_1D in zip(unfinished, states_R1D, strict=True):
            states[row].append(state_1D)
    return [torch.cat(row) for row in states]
