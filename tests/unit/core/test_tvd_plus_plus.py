"""TVD++ by hand, against its identity, by enumeration and against what it may be mistaken for."""

import math

import pytest
import torch
from torch import Tensor

from paceline.core.divergences import tvd
from paceline.core.tvd_plus_plus import Estimator, RewardMoments, reward_moments, tvd_plus_plus
from paceline.train.objectives import ForwardKL, Policy, TVDPlusPlus, policies_of, uniforms_of_terms

ESTIMATORS: tuple[Estimator, ...] = ("exact", "sampled", "uniform")


def pair(seed: int, positions: int = 5, vocab_size: int = 7) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the target, logits of the draft, float64."""
    rng = torch.Generator().manual_seed(seed)
    target, draft = (
        torch.randn(positions, vocab_size, generator=rng, dtype=torch.float64) for _ in range(2)
    )
    return target.log_softmax(-1), draft


def alone(moments: Tensor) -> Tensor:
    """Sums over all processes, where there is one."""
    return moments


def slope(
    target: Tensor,
    logits: Tensor,
    estimator: Estimator,
    drawn: Tensor | None = None,
    moments: RewardMoments | None = None,
) -> Tensor:
    """Of the sum over positions, at the draft's logits."""
    logits = logits.clone().requires_grad_()
    logs = logits.log_softmax(-1)
    if moments is None:
        moments = reward_moments(target, logs.detach(), estimator, drawn)
    tvd_plus_plus(target, logs, estimator, moments, drawn).sum().backward()
    assert logits.grad is not None
    return logits.grad


def slope_of_tvd(target: Tensor, logits: Tensor) -> Tensor:
    logits = logits.clone().requires_grad_()
    return torch.autograd.grad(tvd(target, logits.log_softmax(-1)).sum(), logits)[0]


def test_three_tokens_by_hand():
    # p = (.5 .3 .2), q = (.2 .3 .5): r = (1 0 0), the tie earns nothing
    target = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64).log()
    logits = torch.tensor([[0.2, 0.3, 0.5]], dtype=torch.float64).log()

    def close(got: Tensor, *wanted: float) -> None:
        torch.testing.assert_close(got, torch.tensor([wanted], dtype=torch.float64))

    # mu = .2, sigma = sqrt(.2 .8) = .4; slope of TVD: q (.2 - r) = (-.16 .06 .1)
    close(slope(target, logits, "exact"), -0.4, 0.15, 0.25)
    # mu = 1/3, sigma = sqrt(2)/3, a = (sqrt 2, -1/sqrt 2, -1/sqrt 2): mean 0, so -a/3
    root = math.sqrt(2)
    close(slope(target, logits, "uniform"), -root / 3, root / 6, root / 6)
    # tokens 0 and 2 drawn: mu = 1/2, sigma = 1/2, a = 1, -1; -(grad log q(0) - grad log q(2)) / 2
    close(slope(target, logits, "sampled", torch.tensor([[0, 2]])), -0.5, 0.0, 0.5)


@pytest.mark.parametrize("seed", range(5))
def test_the_exact_estimator_is_tvd_over_sigma(seed: int):
    target, logits = pair(seed)
    draft = logits.softmax(-1)
    rewards = [
        (float(q), float(target[c, v].exp() > q))
        for c, row in enumerate(draft)
        for v, q in enumerate(row)
    ]
    total = sum(q for q, _ in rewards)
    mean = sum(q * r for q, r in rewards) / total
    sigma = math.sqrt(sum(q * (r - mean) ** 2 for q, r in rewards) / total)
    torch.testing.assert_close(slope(target, logits, "exact"), slope_of_tvd(target, logits) / sigma)


def test_the_uniform_estimator_is_another_loss():
    target, logits = pair(0)
    uniform, exact = slope(target, logits, "uniform"), slope(target, logits, "exact")
    assert float(torch.cosine_similarity(uniform.flatten(), exact.flatten(), dim=0)) < 0.999
    # its formula at a logit, from Eq. 1 with n = positions times vocabulary
    rewards = (target > logits.log_softmax(-1)).double()
    advantages = (rewards - rewards.mean()) / rewards.std(correction=0)
    q, size = logits.softmax(-1), logits.shape[-1]
    wanted = q * advantages.mean(-1, keepdim=True) - advantages / size
    torch.testing.assert_close(uniform, wanted)


