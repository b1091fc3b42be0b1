"""Divergences on three tokens by hand, and their slopes against finite differences."""

import math
from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

from paceline.core.divergences import (
    Mean,
    RuleLoss,
    count_units,
    forward_kl,
    jsd,
    negative_log_acceptance,
    reverse_kl,
    rule_loss,
    token_weights,
    tvd,
)
from paceline.core.rule_base import Position, Rule
from paceline.core.rules import Chow, Lenient, Lossless, Lossy, Opt, TokenV1, TokenV3

Divergence = Callable[[Tensor, Tensor], Tensor]


def skewed_jsd(target_log_probs: Tensor, draft_log_probs: Tensor) -> Tensor:
    return jsd(target_log_probs, draft_log_probs, beta=0.25)


ALL = [forward_kl, reverse_kl, jsd, skewed_jsd, tvd, negative_log_acceptance]
every = pytest.mark.parametrize("divergence", ALL)

TARGET = (0.7, 0.2, 0.1)
DRAFT = (0.1, 0.3, 0.6)


def logs(probs: tuple[float, ...]) -> Tensor:
    return torch.tensor([math.log(p) if p else -math.inf for p in probs], dtype=torch.float64)


def random_logits(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def slope(divergence: Divergence, target: Tensor, draft_logits: list[float]) -> Tensor:
    logits = torch.tensor(draft_logits, dtype=target.dtype, requires_grad=True)
    divergence(target, logits.log_softmax(-1)).backward()
    assert logits.grad is not None
    return logits.grad


@pytest.mark.parametrize(
    ("divergence", "by_hand"),
    [
        # .7 ln 7 + .2 ln(2/3) + .1 ln(1/6)
        (forward_kl, 1.101868),
        # .1 ln(1/7) + .3 ln(3/2) + .6 ln 6
        (reverse_kl, 1.002104),
        # m = (.4, .25, .35)
        (jsd, 0.230646),
        # m = (.25, .275, .475): .25 x .501228 + .75 x .074643
        (skewed_jsd, 0.181290),
        # (.6 + .1 + .5) / 2
        (tvd, 0.6),
        # -ln(.1 + .2 + .1)
        (negative_log_acceptance, 0.916291),
    ],
)
def test_three_tokens_give_the_numbers_worked_out_by_hand(divergence: Divergence, by_hand: float):
    assert float(divergence(logs(TARGET), logs(DRAFT))) == pytest.approx(by_hand, abs=2e-6)
    in_float32 = divergence(logs(TARGET).float(), logs(DRAFT).float())
    assert float(in_float32) == pytest.approx(by_hand, abs=2e-6)


@every
def test_a_distribution_is_at_distance_zero_from_itself_alone(divergence: Divergence):
    same = random_logits(4, 50, seed=1).log_softmax(-1)
    assert torch.allclose(divergence(same, same), torch.zeros(4, dtype=torch.float64), atol=1e-14)
    p, q = random_logits(2, 100, 5, seed=2).log_softmax(-1)
    assert (divergence(p, q) > 0).all()


@pytest.mark.parametrize("beta", [0.0, 1.0, -0.5, 1.5, math.nan])
def test_jsd_at_an_end_is_an_error_that_names_the_right_choice(beta: float):
    with pytest.raises(ValueError, match=f"got {beta}; use forward_kl or reverse_kl"):
        jsd(logs(TARGET), logs(DRAFT), beta)


def test_jsd_is_symmetric_at_one_half_and_swaps_beta_elsewhere():
    p, q = logs(TARGET), logs(DRAFT)
    assert float(jsd(p, q)) == pytest.approx(float(jsd(q, p)), abs=1e-15)
    assert float(jsd(p, q, 0.2)) == pytest.approx(float(jsd(q, p, 0.8)), abs=1e-15)
    assert float(jsd(p, q, 0.2)) != pytest.approx(float(jsd(q, p, 0.2)), abs=1e-3)


def test_jsd_near_its_ends_leans_to_the_kl_that_each_end_names():
    # d/d beta at 0 is KL(p || q); by symmetry KL(q || p) at 1.
    p, q = logs(TARGET), logs(DRAFT)
    assert float(jsd(p, q, 1e-6)) / 1e-6 == pytest.approx(1.101868, abs=1e-4)
    assert float(jsd(p, q, 1 - 1e-6)) / 1e-6 == pytest.approx(1.002104, abs=1e-4)


def test_tvd_is_one_less_the_overlap_and_nla_the_log_of_it():
    p, q = random_logits(2, 200, 7, seed=3).softmax(-1)
    overlap = torch.tensor(
        [
            sum(min(a, b) for a, b in zip(*row, strict=True))
            for row in zip(p.tolist(), q.tolist(), strict=True)
        ],
        dtype=torch.float64,
    )
    assert torch.allclose(tvd(p.log(), q.log()), 1 - overlap, atol=1e-12)
    assert torch.allclose(negative_log_acceptance(p.log(), q.log()), -overlap.log(), atol=1e-12)


@every
def test_slopes_equal_finite_differences(divergence: Divergence):
    target = random_logits(3, 6, seed=4).log_softmax(-1)
    draft_logits = random_logits(3, 6, seed=5).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda logits: divergence(target, logits.log_softmax(-1)), (draft_logits,)
    )


