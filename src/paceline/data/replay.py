"""Text of the target, written a round at a time and used more than once.

The target does not change, so its text can be written ahead, in batches far larger than a step's,
and its hidden states kept: nothing is scored a second time. What costs most in alignment is then
paid once a token, and every further use of a text costs the draft's pass alone.
"""

# R rows still being written, W widest prompt, T trained positions, D hidden width
from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from pydantic import Field
from torch import Tensor

from paceline.config import StrictModel
from paceline.data.collate import Row
from paceline.data.completions import sample_completions
from paceline.data.sources import ExampleStream, TextBatch
from paceline.models.hf.causal import recorded_hidden_states
from paceline.progress import silent
from paceline.rng import named_generator

_KEPT = 8  # rounds that are kept for the end of a run
_ROWS = 64  # written at a time: more are slower, and their logits take memory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.core.sampling import SamplingParams
    from paceline.data.sources import Shard
    from paceline.models.hf.causal import CausalModel
    from paceline.progress import Progress


class Rounds(StrictModel):
    """How many texts the target writes at a time, and how they are trained on.

    Attributes:
        rows: Texts of a round, over all processes.
        uses: How often each is trained on.
        train_prompts: Train on the prompts' tokens as well, whose hidden states are there anyway.
    """

    rows: int = Field(default=128, ge=1)
    uses: int = Field(default=2, ge=1)
    train_prompts: bool = False


@dataclass
class WritingClock:
    """How long the latest whole round took to write; a run keeps it with its state."""

    seconds: float = 0.0


class TargetRounds:
    """Prompts of the corpus, continued by the target, `rows` at a time, each used `uses` times.

    The number of batches drawn before, from whatever source, says which round it is and where in it
    this batch stands; a run that is resumed writes its round again, the same one, and forgets the
    earlier ones.
    """

    def __init__(
        self,
        stream: ExampleStream,
        model: CausalModel,
        rounds: Rounds,
        *,
        sampling: SamplingParams,
        max_new_tokens: int,
        eos_token_ids: tuple[int, ...],
        shard: Shard,
        progress: Progress = silent,
        clock: WritingClock | None = None,
    ) -> None:
        assert rounds.rows % stream.batch_size == 0, "a round is cut into whole batches"
        self.stream = stream
        self.model = model
        self.rounds = rounds
        self.sampling = sampling
        self.max_new_tokens = max_new_tokens
        self.eos_token_ids = eos_token_ids
        self.progress = progress
        self._prompts = ExampleStream(stream.examples, rounds.rows, seed=stream.seed, shard=shard)
        self._clock = clock or WritingClock()
        self._size = len(range(stream.batch_size)[stream.mine])
        self._number = -1
        self._latest: deque[list[Row]] = deque(maxlen=_KEPT)

    def next_batch(self, seconds_left: float = math.inf) -> TextBatch:
        """Rows of the current round, in a fresh order every time it is gone through.

        A round that would take more than a third of the time left is not begun: the latest rounds
        are used again instead, all together, since the last one alone would be learnt by heart. Where
        there are none, in a run that was resumed, the part of the round is written that takes a third.
        """
        batch = self.stream.num_drawn // self.stream.batch_size
        self.stream.num_drawn += self.stream.batch_size
        batches_a_use = self.rounds.rows // self.stream.batch_size
        batches_a_round = batches_a_use * self.rounds.uses
        number = batch // batches_a_round
        if number != self._number:
            self._begin(number, seconds_left)
        past = batch - self._number * batches_a_round
        if past < batches_a_round:
            return self._batch(self._latest[-1], past, "round order")
        rows = [row for round_ in self._latest for row in round_]
        return self._batch(rows, past - batches_a_round, "order of latest rounds")

    def _begin(self, number: int, seconds_left: float) -> None:
        """Write the round if there is time, else a part of it if there is no text at all."""
        if seconds_left >= 3 * self._clock.seconds:
            started = time.monotonic()
            self._latest.append(self._write(number, self.rounds.rows))
            self._number = number
            self._clock.seconds = time.monotonic() - started
        elif not self._latest:
            batches = self.rounds.rows // self.stream.batch_size
            batches = int(batches * seconds_left / (3 * self._clock.seconds))
            self._latest.append(self._write(number, max(1, batches) * self.stream.batch_size))
            self._number = number - 1  # none of a whole round

    def _batch(self, rows: Sequence[Row], index: int, stream_name: str) -> TextBatch:
        """Batch `index` of these rows, gone through again and again, each time in a new order."""
        size = self._size
        use, index = divmod(index, len(rows) // size)
        rng = named_generator(self.stream.seed, stream_name, self._number, use)
        order = torch.randperm(len(rows), generator=rng)
        chosen = order[index * size : (index + 1) * size]
        return TextBatch([rows[int(row)] for row in chosen], "target")

    def _write(self, number: int, count: int) -> list[Row]:
        """The first `count` texts of a round, over all processes."""
        self._prompts.num_drawn = number * self.rounds.rows
        count = len(range(count)[self.stream.mine])
        prompts = [example.prompt for example in self._prompts.take_batch()][:count]
        rng = named_generator(self.stream.seed, "target round", number)
        uniforms_BN = self.stream.my_uniforms(self.rounds.rows, self.max_new_tokens, rng)
        rows: list[Row] = []
        for start in range(0, len(prompts), _ROWS):
            part = slice(start, start + _ROWS)
            rows += self._write_part(prompts[part], uniforms_BN[part])
        return rows

    def _write_part(self, prompts: Sequence[Sequence[int]], uniforms_RN: Tensor) -> list[Row]:
        with recorded_hidden_states(self.model) as recorded:
            completions = sample_completions(
                self.model,
                prompts,
                uniforms_RN,
                sampling=self.sampling,
                eos_token_ids=self.eos_token_ids,
                progress=self.progress,
            )
        starts = [1 if self.rounds.train_prompts else len(prompt) for prompt in prompts]
        num_read = [len(prompt) - start + 1 for prompt, start in zip(prompts, starts, strict=True)]
        hidden = _by_row(recorded, completions, num_read)
        return [
            Row([*prompt, *completion], start, states_TD)
            for prompt, completion, start, states_TD in zip(
                prompts, completions, starts, hidden, strict=True
            )
        ]


def _by_row(
    recorded: Sequence[Tensor], completions: Sequence[Sequence[int]], num_read: Sequence[int]
) -> list[Tensor]:
    """The states that each row's trained tokens follow from, [T, D] a row.

    The first pass read the prompts, right-aligned, [R, W, D]; of row b its last num_read[b] columns
    count. The pass before token t held the rows whose completion has a token t, in order, [R, 1, D].
    """
    prompts_RWD, *passes = recorded
    states = [[prompts_RWD[row, -count:]] for row, count in enumerate(num_read)]
    for position, states_R1D in enumerate(passes, start=1):
        writing = [row for row, text in enumerate(completions) if len(text) > position]
        for row, state_1D in zip(writing, states_R1D, strict=True):
            states[row].append(state_1D)
    return [torch.cat(row) for row in states]
