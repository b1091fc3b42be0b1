"""Speculative decoding: propose, extend, verify, roll back.

Before each block, for a text of L tokens, the target's session holds L - 1: all but the newest.
The draft's session holds the same, or one fewer if the previous block was fully accepted, because
the draft has not processed its own last token. With a lossless rule or `bonus="target"`, the first
token comes from the target's pass over the prompt; else it is the first token of the first block.

    text        a b c d | e              L = 5: both sessions hold a b c d
    propose     draft processes e, x, y  drafted x y z (gamma 3), draft holds a..e x y
    extend      target processes e x y z 4 distributions
    verify      x accepted, y rejected   accepted 1, recovered y'
    roll back   target: y z, draft: y    text a b c d e x | y'
"""

# B batch, G gamma, V vocabulary
from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.core.block import Drafted, DrawPlan, DrawRequest, Uniforms, VerifyRequest
from paceline.core.rule_base import Bonus, Rule, with_bonus
from paceline.core.rules import Lossless
from paceline.core.sampling import SamplingParams, as_list, proposal_params
from paceline.decode.block import draft_while_confident, draw, verify
from paceline.decode.decoder import BatchSlots, Decoder, fits_draft, shared_context
from paceline.decode.draft_policies import DraftPolicy, FixedLength
from paceline.decode.text import at_least_one
from paceline.errors import UsageError
from paceline.models.compatibility import check_block, check_same_vocabulary

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline.core.block import Verified
    from paceline.decode.text import Block, Text
    from paceline.models.contract import Model, ModelSession


