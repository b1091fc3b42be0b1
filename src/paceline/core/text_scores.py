"""Scores of text under a target and a draft: acceptance, survival, agreement, tau and nats.

Scoring is teacher-forced: both models read given text, usually sampled from the target. Nothing is
decoded, so the scores apply to any gamma.
"""

# B texts, T positions, V vocabulary
from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from paceline.core.divergences import total_variation
from paceline.core.rules import Lossless
from paceline.core.speed import drafted_tokens, tokens_and_blocks

if TYPE_CHECKING:
    from torch import Tensor

_UNDRAFTED = Lossless().num_undrafted


class TextScores(NamedTuple):
    """Scores at each position of each text, [B, T]; 0 after the end of a text.

    Attributes:
        acceptance_BT: sum_v min(p, q), p target, q draft.
        survival_BT: min(1, q(y)/p(y)) of the text's token y.
        greedy_draft_BT: p(argmax q), the acceptance with greedy drafting.
        agreement_BT: 1 if both models have the same argmax before temperature and penalties.
        mask_BT: True where there is text.
        cross_entropy_BT: -sum_v p log q of the models' own distributions, before temperature and
            filters, in nats; None if it was not computed.
        acceptance_BTG: Of a parallel draft: acceptance at each place of a block that starts at a
            position; its first place is `acceptance_BT`. None: the place makes no difference.
        survival_BTG: The same of survival.
    """

    acceptance_BT: Tensor
    survival_BT: Tensor
    greedy_draft_BT: Tensor
    agreement_BT: Tensor
    mask_BT: Tensor
    cross_entropy_BT: Tensor | None = None
    acceptance_BTG: Tensor | None = None
    survival_BTG: Tensor | None = None

    @property
    def whole(self) -> tuple[Tensor, Tensor, Tensor]:
        """Acceptance and survival, by the place in a block if it makes a difference, and mask."""
        if self.acceptance_BTG is None or self.survival_BTG is None:
            return self.acceptance_BT, self.survival_BT, self.mask_BT
        return self.acceptance_BTG, self.survival_BTG, self.mask_BT

    @property
    def drafted(self) -> tuple[Tensor, Tensor, Tensor]:
        """`whole` at the positions that a lossless engine drafts."""
        acceptance_BT, survival_BT, mask_BT = (score[:, _UNDRAFTED:] for score in self.whole)
        return acceptance_BT, survival_BT, mask_BT

    def tokens_and_blocks(self, gamma: int, budget_B: Tensor) -> tuple[Tensor, Tensor]:
        """Expected tokens and blocks of each text, [B] each; `budget_B`: its maximum new tokens."""
        return tokens_and_blocks(*self.drafted, gamma, budget=budget_B - _UNDRAFTED)

    def drafted_tokens(self, gamma: int, budget_B: Tensor) -> Tensor:
        """Expected number of drafted tokens of each text, [B]."""
        _, survival_BT, mask_BT = self.drafted
        return drafted_tokens(survival_BT, mask_BT, gamma, budget=budget_B - _UNDRAFTED)


def score_tokens(
    target_probs: Tensor, draft_probs: Tensor, tokens: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Acceptance, survival and greedy draft acceptance before each token; see `TextScores`.

    Shapes: probabilities [..., V] and tokens [...] -> three of [...].
    """
    # 1 - TVD instead of the sum of minima: exactly 1 if p = q. Rounding must not make it negative.
    acceptance = (1 - total_variation(target_probs, draft_probs)).clamp(min=0)
    index = tokens[..., None].to(target_probs.device)
    of_target, of_draft = target_probs.gather(-1, index), draft_probs.gather(-1, index)
    survival = (of_draft / of_target.clamp(min=1e-30)).clamp(max=1).squeeze(-1)
    greedy_draft = target_probs.gather(-1, draft_probs.argmax(-1, keepdim=True)).squeeze(-1)
    return acceptance, survival, greedy_draft


def nats_of(log_probs_NV: Tensor, tokens_N: Tensor) -> float:
    """Sum of -log probability of these tokens."""
    tokens_N1 = tokens_N[:, None].to(log_probs_NV.device)
    return -float(log_probs_NV.gather(-1, tokens_N1).double().sum())
