"""Training texts cut to size: what a model may be given, and what of it carries loss."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from paceline.data.tokens import encode, warn_of_cut_prompts
from paceline.errors import PromptError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from transformers import PreTrainedTokenizerBase

    from paceline.data.prompts import Record


@dataclass(frozen=True, slots=True)
class Example:
    """A training text, or a prompt alone.

    Attributes:
        tokens: Prompt and completion.
        prompt_length: Leading tokens that a model is given when it writes the rest itself.
        trained_from: First token that carries loss when the text is used as it is; None for a
            prompt that has no completion.
    """

    tokens: Sequence[int]
    prompt_length: int
    trained_from: int | None
    where: str

    @property
    def prompt(self) -> list[int]:
        return list(self.tokens[: self.prompt_length])


class Lengths(NamedTuple):
    """Limits on the two parts of a text, in tokens."""

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
) -> list[Example]:
    """Tokenise records and fit them to the limits.

    A prompt that is too long loses its beginning (with a warning), a completion its end. A document
    is cut into consecutive pieces of both limits together: a model that writes is given the first
    `lengths.prompt` tokens of a piece, while a piece used as it is trains every token that has one
    before it (or the rest only, with `train_document_prompts` off). Texts that fit end with the
    end-of-text token, as a label.

    `pack_documents` joins all documents before they are cut, so that the pieces are full and no time
    goes into padding; a piece may then begin in one and end in another.
    """
    examples: list[Example] = []
    num_cut = num_prompts = 0
    packed: list[int] = []
    for record in records:
        prompt, completion = encode(record, tokenizer)
        if record.kind == "document":
            text = _ended(prompt, eos_token_id)
            if pack_documents:
                packed += text
            else:
                examples += _cut(text, lengths, record.where, whole=train_document_prompts)
            continue
        num_prompts += 1
        num_cut += len(prompt) > lengths.prompt
        prompt = prompt[-lengths.prompt :]
        tokens, trained_from = prompt, None
        if completion is not None:
            whole = completion if record.open_ended else _ended(completion, eos_token_id)
            tokens = prompt + whole[: lengths.completion]
            trained_from = len(prompt)
        examples.append(Example(array("i", tokens), len(prompt), trained_from, record.where))
    examples += _cut(packed, lengths, "packed documents", whole=train_document_prompts)
    warn_of_cut_prompts(num_cut, num_prompts, lengths.prompt)
    if not examples:
        raise PromptError(
            f"no document from {records[0].where} on has two tokens to learn from; give longer text"
        )
    return examples


def _ended(tokens: list[int], eos_token_id: int | None) -> list[int]:
    if eos_token_id is None or tokens[-1:] == [eos_token_id]:
        return tokens
    return [*tokens, eos_token_id]


def _cut(tokens: list[int], lengths: Lengths, where: str, *, whole: bool) -> Iterator[Example]:
    size = lengths.prompt + lengths.completion
    cuts = [*range(0, len(tokens), size), len(tokens)]
    if len(tokens) % size == 1 and len(cuts) > 2 and size > 2:
        cuts[-2] -= 1  # nothing is learnt of a token that has none before it
    for start, end in pairwise(cuts):
        piece = tokens[start:end]
        if len(piece) < 2:
            continue
        prompt_length = min(lengths.prompt, len(piece) - 1)
        yield Example(array("i", piece), prompt_length, 1 if whole else prompt_length, where)
