"""Cascades that do not speculate: the draft writes, and the target is asked where it must be.

TokenCascade       the draft goes on while it is sure; else the target reads what came and adds a token
OracleCascade      both read every token, so that a rule may look at both: the head-room of a rule
BigLittleDecoder   as TokenCascade, and the target takes back from the first token it disagrees with
"""

# B batch, V vocabulary
from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor

from paceline.core.cascade_rules import BiLDRule, BinaryCascade
from paceline.core.lists import as_list
from paceline.core.rule_base import STRICT, Position, Rule
from paceline.core.sampling import UNTEMPERED, apply_repetition_penalty, sample, to_probs
from paceline.decode.draft_policies import Confident
from paceline.decode.speculative import SpeculativeDecoder
from paceline.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline.core.sampling import SamplingParams
    from paceline.decode.result import Block
    from paceline.decode.text import Text
    from paceline.models.contract import Model, ModelSession

MOST_DRAFTED = 10
"""Draft tokens before the target is asked, in the papers: later it would read a long text at once."""


class _Unjudged(Rule):
    """Rules of cascades: a drafted token stays or goes whatever its own probability."""

    def recover(self, at: Position) -> Tensor:
        return at.target


@dataclass(frozen=True, config=STRICT)
class _KeepAll(_Unjudged):
    def accept(self, at: Position) -> Tensor:
        return torch.ones_like(at.target)


@dataclass(frozen=True, config=STRICT)
class BiLDRollback(_Unjudged):
    """Keeps every token where D(q, p) <= threshold and none where not; replaced by the target's own.

    It induces what `BiLDRule` states, with more rejections: that one keeps min(p, q) even then.
    Paper: Kim et al. 2023, the rollback policy of BiLD, as in Narasimhan et al. 2024, section E.5.
    """

    threshold: float
    uses_confidence = True

    def accept(self, at: Position) -> Tensor:
        rolled_back = BiLDRule(self.threshold).defers(at)
        return (~rolled_back).float().expand_as(at.target)


class _SureDraft(SpeculativeDecoder):
    """The draft writes while it is sure; a text that it ends itself ends there, unread by the target."""

    def _most_drafted(self, text: Text) -> int:
        return min(self.gamma, text.remaining)

    def _block(
        self, target: ModelSession, draft: ModelSession, texts: Sequence[Text]
    ) -> Iterator[tuple[Text, Block]]:
        seen_BV = self._seen(texts)
        drafted, num_drafted = self._propose(draft, texts, seen_BV)
        rows = zip(as_list(drafted.tokens_BG), num_drafted, strict=True)
        written = [tokens[:count] for tokens, count in rows]
        ended = [text.ends_within(new) for text, new in zip(texts, written, strict=True)]
        if all(ended):
            for text, new in zip(texts, written, strict=True):
                yield text, text.add_unjudged(new, None)
            return
        num_kept, next_tokens = self._judge(target, texts, drafted, num_drafted, seen_BV)
        self._roll_back(target, draft, texts, num_kept)
        rows = zip(texts, written, ended, num_kept, next_tokens, strict=True)
        for text, new, has_ended, count, last in rows:
            yield (
                text,
                text.add_unjudged(new, None) if has_ended else self._add(text, new, count, last),
            )

    def _add(self, text: Text, drafted: Sequence[int], num_kept: int, last: int) -> Block:
        return text.add_unjudged(drafted[:num_kept], last)


class TokenCascade(_SureDraft):
    """The draft writes while max q >= 1 - alpha; else the target gives one token.

    The target is asked after ten tokens at the latest. Its pass over them only brings it up to date:
    nothing is judged.

    Paper: Narasimhan et al. 2024, algorithm 2 with equation 2, section E.1.
    """

    def __init__(
        self,
        target: Model,
        draft: Model,
        alpha: float,
        sampling: SamplingParams | None = None,
        most_drafted: int = MOST_DRAFTED,
    ) -> None:
        _check_share("alpha", alpha)
        super().__init__(
            target, draft, _KeepAll(), most_drafted, sampling, policy=Confident(1 - alpha)
        )


class BigLittleDecoder(_SureDraft):
    """BiLD: draft while max q >= fallback, then the target takes back from the first D > rollback.

    Its own token replaces the first one taken back, or follows the last where all stay.
    D = -log p(argmax q) when greedy, else -sum_v q(v) log p(v), p untempered.

    Paper: Kim et al. 2023, algorithm 1, as in Narasimhan et al. 2024, section E.5 (fallback is
    their 1 - alpha_f).
    """

    def __init__(
        self,
        target: Model,
        draft: Model,
        fallback: float,
        rollback: float,
        sampling: SamplingParams | None = None,
        most_drafted: int = MOST_DRAFTED,
    ) -> None:
        _check_share("fallback", fallback)
        if not rollback >= 0:
            raise UsageError(f"rollback must be 0 or more (nats), got {rollback}")
        rule = BiLDRollback(rollback)
        super().__init__(target, draft, rule, most_drafted, sampling, policy=Confident(fallback))

    def _add(self, text: Text, drafted: Sequence[int], num_kept: int, last: int) -> Block:
        return text.add_block(drafted[:num_kept], last, num_drafted=len(drafted))


class OracleCascade(SpeculativeDecoder):
    """Each token from q or from p, as a binary rule decides with both before it.

    Both models read every token, so this is slower than the target alone: it tells what a rule is
    worth. Only tokens that came from the target count as target calls.

    Paper: Narasimhan et al. 2024, algorithm 3.
    """

    def __init__(
        self,
        target: Model,
        draft: Model,
        rule: Rule,
        sampling: SamplingParams | None = None,
    ) -> None:
        if not isinstance(rule, BinaryCascade):
            raise UsageError(
                f"an oracle cascade takes a whole token from one model, so its rule must be chow, "
                f"diff, opt, one of their logs or bild; got {rule}"
            )
        super().__init__(target, draft, rule, 1, sampling)
        self.rule: BinaryCascade = rule

    def _block(
        self, target: ModelSession, draft: ModelSession, texts: Sequence[Text]
    ) -> Iterator[tuple[Text, Block]]:
        newest_B1 = torch.tensor([text.newest(1) for text in texts])
        seen_BV = self._seen(texts)
        p_BV, p_raw_BV = self._distributions(target.extend(newest_B1)[:, -1], seen_BV)
        q_BV, q_raw_BV = self._distributions(draft.extend(newest_B1)[:, -1], seen_BV)
        q_BV, q_raw_BV = q_BV.to(p_BV.device), q_raw_BV.to(p_BV.device)
        defers_B1 = self.rule.defers(Position(p_BV, q_BV, p_raw_BV, q_raw_BV))
        uniforms_B = torch.tensor([text.draw_choice() for text in texts], dtype=torch.float64)
        tokens_B = sample(torch.where(defers_B1, p_BV, q_BV), uniforms_B.to(p_BV.device))
        rows = zip(texts, as_list(tokens_B), as_list(defers_B1[:, 0]), strict=True)
        for text, token, deferred in rows:
            yield text, text.add_unjudged(*([], token) if deferred else ([token], None))

    def _distributions(self, logits_BV: Tensor, seen_BV: Tensor | None) -> tuple[Tensor, Tensor]:
        if seen_BV is not None:
            penalty = self.sampling.repetition_penalty
            logits_BV = apply_repetition_penalty(logits_BV, seen_BV.to(logits_BV.device), penalty)
        return to_probs(logits_BV, self.sampling), to_probs(logits_BV, UNTEMPERED)


def _check_share(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise UsageError(f"{name} must be in [0, 1], got {value}")
