"""The G-test that `verify` rests on."""

# T positions, V vocabulary

import pytest
import torch
from scipy import stats as scipy_stats

from paceline.core.goodness_of_fit import equal_mass_cells, g_test
from paceline.errors import UsageError


def test_g_and_p_are_those_of_scipy():
    counts = torch.tensor([31, 18, 25, 40, 22])
    expected = scipy_stats.power_divergence(counts.numpy(), lambda_="log-likelihood")
    g, p_value = g_test(counts)
    assert g == pytest.approx(expected.statistic)
    assert p_value == pytest.approx(expected.pvalue)


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
