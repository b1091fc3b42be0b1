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
    acceptance_BT: Tensor,
    survival_BT: Tensor,
    mask_BT: Tensor,
    gamma: int,
    *,
    budget: int | Tensor | None = None,
) -> float:
    """tau from products of per-position acceptance along target-sampled text.

    Expected tokens / expected blocks of an engine that writes these texts; `tokens_and_blocks` has
    the formulas. Unlike the i.i.d. estimate, tau accounts for easy and hard stretches that cluster
    and for the last block of a text, which the budget or the end of text makes shorter.

    Args:
        acceptance_BT: beta = sum_v min(p, q), [B, T].
        survival_BT: min(1, q(y)/p(y)) of the text's token y, [B, T].
        mask_BT: 1 where there is text, [B, T]. T counts the positions where blocks draft: without
            a text's first token under a rule that leaves that to the prompt's pass.
        gamma: Tokens that a block drafts at most.
        budget: Positions that a text may have, one number or one per text [B]. A text that fills
            its budget was cut there; a shorter one ended with an end-of-text token. None: T.

    Raises:
        ValueError: the mask holds no text.
    Paper: ours. Differs: Zhou et al. 2023 use the i.i.d. estimate.
    """
    tokens_B, blocks_B = tokens_and_blocks(
        acceptance_BT, survival_BT, mask_BT, gamma, budget=budget
    )
    return float(tokens_B.sum() / blocks_B.sum())


def tokens_and_blocks(
    acceptance_BT: Tensor,
    survival_BT: Tensor,
    mask_BT: Tensor,
    gamma: int,
    *,
    budget: int | Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Expected tokens and blocks of each text, whose ratio of sums is `block_efficiency_from_text`.

    Over y ~ p, a token at a drafted position was an accepted draft with its survival, independently
    of the others given the text. So the text alone gives P(a block starts at t); blocks are the sum
    of that. A block emits its accepted tokens and one more, but nothing behind an accepted
    end-of-text token:

        tokens = blocks + sum_t P(token t is judged) beta_t - P(the end of text is an accepted draft)

    A block drafts at most one token less than the budget has left, so that the last token of a text
    that was cut is never judged. An end of text is: an engine does not know where it will fall.
    With survival in the place of beta, tokens would be the text's length; E[survival] = beta, and
    beta varies less.

    Shapes: [B, T] -> [B] each, float64; 0 for a text without positions.

    Raises:
        ValueError: the mask holds no text.
    """
    mask_BT, budget_B = _text(mask_BT, budget)
    survival_BT = survival_BT.cpu().double() * mask_BT
    judged_BT = judged_places(survival_BT, mask_BT, gamma, budget=budget)
    length_B = mask_BT.sum(-1)
    ends_BT = torch.arange(mask_BT.shape[1]) == length_B[:, None] - 1
    ends_BT &= (length_B < budget_B)[:, None]
    blocks_B = (_block_starts(survival_BT, gamma) * mask_BT).sum(-1)
    accepted_B = (judged_BT * acceptance_BT.cpu().double()).sum(-1)
    return blocks_B + accepted_B - (judged_BT * survival_BT * ends_BT).sum(-1), blocks_B


def accepted_by_position(
    acceptance_BT: Tensor,
    survival_BT: Tensor,
    mask_BT: Tensor,
    gamma: int,
    *,
    budget: int | Tensor | None = None,
    starts_before: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Expected blocks of each text that keep the first, second, ... drafted token, and all its blocks.

    Their ratio, in sums over texts, is vLLM's acceptance rate per position:

        sum_t P(a block starts at t) survival_t ... survival_{t+i-1} beta_{t+i}

    over the t whose i-th token is drafted. Their sum over positions is the expected number of
    accepted tokens.

    `starts_before`: only blocks that start before this position count, one number per text [B]: for
    engines that draft behind a text's end, or do not count a last block without a draft. None: all.

    Shapes and the other arguments: as in `block_efficiency_from_text` -> [B, gamma] and [B], float64.

    Raises:
        ValueError: the mask holds no text.
    Paper: ours.
    """
    _check(gamma)
    mask_BT, budget_B = _text(mask_BT, budget)
    places_T = torch.arange(mask_BT.shape[1])
    survival_BT = survival_BT.cpu().double() * mask_BT
    beta_BT = acceptance_BT.cpu().double() * mask_BT * (places_T < budget_B[:, None] - 1)
    reached_BT = _block_starts(survival_BT, gamma) * mask_BT
    if starts_before is not None:
        reached_BT = reached_BT * (places_T < starts_before[:, None])
    blocks_B = reached_BT.sum(-1)
    kept: list[Tensor] = []
    for _ in range(gamma):
        kept.append((reached_BT * beta_BT).sum(-1))
        reached_BT = torch.nn.functional.pad((reached_BT * survival_BT)[:, :-1], (1, 0))
    return torch.stack(kept, -1), blocks_B


def judged_places(
    survival_BT: Tensor, mask_BT: Tensor, gamma: int, *, budget: int | Tensor | None = None
) -> Tensor:
    """`examined_places` of texts that have ends: 0 beyond them, and where the budget ends.

    Shapes: as in `block_efficiency_from_text` -> [B, T], float64.

    Raises:
        ValueError: the mask holds no text.
    Paper: ours.
    """
    mask_BT, budget_B = _text(mask_BT, budget)
    drafted_BT = mask_BT & (torch.arange(mask_BT.shape[1]) < budget_B[:, None] - 1)
    return examined_places(survival_BT.cpu() * mask_BT, gamma) * drafted_BT


def _text(mask_BT: Tensor, budget: int | Tensor | None) -> tuple[Tensor, Tensor]:
    """Where there is text, and each text's budget, [B]."""
    mask_BT = mask_BT.bool().cpu()
    if not mask_BT.any():
        raise ValueError("no text has a token where a block could draft; give longer texts")
    width = mask_BT.shape[1]
    return mask_BT, torch.as_tensor(width if budget is None else budget).expand(len(mask_BT))


def _block_starts(survival_BT: Tensor, gamma: int) -> Tensor:
    """P(a block starts at t | the text), the first one at 0. [B, T] -> [B, T].

    Given the text, each drafted token was accepted with its survival, on its own; a rejected
    position ends the block with the recovered token, a whole block with the bonus token. The budget
    changes nothing here: a block that it shortens ends with the text.
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


def drafted_per_block(
    survival_BT: Tensor, mask_BT: Tensor, gamma: int, *, budget: int | Tensor | None = None
) -> float:
    """Mean number of tokens that a block drafts: gamma, or what the budget has left less one.

    Shapes and `budget`: as in `block_efficiency_from_text`.

    Raises:
        ValueError: the mask holds no text.
    Paper: ours.
    """
    _check(gamma)
    mask_BT, budget_B = _text(mask_BT, budget)
    starts_BT = _block_starts(survival_BT.cpu() * mask_BT, gamma) * mask_BT
    room_BT = budget_B[:, None] - torch.arange(mask_BT.shape[1]) - 1
    return float((starts_BT * room_BT.clamp(max=gamma)).sum() / starts_BT.sum())


def examined_places(survival_BT: Tensor, gamma: int) -> Tensor:
    """P(the token drafted at t is judged | the text), the first block starting at 0.

    A token is judged where a block starts, and behind every token of the block that stayed. Rates of
    what blocks do are means over these places, not over all.

    Shapes: survival [B, T], 0 beyond a text's end -> [B, T]. `judged_places` knows of budgets.
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
