"""Inequalities that hold for any two distributions, zeros included."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.core.divergences import forward_kl, jsd, negative_log_acceptance, reverse_kl, tvd
from paceline.core.rule_base import Position
from paceline.core.rules import Lenient, Lossless, Lossy

TINY = 1e-9
weights = st.one_of(st.just(0.0), st.floats(1e-6, 1.0))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Two distributions over the same 1 to 8 tokens, float64."""
    size = draw(st.integers(1, 8))
    rows = st.lists(weights, min_size=size, max_size=size).filter(any)
    p, q = (torch.tensor(draw(rows), dtype=torch.float64) for _ in range(2))
    return p / p.sum(), q / q.sum()


many = settings(max_examples=200, deadline=None, derandomize=True)


@many
@given(pairs())
def test_no_divergence_is_negative_or_not_a_number(pair: tuple[Tensor, Tensor]):
    p, q = (part.log() for part in pair)
    for divergence in (forward_kl, reverse_kl, jsd, tvd, negative_log_acceptance):
        assert float(divergence(p, q)) >= -TINY


@many
@given(pairs())
def test_pinsker_bounds_tvd_by_either_kl(pair: tuple[Tensor, Tensor]):
    p, q = (part.log() for part in pair)
    for divergence in (forward_kl, reverse_kl):
        assert float(tvd(p, q)) <= math.sqrt(max(0.0, float(divergence(p, q))) / 2) + 1e-7


@many
@given(pairs())
def test_bretagnolle_huber_bounds_it_where_pinsker_says_nothing(pair: tuple[Tensor, Tensor]):
    p, q = (part.log() for part in pair)
    assert float(tvd(p, q)) <= math.sqrt(1 - math.exp(-max(0.0, float(forward_kl(p, q))))) + 1e-7


@many
@given(pairs(), st.floats(0.01, 0.99))
def test_jsd_lies_below_the_entropy_of_its_beta_and_below_tvd(
    pair: tuple[Tensor, Tensor], beta: float
):
    p, q = (part.log() for part in pair)
    entropy = -beta * math.log(beta) - (1 - beta) * math.log(1 - beta)
    # An f-divergence is at most TVD times its value on disjoint distributions, H(beta) here.
    assert float(jsd(p, q, beta)) <= entropy * float(tvd(p, q)) + 1e-9


@many
@given(pairs())
def test_tvd_is_a_symmetric_distance_and_bounds_nla_from_below(pair: tuple[Tensor, Tensor]):
    p, q = (part.log() for part in pair)
    distance = float(tvd(p, q))
    assert distance == float(tvd(q, p))
    assert 0 <= distance <= 1 + TINY
    assert float(negative_log_acceptance(p, q)) >= distance - TINY


@many
@given(pairs())
def test_nla_lies_below_forward_kl(pair: tuple[Tensor, Tensor]):
    # sum min(p, q) = E_p min(1, q/p) >= exp(E_p log min(1, q/p)): Jensen; where q > p it is slack,
    # by at most TVD, since E_p (log q/p)_+ <= sum (q - p)_+.
    p, q = (part.log() for part in pair)
    bound = float(forward_kl(p, q)) + float(tvd(p, q))
    assert float(negative_log_acceptance(p, q)) <= bound + TINY


@many
@given(
    pairs(),
    st.sampled_from(
        [
            Lossless(),
            Lenient("linear", 0.2),
            Lenient("square", 0.5),
            Lenient("exponential", 0.6),
            Lossy(0.5),
            Lossy(0.3, 0.7),
            Lossy(0.3, 2.5),
        ]
    ),
)
def test_every_rule_makes_a_distribution_that_is_no_further_from_the_target_than_the_draft_is(
    pair: tuple[Tensor, Tensor], rule: Lossless | Lenient | Lossy
):
    p, q = pair
    induced = rule.induced_at(Position.of(p, q))
    assert abs(float(induced.sum()) - 1) < 1e-9
    assert (induced >= 0).all()
    # Mass only moves from where the draft has too much to where it has too little.
    moved = float((induced - p).abs().sum())
    if not isinstance(rule, Lossy) or rule.beta == 1:
        assert moved <= float((q - p).abs().sum()) + 1e-9
    if rule.exact:
        assert moved < 1e-9