class SpeculativeDecoder(Decoder):
    """The draft proposes up to gamma tokens; the target verifies them in one pass with the rule.

    The policy may draft fewer tokens; None: that of the draft, if it has one. With a lossless rule,
    the first token is sampled from the target's pass over the prompt; with any other rule, it is
    drafted and verified like the others.

    Where the draft's context has no room for gamma more tokens, or its encoder none for the prompt,
    each token follows the target, whatever the rule.

    `bonus="target"` decodes as vLLM does with the rule: the first token and every bonus token
    follow the target, and drafted positions follow the rule. Nothing changes for a lossless rule.

    A draft with a `mask_token` proposes the whole block in one pass (parallel drafting): token j is
    drawn from q_j, which depends on the text and on no token drafted before it. Lossless rules stay
    lossless. The repetition penalty then leaves out the tokens of the block.

    `draft_sampling` sets how the draft samples; None uses `sampling`. q is the draft's distribution
    with these settings, one-hot at temperature 0; lossless rules stay lossless for any setting.
    The repetition penalty of `sampling` applies to both models.

    Paper: Zhou et al. 2023, algorithm A.1; Narasimhan et al. 2024, algorithm 4; An et al. 2025,
    arXiv 2504.18583.
    """

    drafts_at_once = True
    """Whether parallel drafts propose a block in one pass; else token by token."""

    def __init__(
        self,
        target: Model,
        draft: Model,
        rule: Rule | None = None,
        gamma: int = 5,
        sampling: SamplingParams | None = None,
        policy: DraftPolicy | None = None,
        draft_sampling: SamplingParams | None = None,
        *,
        bonus: Bonus = "rule",
    ) -> None:
        at_least_one("gamma", gamma)
        shared_vocab_size = check_same_vocabulary(target, draft)
        check_block(gamma, shared_context(target, draft))
        super().__init__(target, sampling)
        self.vocab_size = shared_vocab_size
        self.draft = draft
        self.rule = rule or Lossless()
        self._applied_rule = with_bonus(self.rule, bonus)
        self.gamma = gamma
        self.policy = policy or getattr(draft, "policy", None) or FixedLength()
        self.draft_sampling = proposal_params(self.sampling, draft_sampling)
        # At temperature 0 a lossless rule accepts only the target's argmax, whatever q is.
        self._verifies_argmax = self.sampling.greedy and self.rule.exact
        self.verifies_first = self._applied_rule.num_undrafted == 0
        self._drafts_argmax = self._verifies_argmax and self.draft_sampling.greedy
        self._mask = draft.mask_token if self.drafts_at_once else None

    def _models(self) -> tuple[Model, ...]:
        return self.target, self.draft

    def _drafts(self, text: Text) -> bool:
        return fits_draft(self.draft, text, self.gamma)

    @torch.inference_mode()
    def blocks(
        self, texts: Sequence[Text], batch_size: int | None = None
    ) -> Iterator[tuple[Text, Block]]:
        target, draft = self._start_session(self.target), self._start_session(self.draft)
        slots = BatchSlots(texts, batch_size)
        yield from self._begin(slots, target, draft)
        while True:
            yield from self._refill(slots, target, draft)
            if not slots.texts:
                return
            yield from self._block(target, draft, slots.texts)

    def _block(
        self, target: ModelSession, draft: ModelSession, texts: Sequence[Text]
    ) -> Iterator[tuple[Text, Block]]:
        seen_BV = self._seen(texts)
        drafted, num_drafted = self._propose(draft, texts, seen_BV)
        num_accepted, next_tokens = self._verify(target, texts, drafted, num_drafted, seen_BV)
        self._roll_back(target, draft, texts, num_accepted)
        tokens_of_rows = as_list(drafted.tokens_BG)
        rows = zip(texts, tokens_of_rows, num_accepted, next_tokens, num_drafted, strict=True)
        for text, tokens, accepted, last, count in rows:
            yield text, text.add_block(tokens[:count], accepted, last)

    def _roll_back(
        self,
        target: ModelSession,
        draft: ModelSession,
        texts: Sequence[Text],
        num_kept: Sequence[int],
    ) -> None:
        """Roll back rejected tokens; the draft's session may be one token short already."""
        kept = [text.decoded + count for text, count in zip(texts, num_kept, strict=True)]
        for session in (target, draft):
            pairs = zip(session.lengths, kept, strict=True)
            session.rollback([max(length - count, 0) for length, count in pairs])

    def _propose(
        self, draft: ModelSession, texts: Sequence[Text], seen_BV: Tensor | None
    ) -> tuple[Drafted, list[int]]:
        """Draft every row; also returns how many of the drafted tokens are valid in each row."""
        alone = [not self._drafts(text) for text in texts]
        rows = zip(texts, alone, strict=True)
        lengths = [0 if gone else self._most_drafted(text) for text, gone in rows]
        gamma = max(lengths)
        uniforms = None
        if not self._drafts_argmax:
            # Always self.gamma numbers per block: a text's stream must not depend on the batch.
            uniforms = [text.drafting.take(self.gamma)[:gamma] for text in texts]
        if all(alone) or (gamma == 0 and not self._applied_rule.needs_draft_at_bonus):
            empty = torch.zeros(len(texts), 0, dtype=torch.int64)
            return Drafted(empty, torch.zeros(len(texts), 0, self.vocab_size)), lengths
        plan = DrawPlan(
            gamma,
            self.draft_sampling,
            after_last=self._applied_rule.needs_draft_at_bonus,
            raw=self._applied_rule.uses_confidence,
            mask=self._mask,
        )
        request = DrawRequest(unread_tokens(draft, texts, alone), plan, uniforms, seen_BV)
        if self.policy.stops_early:
            return draft_while_confident(draft, request, lengths, self.policy.goes_on)
        return draw(draft, request), lengths

    def _most_drafted(self, text: Text) -> int:
        # A block emits at most one token more than it drafts, so it drafts at most remaining - 1.
        # A first token that the rule verifies is always drafted.
        least = int(self.verifies_first and not text.tokens)
        most = min(self.gamma, max(text.remaining - 1, least))
        if most == 0:
            return 0
        wanted = self.policy.length(text.num_accepted, text.num_examined, most)
        if not 0 <= wanted <= most:
            raise UsageError(
                f"the policy {self.policy} returned {wanted} tokens to draft; wanted 0 to {most}"
            )
        return wanted

    def _verify(
        self,
        target: ModelSession,
        texts: Sequence[Text],
        drafted: Drafted,
        num_drafted: Sequence[int],
        seen_BV: Tensor | None,
    ) -> Verified:
        uniforms = None
        if not self._verifies_argmax:
            gamma = drafted.tokens_BG.shape[1]
            accept = [text.accepting.take(self.gamma)[:gamma] for text in texts]
            uniforms = Uniforms(accept, [text.draw_choice() for text in texts])
        newest = [text.newest(1)[0] for text in texts]
        pairs = zip(texts, num_drafted, strict=True)
        counts = [count if self._drafts(text) else -1 for text, count in pairs]
        rule = self._applied_rule if max(counts) >= 0 else Lossless()
        request = VerifyRequest(newest, drafted, counts, rule, self.sampling, uniforms, seen_BV)
        limit, width = target.max_length, drafted.tokens_BG.shape[1] + 1
        beyond = [max(0, held + width - (limit or math.inf)) for held in target.lengths]
        pairs = zip(texts, map(int, beyond), strict=True)
        return verify(target, request, [text.newest(count + 1)[:-1] for text, count in pairs])


def unread_tokens(
    draft: ModelSession, texts: Sequence[Text], alone: Sequence[bool]
) -> list[list[int]]:
    """The tokens that the draft's session still has to process: at least one, as many for each row.

    Rows that are `alone`, which have no room for drafts, process any tokens and are then emptied.

    A row lacks two after a block that was fully accepted, and more after blocks without a draft.
    Rows that lack fewer roll back the rest and process it again. While one of them is too short to
    do so, the rows that lack more process one token here instead.
    """
    if any(alone):
        draft.rollback([held * gone for held, gone in zip(draft.lengths, alone, strict=True)])
    rows = zip(texts, draft.lengths, alone, strict=True)
    lacking = [0 if gone else text.decoded - held for text, held, gone in rows]
    lacking = [number or max(lacking) for number in lacking]
    while any(max(lacking) - own > held for own, held in zip(lacking, draft.lengths, strict=True)):
        # every row has to process one token; the rows that lack only one roll it back afterwards
        unread = [text.newest(number)[:1] for text, number in zip(texts, lacking, strict=True)]
        draft.extend(torch.tensor(unread))
        draft.rollback([int(number == 1) for number in lacking])
        lacking = [max(number - 1, 1) for number in lacking]
    count = max(lacking)
    draft.rollback([count - number for number in lacking])
    rows = zip(texts, alone, strict=True)
    return [text.newest(1) * count if gone else text.newest(count) for text, gone in rows]