# Liger-Kernel#1384: a tie between p and q must not push the draft anywhere.
@pytest.mark.parametrize("divergence", [tvd, negative_log_acceptance])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_draft_equal_to_its_target_gets_no_push(divergence: Divergence, dtype: torch.dtype):
    logits = random_logits(5, 40, seed=6).to(dtype)
    draft = logits.log_softmax(-1).requires_grad_()
    divergence(logits.log_softmax(-1), draft).sum().backward()
    assert draft.grad is not None
    assert (draft.grad == 0).all()


# Liger-Kernel#1384
@pytest.mark.parametrize(
    ("divergence", "expected"),
    [
        # half the sign of q - p, times q
        (tvd, [0.5 * 0.5, 0.0, -0.5 * 0.125]),
        # where q < p: -q / overlap, overlap = .25 + .375 + .125
        (negative_log_acceptance, [0.0, 0.0, -0.125 / 0.75]),
    ],
)
def test_a_tied_token_alone_has_slope_zero(divergence: Divergence, expected: list[float]):
    target = logs((0.25, 0.375, 0.375))
    draft = logs((0.5, 0.375, 0.125)).requires_grad_()
    divergence(target, draft).backward()
    assert draft.grad is not None
    assert draft.grad.tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("divergence", "by_hand"),
    [
        (forward_kl, math.log(2)),  # .5 ln(.5/.25) twice
        (reverse_kl, math.inf),  # the draft puts half its mass where the target has none
        (jsd, 0.5 * math.log(4 / 3) + 0.25 * math.log(2 / 3) + 0.25 * math.log(2)),
        (tvd, 0.5),
        (negative_log_acceptance, math.log(2)),
    ],
)
def test_tokens_that_the_target_never_says_by_hand(divergence: Divergence, by_hand: float):
    value = divergence(logs((0.5, 0.5, 0, 0)), logs((0.25, 0.25, 0.5, 0)))
    assert float(value) == pytest.approx(by_hand, abs=1e-12)


@every
def test_tokens_that_neither_can_say_leave_value_and_slope_alone(divergence: Divergence):
    short = slope(divergence, logs(TARGET), [0.3, 0.1, -0.2])
    padded = slope(divergence, logs((*TARGET, 0.0)), [0.3, 0.1, -0.2, -math.inf])
    assert padded[3] == 0
    assert torch.allclose(padded[:3], short, atol=1e-12)
    extended = divergence(logs((*TARGET, 0.0)), logs((*DRAFT, 0.0)))
    assert extended == divergence(logs(TARGET), logs(DRAFT))


