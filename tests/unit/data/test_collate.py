"""Rows are padded and labelled by position, and rows of like length go together."""

import pytest
import torch

from paceline.core.sampling import SamplingParams
from paceline.data.collate import TokenRow, batches_of_like_length, collate
from paceline.measure.acceptance import PairTexts, TextScores, score_texts
from support.fakes import TableModel
from support.models import tiny_model


def test_labels_masks_and_padding_of_an_example_made_by_hand():
    batch = collate(
        [TokenRow([10, 11, 12, 13], trained_from=2), TokenRow([20, 21], trained_from=1)]
    )
    assert batch.tokens_BT.tolist() == [[10, 11, 12], [20, 0, 0]]
    assert batch.labels_BT.tolist() == [[11, 12, 13], [21, 0, 0]]
    assert batch.mask_BT.tolist() == [[False, True, True], [True, False, False]]
    assert batch.attention_BT is not None
    assert batch.attention_BT.tolist() == [[1, 1, 1], [1, 0, 0]]


def test_every_label_is_the_token_that_a_shifted_loss_of_transformers_would_use():
    model = tiny_model()
    tokens = [5, 9, 3, 44, 7, 12]
    row = collate([TokenRow(tokens, trained_from=3)])
    ids = torch.tensor([tokens])
    with torch.no_grad():
        theirs = model.hf(ids, labels=torch.tensor([[-100] * 3 + tokens[3:]])).loss
        logits_BTV = model.hf(row.tokens_BT).logits
    ours = torch.nn.functional.cross_entropy(logits_BTV[row.mask_BT], row.labels_BT[row.mask_BT])
    assert float(ours) == pytest.approx(float(theirs), abs=1e-6)


def test_a_label_that_equals_the_padding_token_is_kept():
    # pad == eos in SmolLM2: a mask by token would drop the label that ends the text
    eos_and_padding = 0
    batch = collate(
        [TokenRow([5, 6, eos_and_padding], 1), TokenRow([5, 6, 7, 8, eos_and_padding], 1)]
    )
    assert batch.mask_BT.sum(-1).tolist() == [2, 4]
    assert batch.labels_BT[batch.mask_BT].tolist() == [6, eos_and_padding, 6, 7, 8, eos_and_padding]


def test_rows_of_one_length_need_no_attention_mask():
    assert collate([TokenRow([1, 2, 3], 1), TokenRow([4, 5, 6], 2)]).attention_BT is None


def test_hidden_states_of_a_padded_row_are_those_of_the_row_alone():
    model = tiny_model()
    short, long = TokenRow([4, 5, 6], 1), TokenRow([9, 8, 7, 6, 5, 4, 3], 1)
    both, alone = collate([long, short]), collate([short])
    with torch.no_grad():
        padded = model.hidden(both)[1, :2]
        single = model.hidden(alone)[0]
    torch.testing.assert_close(padded, single, atol=1e-5, rtol=1e-5)


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


def test_scores_come_in_the_order_of_the_prompts():
    """Each text's figures as when it is scored alone, whatever its length."""
    rng = torch.Generator().manual_seed(3)
    target, draft = (TableModel(torch.rand(6, 6, generator=rng).softmax(-1)) for _ in range(2))
    prompts = [[1] * 40, [2], [3, 4] * 3, [5], [0] * 90, [1, 2]]
    texts = [[1, 2, 3], [4, 5], [0], [1, 1, 1, 2], [5, 4, 3], [2]]

    def score(prompts: list[list[int]], texts: list[list[int]]) -> TextScores:
        of = PairTexts(target, draft, prompts, texts, SamplingParams())
        return score_texts(of, with_cross_entropy=True)

    together = score(prompts, texts)
    for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        alone = score([prompt], [text])
        for whole, own in zip(together, alone, strict=True):
            assert torch.allclose(whole[row, : len(text)].double(), own[0].double(), atol=1e-6)
            assert not whole[row, len(text) :].any()
