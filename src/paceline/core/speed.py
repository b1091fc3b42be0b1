"""From acceptance and cost to speed: what speculation promises, and when it loses.

gamma: tokens drafted a block; c: seconds of a draft pass / seconds of a target pass. The papers take
a target pass over gamma + 1 tokens for as long as one over a single token; where that does not hold,
`block_cost_ratio` is the first divided by the second.
"""

# B texts, T positions
from __future__ import annotations

import math

import torch
from torch import Tensor


def block_efficiency_iid(acceptance: float, gamma: int) -> float:
    """tau = (1 - a^(gamma + 1)) / (1 - a), in [1, gamma + 1].

    Paper: Zhou et al. 2023, section 3: every token accepted with the same, independent chance.
    """
    _check(gamma, acceptance=acceptance)
    return sum(acceptance**i for i in range(gamma + 1))


def block_efficiency_from_text(
    acceptance_BT: Tensor, survival_BT: Tensor, mask_BT: Tensor, gamma: int
) -> float:
    """tau from products of per-position acceptance along target-sampled text.

    A block started at t emits 1 + sum_i P(first i drafted tokens stay) tokens, and over y ~ p
    P(first i stay) = E[prod_{j<i} min(1, q(y_j)/p(y_j)) * beta_i], beta = sum_v min(p, q): the
    survival of the tokens that were passed and the acceptance at the last one. Every start t with
    gamma positions of text left counts by the probability that a block starts there, given the
    text (`_block_starts`): hard stretches are cut into more blocks. Unlike the i.i.d. estimate it
    knows that easy and hard stretches cluster.

    Shapes: acceptance (beta), survival (min(1, q(y)/p(y))), mask (1 = text) [B, T] -> float, T the
    positions where blocks draft: all but a text's first where that comes with the prompt.

    Raises:
        ValueError: no text has gamma positions.
    Paper: ours. Differs: Zhou et al. 2023 use the i.i.d. estimate.
    """
    tokens_B, blocks_B = tokens_and_blocks(acceptance_BT, survival_BT, mask_BT, gamma)
    return float(tokens_B.sum() / blocks_B.sum())


def tokens_and_blocks(
    acceptance_BT: Tensor, survival_BT: Tensor, mask_BT: Tensor, gamma: int
) -> tuple[Tensor, Tensor]:
    """Expected tokens and blocks of each text, whose ratio of sums is `block_efficiency_from_text`.

    Shapes: [B, T] -> [B] each, float64.

    Raises:
        ValueError: no text is longer than gamma.
    """
    _check(gamma)
    if gamma == 0:
        ones_B = torch.ones(mask_BT.shape[0], dtype=torch.float64)
        return ones_B, ones_B
    length = mask_BT.shape[1]
    if length < gamma:
        raise ValueError(f"no text has {gamma} tokens; use a smaller gamma or longer texts")
    starts = length - gamma + 1
    total = torch.ones(mask_BT.shape[0], starts, dtype=torch.float64)
    passed = torch.ones_like(total)
    for offset in range(gamma):
        window = slice(offset, offset + starts)
        total += passed * acceptance_BT[:, window].double()
        passed *= survival_BT[:, window].double()
    # A start counts when the last position of its window is still text.
    whole = mask_BT[:, gamma - 1 :].bool()
    if not whole.any():
        raise ValueError(f"no text has {gamma} tokens; use a smaller gamma or longer texts")
    weight = _block_starts(survival_BT, gamma)[:, :starts] * whole
    return (weight * total).sum(-1), weight.sum(-1)


