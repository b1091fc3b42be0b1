"""A divergence over part of the vocabulary: what it leaves out comes back on average."""

import itertools

import pytest
import torch

from paceline.core.fused import Head
from paceline.rng import named_generator
from paceline.train.vocabulary import LossVocabulary, VocabularySample, places_of


def sample(frequent: int, drawn: int, counts: list[int]) -> VocabularySample:
    ranking = torch.tensor(counts).argsort(descending=True, stable=True)
    return VocabularySample(LossVocabulary(frequent=frequent, drawn=drawn), ranking)


def test_the_frequent_ones_are_always_there_and_the_others_are_drawn_from_the_rest():
    vocabulary = sample(2, 2, [0, 9, 1, 7, 0, 2])
    seen = set()
    for step in range(40):
        tokens_S, offsets_S = vocabulary.draw(named_generator(0, "draw", step))
        assert tokens_S[:2].tolist() == [1, 3]
        assert len(set(tokens_S.tolist())) == 4
        assert offsets_S.tolist() == pytest.approx([0, 0, *[torch.tensor(4 / 2).log().item()] * 2])
        seen |= set(tokens_S[2:].tolist())
    assert seen == {0, 2, 4, 5}


def test_the_sum_in_the_denominator_is_right_on_average():
    # all six ways to draw two of four others are equally likely
    logits_V = torch.tensor([0.3, 2.0, -1.0, 1.5, 0.7, -0.2], dtype=torch.float64)
    vocabulary = sample(2, 2, [0, 9, 1, 7, 0, 2])
    _, offsets_S = vocabulary.draw(named_generator(0, "draw"))
    sums = []
    for pair in itertools.combinations([0, 2, 4, 5], 2):
        cut_S = logits_V[[1, 3, *pair]] + offsets_S
        sums.append(cut_S.exp().sum())
    assert float(torch.stack(sums).mean()) == pytest.approx(float(logits_V.exp().sum()), rel=1e-6)


@pytest.mark.parametrize("bias", [None, torch.linspace(-1, 1, 6)])
def test_drawing_all_of_them_is_the_whole_vocabulary(bias: torch.Tensor | None):
    generator = torch.Generator().manual_seed(0)
    head = Head(torch.randn(6, 3, generator=generator), bias)
    hidden_ND = torch.randn(4, 3, generator=generator)
    tokens_S, offsets_S = sample(2, 99, [0, 9, 1, 7, 0, 2]).draw(named_generator(0, "draw"))
    cut = head.rows(tokens_S, offsets_S)
    torch.testing.assert_close(cut.log_probs(hidden_ND), head.log_probs(hidden_ND)[:, tokens_S])


def test_a_cut_head_has_the_rows_and_the_bias_of_its_tokens():
    head = Head(torch.arange(8.0).view(4, 2), torch.tensor([0.0, 10, 20, 30]))
    cut = head.rows(torch.tensor([2, 0]), torch.tensor([0.0, 0.5]))
    assert cut.weight_VD.tolist() == [[4, 5], [0, 1]]
    assert cut.bias_V is not None
    assert cut.bias_V.tolist() == [20, 0.5]


def test_a_vocabulary_that_is_smaller_than_asked_for_has_no_others():
    tokens_S, offsets_S = sample(9, 5, [1, 2, 3]).draw(named_generator(0, "draw"))
    assert sorted(tokens_S.tolist()) == [0, 1, 2]
    assert offsets_S.tolist() == [0, 0, 0]


def test_labels_stand_where_their_token_does_or_nowhere():
    places, known = places_of(torch.tensor([4, 0, 2, 4]), torch.tensor([2, 5, 4]), 6)
    assert places.tolist() == [2, 0, 0, 2]
    assert known.tolist() == [True, False, True, True]
