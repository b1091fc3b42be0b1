"""Rules on three tokens by hand, and against loops in double precision for any distributions."""

import math

import pytest
import torch
from torch import Tensor

from paceline.core.rules import Lenient, Lossless, Lossy, Rule
from paceline.errors import ConfigError
from support import exact

TARGET = torch.tensor([0.7, 0.2, 0.1])
DRAFT = torch.tensor([0.1, 0.3, 0.6])

RULES: list[tuple[Rule, exact.RuleVectors]] = [
    (Lossless(), exact.lossless),
    (Lenient("linear", 0.5), exact.lenient("linear", 0.5)),
    (Lenient("square", 0.7), exact.lenient("square", 0.7)),
    (Lenient("exponential", 0.3), exact.lenient("exponential", 0.3)),
    (Lenient("linear", 0.05), exact.lenient("linear", 0.05)),
    (Lossy(0.4), exact.lossy(0.4)),
    (Lossy(0.3, 0.8), exact.lossy(0.3, 0.8)),
    (Lossy(0.2, 1.7), exact.lossy(0.2, 1.7)),
    (Lossy(0.0), exact.lossy(0.0)),
]
rules = pytest.mark.parametrize("rule", [rule for rule, _ in RULES], ids=str)


def random_pairs(vocab_size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Close, far, sparse and equal pairs, [40, V] each, float32."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(2, 40, vocab_size, generator=generator)
    logits[1, 10:20] = logits[0, 10:20] + 0.1 * logits[1, 10:20]
    absent = torch.rand(2, 10, vocab_size, generator=generator) < 0.5
    absent[..., 0] = False
    logits[:, 20:30] = logits[:, 20:30].masked_fill(absent, -math.inf)
    logits[1, 30:35] = logits[0, 30:35]
    p, q = logits.softmax(-1)
    return p, q


@pytest.mark.parametrize(
    ("rule", "accept", "residual", "induced"),
    [
        (Lossless(), [1, 2 / 3, 1 / 6], [1, 0, 0], [0.7, 0.2, 0.1]),
        # f = 1.4, .4, .2; kept .1, .3, .2; .4 is rejected
        (Lenient("linear", 0.5), [1, 1, 1 / 3], [1, 0, 0], [0.5, 0.3, 0.2]),
        # f = 2.8, .8, .4
        (Lenient("square", 0.5), [1, 1, 2 / 3], [1, 0, 0], [0.3, 0.3, 0.4]),
        # f = .83666, .44721, .31623
        (Lenient("exponential", 0.5), [1, 1, 0.527046], [1, 0, 0], [0.383772, 0.3, 0.316228]),
        (Lossy(0.5, 0.5), [1, 1, 1 / 3], [13 / 14, 1 / 14, 0], [0.471429, 0.328571, 0.2]),
        # p / 7 = .1 exceeds q nowhere, so the target itself is drawn from
        (Lossy(0.5, 7.0), [1, 1, 1 / 3], [0.7, 0.2, 0.1], [0.38, 0.38, 0.24]),
    ],
    ids=str,
)
def test_three_tokens_by_hand(
    rule: Rule, accept: list[float], residual: list[float], induced: list[float]
):
    assert rule.accept_probs(TARGET, DRAFT).tolist() == pytest.approx(accept, abs=1e-6)
    assert rule.residual(TARGET, DRAFT).tolist() == pytest.approx(residual, abs=1e-6)
    assert rule.induced_distribution(TARGET, DRAFT).tolist() == pytest.approx(induced, abs=1e-6)


@pytest.mark.parametrize(("rule", "vectors"), RULES, ids=[str(rule) for rule, _ in RULES])
@pytest.mark.parametrize("vocab_size", [3, 7, 50])
def test_every_vector_equals_a_loop_in_double_precision(
    rule: Rule, vectors: exact.RuleVectors, vocab_size: int
):
    p_RV, q_RV = random_pairs(vocab_size, seed=vocab_size)
    found = [
        rule.accept_probs(p_RV, q_RV),
        rule.residual(p_RV, q_RV),
        rule.induced_distribution(p_RV, q_RV),
    ]
    for row, (p, q) in enumerate(zip(p_RV.tolist(), q_RV.tolist(), strict=True)):
        accept, residual = vectors(p, q)
        rejected = math.fsum(b * (1 - a) for a, b in zip(accept, q, strict=True))
        induced = [a * b + rejected * r for a, b, r in zip(accept, q, residual, strict=True)]
        assert found[0][row].tolist() == pytest.approx(accept, abs=1e-6)
        assert found[2][row].tolist() == pytest.approx(induced, abs=1e-6)
        if rejected > 1e-3:
            # The excess of nearly equal distributions is rounding; it is also next to never drawn.
            assert found[1][row].tolist() == pytest.approx(residual, abs=1e-4)


@rules
def test_residual_and_induced_distribution_sum_to_one_and_acceptance_is_a_probability(rule: Rule):
    p, q = random_pairs(20, seed=3)
    ones = torch.ones(40)
    assert torch.allclose(rule.residual(p, q).sum(-1), ones, atol=1e-5)
    assert torch.allclose(rule.induced_distribution(p, q).sum(-1), ones, atol=1e-5)
    accept = rule.accept_probs(p, q)
    assert ((accept >= 0) & (accept <= 1)).all()


def test_accepted_and_recovered_mass_make_exactly_the_target():
    p, q = random_pairs(30, seed=4)
    kept = torch.minimum(p, q)
    recovered = (1 - kept.sum(-1, keepdim=True)) * Lossless().residual(p, q)
    assert torch.allclose(kept + recovered, p, atol=1e-6)


@pytest.mark.parametrize("kind", ["linear", "square", "exponential"])
def test_epsilon_one_is_lossless(kind: str):
    p, q = random_pairs(15, seed=5)
    rule = Lenient(kind, 1.0)  # pyright: ignore[reportArgumentType]
    assert torch.equal(rule.accept_probs(p, q), Lossless().accept_probs(p, q))
    assert torch.equal(rule.residual(p, q), Lossless().residual(p, q))
    assert torch.allclose(rule.induced_distribution(p, q), p, atol=1e-6)


@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.25, 0.5, 0.9])
def test_lossy_with_beta_one_is_linear_lenience_with_epsilon_one_less_alpha(alpha: float):
    p, q = random_pairs(15, seed=6)
    lossy, lenient = Lossy(alpha), Lenient("linear", 1 - alpha)
    assert torch.equal(lossy.accept_probs(p, q), lenient.accept_probs(p, q))
    assert torch.equal(lossy.residual(p, q), lenient.residual(p, q))


