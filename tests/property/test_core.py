"""Inequalities of divergences for any two distributions, and shaping and drawing for any logits."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.core.divergences import forward_kl, jsd, negative_log_acceptance, reverse_kl, tvd
from paceline.core.sampling import SamplingParams, sample, to_probs

TINY = 1e-9
weights = st.one_of(st.just(0.0), st.floats(1e-6, 1.0))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Two distributions over the same 1 to 8 tokens, float64."""
    size = draw(st.integers(1, 8))
    rows = st.lists(weights, min_size=size, max_size=size).filter(any)
    p, q = (torch.tensor(draw(rows), dtype=torch.float64) for _ in range(2))
    return p / p.sum(), q / q.sum()


@settings(max_examples=200, deadline=None, derandomize=True)
@given(pairs(), st.floats(0.01, 0.99))
def test_divergences_keep_the_inequalities_between_them(pair: tuple[Tensor, Tensor], beta: float):
    p, q = (part.log() for part in pair)
    kl, reverse = float(forward_kl(p, q)), float(reverse_kl(p, q))
    nla, distance = float(negative_log_acceptance(p, q)), float(tvd(p, q))
    assert min(kl, reverse, nla, distance, float(jsd(p, q))) >= -TINY
    assert distance == float(tvd(q, p))
    assert distance <= 1 + TINY
    for each in (kl, reverse):  # Pinsker
        assert distance <= math.sqrt(max(0.0, each) / 2) + 1e-7
    # Bretagnolle and Huber, where Pinsker says nothing
    assert distance <= math.sqrt(1 - math.exp(-max(0.0, kl))) + 1e-7
    # An f-divergence is at most TVD times its value on disjoint distributions, H(beta) here.
    entropy = -beta * math.log(beta) - (1 - beta) * math.log(1 - beta)
    assert float(jsd(p, q, beta)) <= entropy * distance + TINY
    assert nla >= distance - TINY
    # sum min(p, q) = E_p min(1, q/p) >= exp(E_p log min(1, q/p)): Jensen; where q > p it is slack,
    # by at most TVD, since E_p (log q/p)_+ <= sum (q - p)_+.
    assert nla <= kl + distance + TINY


# Steps of .1: whether two tokens tie must not hang on float32's last digit.
tenths = st.integers(-1000, 1000).map(lambda x: x / 10)
logit_rows = st.lists(st.one_of(tenths, st.just(-math.inf)), min_size=1, max_size=12).filter(
    lambda row: max(row) > -math.inf
)
uniforms = st.floats(0, 1, exclude_max=True)


def reference(logits: list[float], temperature: float, top_k: int, top_p: float) -> list[float]:
    """The same distribution in Python floats, token by token."""
    highest = max(logits)
    weights = [math.exp((x - highest) / temperature) for x in logits]
    ranked = sorted(range(len(logits)), key=lambda v: -weights[v])
    kept = ranked[: top_k or None]
    total = sum(weights[v] for v in kept)
    nucleus, mass = [], 0.0
    for v in kept:
        if mass >= top_p:
            break
        nucleus.append(v)
        mass += weights[v] / total
    total = sum(weights[v] for v in nucleus)
    return [weights[v] / total if v in nucleus else 0.0 for v in range(len(logits))]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.lists(tenths, min_size=1, max_size=12, unique=True),
    st.floats(0.05, 5),
    st.integers(0, 12),
    st.floats(0.01, 0.999),
)
def test_shaping_equals_a_loop_in_double_precision(
    logits: list[float], temperature: float, top_k: int, top_p: float
):
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    probs = to_probs(torch.tensor(logits), params).tolist()
    # A mass that reaches top_p within float32's last digits may fall on either side.
    candidates = [
        reference(logits, temperature, top_k, near)
        for near in (top_p * (1 - 1e-5), top_p, min(top_p * (1 + 1e-5), 1))
    ]
    errors = [max(abs(a - b) for a, b in zip(probs, c, strict=True)) for c in candidates]
    assert min(errors) < 1e-5


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    logit_rows,
    st.one_of(st.just(0.0), st.floats(0, 10)),
    st.integers(0, 12),
    st.floats(0, 1, exclude_min=True),
)
def test_every_shaping_gives_a_distribution_that_keeps_the_likeliest_token(
    logits: list[float], temperature: float, top_k: int, top_p: float
):
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    probs = to_probs(torch.tensor(logits), params)
    assert torch.isfinite(probs).all()
    assert (probs >= 0).all()
    assert abs(float(probs.double().sum()) - 1) < 1e-5
    assert probs.max() == probs[torch.tensor(logits) == max(logits)].max()
    assert (probs > 0).sum() <= (top_k or len(logits))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(logit_rows, st.integers(0, 6), st.floats(0.1, 1), uniforms)
def test_a_token_without_mass_is_never_drawn(
    logits: list[float], top_k: int, top_p: float, uniform: float
):
    probs = to_probs(torch.tensor([logits]), SamplingParams(top_k=top_k, top_p=top_p))
    token = sample(probs, torch.tensor([uniform], dtype=torch.float64))
    assert probs[0, token] > 0


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.lists(st.sampled_from([0.0, 1e-38, 1e-9, 0.1, 1 / 3, 1.0]), min_size=1, max_size=8).filter(
        any
    ),
    st.sampled_from([0.0, 5e-324, 2**-53, 0.5, 1 - 2**-24, 1 - 2**-53]),
)
def test_uniforms_at_the_ends_draw_tokens_with_mass(weights: list[float], uniform: float):
    probs = torch.tensor([weights])
    token = int(sample(probs, torch.tensor([uniform], dtype=torch.float64)))
    assert weights[token] > 0
    if uniform == 0:
        assert not any(weights[:token])


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.floats(0, 1, width=32), min_size=2, max_size=8).filter(any), uniforms)
def test_a_draw_inverts_the_cumulative_distribution(weights: list[float], uniform: float):
    token = int(sample(torch.tensor([weights]), torch.tensor([uniform], dtype=torch.float64)))
    point = uniform * math.fsum(weights)
    assert math.fsum(weights[:token]) <= point * (1 + 1e-12)
    assert math.fsum(weights[: token + 1]) >= point * (1 - 1e-12)
