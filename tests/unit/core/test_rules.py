"""Rules on three tokens by hand, and for any distributions against loops in double precision."""

import math
from functools import partial
from itertools import product

import pytest
import torch
from pydantic import TypeAdapter
from torch import Tensor

from paceline.core.rule_base import Position, as_read
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
from paceline.core.sampling import SamplingParams, to_probs
from paceline.errors import ConfigError
from support import exact
from support.rules import CASCADES, stating

FAR = [[0.7, 0.2, 0.1], [0.1, 0.3, 0.6]]
# p is sure of token 0, q of token 1; TVD .4, H(p) .9433, H(q) .9502 (nats)
SURE = [[0.6, 0.2, 0.2], [0.2, 0.6, 0.2]]
GREEDY = SamplingParams(temperature=0)

LOOSE: list[tuple[Rule, exact.Vectors]] = [
    (rule, exact.near(vectors))
    for rule, vectors in [
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
]
AIMED: list[tuple[Rule, exact.Vectors]] = [
    (
        stating(kind, alpha),
        exact.aimed_vectors(exact.AIMS[kind](min(alpha, 0.95) if kind == "tuned" else alpha)),
    )
    for kind, alpha in product([*CASCADES, "tuned"], (0.0, 0.05, 0.3, 0.7, 1.0))
]
AT_0: list[tuple[Rule, exact.Vectors]] = [
    (rule, lambda _p, q, p_raw, _q_raw, vectors=vectors: vectors(p_raw, q))
    for rule, vectors in [
        (Lenient("linear", 0.3), exact.lenient_at_0("linear", 0.3)),
        (Lenient("square", 0.5), exact.lenient_at_0("square", 0.5)),
        (Lenient("exponential", 0.4), exact.lenient_at_0("exponential", 0.4)),
        (Lossy(0.6), exact.lossy_at_0(0.6)),
        (Lossy(0.6, 0.4), exact.lossy_at_0(0.6)),
        (Lossy(0.6, 3.0), exact.lossy_at_0(0.6)),
        (Lossy(0.6, "tuned"), exact.lossy_at_0(0.6)),
    ]
]
STRICT: list[Rule] = [
    *(Lenient(kind, 1.0) for kind in ("linear", "square", "exponential")),
    *(Lossy(0.0), Lossy(0.0, 1.5), Lossy(0.0, "tuned")),
]
DRAFTS = {"greedy": GREEDY, "sampled": SamplingParams(), "few": SamplingParams(top_k=2)}


def random_logits(vocab_size: int, seed: int) -> Tensor:
    """Of close, far, sparse and equal pairs, [2, 40, V], float64."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2.5 * torch.randn(2, 40, vocab_size, generator=generator, dtype=torch.float64)
    logits[1, 10:20] = logits[0, 10:20] + 0.1 * logits[1, 10:20]
    absent = torch.rand(2, 10, vocab_size, generator=generator) < 0.5
    absent[..., 0] = False
    logits[:, 20:30] = logits[:, 20:30].masked_fill(absent, -math.inf)
    logits[1, 30:35] = logits[0, 30:35]
    return logits


def random_pairs(vocab_size: int, seed: int) -> tuple[Tensor, Tensor]:
    p, q = random_logits(vocab_size, seed).softmax(-1)
    return p, q


def check_vectors(rule: Rule, vectors: exact.Vectors, at: Position) -> int:
    """Each row of what a rule says, against `vectors`; how many rows keep two tokens for sure."""
    accept_RV = rule.accept_at(at)
    residual_RV = rule.residual_at(at)
    induced_RV = rule.induced_at(at)
    pi_RV = rule.pi_at(at)
    assert (pi_RV is None) != (rule.needs_draft_at_bonus or rule.exact)
    assert torch.allclose(residual_RV.sum(-1), residual_RV.new_ones(()), atol=1e-5)
    num_sure = 0
    for row, given in enumerate(zip(*(part.tolist() for part in at), strict=True)):
        accept, residual = vectors(*given)
        q = given[1]
        rejected = math.fsum(b * (1 - a) for a, b in zip(accept, q, strict=True))
        law = [a * b + rejected * r for a, b, r in zip(accept, q, residual, strict=True)]
        law = pytest.approx(law, abs=1e-6)
        assert accept_RV[row].tolist() == pytest.approx(accept, abs=1e-6)
        assert induced_RV[row].tolist() == law
        assert pi_RV is None or pi_RV[row].tolist() == law
        if rejected > 1e-3:
            # The excess of nearly equal distributions is rounding; it is also next to never drawn.
            assert residual_RV[row].tolist() == pytest.approx(residual, abs=1e-4)
        num_sure += accept.count(1) > 1
    return num_sure


@pytest.mark.parametrize(
    ("rule", "pair", "law"),
    [
        (Lossless(), FAR, [0.7, 0.2, 0.1]),
        # f = 1.4, .4, .2; kept .1, .3, .2; .4 is rejected
        (Lenient("linear", 0.5), FAR, [0.5, 0.3, 0.2]),
        # f = 2.8, .8, .4
        (Lenient("square", 0.5), FAR, [0.3, 0.3, 0.4]),
        # f = .83666, .44721, .31623
        (Lenient("exponential", 0.5), FAR, [0.383772, 0.3, 0.316228]),
        # kept .1, .3, .2; .4 is recovered by 13/14, 1/14, 0
        (Lossy(0.5, 0.5), FAR, [0.471429, 0.328571, 0.2]),
        # p / 7 = .1 exceeds q nowhere, so the target itself is drawn from
        (Lossy(0.5, 7.0), FAR, [0.38, 0.38, 0.24]),
        (Chow(0.3), SURE, SURE[0]),  # .6 < .7
        (Chow(0.5), SURE, SURE[1]),
        (Diff(0.0), SURE, SURE[1]),  # both are equally sure
        (Diff(-0.1), SURE, SURE[0]),
        (Opt(-0.1), SURE, SURE[0]),  # .6 < .6 + .04
        (BiLDRule(1.3), SURE, SURE[0]),  # D = -(.2 ln .6 + .6 ln .2 + .2 ln .2) = 1.3897
        (BiLDRule(1.4), SURE, SURE[1]),
        (ChowLog(0.9), SURE, SURE[0]),
        (ChowLog(1.0), SURE, SURE[1]),
        # tokens 1 and 2 are given up, .8 of q
        (TokenV2(0.3), SURE, [0.2 + 0.8 * 0.6, 0.16, 0.16]),
        (TokenV3(0.5), SURE, [0.2 + 0.8 * 0.6, 0.16, 0.16]),
        # q(0) and q(2) are below .6 - .3
        (TokenV1(0.3), SURE, [0.24, 0.6 + 0.4 * 0.2, 0.08]),
        # p/(1-a) = 1, 1/3, 1/3: .2667 of q is rejected; (.6 u - .2)_+ is that at u = .7778
        (Lossy(0.4, "tuned"), SURE, [0.466667, 0.333333, 0.2]),
    ],
    ids=str,
)
def test_the_law_of_three_tokens_by_hand(rule: Rule, pair: list[list[float]], law: list[float]):
    found = rule.induced_at(Position.of(*map(torch.tensor, pair)))
    assert found.tolist() == pytest.approx(law, abs=1e-6)


@pytest.mark.parametrize("vocab_size", [3, 50])
@pytest.mark.parametrize(
    ("rules", "way"),
    [*product([LOOSE, AIMED], ["float32", "float64"]), *product([AT_0], DRAFTS)],
)
def test_every_vector_equals_a_loop_in_double_precision(
    rules: list[tuple[Rule, exact.Vectors]], way: str, vocab_size: int
):
    """`DRAFTS`: at temperature 0, where loose rules read the untempered target."""
    target, draft = random_logits(vocab_size, vocab_size)
    if way in DRAFTS:
        # some tokens of the target have no mass, and some tie
        target, draft = 0.4 * target.float(), 0.4 * draft.float()
        target[10:20] = target[10:20].round()
        q, raw = to_probs(draft, DRAFTS[way]), target.softmax(-1)
        at = Position(to_probs(target, GREEDY), q, raw, q)
    else:
        at = Position.of(*(part.softmax(-1).to(getattr(torch, way)) for part in (target, draft)))
    if rules is AIMED:
        # without the sparse ones, of which a single token looks like temperature 0
        at = Position(*(torch.cat([part[:20], part[30:]]) for part in at))
    for rule, vectors in rules:
        num_sure = check_vectors(rule, vectors, at)
        assert way not in DRAFTS or num_sure > 10, "the rule changes nothing here"


@pytest.mark.parametrize("kind", ["linear", "square", "exponential"])
def test_epsilon_one_is_lossless(kind: str):
    p, q = random_pairs(15, seed=5)
    rule = Lenient(kind, 1.0)  # pyright: ignore[reportArgumentType]
    at = Position.of(p, q)
    assert torch.equal(rule.accept_at(at), Lossless().accept_at(at))
    assert torch.equal(rule.residual_at(at), Lossless().residual_at(at))
    assert torch.allclose(rule.induced_at(at), p, atol=1e-6)


@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.25, 0.5, 0.9])
def test_lossy_with_beta_one_is_linear_lenience_with_epsilon_one_less_alpha(alpha: float):
    p, q = random_pairs(15, seed=6)
    lossy, lenient = Lossy(alpha), Lenient("linear", 1 - alpha)
    at = Position.of(p, q)
    assert torch.equal(lossy.accept_at(at), lenient.accept_at(at))
    assert torch.equal(lossy.residual_at(at), lenient.residual_at(at))


# transformers#28508: no residual mass, no NaN: the target itself.
@pytest.mark.parametrize("rule", [rule for rule, _ in LOOSE], ids=str)
def test_without_residual_mass_the_target_is_drawn_from(rule: Rule):
    p = torch.tensor([[0.5, 0.25, 0.25, 0.0], [0.0, 0.0, 1.0, 0.0]])
    beta = rule.beta if isinstance(rule, Lossy) else 1.0
    q = p / min(beta, 1.0)  # nowhere below p / beta
    assert torch.equal(rule.residual_at(Position.of(p, q)), p)


# lemma 8
@pytest.mark.parametrize("alpha", [-0.2, 0.0, 0.1, 0.4, 1.0])
def test_at_temperature_0_opt_is_diff(alpha: float):
    p_raw, q_raw = random_pairs(6, seed=10)
    p, q = (torch.nn.functional.one_hot(raw.argmax(-1), 6).double() for raw in (p_raw, q_raw))
    raw = {"target_raw": p_raw, "draft_raw": q_raw}
    at = Position.of(p, q, **raw)
    assert torch.equal(Opt(alpha).pi_at(at), Diff(alpha).pi_at(at))
    assert torch.equal(OptLog(alpha).pi_at(at), DiffLog(alpha).pi_at(at))


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
    at = Position.of(p, q)
    assert torch.equal(rule.accept_at(at), torch.ones(1, 3))
    assert torch.allclose(rule.pi_at(at), q)
    assert rule.residual_at(at).sum() == pytest.approx(1)


def test_of_tokens_that_tie_a_loose_rule_keeps_all_and_a_strict_one_the_first():
    raw, q = torch.tensor([0.1, 0.45, 0.45]), torch.tensor([0.2, 0.4, 0.4])
    p = to_probs(raw.log(), GREEDY)
    for rule, _ in AT_0:
        at = Position.of(p, q, target_raw=raw)
        assert rule.accept_at(at).tolist()[1:] == [1, 1]
        assert rule.residual_at(at).tolist() == [0, 1, 0]
    for rule in STRICT:
        assert rule.accept_at(at).tolist() == [0, 1, 0]
        assert rule.induced_at(at).tolist() == [0, 1, 0]


@pytest.mark.parametrize("rule", [*(rule for rule, _ in AT_0), *STRICT], ids=str)
def test_at_other_temperatures_untempered_probabilities_change_nothing(rule: Rule):
    target, draft = random_logits(20, seed=20)
    p, q = (0.7 * target).softmax(-1), (0.7 * draft).softmax(-1)
    with_raw, without = Position.of(p, q, target.softmax(-1)), Position.of(p, q)
    for method in (rule.accept_at, rule.residual_at, rule.induced_at):
        assert torch.equal(method(with_raw), method(without))


def test_the_rule_gets_untempered_probabilities_at_temperature_0_alone():
    """At top-k 1, too, p is one-hot, and the rule is what it was."""
    probs = torch.tensor([0.0, 1.0]), torch.tensor([0.5, 0.5]), torch.tensor([0.4, 0.6])
    at = Position(*probs, probs[1])
    settings = [SamplingParams(), SamplingParams(temperature=0.5), SamplingParams(top_k=1)]
    for rule, sampling in product([*(rule for rule, _ in AT_0), *STRICT, Lossless()], settings):
        assert not rule.reads_raw(sampling)
        assert as_read(rule, at, sampling).target_raw is at.target
    assert all(rule.reads_raw(GREEDY) for rule, _ in AT_0)
    assert not any(rule.reads_raw(GREEDY) for rule in [*STRICT, Lossless()])
    reads = partial(as_read, Chow(0.5), at)
    assert [reads(one) is at for one in (GREEDY, *settings)] == [True] * 4


@pytest.mark.parametrize(
    ("kind", "values", "said"),
    [
        (Lossy, {}, "^alpha is missing; give it$"),
        (Lossy, {"alpha": 0.3, "beta": 0.6}, "at least 1 - alpha = 0.7"),
        (Lossy, {"alpha": 0.3, "beta": math.inf}, "finite"),
        (Diff, {"alpha": math.nan}, "finite"),
    ],
)
def test_a_bad_parameter_is_an_error_that_says_what_is_wanted(
    kind: type[Rule], values: dict[str, float], said: str
):
    """Limits: `unit/test_config.py`."""
    with pytest.raises(ConfigError, match=said):
        kind(**values)


def test_beta_may_be_written_as_the_decimal_one_less_alpha():
    for hundredths in range(100):
        beta = (100 - hundredths) / 100
        assert Lossy(hundredths / 100, beta).beta == beta


@pytest.mark.parametrize("kind", [*CASCADES, "tuned"])
def test_rules_are_read_from_a_configuration_by_their_tag(kind: str):
    adapter: TypeAdapter[AnyRule] = TypeAdapter(AnyRule)
    rule = stating(kind, 0.5)
    assert adapter.validate_python(adapter.dump_python(rule)) == rule
