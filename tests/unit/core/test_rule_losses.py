import pytest
import torch
from torch import Tensor

from paceline.core.divergences import RuleLoss, forward_kl, rule_loss, tvd
from paceline.core.rule_base import Rule
from paceline.core.rules import Chow, Lenient, Lossless, Lossy, Opt, TokenV1, TokenV3

# p = (.5 .3 .2), q = (.2 .3 .5)
TARGET = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()
DRAFT = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64).log()


@pytest.mark.parametrize(
    ("rule", "rejected"),
    [
        (Lossless(), 0.3),
        # sum min(q, p / .5) = .2 + .3 + .4
        (Lenient("linear", 0.5), 0.1),
        # p / .25 is above q everywhere
        (Lenient("square", 0.5), 0.0),
        (Lossy(0.5), 0.1),
        # max q = .5: not below 1 - .5, below 1 - .4
        (Chow(0.5), 0.0),
        (Chow(0.4), 0.3),
        # .5 < .5 - alpha TVD only for a negative alpha
        (Opt(0.1), 0.0),
        (Opt(-0.1), 0.3),
        # p < .5 gives up tokens 1 and 2, .8 of q: pi = (.2 + .4, .24, .16),
        # min(pi, q) = .2 + .24 + .16
        (TokenV3(0.0), 0.4),
    ],
)
def test_what_a_rule_rejects_by_hand(rule: Rule, rejected: float):
    assert float(rule_loss(rule, TARGET, DRAFT, "rejection")) == pytest.approx(rejected)
    log = rule_loss(rule, TARGET, DRAFT, "negative_log_acceptance")
    assert float(log) == pytest.approx(-torch.tensor(1 - rejected).log())


def slopes(rule: Rule, target: Tensor, logits: Tensor, kind: RuleLoss) -> Tensor:
    logits = logits.clone().requires_grad_()
    rule_loss(rule, target, logits.log_softmax(-1), kind).sum().backward()
    assert logits.grad is not None
    return logits.grad


def pair() -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(0)
    target, draft = (torch.randn(4, 6, generator=rng, dtype=torch.float64) for _ in range(2))
    return target.log_softmax(-1), draft


def test_under_the_lossless_rule_it_is_tvd_with_its_slope():
    target, logits = pair()
    logits.requires_grad_()
    tvd(target, logits.log_softmax(-1)).sum().backward()
    assert logits.grad is not None
    got = slopes(Lossless(), target, logits.detach(), "rejection")
    torch.testing.assert_close(got, logits.grad)


@pytest.mark.parametrize("kind", ["rejection", "negative_log_acceptance"])
@pytest.mark.parametrize(
    "rule",
    [Lenient("exponential", 0.6), Lossy(0.3), Chow(0.3), Opt(0.2), TokenV1(0.2), TokenV3(0.3)],
    ids=lambda rule: rule.rule,
)
def test_slopes_are_those_of_small_steps(rule: Rule, kind: RuleLoss):
    """Central differences; no logit here lies so near a decision that the step crosses it."""
    target, logits = pair()
    wanted, step = torch.zeros_like(logits), 1e-6
    for index in range(logits.numel()):
        sides = [logits.clone(), logits.clone()]
        for side, sign in zip(sides, (1, -1), strict=True):
            side.view(-1)[index] += sign * step
        high, low = (rule_loss(rule, target, s.log_softmax(-1), kind).sum() for s in sides)
        wanted.view(-1)[index] = (high - low) / (2 * step)
    got = slopes(rule, target, logits, kind)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-8)


def test_where_a_rule_keeps_to_the_draft_nothing_is_asked_of_it():
    target, logits = pair()
    assert slopes(Chow(1.0), target, logits, "rejection").abs().max() < 1e-15
    assert slopes(Chow(1.0), target, logits, "forward_kl").abs().max() < 1e-15
    assert slopes(Chow(0.0), target, logits, "rejection").abs().max() > 0.01


def test_forward_kl_aims_at_pi_as_it_is():
    target, logits = pair()
    rule = TokenV3(0.3)
    pi = rule.pi(target.exp(), logits.softmax(-1))
    logits.requires_grad_()
    forward_kl(pi.log(), logits.log_softmax(-1)).sum().backward()
    assert logits.grad is not None
    torch.testing.assert_close(slopes(rule, target, logits.detach(), "forward_kl"), logits.grad)


@pytest.mark.parametrize("rule", [Lossless(), Lenient("square", 0.5), Opt(0.1), TokenV3(0.2)])
def test_tokens_without_mass_leave_slopes_finite(rule: Rule):
    target = torch.tensor([[0.0, -60.0, -200.0, -torch.inf]]).log_softmax(-1)
    logits = torch.tensor([[-300.0, 0.0, -95.0, -torch.inf]])
    assert slopes(rule, target, logits, "rejection").isfinite().all()
