"""Predict block efficiency and speedup from acceptance and cost.

gamma: drafted tokens per block. c: seconds per draft pass / seconds per target pass.
block_cost_ratio: seconds of a target pass over gamma + 1 tokens / over one; 1 in the papers.
"""

# B texts, T positions, G places of a block
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


def tokens_and_blocks(
    acceptance_BT: Tensor,
    survival_BT: Tensor,
    mask_BT: Tensor,
    gamma: int,
    *,
    budget: int | Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Expected tokens and blocks of each text, as an engine generates it; tau: their ratio of sums.

    Unlike the i.i.d. estimate, it accounts for clusters of easy and hard positions, and for shorter
    blocks at the end of a text. Given a text y ~ p, the token at a drafted position was an accepted
    draft token with probability survival, independently of the others. This gives P(a block starts
    at t); the sum over t is the number of blocks. A block emits its accepted tokens and one more,
    but none after an accepted end-of-text token:

        tokens = blocks + sum_t P(t is verified) beta_t - P(the end of text is an accepted draft)

    A block drafts fewer tokens than the budget has left, so the last token of a truncated text is
    never verified; an end-of-text token can be. With survival instead of beta, tokens would be the
    text's length: E[survival] = beta, and beta has less variance.

    Args:
        acceptance_BT: beta = sum_v min(p, q), [B, T]; of a parallel draft [B, T, G or more], by the
            position at which a block starts and the place in it: q depends on both.
        survival_BT: min(1, q(y)/p(y)) of the text's token y, of the same shape.
        mask_BT: 1 for text, [B, T]. T counts drafted positions: it excludes a first token that the
            prefill generates.
        gamma: Maximum number of drafted tokens per block.
        budget: Maximum positions per text, a number or [B]; None: T. A text that fills its budget
            was truncated; a shorter one ended with an end-of-text token.

    Returns:
        Tokens and blocks, [B] each, float64; 0 for empty texts.

    Raises:
        ValueError: the mask contains no text.
    Paper: ours. Differs: Zhou et al. 2023 use the i.i.d. estimate.
    """
    mask_BT, budget_B = _text(mask_BT, budget)
    starts_BT, reached_BTG = _reached(survival_BT, mask_BT, gamma, budget_B)
    length_B = mask_BT.sum(-1)
    ends_BT = torch.arange(mask_BT.shape[1]) == length_B[:, None] - 1
    ends_BTG = _by_place(ends_BT & (length_B < budget_B)[:, None], gamma)
    accepted_B = (reached_BTG * _by_place(acceptance_BT, gamma)).sum((-1, -2))
    ended_B = (reached_BTG * _by_place(survival_BT, gamma) * ends_BTG).sum((-1, -2))
    blocks_B = starts_BT.sum(-1)
    return blocks_B + accepted_B - ended_B, blocks_B


def accepted_by_position(
    acceptance_BT: Tensor,
    survival_BT: Tensor,
    mask_BT: Tensor,
    gamma: int,
    *,
    budget: int | Tensor | None = None,
    starts_before: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Per text: expected blocks that accept the 1st, 2nd, ... drafted token, and expected blocks.

    The ratio of sums over texts is vLLM's acceptance rate per position. The number of blocks for
    the i-th token is

        sum_t P(a block starts at t) survival_t ... survival_{t+i-1} beta_{t+i}

    over the t with an i-th drafted token. The sum over i is the expected number of accepted tokens.

    `starts_before`: count only blocks that start before this position, [B], for engines that draft
    beyond a text's end or do not count a last block without drafted tokens. None: all.

    Shapes and errors: as in `tokens_and_blocks` -> [B, gamma] and [B], float64.
    Paper: ours.
    """
    _check(gamma)
    mask_BT, budget_B = _text(mask_BT, budget)
    starts_BT, reached_BTG = _reached(survival_BT, mask_BT, gamma, budget_B)
    if starts_before is not None:
        counted_BT = torch.arange(mask_BT.shape[1]) < starts_before[:, None]
        starts_BT, reached_BTG = starts_BT * counted_BT, reached_BTG * counted_BT[..., None]
    return (reached_BTG * _by_place(acceptance_BT, gamma)).sum(1), starts_BT.sum(-1)


def _text(mask_BT: Tensor, budget: int | Tensor | None) -> tuple[Tensor, Tensor]:
    """The mask as bool, and each text's budget, [B]; both on the CPU."""
    mask_BT = mask_BT.bool().cpu()
    if not mask_BT.any():
        raise ValueError("no text has a token where a block could draft; give longer texts")
    width = mask_BT.shape[1]
    return mask_BT, torch.as_tensor(width if budget is None else budget).expand(len(mask_BT))


def _by_place(scores: Tensor, gamma: int) -> Tensor:
    """By the position where a block starts and the place in it, [B, T, G], float64.

    Scores [B, T] are those of each position, wherever its block starts; 0 behind the text.
    """
    scores = scores.cpu().double()
    if scores.ndim == 3:
        return scores[..., :gamma]
    return torch.nn.functional.pad(scores, (0, gamma - 1)).unfold(1, gamma, 1)


def _reached(
    survival: Tensor, mask_BT: Tensor, gamma: int, budget_B: Tensor
) -> tuple[Tensor, Tensor]:
    """P(a block starts at t), [B, T], and that its places are verified, [B, T, G]."""
    survival_BTG = _by_place(survival, gamma) * _by_place(mask_BT, gamma)
    starts_BT = _block_starts(survival_BTG) * mask_BT
    before_BTG = torch.nn.functional.pad(survival_BTG.cumprod(-1)[..., :-1], (1, 0), value=1.0)
    drafted_BT = mask_BT & (torch.arange(mask_BT.shape[1]) < budget_B[:, None] - 1)
    return starts_BT, starts_BT[..., None] * before_BTG * _by_place(drafted_BT, gamma)


def _block_starts(survival_BTG: Tensor) -> Tensor:
    """P(a block starts at t | the text); the first block starts at 0. [B, T, G] -> [B, T].

    Given the text, each drafted token was accepted with probability survival, independently. A
    rejection ends the block with the recovered token, a full block with the bonus token. The budget
    does not matter: a block that it shortens ends with the text.
    """
    batch, length, gamma = survival_BTG.shape
    starts = torch.zeros(batch, length + gamma + 1, dtype=torch.float64)
    starts[:, 0] = 1  # what lies behind the text is removed at the end
    for start in range(length):
        kept = starts[:, start, None] * survival_BTG[:, start].cumprod(-1)
        starts[:, start + 1] += starts[:, start]
        starts[:, start + 1 : start + gamma + 1] -= kept
        starts[:, start + 2 : start + gamma + 2] += kept
    return starts[:, :length]


def drafted_tokens(
    survival_BT: Tensor, mask_BT: Tensor, gamma: int, *, budget: int | Tensor | None = None
) -> Tensor:
    """Expected number of drafted tokens of each text: gamma per block, or less at the budget's end.

    Shapes and errors: as in `tokens_and_blocks` -> [B], float64; 0 for empty texts.
    Paper: ours.
    """
    _check(gamma)
    mask_BT, budget_B = _text(mask_BT, budget)
    starts_BT, _ = _reached(survival_BT, mask_BT, gamma, budget_B)
    left_BT = budget_B[:, None] - torch.arange(mask_BT.shape[1]) - 1
    return (starts_BT * left_BT.clamp(max=gamma)).sum(-1)


def examined_places(
    survival_BT: Tensor, mask_BT: Tensor, gamma: int, *, budget: int | Tensor | None = None
) -> Tensor:
    """P(the token drafted at t is verified | the text); 0 beyond a text and at its budget's end.

    A drafted token is verified if all drafted tokens before it in its block were accepted.
    Acceptance rates of blocks are means weighted by these probabilities.

    Shapes and errors: as in `tokens_and_blocks` -> [B, T], float64.
    Paper: ours. Differs: a mean over the text counts positions where no block drafts.
    """
    _check(gamma)
    mask_BT, budget_B = _text(mask_BT, budget)
    _, reached_BTG = _reached(survival_BT, mask_BT, gamma, budget_B)
    length = mask_BT.shape[1]
    examined_BT = torch.zeros(mask_BT.shape, dtype=torch.float64)
    for place in range(min(gamma, length)):
        examined_BT[:, place:] += reached_BTG[:, : length - place, place]
    return examined_BT


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
    """The acceptance where the predicted speedup is 1: i.i.d. tau = c gamma + block_cost_ratio.

    Returns: a number in [0, 1], or inf if no acceptance is sufficient.
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


def _check(gamma: int, *, acceptance: float | None = None, cost_ratio: float | None = None) -> None:
    if gamma < 0:
        raise ValueError(f"gamma must be 0 or more, got {gamma}")
    if acceptance is not None and not 0 <= acceptance <= 1:
        raise ValueError(f"acceptance must be in [0, 1], got {acceptance}")
    if cost_ratio is not None and not cost_ratio >= 0:
        raise ValueError(f"cost ratio must be 0 or more, got {cost_ratio}")
