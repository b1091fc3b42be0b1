"""Cascades: the draft generates, and defers to the target when it is not confident.

TokenCascade       the draft generates while confident, then the target generates one token
BigLittleDecoder   as TokenCascade, and the target rolls back from the first token it disagrees with
OracleCascade      both models process every token, so the rule sees both distributions
SequenceCascade    the target answers again if the draft's response is improbable
"""

# B batch, V vocabulary
from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from paceline.core.rule_base import STRICT, Position, Rule
from paceline.core.rules import BiLDRule, BinaryCascade
from paceline.core.sampling import (
    UNTEMPERED,
    SamplingParams,
    as_list,
    sample,
    seen_tokens,
    to_probs,
)
from paceline.decode.autoregressive import AutoregressiveDecoder
from paceline.decode.decoder import Decoder, fits_draft
from paceline.decode.draft_policies import Confident
from paceline.decode.speculative import SpeculativeDecoder
from paceline.errors import UsageError
from paceline.models.compatibility import check_same_vocabulary

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline.decode.text import Block, Text
    from paceline.models.contract import Model, ModelSession

MOST_DRAFTED = 10
"""Maximum number of tokens drafted between two target passes, as in the papers."""


@dataclass(frozen=True, config=STRICT)
class _KeepAll(Rule):
    def accept_at(self, at: Position) -> Tensor:
        return torch.ones_like(at.target)

    def residual_at(self, at: Position) -> Tensor:
        return at.target


@dataclass(frozen=True, config=STRICT)
class BiLDRollback(Rule):
    """Accepts every token where D(q, p) <= threshold; elsewhere samples from the target.

    It induces the same distribution as `BiLDRule`, but rejects more tokens: where D exceeds the
    threshold, `BiLDRule` still accepts min(p, q).
    Paper: Kim et al. 2023, the rollback policy of BiLD, as in Narasimhan et al. 2024, section E.5.
    """

    threshold: float = Field(ge=0, allow_inf_nan=False)
    uses_confidence = True

    def accept_at(self, at: Position) -> Tensor:
        rolled_back = BiLDRule(self.threshold).defers(at)
        return (~rolled_back).float().expand_as(at.target)

    def residual_at(self, at: Position) -> Tensor:
        return at.target


class _ConfidentDraft(SpeculativeDecoder):
    """The draft generates while confident; a text that the draft ends needs no target pass."""

    drafts_at_once = False  # its tokens are kept as they are, so each has to know the last one

    def _most_drafted(self, text: Text) -> int:
        return min(self.gamma, text.remaining)

    def _block(
        self, target: ModelSession, draft: ModelSession, texts: Sequence[Text]
    ) -> Iterator[tuple[Text, Block]]:
        seen_BV = self._seen(texts)
        drafted, num_drafted = self._propose(draft, texts, seen_BV)
        rows = zip(as_list(drafted.tokens_BG), num_drafted, strict=True)
        generated = [tokens[:count] for tokens, count in rows]
        ended = [text.ends_within(new) for text, new in zip(texts, generated, strict=True)]
        if all(ended):
            for text, new in zip(texts, generated, strict=True):
                yield text, text.add_unverified(new, None)
            return
        num_kept, next_tokens = self._verify(target, texts, drafted, num_drafted, seen_BV)
        self._roll_back(target, draft, texts, num_kept)
        rows = zip(texts, generated, ended, num_kept, next_tokens, strict=True)
        for text, new, has_ended, count, last in rows:
            if has_ended:
                yield text, text.add_unverified(new, None)
            else:
                yield text, self._add(text, new, count, last)

    def _add(self, text: Text, drafted: Sequence[int], num_kept: int, last: int) -> Block:
        return text.add_unverified(drafted[:num_kept], last)


class TokenCascade(_ConfidentDraft):
    """The draft generates while max q >= 1 - alpha; else the target generates one token.

    The target also generates a token after `most_drafted` draft tokens. It processes the draft's
    tokens but does not verify them. Where the draft's context has no room for `most_drafted` more
    tokens, the target generates each token, in `BigLittleDecoder` too.

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


class BigLittleDecoder(_ConfidentDraft):
    """BiLD: draft while max q >= fallback, then roll back from the first token with D > rollback.

    A token of the target replaces the first token rolled back, or follows the last if all are kept.
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
        rule = BiLDRollback(rollback)
        super().__init__(target, draft, rule, most_drafted, sampling, policy=Confident(fallback))

    def _add(self, text: Text, drafted: Sequence[int], num_kept: int, last: int) -> Block:
        return text.add_block(drafted, num_kept, last)