def _block_starts(survival_BT: Tensor, gamma: int) -> Tensor:
    """P(a block starts at t | the text), the first one at 0. [B, T] -> [B, T].

    Given the text, each drafted token was accepted with its survival, on its own; a rejected
    position ends the block with the recovered token, a whole block with the bonus token.
    """
    batch, length = survival_BT.shape
    starts = torch.zeros(batch, length + gamma + 1, dtype=torch.float64)
    starts[:, 0] = 1
    # Beyond the end nothing survives; those columns are cut off again.
    survival = torch.nn.functional.pad(survival_BT.double(), (0, gamma))
    for start in range(length):
        kept = starts[:, start, None] * survival[:, start : start + gamma].cumprod(-1)
        starts[:, start + 1] += starts[:, start]
        starts[:, start + 1 : start + gamma + 1] -= kept
        starts[:, start + 2 : start + gamma + 2] += kept
    return starts[:, :length]


def examined_places(survival_BT: Tensor, gamma: int) -> Tensor:
    """P(the token drafted at t is judged | the text), the first block starting at 0.

    A token is judged where a block starts, and behind every token of the block that stayed. Rates of
    what blocks do are means over these places, not over all.

    Shapes: survival [B, T], 0 beyond a text's end -> [B, T].
    Paper: ours. Differs: a mean over the text counts places that no block drafts at.
    """
    _check(gamma)
    length = survival_BT.shape[1]
    starts = _block_starts(survival_BT, gamma)
    examined = torch.zeros_like(starts)
    stayed = torch.ones_like(starts)
    for offset in range(min(gamma, length)):
        places = slice(0, length - offset)
        examined[:, offset:] += starts[:, places] * stayed[:, places]
        stayed[:, places] *= survival_BT[:, offset:].double()
    return examined


def predicted_speedup(
    block_efficiency: float, gamma: int, cost_ratio: float, block_cost_ratio: float = 1.0
) -> float:
    """tau / (c gamma + block_cost_ratio).

    Paper: Zhou et al. 2023, section 3. Differs: theirs has block_cost_ratio 1.
    """
    _check(gamma, cost_ratio=cost_ratio)
    return block_efficiency / (cost_ratio * gamma + block_cost_ratio)


def mbsu(block_efficiency: float, gamma: int, parameter_ratio: float) -> float:
    """Memory-bound speed-up: `predicted_speedup` with c = draft parameters / target parameters.

    Paper: Goel et al. 2024, section 3.2. Differs: the text as extracted has a stray factor c in
    the numerator; without it their own example (tau 2.3, gamma 3, c 0.0164) gives 2.19.
    """
    return predicted_speedup(block_efficiency, gamma, parameter_ratio)


def break_even_acceptance(gamma: int, cost_ratio: float, block_cost_ratio: float = 1.0) -> float:
    """The acceptance at which speculation gains nothing: iid tau = c gamma + block_cost_ratio.

    Returns: a number in [0, 1], or inf where no acceptance suffices.
    """
    _check(gamma, cost_ratio=cost_ratio)
    cost = cost_ratio * gamma + block_cost_ratio
    if cost <= 1:
        return 0.0
    if cost >= gamma + 1:
        return math.inf
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if block_efficiency_iid(middle, gamma) < cost:
            low = middle
        else:
            high = middle
    return high


def best_gamma(acceptance: float, cost_ratio: float, max_gamma: int = 16) -> int:
    """The gamma of the largest predicted speed-up; 0 where plain decoding is best.

    The smaller one of equals, since a shorter block wastes less when the estimate is off.
    """
    _check(max_gamma, acceptance=acceptance, cost_ratio=cost_ratio)

    def speedup(gamma: int) -> float:
        return predicted_speedup(block_efficiency_iid(acceptance, gamma), gamma, cost_ratio)

    return max(range(max_gamma + 1), key=speedup)


def _check(gamma: int, *, acceptance: float | None = None, cost_ratio: float | None = None) -> None:
    if gamma < 0:
        raise ValueError(f"gamma must be 0 or more, got {gamma}")
    if acceptance is not None and not 0 <= acceptance <= 1:
        raise ValueError(f"acceptance must be in [0, 1], got {acceptance}")
    if cost_ratio is not None and not cost_ratio >= 0:
        raise ValueError(f"cost ratio must be 0 or more, got {cost_ratio}")
