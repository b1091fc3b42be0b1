"""The G-test that `verify` rests on."""

# T positions, V vocabulary
import math

import numpy as np
import pytest
import torch
from scipy import stats as scipy_stats

from paceline.core.goodness_of_fit import (
    equal_mass_cells,
    g_test,
    mass_in_cells,
    tokens_to_reject,
)
from paceline.errors import UsageError


def test_g_and_p_are_those_of_scipy():
    counts = torch.tensor([31, 18, 25, 40, 22])
    expected = scipy_stats.power_divergence(counts.numpy(), lambda_="log-likelihood")
    g, p_value = g_test(counts)
    assert g == pytest.approx(expected.statistic)
    assert p_value == pytest.approx(expected.pvalue)


def test_equal_counts_give_p_one():
    assert g_test(torch.full((8,), 20)) == (0.0, 1.0)


def test_too_few_tokens_for_the_cells_is_refused():
    with pytest.raises(UsageError, match="got 12 tokens for 4 cells, wanted at least 20"):
        g_test(torch.full((4,), 3))


def test_the_token_that_the_draft_overrates_most_falls_into_the_first_cells():
    # q/p is 3, 1 and 1/3: stretches [0, 0.2), [0.2, 0.8), [0.8, 1].
    p = torch.tensor([[0.2, 0.6, 0.2]] * 3)
    q = torch.tensor([[0.6, 0.6, 0.0666]] * 3)
    rng = torch.Generator().manual_seed(0)
    cells, possible = equal_mass_cells(p, q, torch.tensor([0, 1, 2]), 5, rng=rng)
    assert cells[0] == 0
    assert cells[1] in (1, 2, 3)
    assert cells[2] == 4
    assert possible.all()


def test_a_token_outside_the_targets_support_is_impossible():
    p = torch.tensor([[0.5, 0.5, 0.0]])
    rng = torch.Generator().manual_seed(0)
    _, possible = equal_mass_cells(p, p, torch.tensor([2]), 4, rng=rng)
    assert not possible.any()


def test_cells_are_uniform_under_the_target_whatever_the_draft():
    """n = 20,000 tokens over 200 contexts, 16 cells; fails once in 10,000 seeds."""
    rng = torch.Generator().manual_seed(1)
    p = torch.randn(200, 30, generator=rng).mul(2).softmax(-1).repeat(100, 1)
    q = torch.randn(200, 30, generator=rng).mul(2).softmax(-1).repeat(100, 1)
    tokens = torch.multinomial(p, 1, generator=rng).squeeze(-1)
    cells, _ = equal_mass_cells(p, q, tokens, 16, rng=rng)
    assert g_test(torch.bincount(cells, minlength=16))[1] > 1e-4


def test_text_of_the_draft_is_caught():
    """The mutant of the test above: tokens drawn from q."""
    rng = torch.Generator().manual_seed(1)
    p = torch.randn(200, 30, generator=rng).softmax(-1)
    q = (0.9 * p + 0.1 * torch.randn(200, 30, generator=rng).softmax(-1)).repeat(100, 1)
    tokens = torch.multinomial(q, 1, generator=rng).squeeze(-1)
    cells, _ = equal_mass_cells(p.repeat(100, 1), q, tokens, 16, rng=rng)
    assert g_test(torch.bincount(cells, minlength=16))[1] < 1e-4


def test_the_mass_of_a_distribution_in_the_cells_is_counted_by_hand():
    """q/p is 3, 1 and 1/3, in the order b, a, c: a border at 1/2 divides a in the middle."""
    p = torch.tensor([[0.6, 0.2, 0.2]])
    q = torch.tensor([[0.3, 0.6, 0.1]])
    # b has [0, 0.2), a [0.2, 0.8), c [0.8, 1]; a has half of its 0.3 below 0.5
    assert mass_in_cells(p, q, 2)[0].tolist() == pytest.approx([0.75, 0.25])
    assert mass_in_cells(p, p, 5)[0].tolist() == pytest.approx([0.2] * 5)


def test_the_mass_in_the_cells_is_the_frequency_of_drawn_tokens():
    """n = 200,000 tokens of each of two contexts; 6 standard errors."""
    rng = torch.Generator().manual_seed(2)
    p, q = (torch.randn(2, 9, generator=rng).mul(2).softmax(-1) for _ in range(2))
    num = 200_000
    for p_V, q_V in zip(p, q, strict=True):
        tokens = torch.multinomial(q_V, num, replacement=True, generator=rng)
        rows = (row.expand(num, -1) for row in (p_V, q_V))
        cells, _ = equal_mass_cells(*rows, tokens, 4, rng=rng)
        counted = torch.bincount(cells, minlength=4) / num
        expected = mass_in_cells(p_V[None], q_V[None], 4)[0]
        assert (counted - expected).abs().max() < 6 * 0.5 / num**0.5


@pytest.mark.parametrize(("num_cells", "shift"), [(2, 0.02), (16, 0.01), (300, 0.001)])
def test_the_tokens_to_reject_give_the_power_by_scipy(num_cells, shift):
    shares = torch.full((num_cells,), 1 / num_cells, dtype=torch.float64)
    shares[0] += shift
    shares[-1] -= shift
    tokens = tokens_to_reject(shares, 1e-4, 0.9)
    noncentrality = 2 * tokens * float((shares * (shares * num_cells).log()).sum())
    least = scipy_stats.chi2.isf(1e-4, num_cells - 1)
    power = scipy_stats.ncx2.sf(least, num_cells - 1, noncentrality)
    assert power == pytest.approx(0.9, abs=1e-4)


def test_texts_of_this_length_are_rejected_as_often_as_said():
    """600 multinomial draws: 0.8 within 4 standard errors. Half of the tokens, a mutant: not."""
    shares = np.array([0.28, 0.26, 0.24, 0.22])
    tokens = tokens_to_reject(torch.tensor(shares), 1e-3, 0.8)
    rng = np.random.default_rng(0)

    def rejected(count: int) -> float:
        counts = rng.multinomial(count, shares, size=600)
        return float(np.mean([g_test(torch.tensor(row))[1] < 1e-3 for row in counts]))

    assert abs(rejected(round(tokens)) - 0.8) < 4 * (0.16 / 600) ** 0.5
    assert abs(rejected(round(tokens / 2)) - 0.8) > 4 * (0.16 / 600) ** 0.5


def test_no_number_of_tokens_rejects_equal_shares():
    assert tokens_to_reject(torch.full((16,), 1 / 16), 1e-4) == math.inf
