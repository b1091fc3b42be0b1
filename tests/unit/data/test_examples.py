from typing import Any

import pytest
from tokenizers.normalizers import Replace

from paceline.data.collate import TokenRow, batches_of_like_length, collate
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


@pytest.mark.parametrize(
    ("completion", "built"),
    [
        ([7, 8], ([5, 6, 7, 8, EOS], 2, 2)),
        ([7, EOS], ([5, 6, 7, EOS], 2, 2)),
        ([11, 12, 13, 14, 15], ([5, 6, 11, 12, 13, 14], 2, 2)),  # one that is cut has no end
        (None, ([5, 6], 2, 2)),  # a prompt alone is not fixed text
    ],
)
@pytest.mark.filterwarnings("ignore:1 of 1 completions are longer")
def test_a_pair_ends_with_one_end_token_and_trains_the_completion_only(
    tokenizer: Any, completion: list[int] | None, built: Any
):
    pair = Record("p", "prompt", text=[5, 6], completion=completion)
    assert build(tokenizer, pair) == [built]


def test_of_a_completion_that_is_normalised_to_nothing_the_end_is_left():
    """As of the zero-width spaces in parallel corpora, in the tokenizers of T5 and Marian."""
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.normalizer = Replace("\u200b", "")
    prompt = tokenizer("hi")["input_ids"]
    pair = Record("p", "prompt", text="hi", completion="\u200b")
    assert build(tokenizer, pair) == [([*prompt, EOS], len(prompt), len(prompt))]


def test_a_prompt_that_is_too_long_loses_its_beginning_with_a_warning_and_stays(tokenizer: Any):
    # trl#4725: prompts were cut away silently
    records = [
        Record("p", "prompt", text=[5, 6, 7, 8, 9], completion=[10]),
        Record("q", "prompt", text=[5], completion=[10]),
    ]
    with pytest.warns(UserWarning, match="1 of 2 prompts are longer than 3 tokens"):
        built = build(tokenizer, *records)
    assert built == [([7, 8, 9, 10, EOS], 3, 3), ([5, 10, EOS], 1, 1)]


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
    assert all((prompt, t) == (min(3, len(piece) - 1), 1) for piece, prompt, t in built)


def test_nothing_to_learn_from_is_an_error():
    endless = tiny_tokenizer()
    endless.eos_token = None
    with pytest.raises(PromptError, match="no text from d on can be trained"):
        build(endless, document([10]))


def test_labels_masks_and_padding_of_an_example_made_by_hand():
    batch = collate(
        [TokenRow([10, 11, 12, 13], trained_from=2), TokenRow([20, 21], trained_from=1)]
    )
    assert batch.tokens_BT.tolist() == [[10, 11, 12], [20, 0, 0]]
    assert batch.labels_BT.tolist() == [[11, 12, 13], [21, 0, 0]]
    assert batch.mask_BT.tolist() == [[False, True, True], [True, False, False]]
    assert batch.attention_BT is not None
    assert batch.attention_BT.tolist() == [[1, 1, 1], [1, 0, 0]]
    assert collate([TokenRow([1, 2, 3], 1), TokenRow([4, 5, 6], 2)]).attention_BT is None


def test_a_label_that_equals_the_padding_token_is_kept():
    # pad == eos in SmolLM2: a mask by token would drop the label that ends the text
    eos_and_padding = 0
    batch = collate(
        [TokenRow([5, 6, eos_and_padding], 1), TokenRow([5, 6, 7, 8, eos_and_padding], 1)]
    )
    assert batch.mask_BT.sum(-1).tolist() == [2, 4]
    assert batch.labels_BT[batch.mask_BT].tolist() == [6, eos_and_padding, 6, 7, 8, eos_and_padding]


@pytest.mark.parametrize(("tokens", "trained_from"), [([1], 1), ([1, 2], 0), ([1, 2], 2)])
def test_a_row_without_context_or_label_is_our_own_mistake(tokens: list[int], trained_from: int):
    with pytest.raises(AssertionError):
        collate([TokenRow(tokens, trained_from)])


def test_one_long_row_among_many_is_alone():
    lengths = [8] * 15 + [3003] + [9] * 14
    batches = list(batches_of_like_length(lengths, 16))
    assert [row for batch in batches for row in batch if lengths[row] > 9] == [15]
    assert [15] in batches
    assert sorted(row for batch in batches for row in batch) == list(range(30))
    assert sum(len(batch) * max(lengths[row] for row in batch) for batch in batches) < 3300


@pytest.mark.parametrize("most_rows", [1, 3, 4, 100])
def test_batches_keep_every_bound(most_rows: int):
    lengths = [(7 * n) % 23 + 1 for n in range(50)]
    added = [(5 * n) % 11 + 1 for n in range(50)]
    limit = 24
    batches = list(batches_of_like_length(lengths, most_rows, added, limit))
    assert sorted(row for batch in batches for row in batch) == list(range(50))
    for batch in batches:
        longest = max(lengths[row] for row in batch)
        assert len(batch) <= most_rows
        assert len(batch) * longest <= 2 * sum(lengths[row] for row in batch)
        if len(batch) > 1:
            assert longest + max(added[row] for row in batch) <= limit