class OracleCascade(SpeculativeDecoder):
    """Samples each token from q or from p, as a binary rule decides given both.

    Both models process every token, so this is slower than the target alone; it shows the quality
    that a rule can reach. Only tokens sampled from the target count as target calls. Beyond the
    draft's context every token is.

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
                f"diff, opt, one of their log variants or bild; got {rule}"
            )
        super().__init__(target, draft, rule, 1, sampling)
        self.rule: BinaryCascade = rule

    def _block(
        self, target: ModelSession, draft: ModelSession, texts: Sequence[Text]
    ) -> Iterator[tuple[Text, Block]]:
        newest_B1 = torch.tensor([text.newest(1) for text in texts])
        alone = [not self._drafts(text) for text in texts]
        draft.rollback([held * gone for held, gone in zip(draft.lengths, alone, strict=True)])
        seen_BV = self._seen(texts)
        p_BV, p_raw_BV = self._distributions(target.extend(newest_B1)[:, -1], seen_BV)
        q_BV, q_raw_BV = self._distributions(draft.extend(newest_B1)[:, -1], seen_BV)
        q_BV, q_raw_BV = q_BV.to(p_BV.device), q_raw_BV.to(p_BV.device)
        alone_B1 = torch.tensor(alone, device=p_BV.device)[:, None]
        defers_B1 = alone_B1 | self.rule.defers(Position(p_BV, q_BV, p_raw_BV, q_raw_BV))
        uniforms_B = torch.tensor([text.draw_choice() for text in texts], dtype=torch.float64)
        tokens_B = sample(torch.where(defers_B1, p_BV, q_BV), uniforms_B.to(p_BV.device))
        rows = zip(texts, as_list(tokens_B), as_list(defers_B1[:, 0]), strict=True)
        for text, token, deferred in rows:
            yield text, text.add_unverified(*([], token) if deferred else ([token], None))

    def _distributions(self, logits_BV: Tensor, seen_BV: Tensor | None) -> tuple[Tensor, Tensor]:
        logits_BV = self._penalized(logits_BV, seen_BV)
        return to_probs(logits_BV, self.sampling), to_probs(logits_BV, UNTEMPERED)


class SequenceCascade(Decoder):
    """Keeps the draft's response if q(response) >= 1 - alpha; else the target generates its own.

    q(response) is the product of the untempered probabilities of its tokens, or with `normalise`
    their geometric mean, which does not depend on the length. A response that the draft's context
    cuts is not kept.

    Paper: Narasimhan et al. 2024, equation 1 (SeqCascade [Chow]); the mean after Gupta et al. 2024.
    """

    def __init__(
        self,
        target: Model,
        draft: Model,
        alpha: float,
        sampling: SamplingParams | None = None,
        *,
        normalise: bool = False,
    ) -> None:
        _check_share("alpha", alpha)
        shared_vocab_size = check_same_vocabulary(target, draft)
        super().__init__(target, sampling)
        self.vocab_size = shared_vocab_size
        self.draft = draft
        self.alpha = alpha
        self.normalise = normalise
        self._rewriter = AutoregressiveDecoder(target, self.sampling)
        self._rewriter.vocab_size = shared_vocab_size

    def _models(self) -> tuple[Model, ...]:
        return self.target, self.draft

    @torch.inference_mode()
    def blocks(
        self, texts: Sequence[Text], batch_size: int | None = None
    ) -> Iterator[tuple[Text, Block]]:
        deferred: list[Text] = []
        size = batch_size or len(texts)
        for start in range(0, len(texts), size):
            responding = texts[start : start + size]
            responses = self._draft_responses(responding)
            for text, response in zip(responding, responses, strict=True):
                ended = text.ends_within(response.tokens)
                if ended and response.is_kept(self.alpha, normalise=self.normalise):
                    yield text, text.add_unverified(response.tokens, None)
                else:
                    deferred.append(text)
        if deferred:
            yield from self._rewriter.blocks(deferred, batch_size)

    def _draft_responses(self, texts: Sequence[Text]) -> list[_Response]:
        session = self._start_session(self.draft)
        responses = [_Response() for _ in texts]
        rows = [row for row, text in enumerate(texts) if fits_draft(self.draft, text, 0)]
        logits_BV = session.prefill([texts[row].prompt for row in rows]) if rows else torch.empty(0)
        while rows:
            live = [(texts[row], responses[row]) for row in rows]
            if self.sampling.repetition_penalty != 1:
                tokens = [text.context + response.tokens for text, response in live]
                logits_BV = self._penalized(logits_BV, seen_tokens(tokens, logits_BV.shape[-1]))
            numbers = [text.drafting.take(1)[0] for text, _ in live]
            uniforms_B = torch.tensor(numbers, dtype=torch.float64)
            tokens_B = sample(to_probs(logits_BV, self.sampling), uniforms_B.to(logits_BV.device))
            probs_BV = to_probs(logits_BV, UNTEMPERED)
            logs = as_list(probs_BV.gather(-1, tokens_B[:, None])[:, 0].log())
            for (text, response), token, log in zip(live, as_list(tokens_B), logs, strict=True):
                forced = text.forced(len(response.tokens))
                response.tokens.append(token if forced is None else forced)
                response.log_prob += log if forced is None else 0.0
            kept = [
                at
                for at, (text, drafted) in enumerate(live)
                if not text.ends_within(drafted.tokens)
                and fits_draft(self.draft, text, len(drafted.tokens))
            ]
            if not kept:
                break
            if len(kept) < len(rows):
                session.keep_rows(kept)
                rows = [rows[at] for at in kept]
            newest_B1 = torch.tensor([[responses[row].tokens[-1]] for row in rows])
            logits_BV = session.extend(newest_B1)[:, -1]
        return responses


class _Response:
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.log_prob = 0.0

    def is_kept(self, alpha: float, *, normalise: bool) -> bool:
        score = self.log_prob / len(self.tokens) if normalise else self.log_prob
        # compare logarithms, because the probability of a long text underflows
        return score >= (math.log1p(-alpha) if alpha < 1 else -math.inf)


def _check_share(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise UsageError(f"{name} must be in [0, 1], got {value}")
