"""Builds training examples from records: truncation, packing and the first token with loss."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from paceline.core.top_k_tail import UNUSED, TopScores
from paceline.data.tokens import encode, truncated, warn_of_cut_prompts
from paceline.errors import PromptError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from transformers import PreTrainedTokenizerBase

    from paceline.data.prompts import Record, TopTokens


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
    eos_token_id: int | None,
    train_document_prompts: bool = True,
    pack_documents: bool = False,
    decoder_prompt: Sequence[int] | None = None,
    recorded_states: bool = False,
) -> list[Example]:
    """Tokenise records and truncate them to the limits.

    With the `decoder_prompt` of an encoder-decoder, all prompts and documents are encoder inputs
    and only completions carry loss. For a decoder-only model:

    Prompts are truncated on the left (with a warning), completions on the right. Documents are
    split into consecutive chunks of `lengths.prompt + lengths.completion` tokens. The first
    `lengths.prompt` tokens of a chunk are its prompt for on-policy generation; if the chunk is used
    unchanged, all but the first carry loss unless `train_document_prompts` is False. Documents and
    untruncated completions end with the end-of-text token. `pack_documents` concatenates the
    documents before splitting them, which avoids padding; a chunk may then span two documents.

    `recorded_states`: every record needs the target's hidden states, which the examples then have.
    """
    examples: list[Example] = []
    num_cut = num_prompts = 0
    packed: list[int] = []
    encoder = decoder_prompt is not None
    for record in records:
        prompt, completion = encode(record, tokenizer)
        if record.kind == "document" and not encoder:
            if recorded_states:
                _hidden_states(record, 0)
            text = append_eos(prompt, eos_token_id)
            if pack_documents:
                packed += text
            else:
                examples += _cut(text, lengths, record.where, whole=train_document_prompts)
            continue
        num_prompts += 1
        num_cut += len(prompt) > lengths.prompt
        prompt = truncated(prompt, lengths.prompt, record, tokenizer, encoder=encoder)
        if completion is not None and not record.open_ended:
            completion = append_eos(completion, eos_token_id)
        text = None if completion is None else completion[: lengths.completion]
        examples.append(
            _example(record, prompt, text, decoder_prompt, recorded_states=recorded_states)
        )
    examples += _cut(packed, lengths, "packed documents", whole=train_document_prompts)
    warn_of_cut_prompts(num_cut, num_prompts, lengths.prompt, encoder=encoder)
    if not examples:
        raise PromptError(
            f"no document from {records[0].where} on has the two tokens that training needs; "
            "use longer documents"
        )
    return examples


def _example(
    record: Record,
    prompt: Sequence[int],
    text: Sequence[int] | None,
    decoder_prompt: Sequence[int] | None,
    *,
    recorded_states: bool,
) -> Example:
    """A prompt and its completion, truncated to the limits; None: it has none."""
    context = prompt if decoder_prompt is None else decoder_prompt
    count = len(text or ())
    return Example(
        tokens=array("i", [*context, *(text or ())]),
        prompt_length=len(context),
        trained_from=None if text is None else len(context),
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


def append_eos(tokens: list[int], eos_token_id: int | None) -> list[int]:
    """Append the end-of-text token unless it is already the last token."""
    if eos_token_id is None or tokens[-1:] == [eos_token_id]:
        return tokens
    return [*tokens, eos_token_id]


def _cut(tokens: list[int], lengths: Lengths, where: str, *, whole: bool) -> Iterator[Example]:
    size = lengths.prompt + lengths.completion
    cuts = [*range(0, len(tokens), size), len(tokens)]
    if len(tokens) % size == 1 and len(cuts) > 2 and size > 2:
        cuts[-2] -= 1  # a chunk of one token has no label, so move a token into it
    for start, end in pairwise(cuts):
        piece = tokens[start:end]
        if len(piece) < 2:
            continue
        prompt_length = min(lengths.prompt, len(piece) - 1)
        yield Example(array("i", piece), prompt_length, 1 if whole else prompt_length, where)
