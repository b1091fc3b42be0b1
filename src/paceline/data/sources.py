"""Sources of training text (Alg. A.2): corpus text, text from the draft or the target, or a mix.

The random generators are keyed by the number of examples drawn so far. This integer is the whole
state of a source: restoring it reproduces the remaining batches.
"""

# N trained positions of a batch, T of a row, D hidden size
from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import torch

from paceline.data.collate import TokenRow, collate
from paceline.data.examples import append_eos
from paceline.data.prompts import NO_COMPLETION, stream_records
from paceline.data.tokens import last_turn
from paceline.decode import AutoregressiveDecoder
from paceline.errors import ConfigError, PromptError
from paceline.models.contract import decoder_contexts
from paceline.records import append_jsonl, read_jsonl
from paceline.rng import named_generator

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

    from paceline.core.sampling import SamplingParams
    from paceline.data.prompts import CorpusConfig, Record
    from paceline.models.contract import Model
    from paceline.models.hf.base import HfModel


Origin = Literal["fixed", "draft", "target"]


@dataclass(frozen=True, slots=True)
class TextBatch:
    """This process's rows of one optimizer step, and which model or corpus they come from."""

    rows: list[TokenRow]
    origin: Origin


class BatchSource(Protocol):
    """Interface between the training loop and its source of text."""

    def next_batch(self, seconds_left: float = math.inf) -> TextBatch:
        """The next step's text."""
        ...


class Shard(NamedTuple):
    """Rank of this process; rows of a step are distributed round-robin over processes."""

    rank: int = 0
    world_size: int = 1


class ExampleStream:
    """Batches of examples, reshuffled every epoch; `num_drawn` is all of its state."""

    def __init__(
        self,
        examples: Sequence[TokenRow],
        batch_size: int,
        *,
        seed: int,
        shard: Shard | None = None,
    ) -> None:
        shard = shard or Shard()
        self.examples = examples
        self.batch_size = batch_size
        self.seed = seed
        self.mine = slice(shard.rank, None, shard.world_size)
        self.num_drawn = 0
        self._epoch = -1
        self._order: list[int] = []

    def take_indices(self) -> list[int]:
        """Indices of this process's examples in the next batch, which may span two epochs."""
        first = self.num_drawn
        self.num_drawn += self.batch_size
        return [self._at(position) for position in range(first, self.num_drawn)[self.mine]]

    def take_batch(self) -> list[TokenRow]:
        return [self.examples[index] for index in self.take_indices()]

    def my_seeds(self, num_rows: int, rng: torch.Generator) -> list[int]:
        """This process's seeds of `num_rows` texts.

        Every process draws all, so a text's seed does not depend on the number of processes.
        """
        return torch.randint(2**31, (num_rows,), generator=rng)[self.mine].tolist()

    def _at(self, position: int) -> int:
        epoch, index = divmod(position, len(self.examples))
        if epoch != self._epoch:
            rng = named_generator(self.seed, "example order", epoch)
            self._order = torch.randperm(len(self.examples), generator=rng).tolist()
            self._epoch = epoch
        return self._order[index]


class FixedText:
    """Training text taken unchanged from the corpus."""

    def __init__(self, stream: ExampleStream) -> None:
        self.stream = stream

    def next_batch(self, seconds_left: float = math.inf) -> TextBatch:
        return TextBatch([self.row(index) for index in self.stream.take_indices()], "fixed")

    def check(self, *, recorded: bool = False) -> None:
        """Raise PromptError if an example has no completion.

        `recorded`: or if the target's most likely tokens were not recorded with it.
        """
        for index in range(len(self.stream.examples)):
            example = self.row(index)
            if example.top is None and recorded:
                raise PromptError(
                    f"{example.where} has no top_tokens; record them by generate-data with "
                    "writer.top_logprobs, or choose another objective than top_k_tail"
                )

    def row(self, index: int) -> TokenRow:
        """An example; raises PromptError if it has no completion."""
        example = self.stream.examples[index]
        if example.trained_from == len(example.tokens):
            raise PromptError(f"{example.where} {NO_COMPLETION}")
        return example


