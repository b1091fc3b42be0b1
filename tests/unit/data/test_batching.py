"""Rows of like length go together, and what comes out does not depend on who went with whom."""

import pytest
import torch

from paceline.core.sampling import SamplingParams
from paceline.data.collate import batches_of_like_length
from paceline.measure.acceptance import score_texts
from paceline.models.fakes import TableModel
from paceline.progress import silent


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
    together = score_texts(target, draft, prompts, texts, SamplingParams(), silent)
    for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        alone = score_texts(target, draft, [prompt], [text], SamplingParams(), silent)
        for whole, own in zip(together, alone, strict=True):
            assert torch.allclose(whole[row, : len(text)].double(), own[0].double(), atol=1e-6)
            assert not whole[row, len(text) :].any()