def test_sampled_slopes_are_right_on_average_over_every_token_that_can_be_drawn():
    target, logits = pair(1, positions=1)
    draft = logits.softmax(-1)
    moments = reward_moments(target, draft.log(), "exact")
    mean = sum(
        draft[0, v] * slope(target, logits, "sampled", torch.tensor([[v]]), moments)
        for v in range(draft.shape[1])
    )
    assert isinstance(mean, Tensor)
    torch.testing.assert_close(mean, slope(target, logits, "exact"))


def mean_of_draws(target: Tensor, logits: Tensor, drawn_from: Tensor) -> Tensor:
    """The sampled slope where tokens are drawn as in training, 4,000 of each position."""
    term = TVDPlusPlus(estimator="sampled", num_samples=4000)
    rows = [(torch.Generator().manual_seed(0), len(logits))]
    (policy,) = policies_of([term], uniforms_of_terms([term], rows), [(target, drawn_from)], alone)
    assert policy is not None
    return slope(target, logits, "sampled", policy.drawn_CK, policy.moments)


def test_many_draws_come_near_the_exact_slope_and_draws_of_the_target_do_not():
    """n = 20,000; a slope's standard error is below 1 / sqrt(4000) = 0.016; four are allowed."""
    target, logits = pair(2)
    exact = slope(target, logits, "exact")
    right = mean_of_draws(target, logits, logits.log_softmax(-1))
    assert float((right - exact).abs().max()) < 0.065
    mutant = mean_of_draws(target, logits, target)
    assert float((mutant - exact).abs().max()) > 0.13


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_batch_in_parts_has_the_moments_of_the_whole(estimator: Estimator):
    target, logits = pair(3, positions=6)
    logs = logits.log_softmax(-1)
    term = TVDPlusPlus(estimator=estimator, num_samples=2)

    uniforms = uniforms_of_terms([term], [(torch.Generator().manual_seed(1), 6)])

    def policy(*parts: slice) -> Policy:
        chunks = [(target[part], logs[part]) for part in parts]
        (found,) = policies_of([term], uniforms, chunks, alone)
        assert found is not None
        return found

    whole, cut = policy(slice(None)), policy(slice(0, 4), slice(4, 6))
    torch.testing.assert_close(cut.moments, whole.moments)
    if estimator == "sampled":
        assert whole.drawn_CK is not None
        assert cut.drawn_CK is not None
        assert torch.equal(cut.drawn_CK, whole.drawn_CK)


def test_moments_are_those_of_all_processes():
    target, logits = pair(3, positions=6)
    logs = logits.log_softmax(-1)
    term = TVDPlusPlus(estimator="exact")
    elsewhere = reward_moments(target[4:], logs[4:], "exact")
    seen = [(target[:4], logs[:4])]
    (policy,) = policies_of([term], [None], seen, lambda mine: mine + torch.stack(elsewhere))
    assert policy is not None
    torch.testing.assert_close(policy.moments, reward_moments(target, logs, "exact"))


def test_a_row_draws_by_its_own_generator_whatever_is_beside_it():
    terms = [
        TVDPlusPlus(estimator="sampled", num_samples=2),
        ForwardKL(),
        TVDPlusPlus(estimator="sampled", num_samples=3),
    ]

    def uniforms(*rows: tuple[int, int]) -> list[Tensor | None]:
        return uniforms_of_terms(
            terms, [(torch.Generator().manual_seed(seed), length) for seed, length in rows]
        )

    together, first, second = uniforms((7, 4), (8, 5)), uniforms((7, 4)), uniforms((8, 5))
    assert together[1] is None
    for index, count in ((0, 2), (2, 3)):
        both, one, other = together[index], first[index], second[index]
        assert both is not None
        assert one is not None
        assert other is not None
        assert both.shape == (9, count)
        assert torch.equal(both, torch.cat([one, other]))
        assert both.unique().numel() == both.numel()


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_value_is_tvd_and_equal_models_feel_nothing(estimator: Estimator):
    target, logits = pair(4)
    logs, drawn = logits.log_softmax(-1), torch.zeros(5, 1, dtype=torch.int64)
    moments = reward_moments(target, logs, estimator, drawn)
    got = tvd_plus_plus(target, logs, estimator, moments, drawn)
    torch.testing.assert_close(got, tvd(target, logs))
    assert slope(logs, logits, estimator, drawn).abs().max() == 0


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_tokens_that_the_draft_cannot_propose_leave_slopes_finite(estimator: Estimator):
    target, logits = pair(5)
    logits[:, 3] = -torch.inf
    drawn = torch.zeros(5, 1, dtype=torch.int64)
    got = slope(target, logits, estimator, drawn)
    assert got.isfinite().all()
    assert got[:, 3].abs().max() == 0