class SampledText:
    """Corpus prompts with completions sampled from a model; the corpus's completions are unused."""

    def __init__(
        self,
        stream: ExampleStream,
        model: Model,
        origin: Literal["draft", "target"],
        *,
        sampling: SamplingParams,
        max_new_tokens: int,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        self.stream = stream
        self.model = model
        self.origin: Literal["draft", "target"] = origin
        self.sampling = sampling
        self.max_new_tokens = max_new_tokens
        self.eos_token_ids = eos_token_ids

    def next_batch(self, seconds_left: float = math.inf) -> TextBatch:
        """Rows of the next prompts with sampled completions; the prompt carries no loss."""
        rng = named_generator(self.stream.seed, f"{self.origin} text", self.stream.num_drawn)
        seeds = self.stream.my_seeds(self.stream.batch_size, rng)
        prompts = [example.prompt for example in self.stream.take_batch()]
        completions = sample_completions(
            self.model,
            prompts,
            seeds,
            self.max_new_tokens,
            sampling=self.sampling,
            eos_token_ids=self.eos_token_ids,
        )
        return TextBatch(rows_of(self.model, prompts, completions), self.origin)


def rows_of(
    model: Model, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]
) -> list[TokenRow]:
    """Training texts of generated completions; prompts carry no loss."""
    encodes = model.decoder_prompt is not None
    parts = zip(prompts, decoder_contexts(model, prompts), completions, strict=True)
    return [
        TokenRow([*context, *text], len(context), source=prompt if encodes else None)
        for prompt, context, text in parts
    ]


class Origins:
    """Samples each batch's source: fixed (probability lambda1), else draft (lambda2), else target.

    Paper: Zhou et al. 2023, Alg. A.2. Differs: the uniforms lie in [0, 1) and are compared with <,
    so that a fraction of 0 means never and a fraction of 1 means always.
    """

    def __init__(
        self, stream: ExampleStream, *, fixed_fraction: float, draft_fraction: float
    ) -> None:
        self.stream = stream
        self.fixed_fraction = fixed_fraction
        self.draft_fraction = draft_fraction
        self._counted, self._num_of_target = 0, 0

    def at(self, num_drawn: int) -> Origin:
        """Source of the batch that begins at this position of the stream."""
        rng = named_generator(self.stream.seed, "batch origin", num_drawn)
        first, second = torch.rand(2, generator=rng, dtype=torch.float64).tolist()
        if first < self.fixed_fraction:
            return "fixed"
        return "draft" if second < self.draft_fraction else "target"

    def num_of_target(self, num_drawn: int) -> int:
        """How many batches before this position of the stream are the target's."""
        if num_drawn < self._counted:
            self._counted, self._num_of_target = 0, 0
        for position in range(self._counted, num_drawn, self.stream.batch_size):
            self._num_of_target += self.at(position) == "target"
        self._counted = num_drawn
        return self._num_of_target


class MixedText:
    """Takes each batch from its source by `Origins`; all sources share one stream of examples."""

    def __init__(
        self, origins: Origins, fixed: BatchSource, draft: BatchSource, target: BatchSource
    ) -> None:
        self.origins = origins
        self.sources: dict[Origin, BatchSource] = {"fixed": fixed, "draft": draft, "target": target}

    def next_batch(self, seconds_left: float = math.inf) -> TextBatch:
        origin = self.origins.at(self.origins.stream.num_drawn)
        return self.sources[origin].next_batch(seconds_left)


class BlendedText:
    """Adds rows of a second corpus, such as pretraining text, to every batch.

    Paper: Goel et al. 2024, section 3: distillation and pretraining text 9:1 in each batch.
    """

    def __init__(self, main: BatchSource, stream: ExampleStream, other: PackedText) -> None:
        """`stream` is that of `main`; its position sets the batch of `other` too."""
        self.main = main
        self.stream = stream
        self.other = other

    def next_batch(self, seconds_left: float = math.inf) -> TextBatch:
        number = self.stream.num_drawn // self.stream.batch_size
        batch = self.main.next_batch(seconds_left)
        self.other.num_drawn = number * self.other.batch_size
        return TextBatch([*batch.rows, *self.other.next_batch().rows], batch.origin)


def sample_completions(
    model: Model,
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[int],
    max_new_tokens: int,
    *,
    sampling: SamplingParams | None = None,
    eos_token_ids: Sequence[int] | None = None,
) -> list[list[int]]:
    """Sample up to `max_new_tokens` for each prompt, with its seed; the end of a text included.

    `forced_eos` is not applied, because a forced token is not a sample of the model's distribution.
    """
    decoder = AutoregressiveDecoder(model, sampling)
    decoder.forces_eos = False
    written = decoder.generate(prompts, max_new_tokens, seeds, eos_token_ids)
    return [text.tokens for text in written]


_GROUP_SIZE = 16  # texts per forward pass of the target


class ReadText:
    """Fixed text with the target's hidden states for its trained tokens.

    Texts of similar length form fixed groups. The hidden states of a text therefore do not depend
    on when it is drawn, and a resumed run computes the same losses.
    """

    def __init__(self, stream: ExampleStream, target: HfModel, limit_gb: float) -> None:
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
        self._rows: dict[int, TokenRow] = {}
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
