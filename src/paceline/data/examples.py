"""Builds training examples from records: truncation, packing and the first token with loss."""

from __future__ import annotations

import sys
import warnings
from array import array
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor

from paceline.core.top_k_tail import UNUSED, TopScores
from paceline.data.tokens import cut_text, encode_prompt, truncated, turns, warn_of_unused
from paceline.errors import PromptError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from transformers import PreTrainedTokenizerBase

    from paceline.data.prompts import Record, TopTokens
    from paceline.data.tokens import Turn


@dataclass(frozen=True, slots=True)
class Example:
    """A training text, or a prompt without a completion.

    Attributes:
        tokens: Prompt and completion; for an encoder-decoder, decoder prompt and completion.
        prompt_length: Number of leading tokens used as the prompt for on-policy generation.
        trained_from: Index of the first token with loss when the text is used unchanged; None if
            there is no completion.
        where: Source location, for error messages.
        source: Encoder input; None for a decoder-only model.
        top: The target's most likely tokens before each token with loss; None: not recorded.
        hidden_TD: Its hidden states before each token with loss, bfloat16; None: not recorded.
    """

    tokens: Sequence[int]
    prompt_length: int
    trained_from: int | None
    where: str
    source: Sequence[int] | None = None
    top: TopScores | None = None
    hidden_TD: Tensor | None = None

    @property
    def prompt(self) -> list[int]:
        """The model's input."""
        return list(self.tokens[: self.prompt_length] if self.source is None else self.source)


class Lengths(NamedTuple):
    """Maximum lengths of prompt and completion, in tokens."""

    prompt: int
    completion: int


def build_examples(
    records: Sequence[Record],
    tokenizer: PreTrainedTokenizerBase,
    lengths: Lengths,
    *,
    eos_token_ids: Sequence[int] = (),
    pack_documents: bool = False,
    decoder_prompt: Sequence[int] | None = None,
    recorded_states: bool = False,
) -> list[Example]:
    """Tokenise records and truncate them to the limits.

    With the `decoder_prompt` of an encoder-decoder, all prompts and documents are encoder inputs
    and only completions carry loss. For a decoder-only model:

    A chat gives an example for each answer of its assistant, with the chat before it as the prompt.
    Prompts are truncated on the left, completions on the right; a warning counts the prompts and
    the answers of chats. Documents are split into consecutive chunks of `lengths.prompt +
    lengths.completion` tokens. The first `lengths.prompt` tokens of a chunk are its prompt for
    on-policy generation; if the chunk is used unchanged, all but the first carry loss.
    `pack_documents` concatenates the documents before splitting
    them, which avoids padding; a chunk may then span two documents.

    Documents and untruncated completions end with the tokenizer's end-of-text token, and answers of
    chats with the first of the model's stop tokens, `eos_token_ids`, that their template puts
    there. `recorded_states`: every record needs the target's hidden states, which the examples then
    have.
    """
    examples: list[Example] = []
    packed: list[int] = []
    encoder = decoder_prompt is not None
    cut = _Truncated(lengths, encoder=encoder)
    for record in records:
        if record.kind == "document" and not encoder:
            if recorded_states:
                _hidden_states(record, 0)
            text = append_eos(encode_prompt(record, tokenizer), tokenizer)
            if pack_documents:
                packed += text
            else:
                examples += _cut(text, lengths, record.where)
            continue
        for turn in turns(record, tokenizer, eos_token_ids=eos_token_ids, encoder=encoder):
            cut.add(turn, record)
            prompt = truncated(turn.prompt, lengths.prompt, record, tokenizer, encoder=encoder)
            text = _completion(turn, record, lengths, tokenizer)
            found = turn._replace(prompt=prompt, completion=text)
            examples.append(
                _example(record, found, decoder_prompt, recorded_states=recorded_states)
            )
    examples += _cut(packed, lengths, "packed documents")
    cut.warn()
    warn_of_unused(records, tokenizer)
    if not examples:
        raise PromptError(
            f"no text from {records[0].where} on can be trained; a document needs two tokens"
        )
    return examples


