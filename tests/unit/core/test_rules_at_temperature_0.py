"""Lenience and lossy sampling at temperature 0: by hand, and against a loop in double precision."""

import math
from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor

from paceline.core.rule_base import Position, as_read
from paceline.core.rules import Chow, Lenient, Lossless, Lossy, Rule
from paceline.core.sampling import SamplingParams, to_probs
from support import exact

GREEDY = SamplingParams(temperature=0)
RULES: list[tuple[Rule, exact.RuleVectors]] = [
    (Lenient("linear", 0.3), exact.lenient_at_0("linear", 0.3)),
    (Lenient("square", 0.5), exact.lenient_at_0("square", 0.5)),
    (Lenient("exponential", 0.4), exact.lenient_at_0("exponential", 0.4)),
    (Lossy(0.6), exact.lossy_at_0(0.6)),
    (Lossy(0.6, 0.4), exact.lossy_at_0(0.6)),
    (Lossy(0.6, 3.0), exact.lossy_at_0(0.6)),
    (Lossy(0.6, "tuned"), exact.lossy_at_0(0.6)),
]
rules = pytest.mark.parametrize(("rule", "vectors"), RULES, ids=[str(rule) for rule, _ in RULES])
LOOSE = [rule for rule, _ in RULES]
EXACT: list[Rule] = [
    *(Lenient(kind, 1.0) for kind in ("linear", "square", "exponential")),
    *(Lossy(0.0), Lossy(0.0, 1.5), Lossy(0.0, "tuned")),
]
DRAFTS = {"greedy": GREEDY, "sampled": SamplingParams(), "few": SamplingParams(top_k=2)}


def logits(vocab_size: int, count: int = 40) -> tuple[Tensor, Tensor]:
    """The target's and the draft's; some tokens of the target have no mass, and some tie."""
    generator = torch.Generator().manual_seed(vocab_size)
    target, draft = 1.5 * torch.randn(2, count, vocab_size, generator=generator)
    target[:10, 1] = -math.inf
    target[10:20] = target[10:20].round()
    return target, draft


@rules
@pytest.mark.parametrize("draft_sampling", DRAFTS.values(), ids=list(DRAFTS))
@pytest.mark.parametrize("vocab_size", [3, 50])
def test_every_vector_equals_a_loop(
    rule: Rule, vectors: exact.RuleVectors, draft_sampling: SamplingParams, vocab_size: int
):
    target, draft = logits(vocab_size)
    p, q, raw = to_probs(target, GREEDY), to_probs(draft, draft_sampling), target.softmax(-1)
    accept = rule.accept_probs(p, q, target_raw=raw)
    residual = rule.residual(p, q, target_raw=raw)
    induced = rule.induced_distribution(p, q, target_raw=raw)
    pi = rule.pi(p, q, target_raw=raw)
    assert (pi is None) != rule.needs_draft_at_bonus
    kept = 0
    for row, (raw_row, q_row) in enumerate(zip(raw.tolist(), q.tolist(), strict=True)):
        wanted, recovered = vectors(raw_row, q_row)
        assert accept[row].tolist() == wanted
        assert residual[row].tolist() == recovered
        rejected = math.fsum(b * (1 - a) for a, b in zip(wanted, q_row, strict=True))
        rows = zip(wanted, q_row, recovered, strict=True)
        law = pytest.approx([a * b + rejected * r for a, b, r in rows], abs=1e-6)
        assert induced[row].tolist() == law
        assert pi is None or pi[row].tolist() == law
        kept += sum(wanted) > 1
    assert kept > 10, "the rule changes nothing here"


def test_of_tokens_that_tie_a_loose_rule_keeps_all_and_a_strict_one_the_first():
    raw, q = torch.tensor([0.1, 0.45, 0.45]), torch.tensor([0.2, 0.4, 0.4])
    p = to_probs(raw.log(), GREEDY)
    for rule in LOOSE:
        assert rule.accept_probs(p, q, target_raw=raw).tolist()[1:] == [1, 1]
        assert rule.residual(p, q, target_raw=raw).tolist() == [0, 1, 0]
    for rule in EXACT:
        assert rule.accept_probs(p, q, target_raw=raw).tolist() == [0, 1, 0]
        assert rule.induced_distribution(p, q, target_raw=raw).tolist() == [0, 1, 0]


@pytest.mark.parametrize("rule", [*LOOSE, *EXACT], ids=str)
def test_at_other_temperatures_untempered_probabilities_change_nothing(rule: Rule):
    target, draft = logits(20)
    p, q = (0.7 * target).softmax(-1), (0.7 * draft).softmax(-1)
    for method in (rule.accept_probs, rule.residual, rule.induced_distribution):
        assert torch.equal(method(p, q, target_raw=target.softmax(-1)), method(p, q))


def test_the_rule_gets_untempered_probabilities_at_temperature_0_alone():
    """At top-k 1, too, p is one-hot, and the rule is what it was."""
    probs = torch.tensor([0.0, 1.0]), torch.tensor([0.5, 0.5]), torch.tensor([0.4, 0.6])
    at = Position(*probs, probs[1])
    settings = [SamplingParams(), SamplingParams(temperature=0.5), SamplingParams(top_k=1)]
    for rule, sampling in product([*LOOSE, *EXACT, Lossless()], settings):
        assert not rule.reads_raw(sampling)
        assert as_read(rule, at, sampling).target_raw is at.target
    assert all(rule.reads_raw(GREEDY) for rule in LOOSE)
    assert not any(rule.reads_raw(GREEDY) for rule in [*EXACT, Lossless()])
    reads = partial(as_read, Chow(0.5), at)
    assert [reads(one) is at for one in (GREEDY, *settings)] == [True] * 4
