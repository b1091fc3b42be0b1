"""Rules with one fault each, which the tests of laws must catch."""

import torch
from torch import Tensor

from paceline.core.rule_base import Position
from paceline.core.rules import (
    BiLDRule,
    Chow,
    Lenient,
    Lossless,
    Lossy,
    Opt,
    TokenV2,
)


class SoftmaxesTheResidual(Lossless):  # transformers#28508
    def residual_at(self, at: Position) -> Tensor:
        return (at.target - at.draft).clamp(min=0).softmax(-1)


class AcceptsLess(Lossless):
    """By half a per cent."""

    def accept_at(self, at: Position) -> Tensor:
        return 0.995 * super().accept_at(at)


class ResidualOfLess(Lossless):
    """p - 0.995 q."""

    def residual_at(self, at: Position) -> Tensor:
        left = (at.target - 0.995 * at.draft).clamp(min=0)
        return left / left.sum(-1, keepdim=True)


class ResidualWithTarget(Lossless):
    """Half a per cent of p in it."""

    def residual_at(self, at: Position) -> Tensor:
        return 0.995 * super().residual_at(at) + 0.005 * at.target


class BonusFromTarget(Chow):
    """Takes the bonus from p, as a lossless rule does."""

    def pi_at(self, at: Position) -> Tensor:
        aim = super().pi_at(at)
        return torch.cat([aim[:, :-1], at.target[:, -1:]], 1)


class UntemperedLeftOut(Chow):
    """Reads confidence from the proposal, at any temperature of it."""

    def defers(self, at: Position) -> Tensor:
        return super().defers(Position.of(at.target, at.draft))


class ForgetsWhatWasGivenUp(TokenV2):
    """Renormalises what is left of q, where eta p belongs."""

    def pi_at(self, at: Position) -> Tensor:
        lost = self.defers(Position.of(at.target, at.draft))
        left = at.draft.masked_fill(lost, 0)
        return left / left.sum(-1, keepdim=True).clamp(min=1e-9)


class AimWithTarget(TokenV2):
    """Half a per cent of p in it."""

    def pi_at(self, at: Position) -> Tensor:
        return 0.995 * super().pi_at(at) + 0.005 * at.target


class SurpriseOfTheDraft(BiLDRule):
    """D the other way round."""

    def defers(self, at: Position) -> Tensor:
        return super().defers(Position(at.draft, at.target, at.draft_raw, at.target_raw))


class WeighsWithTwiceTheDistance(Opt):
    """The L1 norm, where its half belongs."""

    def defers(self, at: Position) -> Tensor:
        return Opt(2 * self.alpha).defers(at)


class UntunedAim(Lossy):
    """The paper's aim with beta 1, normalised: not what the procedure makes."""

    def pi_at(self, at: Position) -> Tensor:
        kept = torch.minimum(at.draft, at.target / (1 - self.alpha))
        aim = torch.maximum(kept, at.target)
        return aim / aim.sum(-1, keepdim=True)


class ComparesWithTheDraft(Lenient):
    """f(p_raw) against max q."""

    def accept_at(self, at: Position) -> Tensor:
        return (self.relaxed(at.target_raw) >= at.draft.amax(-1, keepdim=True)).float()


class KeepsWithProbability(Lenient):
    """min(1, f(p_raw) / max p_raw): a coin, where there is none."""

    def accept_at(self, at: Position) -> Tensor:
        peak = at.target_raw.amax(-1, keepdim=True)
        return (self.relaxed(at.target_raw) / peak).clamp(max=1)


class CutsBeforeItCompares(Lenient):
    """The two best tokens alone: exponential lenience depends on the sum."""

    def accept_at(self, at: Position) -> Tensor:
        best = at.target_raw.topk(2).indices
        raw = torch.zeros_like(at.target_raw).scatter(-1, best, at.target_raw.gather(-1, best))
        raw = raw / raw.sum(-1, keepdim=True)
        return (self.relaxed(raw) >= raw.amax(-1, keepdim=True)).float()