@pytest.mark.parametrize(
    ("divergence", "target", "logits"),
    [
        *product(
            [forward_kl, jsd, tvd, negative_log_acceptance], [(0.5, 0.5, 0.0)], [[1.0, 0.0, 2.0]]
        ),
        *product(
            [reverse_kl, jsd, tvd, negative_log_acceptance], [TARGET], [[1.0, 0.0, -math.inf]]
        ),
    ],
)
def test_slopes_are_numbers_where_one_model_alone_has_impossible_tokens(
    divergence: Divergence, target: tuple[float, ...], logits: list[float]
):
    assert torch.isfinite(slope(divergence, logs(target), logits)).all()


def test_nla_has_a_slope_where_the_overlap_is_e_to_the_minus_200():
    target = torch.tensor([0.0, -200.0])
    logits = torch.tensor([-200.0, 0.0], requires_grad=True)
    value = negative_log_acceptance(target.log_softmax(-1), logits.log_softmax(-1))
    value.backward()
    assert float(value.detach()) == pytest.approx(200 - math.log(2), abs=1e-3)
    assert logits.grad is not None
    # Half of the overlap hangs on each token; only the first one depends on the draft.
    assert logits.grad.tolist() == pytest.approx([-0.5, 0.5], abs=1e-6)
    vanished = torch.tensor([-200.0, 0.0], requires_grad=True)
    tvd(target.log_softmax(-1), vanished.log_softmax(-1)).backward()
    assert vanished.grad is not None
    assert vanished.grad.tolist() == [0, 0]


def test_mass_that_underflows_counts_for_nothing():
    target = torch.tensor([0.0, -120.0]).log_softmax(-1)
    assert float(forward_kl(target, torch.tensor([0.0, -torch.inf]))) == 0
    rare = torch.tensor([0.0, -9.0]).log_softmax(-1)
    assert float(forward_kl(rare, torch.tensor([0.0, -torch.inf]))) == torch.inf


# The one mean over losses, by hand on four sequences.


LOSS = torch.tensor([[1.0, 2.0, 3.0], [10.0, 99.0, 99.0], [4.0, 6.0, 99.0], [99.0, 99.0, 99.0]])
MASK = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [0, 0, 0]])
means = pytest.mark.parametrize("mean", ["sequence", "token"])


def mean_of(loss: Tensor, mask: Tensor, mean: Mean, total: Tensor | float | None = None) -> Tensor:
    """The weighted sum, as a step of training adds it up."""
    return (loss * token_weights(mask, mean=mean, total=total)).sum()


def test_the_sequence_mean_gives_every_sequence_one_voice_and_the_token_mean_every_token():
    # means 2, 10, 5; the empty sequence has none
    assert float(mean_of(LOSS, MASK, "sequence")) == pytest.approx(17 / 3)
    assert float(mean_of(LOSS, MASK, "token")) == pytest.approx(26 / 6)
    assert [int(count_units(MASK, mean)) for mean in ("token", "sequence")] == [6, 3]


@means
def test_masks_of_any_kind_and_totals_as_numbers_mean_the_same(mean: Mean):
    wanted, total = mean_of(LOSS, MASK, mean), float(count_units(MASK, mean))
    for kind in (torch.bool, torch.int64, torch.float32):
        assert mean_of(LOSS, MASK.to(kind), mean) == wanted
    assert mean_of(LOSS, MASK, mean, total=total) == wanted
    narrow = mean_of(LOSS[1:3, :2], MASK[1:3, :2], mean)
    assert narrow == mean_of(LOSS[1:3], MASK[1:3], mean)
    assert float(mean_of(LOSS[3:], MASK[3:], mean, total=5)) == 0
    weights = token_weights(MASK, mean=mean)
    assert float(weights.sum()) == pytest.approx(1)
    assert (weights[MASK == 0] == 0).all()


