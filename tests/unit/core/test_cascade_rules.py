"""Cascade rules on three tokens by hand, and for any distributions against loops in float64."""

import math

import pytest
import torch
from pydantic import TypeAdapter
from torch import Tensor

from paceline.core.rules import (
    AnyRule,
    BiLDRule,
    Chow,
    ChowLog,
    Diff,
    DiffLog,
    Lenient,
    Lossless,
    Lossy,
    Opt,
    OptLog,
    Rule,
    TokenV1,
    TokenV2,
    TokenV3,
    tuned_inverse_beta,
)
from paceline.errors import ConfigError
from support import exact
from support.rules import CASCADES, stating

# p is sure of token 0, q of token 1; TVD .4, H(p) .9433, H(q) .9502 (nats)
TARGET = torch.tensor([0.6, 0.2, 0.2])
DRAFT = torch.tensor([0.2, 0.6, 0.2])

THRESHOLDS = (0.0, 0.05, 0.3, 0.7, 1.0)


def random_pairs(vocab_size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Close, far and equal pairs, [40, V] each, float64."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(2, 40, vocab_size, generator=generator, dtype=torch.float64)
    logits[1, 10:20] = logits[0, 10:20] + 0.1 * logits[1, 10:20]
    logits[1, 30:35] = logits[0, 30:35]
    p, q = logits.softmax(-1)
    return p, q


kinds = pytest.mark.parametrize("kind", [*CASCADES, "tuned"])


@pytest.mark.parametrize(
    ("rule", "pi"),
    [
        (Chow(0.3), TARGET),  # .6 < .7
        (Chow(0.5), DRAFT),
        (Diff(0.0), DRAFT),  # both are equally sure
        (Diff(-0.1), TARGET),
        (Opt(-0.1), TARGET),  # .6 < .6 + .04
        (BiLDRule(1.3), TARGET),  # D = -(.2 ln .6 + .6 ln .2 + .2 ln .2) = 1.3897
        (BiLDRule(1.4), DRAFT),
        (ChowLog(0.9), TARGET),
        (ChowLog(1.0), DRAFT),
        # tokens 1 and 2 are given up, .8 of q
        (TokenV2(0.3), torch.tensor([0.2 + 0.8 * 0.6, 0.16, 0.16])),
        (TokenV3(0.5), torch.tensor([0.2 + 0.8 * 0.6, 0.16, 0.16])),
        # q(0) and q(2) are below .6 - .3
        (TokenV1(0.3), torch.tensor([0.24, 0.6 + 0.4 * 0.2, 0.08])),
        # p/(1-a) = 1, 1/3, 1/3: .2667 of q is rejected; (.6 u - .2)_+ is that at u = .7778
        (Lossy(0.4, "tuned"), torch.tensor([0.466667, 0.333333, 0.2])),
    ],
    ids=str,
)
def test_three_tokens_by_hand(rule: Rule, pi: Tensor):
    found = rule.pi(TARGET, DRAFT)
    assert found is not None
    assert found.tolist() == pytest.approx(pi.tolist(), abs=1e-6)
    assert rule.induced_distribution(TARGET, DRAFT).tolist() == pytest.approx(pi.tolist(), abs=1e-6)


@kinds
@pytest.mark.parametrize("vocab_size", [3, 11, 50])
def test_the_closed_form_equals_a_loop_and_is_what_the_rule_induces(kind: str, vocab_size: int):
    p_RV, q_RV = random_pairs(vocab_size, seed=vocab_size)
    p_raw_RV, q_raw_RV = random_pairs(vocab_size, seed=vocab_size + 1)
    raw = {"target_raw": p_raw_RV, "draft_raw": q_raw_RV}
    for alpha in THRESHOLDS:
        rule = stating(kind, alpha)
        found = rule.pi(p_RV, q_RV, **raw)
        assert found is not None
        aim = exact.AIMS[kind](min(alpha, 0.95) if kind == "tuned" else alpha)
        rows = zip(p_RV.tolist(), q_RV.tolist(), p_raw_RV.tolist(), q_raw_RV.tolist(), strict=True)
        expected = torch.tensor([aim(*row) for row in rows], dtype=torch.float64)
        assert (found - expected).abs().max() < 1e-6
        assert torch.allclose(found.sum(-1), torch.ones(40, dtype=torch.float64), atol=1e-9)
        induced = rule.induced_distribution(p_RV, q_RV, **raw)
        assert (induced - found).abs().max() < 1e-6
        accept = rule.accept_probs(p_RV, q_RV, **raw)
        rejected = (q_RV * (1 - accept)).sum(-1)
        assert torch.allclose(rejected, 0.5 * (found - q_RV).abs().sum(-1), atol=1e-9)


# lemma 8
@pytest.mark.parametrize("alpha", [-0.2, 0.0, 0.1, 0.4, 1.0])
def test_at_temperature_0_opt_is_diff(alpha: float):
    p_raw, q_raw = random_pairs(6, seed=10)
    p, q = (torch.nn.functional.one_hot(raw.argmax(-1), 6).double() for raw in (p_raw, q_raw))
    raw = {"target_raw": p_raw, "draft_raw": q_raw}
    assert torch.equal(Opt(alpha).pi(p, q, **raw), Diff(alpha).pi(p, q, **raw))
    assert torch.equal(OptLog(alpha).pi(p, q, **raw), DiffLog(alpha).pi(p, q, **raw))


@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.5, 0.9])
def test_the_tuned_beta_balances_what_is_rejected_with_what_is_recovered(alpha: float):
    for dtype in (torch.float64, torch.float32):
        p, q = (probs.to(dtype) for probs in random_pairs(50, seed=11))
        inverse = tuned_inverse_beta(p, q, alpha)
        recovered = (p.double() * inverse - q.double()).clamp(min=0).sum(-1)
        rejected = (q.double() - p.double() / (1 - alpha)).clamp(min=0).sum(-1)
        assert (recovered - rejected).abs().max() < 1e-6
        assert ((inverse >= 0) & (inverse <= 1)).all()


def test_the_tuned_beta_recovers_nothing_where_nothing_is_rejected():
    # a draft without some of the target's tokens, and all of whose own are good enough
    p, q = torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([[0.6, 0.4, 0.0]])
    rule = Lossy(0.5, "tuned")
    assert torch.equal(rule.accept_probs(p, q), torch.ones(1, 3))
    assert torch.allclose(rule.pi(p, q), q)
    assert rule.residual(p, q).sum() == pytest.approx(1)


@pytest.mark.parametrize(
    ("kind", "alpha"),
    [("chow", 1.5), ("chow", -0.1), ("token_v3", 2), ("bild", -1), ("diff", math.nan)],
)
def test_a_threshold_that_means_nothing_is_refused(kind: str, alpha: float):
    with pytest.raises(ConfigError):
        stating(kind, alpha)


@kinds
def test_rules_are_read_from_a_configuration_by_their_tag(kind: str):
    adapter: TypeAdapter[AnyRule] = TypeAdapter(AnyRule)
    rule = stating(kind, 0.5)
    assert adapter.validate_python(adapter.dump_python(rule)) == rule


def test_rules_say_what_they_need():
    assert not Lossless().needs_draft_at_bonus
    assert not Lenient("linear", 0.5).needs_draft_at_bonus
    assert not Lossy(0.5).needs_draft_at_bonus
    assert Lossy(0.5, "tuned").needs_draft_at_bonus
    assert Chow(0.5).needs_draft_at_bonus
    assert Chow(0.5).uses_confidence
    assert not Chow(0.5).exact