def record_examples(
    record: Record,
    tokenizer: PreTrainedTokenizerBase,
    *,
    eos_token_ids: Sequence[int] = (),
    decoder_prompt: Sequence[int] | None = None,
) -> list[Example]:
    """The examples of one record at their full lengths, as `build_examples` makes them."""
    return build_examples(
        [record],
        tokenizer,
        Lengths(sys.maxsize // 2, sys.maxsize // 2),
        eos_token_ids=eos_token_ids,
        decoder_prompt=decoder_prompt,
    )


def _completion(
    turn: Turn, record: Record, lengths: Lengths, tokenizer: PreTrainedTokenizerBase
) -> list[int] | None:
    """The completion with its end, up to the maximum length."""
    text = turn.completion
    if text is None:
        return None
    if not (record.open_ended or turn.ended):
        text = append_eos(text, tokenizer)
    return text[: turn.given + lengths.completion]


class _Truncated:
    """Lengths of the prompts, and of the answers of chats, that are truncated."""

    def __init__(self, lengths: Lengths, *, encoder: bool) -> None:
        self.lengths = lengths
        self.encoder = encoder
        self.num_prompts = self.num_answers = 0
        self.prompts: list[int] = []
        self.answers: list[int] = []

    def add(self, turn: Turn, record: Record) -> None:
        self.num_prompts += 1
        if len(turn.prompt) > self.lengths.prompt:
            self.prompts.append(len(turn.prompt))
        if turn.completion is not None and record.kind == "chat":
            self.num_answers += 1
            size = len(turn.completion) - turn.given
            if size > self.lengths.completion:
                self.answers.append(size)

    def warn(self) -> None:
        """Warn once of what is left out, with the settings that decide about it."""
        found: list[str] = []
        if self.prompts:
            counts = f"{len(self.prompts)} of {self.num_prompts} prompts"
            side = "right" if self.encoder else "left"
            found.append(
                cut_text(counts, self.prompts, self.lengths.prompt, side, "max_prompt_tokens")
            )
        if self.answers:
            counts = f"{len(self.answers)} of {self.num_answers} answers of chats"
            limit = self.lengths.completion
            found.append(cut_text(counts, self.answers, limit, "right", "max_completion_tokens"))
        if found:
            warnings.warn(". ".join(found), stacklevel=3)


def _example(
    record: Record,
    turn: Turn,
    decoder_prompt: Sequence[int] | None,
    *,
    recorded_states: bool,
) -> Example:
    """A prompt and its completion, truncated to the limits; None: it has none."""
    prompt, text = turn.prompt, turn.completion
    context = prompt if decoder_prompt is None else decoder_prompt
    count = len(text or ())
    return Example(
        tokens=array("i", [*context, *(text or ())]),
        prompt_length=len(context),
        trained_from=None if text is None else len(context) + turn.given,
        where=record.where,
        source=None if decoder_prompt is None else array("i", prompt),
        top=None if record.top is None else top_scores_of(record.top, count),
        hidden_TD=_hidden_states(record, count) if recorded_states else None,
    )


def top_scores_of(top: TopTokens, count: int) -> TopScores:
    """The first `count` positions as tensors, filled up with the token `UNUSED`."""
    width = max((len(row) for row in top.tokens[:count]), default=0)
    tokens = torch.full((count, width), UNUSED, dtype=torch.int32)
    log_probs = torch.zeros(count, width)
    for index in range(count):
        size = len(top.tokens[index])
        tokens[index, :size] = torch.tensor(top.tokens[index], dtype=torch.int32)
        log_probs[index, :size] = torch.tensor(top.log_probs[index])
    return TopScores(tokens, log_probs)


def _hidden_states(record: Record, count: int) -> Tensor:
    """The first `count` rows of a record's hidden states, [count, D]."""
    if record.hidden is None or record.completion is None:
        raise PromptError(
            f"{record.where} has no hidden_states; record them by generate-data with "
            "writer.hidden_states, or unset data.recorded_states"
        )
    num_tokens = len(record.completion)
    width, rest = divmod(len(record.hidden), 2 * num_tokens)
    if rest or not width:
        raise PromptError(
            f"{record.where} has {num_tokens} completion tokens and {len(record.hidden):,} bytes "
            "of hidden_states, which is not a whole number of bfloat16 values for each; record "
            "them again"
        )
    values = torch.frombuffer(bytearray(record.hidden), dtype=torch.bfloat16)
    return values.view(num_tokens, width)[:count].clone()


def append_eos(tokens: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Append the end-of-text token, if there is one, unless it is already the last token."""
    end = cast("int | None", tokenizer.eos_token_id)
    return tokens if end is None or tokens[-1:] == [end] else [*tokens, end]


def _cut(tokens: list[int], lengths: Lengths, where: str) -> Iterator[Example]:
    size = lengths.prompt + lengths.completion
    cuts = [*range(0, len(tokens), size), len(tokens)]
    if len(tokens) % size == 1 and len(cuts) > 2 and size > 2:
        cuts[-2] -= 1  # a chunk of one token has no label, so move a token into it
    for start, end in pairwise(cuts):
        piece = tokens[start:end]
        if len(piece) < 2:
            continue
        prompt_length = min(lengths.prompt, len(piece) - 1)
        yield Example(array("i", piece), prompt_length, 1, where)