# trl#6006: accumulation must not average the averages of uneven batches.
@means
@pytest.mark.parametrize("split", [1, 2, 3])
def test_two_part_batches_with_the_total_of_the_step_make_one_whole_batch(mean: Mean, split: int):
    whole_loss = LOSS.clone().requires_grad_()
    whole = mean_of(whole_loss, MASK, mean)
    whole.backward()
    parts_loss = LOSS.clone().requires_grad_()
    total = count_units(MASK, mean)
    parts: list[Tensor] = []
    for rows in (slice(None, split), slice(split, None)):
        parts.append(mean_of(parts_loss[rows], MASK[rows], mean, total=total))
        parts[-1].backward()
    assert float(sum(part.detach() for part in parts)) == pytest.approx(float(whole.detach()))
    assert whole_loss.grad is not None
    assert parts_loss.grad is not None
    assert torch.allclose(whole_loss.grad, parts_loss.grad, atol=1e-7)


@means
def test_a_batch_with_every_position_masked_is_an_error(mean: Mean):
    for mask, total in ((torch.zeros_like(MASK), None), (MASK, 0)):
        with pytest.raises(ValueError, match="every position is masked"):
            mean_of(LOSS, mask, mean, total=total)


# p = (.5 .3 .2), q = (.2 .3 .5)
OF_TARGET = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()
OF_DRAFT = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64).log()


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
    assert float(rule_loss(rule, OF_TARGET, OF_DRAFT, "rejection")) == pytest.approx(rejected)
    log = rule_loss(rule, OF_TARGET, OF_DRAFT, "negative_log_acceptance")
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


@pytest.mark.parametrize("kind", ["rejection", "negative_log_acceptance"])
@pytest.mark.parametrize(
    "rule",
    [Lenient("exponential", 0.6), Lossy(0.3), Chow(0.3), Opt(0.2), TokenV1(0.2), TokenV3(0.3)],
    ids=lambda rule: rule.rule,
)
def test_slopes_of_a_rule_are_those_of_small_steps(rule: Rule, kind: RuleLoss):
    """No logit here lies so near a decision that the step crosses it."""
    target, logits = pair()
    assert torch.autograd.gradcheck(
        lambda logits: rule_loss(rule, target, logits.log_softmax(-1), kind),
        (logits.requires_grad_(),),
    )


def test_where_a_rule_keeps_to_the_draft_nothing_is_asked_of_it():
    target, logits = pair()
    assert slopes(Chow(1.0), target, logits, "rejection").abs().max() < 1e-15
    assert slopes(Chow(1.0), target, logits, "forward_kl").abs().max() < 1e-15
    assert slopes(Chow(0.0), target, logits, "rejection").abs().max() > 0.01


def test_the_lossless_rule_loses_tvd_and_forward_kl_aims_at_pi_as_it_is():
    target, logits = pair()
    rule = TokenV3(0.3)
    pi = rule.pi_at(Position.of(target.exp(), logits.softmax(-1)))
    for of, kind, plain, aim in (
        (Lossless(), "rejection", tvd, target),
        (rule, "forward_kl", forward_kl, pi.log()),
    ):
        wanted = logits.clone().requires_grad_()
        plain(aim, wanted.log_softmax(-1)).sum().backward()
        torch.testing.assert_close(slopes(of, target, logits, kind), wanted.grad)


@pytest.mark.parametrize("rule", [Lossless(), Lenient("square", 0.5), Opt(0.1), TokenV3(0.2)])
def test_tokens_without_mass_leave_slopes_finite(rule: Rule):
    target = torch.tensor([[0.0, -60.0, -200.0, -torch.inf]]).log_softmax(-1)
    logits = torch.tensor([[-300.0, 0.0, -95.0, -torch.inf]])
    assert slopes(rule, target, logits, "rejection").isfinite().all()
