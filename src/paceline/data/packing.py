"""Packs documents end to end into rows of equal length, without padding or lost tokens.

Reads one block of documents at a time, so a corpus can be larger than memory. Leftover tokens go
into the next row, also at the end of an epoch.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from paceline.data.collate import TokenRow
from paceline.data.examples import append_eos
from paceline.data.prompts import stream_records
from paceline.data.sources import Shard, TextBatch
from paceline.data.tokens import last_turn
from paceline.errors import PromptError
from paceline.records import append_jsonl, read_jsonl
from paceline.rng import named_generator

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

    from paceline.data.prompts import CorpusConfig, Record

_BLOCK = 4096  # documents per shuffling block


class _Mark(NamedTuple):
    """State at the start of a block: number of rows before it, and the leftover tokens."""

    num_rows: int
    epoch: int
    block: int
    waiting: list[int]


class PackedText:
    """Source of rows of packed documents, each document followed by the end-of-text token.

    Answers of chats end with the first of the model's stop tokens, `eos_token_ids`, instead.

    Documents are shuffled within blocks, anew every epoch. The file `marks` records the start of
    each block, so that a resumed run skips earlier blocks; the rows do not depend on it.

    Raises:
        PromptError: the corpus is missing or empty, or a chat ends without an answer.
    """

    def __init__(
        self,
        corpus: CorpusConfig,
        tokenizer: PreTrainedTokenizerBase,
        row_length: int,
        batch_size: int,
        *,
        eos_token_ids: Sequence[int] = (),
        seed: int,
        shard: Shard | None = None,
        marks: Path | None = None,
        block_size: int = _BLOCK,
    ) -> None:
        self.corpus = corpus
        self.tokenizer = tokenizer
        self.row_length = row_length
        self.batch_size = batch_size
        self.eos_token_ids = eos_token_ids
        self.seed = seed
        self.shard = shard or Shard()
        self.marks = marks
        self.block_size = block_size
        self.num_drawn = 0
        next(stream_records(corpus))  # raises here rather than at the first step
        self._known = [_Mark(0, 0, 0, [])]
        self._rows: Iterator[list[int]] = iter(())
        self._next = -1  # index of the next row of `_rows`

    def next_batch(self, seconds_left: float = math.inf) -> TextBatch:
        """This process's share of the next rows."""
        if self._next != self.num_drawn:
            self._rows = self._rows_from(self.num_drawn)
        rows = list(itertools.islice(self._rows, self.batch_size))
        self.num_drawn += self.batch_size
        self._next = self.num_drawn
        mine = rows[self.shard.rank :: self.shard.world_size]
        return TextBatch([TokenRow(tokens, 1) for tokens in mine], "fixed")

    def _rows_from(self, first: int) -> Iterator[list[int]]:
        if self.marks is not None and len(self._known) == 1:
            self._known += [_Mark(**row) for row in read_jsonl(self.marks)]
        start = max((mark for mark in self._known if mark.num_rows <= first), key=_position)
        return itertools.islice(self._pack(start), first - start.num_rows, None)

    def _pack(self, start: _Mark) -> Iterator[list[int]]:
        num_rows, waiting = start.num_rows, list(start.waiting)
        for epoch in itertools.count(start.epoch):
            skipped = start.block if epoch == start.epoch else 0
            for block, records in enumerate(self._blocks(skipped), start=skipped):
                self._remember(_Mark(num_rows, epoch, block, list(waiting)))
                for record in self._shuffled(records, epoch, block):
                    waiting += self._tokens(record)
                    whole = len(waiting) // self.row_length * self.row_length
                    for begin in range(0, whole, self.row_length):
                        yield waiting[begin : begin + self.row_length]
                    num_rows += whole // self.row_length
                    del waiting[:whole]

    def _blocks(self, skipped: int) -> Iterator[Sequence[Record]]:
        records = itertools.islice(stream_records(self.corpus), skipped * self.block_size, None)
        while block := list(itertools.islice(records, self.block_size)):
            yield block

    def _shuffled(self, records: Sequence[Record], epoch: int, block: int) -> Iterator[Record]:
        rng = named_generator(self.seed, "packing", epoch, block)
        return (records[index] for index in torch.randperm(len(records), generator=rng).tolist())

    def _tokens(self, record: Record) -> list[int]:
        turn = last_turn(record, self.tokenizer, eos_token_ids=self.eos_token_ids)
        if turn.completion is None and record.kind == "chat":  # it ends with an open answer
            raise PromptError(
                f"{record.where} is a chat without a last answer; add it, or leave the line out"
            )
        text = turn.prompt + (turn.completion or [])
        ended = record.open_ended or turn.ended
        return text if ended else append_eos(text, self.tokenizer)

    def _remember(self, mark: _Mark) -> None:
        if _position(mark) > _position(self._known[-1]):
            self._known.append(mark)
            if self.marks is not None and self.shard.rank == 0:
                append_jsonl(self.marks, mark._asdict())


def _position(mark: _Mark) -> tuple[int, int]:
    return mark.epoch, mark.block
