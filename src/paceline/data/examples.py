"""Builds training examples from records: truncation, packing and the first token with loss."""

from __future__ import annotations

from array import array
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor

from paceline.data.collate import TokenRow
from paceline.data.tokens import encode_prompt, truncated, turns, warn_of_cut
from paceline.errors import PromptError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from transformers import PreTrainedTokenizerBase

    from paceline.data.prompts import Record
    from paceline.data.tokens import Turn


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
) -> list[TokenRow]:
    """Tokenise records and truncate them to the limits.

    With the `decoder_prompt` of an encoder-decoder, all prompts and documents are encoder inputs
    and only completions carry loss. For a decoder-only model:

    A chat gives an example for each answer of its assistant, with the chat before it as the prompt.
    Prompts are truncated on the left, completions on the right; a warning counts both.
    Documents are split into consecutive chunks of `lengths.prompt +
    lengths.completion` tokens. The first `lengths.prompt` tokens of a chunk are its prompt for
    on-policy generation; if the chunk is used unchanged, all but the first carry loss.
    `pack_documents` concatenates the documents before splitting
    them, which avoids padding; a chunk may then span two documents.

    Documents and untruncated completions end with the tokenizer's end-of-text token, and answers of
    chats with the first of the model's stop tokens, `eos_token_ids`, that their template puts
    there. `recorded_states`: every record needs the target's hidden states, which the examples then
    have.
    """
    examples: list[TokenRow] = []
    packed: list[int] = []
    encoder = decoder_prompt is not None
    num_prompts, long_prompts = 0, list[int]()
    num_answers, long_answers = 0, list[int]()
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
            num_prompts += 1
            long_prompts += [len(turn.prompt)] * (len(turn.prompt) > lengths.prompt)
            if turn.completion is not None:
                num_answers += 1
                size = len(turn.completion)
                long_answers += [size] * (size > lengths.completion)
            prompt = truncated(turn.prompt, lengths.prompt, record, tokenizer, encoder=encoder)
            text = _completion(turn, record, lengths, tokenizer)
            found = turn._replace(prompt=prompt, completion=text)
            examples.append(
                _example(record, found, decoder_prompt, recorded_states=recorded_states)
            )
    examples += _cut(packed, lengths, "packed documents")
    side = "right" if encoder else "left"
    warn_of_cut(long_prompts, f"{num_prompts} prompts", lengths.prompt, side=side)
    counted = f"{num_answers} completions"
    warn_of_cut(long_answers, counted, lengths.completion, "max_completion_tokens", "right")
    if not examples:
        raise PromptError(
            f"no text from {records[0].where} on can be trained; a document needs two tokens"
        )
    return examples


def _completion(
    turn: Turn, record: Record, lengths: Lengths, tokenizer: PreTrainedTokenizerBase
) -> list[int] | None:
    """The completion with its end, up to the maximum length."""
    text = turn.completion
    if text is None:
        return None
    if not (record.open_ended or turn.ended):
        text = append_eos(text, tokenizer)
    return text[: lengths.completion]


def _example(
    record: Record,
    turn: Turn,
    decoder_prompt: Sequence[int] | None,
    *,
    recorded_states: bool,
) -> TokenRow:
    """A prompt and its completion, truncated to the limits; None: it has none."""
    prompt, text = turn.prompt, turn.completion
    context = prompt if decoder_prompt is None else decoder_prompt
    count = len(text or ())
    return TokenRow(
        array("i", [*context, *(text or ())]),
        len(context),
        _hidden_states(record, count) if recorded_states else None,
        None if decoder_prompt is None else array("i", prompt),
        None if record.top is None else record.top.rows(slice(count)),
        prompt_length=len(context),
        where=record.where,
    )


def _hidden_states(record: Record, count: int) -> Tensor:
    """The first `count` rows of a record's hidden states, [count, D]."""
    if record.hidden is None or record.completion is None:
        raise PromptError(
            f"{record.where} has no hidden_states; record them by generate-data with "
            "writer.hidden_states, or unset data.recorded_states"
        )
    values = torch.frombuffer(bytearray(record.hidden), dtype=torch.bfloat16)
    return values.view(len(record.completion), -1)[:count].clone()


def append_eos(tokens: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Append the end-of-text token, if there is one, unless it is already the last token."""
    end = cast("int | None", tokenizer.eos_token_id)
    return tokens if end is None or tokens[-1:] == [end] else [*tokens, end]


def _cut(tokens: list[int], lengths: Lengths, where: str) -> Iterator[TokenRow]:
    size = lengths.prompt + lengths.completion
    cuts = [*range(0, len(tokens), size), len(tokens)]
    if len(tokens) % size == 1 and len(cuts) > 2 and size > 2:
        cuts[-2] -= 1  # a chunk of one token has no label, so move a token into it
    for start, end in pairwise(cuts):
        piece = tokens[start:end]
        if len(piece) < 2:
            continue
        prompt_length = min(lengths.prompt, len(piece) - 1)
        yield TokenRow(array("i", piece), 1, prompt_length=prompt_length, where=where)