@pytest.mark.parametrize("alpha", [0.2, 0.5])
def test_lossy_reaches_the_aim_of_the_paper_at_the_beta_that_balances_it(alpha: float):
    # Cascades E.6: at that beta the text follows max{min{q, p/(1-a)}, p/b}.
    p, q = (part.double() / part.double().sum(-1, True) for part in random_pairs(9, seed=8))
    for row in range(10):
        lifted = p[row] / (1 - alpha)
        rejected = float((q[row] - lifted).clamp(min=0).sum())
        low, high = 1 - alpha, 1e6
        for _ in range(200):
            beta = (low + high) / 2
            if float((p[row] / beta - q[row]).clamp(min=0).sum()) > rejected:
                low = beta
            else:
                high = beta
        aim = torch.maximum(torch.minimum(q[row], lifted), p[row] / high)
        assert float(aim.sum()) == pytest.approx(1, abs=1e-9)
        found = Lossy(alpha, high).induced_distribution(p[row], q[row])
        assert torch.allclose(found, aim, atol=1e-7)


# transformers#28508: no residual mass, no NaN: the target itself.
@rules
def test_without_residual_mass_the_target_is_drawn_from(rule: Rule):
    p = torch.tensor([[0.5, 0.25, 0.25, 0.0], [0.0, 0.0, 1.0, 0.0]])
    beta = rule.beta if isinstance(rule, Lossy) else 1.0
    q = p / min(beta, 1.0)  # nowhere below p / beta
    assert torch.equal(rule.residual(p, q), p)


@rules
def test_one_hot_distributions_are_kept_or_replaced_outright(rule: Rule):
    p = torch.tensor([[0.0, 1.0, 0.0], [0.0, 1.0, 0.0]])
    q = torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    assert torch.equal(rule.induced_distribution(p, q), p)
    assert rule.accept_probs(p, q)[[0, 1], [1, 0]].tolist() == [1, 0]


@rules
def test_acceptance_of_a_drafted_token_alone_equals_its_entry_in_the_whole_vector(rule: Rule):
    p, q = random_pairs(10, seed=10)
    whole = rule.accept_probs(p, q)[:, 4]
    assert torch.allclose(rule.accept_probs(p[:, 4:5], q[:, 4:5])[:, 0], whole, atol=1e-6)


@rules
def test_a_draft_equal_to_its_target_is_always_accepted(rule: Rule):
    p, _ = random_pairs(10, seed=11)
    assert (rule.accept_probs(p, p) == 1).all()
    assert torch.allclose(rule.induced_distribution(p, p), p, atol=1e-6)


def test_only_lossless_calls_itself_exact_and_states_the_target_as_its_aim():
    assert [rule.exact for rule, _ in RULES] == [True] + [False] * (len(RULES) - 1)
    assert torch.equal(Lossless().pi(TARGET, DRAFT), TARGET)
    assert all(rule.pi(TARGET, DRAFT) is None for rule, _ in RULES[1:])


@pytest.mark.parametrize(
    ("kind", "values", "said"),
    [
        (Lenient, {"epsilon": 0}, "greater than 0"),
        (Lenient, {"epsilon": 1.1}, "less than or equal to 1"),
        (Lenient, {"kind": "cubic"}, "'linear', 'square' or 'exponential'"),
        (Lossy, {"alpha": 1.0}, "less than 1"),
        (Lossy, {"alpha": -0.1}, "greater than or equal to 0"),
        (Lossy, {}, "^alpha is missing; give it$"),
        (Lossy, {"alpha": 0.3, "beta": 0.6}, "at least 1 - alpha = 0.7"),
        (Lossy, {"alpha": 0.3, "beta": math.inf}, "finite"),
        (Lossless, {"epsilon": 1.0}, "^epsilon: unknown key"),
    ],
)
def test_a_bad_parameter_is_an_error_that_says_what_is_wanted(
    kind: type[Rule], values: dict[str, float], said: str
):
    with pytest.raises(ConfigError, match=said):
        kind(**values)


def test_beta_may_be_written_as_the_decimal_one_less_alpha():
    for hundredths in range(100):
        beta = (100 - hundredths) / 100
        assert Lossy(hundredths / 100, beta).beta == beta
