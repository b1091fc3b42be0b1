from typing import Any

import pytest
from tokenizers.normalizers import Replace

from paceline.data.examples import Lengths, build_examples
from paceline.data.prompts import Record
from paceline.errors import PromptError
from support.models import tiny_tokenizer

EOS = 1
LIMITS = Lengths(prompt=3, completion=4)


def document(tokens: list[int]) -> Record:
    return Record("d", "document", text=tokens)


def build(
    tokenizer: Any, *records: Record, **options: Any
) -> list[tuple[list[int], int, int | None]]:
    examples = build_examples(records, tokenizer, LIMITS, **options)
    return [(list(e.tokens), e.prompt_length, e.trained_from) for e in examples]


def test_a_pair_ends_with_its_end_token_and_trains_the_completion_only(tokenizer: Any):
    pair = Record("p", "prompt", text=[5, 6], completion=[7, 8])
    assert build(tokenizer, pair) == [([5, 6, 7, 8, EOS], 2, 2)]


def test_of_a_completion_that_is_normalised_to_nothing_the_end_is_left():
    """As of the zero-width spaces in parallel corpora, in the tokenizers of T5 and Marian."""
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.normalizer = Replace("\u200b", "")
    prompt = tokenizer("hi")["input_ids"]
    pair = Record("p", "prompt", text="hi", completion="\u200b")
    assert build(tokenizer, pair) == [([*prompt, EOS], len(prompt), len(prompt))]


def test_an_end_token_that_is_there_is_not_doubled(tokenizer: Any):
    pair = Record("p", "prompt", text=[5], completion=[7, EOS])
    assert build(tokenizer, pair) == [([5, 7, EOS], 1, 1)]


def test_a_completion_that_is_cut_has_no_end_token(tokenizer: Any):
    pair = Record("p", "prompt", text=[5], completion=[11, 12, 13, 14, 15])
    assert build(tokenizer, pair) == [([5, 11, 12, 13, 14], 1, 1)]


def test_a_prompt_that_is_too_long_loses_its_beginning_with_a_warning_and_stays(tokenizer: Any):
    # trl#4725: prompts were cut away silently
    records = [
        Record("p", "prompt", text=[5, 6, 7, 8, 9], completion=[10]),
        Record("q", "prompt", text=[5], completion=[10]),
    ]
    with pytest.warns(UserWarning, match="1 of 2 prompts are longer than 3 tokens"):
        built = build(tokenizer, *records)
    assert built == [([7, 8, 9, 10, EOS], 3, 3), ([5, 10, EOS], 1, 1)]


def test_a_prompt_alone_is_not_fixed_text(tokenizer: Any):
    assert build(tokenizer, Record("p", "prompt", text=[5, 6])) == [([5, 6], 2, 2)]


def test_a_document_is_cut_into_pieces_that_lose_no_token(tokenizer: Any):
    tokens = list(range(10, 27))
    built = build(tokenizer, document(tokens))
    assert [piece for piece, _, _ in built] == [tokens[:7], tokens[7:14], [*tokens[14:], EOS]]
    assert [prompt for _, prompt, _ in built] == [3, 3, 3]
    assert {trained for _, _, trained in built} == {1}


def test_packed_documents_fill_every_piece_but_the_last(tokenizer: Any):
    documents = [document(list(range(first, first + 5))) for first in (10, 20, 30)]
    built = build(tokenizer, *documents, pack_documents=True)
    assert [piece for piece, _, _ in built] == [
        [10, 11, 12, 13, 14, EOS, 20],
        [21, 22, 23, 24, EOS, 30, 31],
        [32, 33, 34, EOS],
    ]
    assert [prompt for _, prompt, _ in built] == [3, 3, 3]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("length", [1, 5, 6, 7, 12, 13, 14, 20, 27])
def test_whatever_its_length_no_token_of_a_document_is_lost(
    tokenizer: Any, length: int, *, packed: bool
):
    tokens = list(range(10, 10 + length))
    built = build(tokenizer, document(tokens), pack_documents=packed)
    assert [token for piece, _, _ in built for token in piece] == [*tokens, EOS]
    # a last token that would stand alone takes one from the piece before it
    assert all(2 <= len(piece) <= 7 for piece, _, _ in built)
    assert all(len(piece) >= 6 for piece, _, _ in built[:-1])
    assert all(prompt == min(3, len(piece) - 1) for piece, prompt, _ in built)


def test_a_document_shorter_than_a_prompt_leaves_its_end_to_be_written(tokenizer: Any):
    assert build(tokenizer, document([10])) == [([10, EOS], 1, 1)]


def test_nothing_to_learn_from_is_an_error():
    endless = tiny_tokenizer()
    endless.eos_token = None
    with pytest.raises(PromptError, match="no text from d on can be trained"):
        build(endless, document([10]))
