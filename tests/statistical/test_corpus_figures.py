"""Intervals of corpus figures cover the figure of the population.

Populations of 100,000 sentences of 4 to 19 words, whose shares of right words differ. 400 samples
each: at a coverage of 95%, fewer than 91% has a probability below 1e-3.
"""

from functools import cache

import pytest
import sacrebleu
import torch
from scipy import stats
from torch import Tensor

from paceline.core.bootstrap import mean_interval
from paceline.tasks.scoring import CorpusCounts, means

_SAMPLES = 400
BLEU = sacrebleu.BLEU()


def bleu(sums: list[float], *, sentence: bool = False) -> float:
    sys_len, ref_len, *counts = map(int, sums)
    return BLEU.compute_bleu(
        counts[:4], counts[4:], sys_len, ref_len, smooth_method="exp", effective_order=sentence
    ).score


KINDS = {"good": (1.0, 1.0), "fair": (4.0, 1.0), "poor": (2.0, 0.3)}  # corpus BLEU 30, 10, 3


@cache
def population(kind: str) -> Tensor:
    """Counts of each sentence, as sacrebleu adds them up. [N, 10].

    Of a poor text, single words are right more often than words in a row.
    """
    skill, chained = KINDS[kind]
    rng = torch.Generator().manual_seed(1)
    count = 100_000
    lengths = torch.randint(4, 20, (count,), generator=rng)
    of_references = (lengths + torch.randint(-3, 4, (count,), generator=rng)).clamp(min=3)
    right = torch.rand(count, generator=rng) ** skill
    total = [(lengths - order).clamp(min=0).float() for order in range(4)]
    correct = [
        torch.binomial(each, right ** (order + 1) * chained**order, generator=rng)
        for order, each in enumerate(total)
    ]
    return torch.stack([lengths, of_references, *correct, *total], 1).double()


def samples(counts_NK: Tensor, size: int) -> list[Tensor]:
    rng = torch.Generator().manual_seed(2)
    return [
        counts_NK[torch.randint(len(counts_NK), (size,), generator=rng)] for _ in range(_SAMPLES)
    ]


def coverage(found: list[tuple[float, float]], true: float) -> float:
    return sum(low <= true <= high for low, high in found) / len(found)


@pytest.mark.parametrize(
    ("kind", "size"), [("good", 64), ("good", 400), ("fair", 64), ("fair", 400), ("poor", 400)]
)
def test_intervals_of_corpus_bleu_cover_that_of_the_population(kind: str, size: int):
    """Of poor texts, 100 sentences have too few matches of four words: they cover 90%."""
    counts_NK = population(kind)
    true = bleu(counts_NK.sum(0).tolist())
    found = [CorpusCounts(part, bleu, 100.0).interval() for part in samples(counts_NK, size)]
    assert coverage([(each.low, each.high) for each in found if each], true) >= 0.91
    assert all(found)


@pytest.mark.parametrize("kind", ["good", "poor"])
def test_mutant_the_mean_of_sentence_scores_is_another_figure(kind: str):
    """Its interval is about another number."""
    counts_NK = population(kind)
    true = bleu(counts_NK.sum(0).tolist())
    found = []
    for part in samples(counts_NK, 800)[:40]:
        scores = [bleu(row, sentence=True) for row in part.tolist()]
        interval = mean_interval(torch.tensor(scores, dtype=torch.float64))
        found.append((interval.low, interval.high))
    assert coverage(found, true) < 0.5


def test_a_mean_of_scores_has_their_exact_interval():
    """190 of 200 right: the bounds of Clopper and Pearson, in percent."""
    found = means({"accuracy": [1.0] * 190 + [0.0] * 10}, most=100.0)["accuracy"].interval()
    assert found is not None
    low, high = stats.beta.ppf(0.025, 190, 11), stats.beta.ppf(0.975, 191, 10)
    assert found == pytest.approx((95.0, 100 * low, 100 * high), abs=0.3)
