"""Speculative decoding: propose, extend, verify, roll back.

Between blocks, of a text of L tokens the target's session holds L - 1: all but the newest. So does
the draft's, or one fewer where the block before was accepted whole, since the draft never read its own
last token then. A text begins so, too: with a lossless rule behind the first token, which is the
target's own, with any other rule behind the prompt, so that the first block drafts the first token.

    text        a b c d | e            L = 5: both hold a b c d
    propose     draft reads e, then x, then y           drafted x y z (gamma 3), draft holds a..e x y
    extend      target reads e x y z                    4 distributions
    verify      x stays, y is rejected, y' replaces it  accepted 1
    roll back   target forgets y z, draft forgets y     text a b c d e x | y'
"""

# B batch, G gamma, V vocabulary
from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.core.block import DrawPlan, DrawRequest, JudgeRequest, UniformRows
from paceline.core.drafted import Drafted
from paceline.core.lists import as_list
from paceline.core.rules import Lossless
from paceline.core.sampling import SamplingParams, proposal_params
from paceline.decode.block import draw, judge
from paceline.decode.decoder import Decoder, Seats
from paceline.decode.draft_policies import FixedLength
from paceline.decode.drafting import draft_while_sure
from paceline.errors import ContextLengthError, UsageError
from paceline.models.compatibility import check_same_vocabulary

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline.core.block import Judgement
    from paceline.core.rule_base import Rule
    from paceline.decode.draft_policies import DraftPolicy
    from paceline.decode.result import Block
    from paceline.decode.text import Text
    from paceline.models.contract import Model, ModelSession

_SHORTEST = 2  # a prompt of one token, and one behind it


class SpeculativeDecoder(Decoder):
    """The draft proposes up to gamma tokens; the target judges them in one pass, by the rule.

    The policy may end a block's draft earlier. A block needs room for gamma tokens that may be
    forgotten again, so a text ends that much before the context does. A lossless rule takes a text's
    first token from the target's pass over the prompt; under any other rule the first token opens the
    first block, drafted and judged as the others are.

    `draft_sampling` says how the draft draws; None: as `sampling` says. q is what the draft proposes
    at these settings, one-hot at temperature 0, and a lossless rule stays lossless at any. The
    repetition penalty is that of `sampling` for both models.

    Paper: Zhou et al. 2023, algorithm A.1; Narasimhan et al. 2024, algorithm 4.
    """

    def __init__(
        self,
        target: Model,
        draft: Model,
        rule: Rule | None = None,
        gamma: int = 5,
        sampling: SamplingParams | None = None,
        policy: DraftPolicy | None = None,
        draft_sampling: SamplingParams | None = None,
    ) -> None:
        if gamma < 1:
            raise UsageError(
                f"gamma must be 1 or more, got {gamma}; AutoregressiveDecoder drafts nothing"
            )
        shared_vocab_size = check_same_vocabulary(target, draft)
        super().__init__(target, sampling or SamplingParams())
        self.vocab_size = shared_vocab_size
        self.draft = draft
        self.rule = rule or Lossless()
        self.gamma = gamma
        self.policy = policy or FixedLength()
        self.draft_sampling = proposal_params(self.sampling, draft_sampling)
        # A lossless rule at temperature 0 keeps the target's likeliest tokens, whatever q is.
        self._judges_best = self.sampling.greedy and self.rule.exact
        self.judges_first = not self.rule.exact
        self._drafts_best = self._judges_best and self.draft_sampling.greedy

    def _usable_length(self) -> int | None:
        # A block may read gamma tokens that are then forgotten: they need room.
        limits = [model.max_length for model in (self.target, self.draft)]
        known = [limit for limit in limits if limit is not None]
        if known and min(known) - self.gamma < _SHORTEST:
            raise ContextLengthError(
                f"a block of gamma {self.gamma} does not fit the models' context of {min(known)} tokens; "
                f"choose a gamma of at most {min(known) - _SHORTEST}"
            )
        return min(known) - self.gamma if known else None

    def _kept_free(self) -> int:
        return self.gamma

    @torch.inference_mode()
    def blocks(
        self, texts: Sequence[Text], batch_size: int | None = None
    ) -> Iterator[tuple[Text, Block]]:
        target, draft = self._start_session(self.target), self._start_session(self.draft)
        seats = Seats(texts, batch_size)
        yield from self._begin(seats, target, draft)
        while True:
            yield from self._reseat(seats, target, draft)
            if not seats.texts:
                return
            yield from self._block(target, draft, seats.texts)

    def _block(
        self, target: ModelSession, draft: ModelSession, texts: Sequence[Text]
    ) -> Iterator[tuple[Text, Block]]:
        seen_BV = self._seen(texts)
        drafted, num_drafted = self._propose(draft, texts, seen_BV)
        num_accepted, next_tokens = self._judge(target, texts, drafted, num_drafted, seen_BV)
        self._roll_back(target, draft, texts, num_accepted)
        tokens_of_rows = as_list(drafted.tokens_BG)
        rows = zip(texts, tokens_of_rows, num_accepted, next_tokens, num_drafted, strict=True)
        for text, tokens, accepted, last, count in rows:
            yield text, text.add_block(tokens[:accepted], last, num_drafted=count)

    def _roll_back(
        self,
        target: ModelSession,
        draft: ModelSession,
        texts: Sequence[Text],
        num_kept: Sequence[int],
    ) -> None:
        """Forget what does not stay; a draft may not have read its last token."""
        stay = [text.decoded + count for text, count in zip(texts, num_kept, strict=True)]
        for session in (target, draft):
            pairs = zip(session.lengths, stay, strict=True)
            session.rollback([max(length - count, 0) for length, count in pairs])

    def _propose(
        self, draft: ModelSession, texts: Sequence[Text], seen_BV: Tensor | None
    ) -> tuple[Drafted, list[int]]:
        """Draft for every row, one pass a token; how many of the tokens each row means."""
        wanted = [self._most_drafted(text) for text in texts]
        gamma = max(wanted)
        if gamma == 0 and not self.rule.needs_draft_at_bonus:
            empty = torch.zeros(len(texts), 0, dtype=torch.int64)
            return Drafted(empty, torch.zeros(len(texts), 0, self.vocab_size)), wanted
        uniforms = None
        if not self._drafts_best:
            # Every text draws self.gamma numbers a block, or its stream would depend on the batch.
            uniforms = [text.draw_draft(self.gamma)[:gamma] for text in texts]
        plan = DrawPlan(
            gamma,
            self.draft_sampling,
            after_last=self.rule.needs_draft_at_bonus,
            raw=self.rule.uses_confidence,
        )
        request = DrawRequest(unread_tokens(draft, texts), plan, uniforms, seen_BV)
        if self.policy.stops_early:
            return draft_while_sure(draft, request, wanted, self.policy.goes_on)
        return draw(draft, request), wanted

    def _most_drafted(self, text: Text) -> int:
        """A block gives at most one token more than it drafted: no text drafts past its budget.

        But a first token that the rule judges is drafted even if it is the only one.
        """
        least = int(self.judges_first and not text.tokens)
        most = min(self.gamma, max(text.remaining - 1, least))
        if most == 0:
            return 0
        return self.policy.length(text.num_accepted, text.num_examined, most)

    def _judge(
        self,
        target: ModelSession,
        texts: Sequence[Text],
        drafted: Drafted,
        num_drafted: Sequence[int],
        seen_BV: Tensor | None,
    ) -> Judgement:
        """One target pass over the newest token and the drafted ones, then the rule."""
        uniforms = None
        if not self._judges_best:
            gamma = drafted.tokens_BG.shape[1]
            accept = [text.draw_accept(self.gamma)[:gamma] for text in texts]
            uniforms = UniformRows(accept, [text.draw_choice() for text in texts])
        newest = [text.newest(1)[0] for text in texts]
        return judge(
            target,
            JudgeRequest(newest, drafted, num_drafted, self.rule, self.sampling, uniforms, seen_BV),
        )


def unread_tokens(draft: ModelSession, texts: Sequence[Text]) -> list[list[int]]:
    """The tokens that the draft has yet to read, the same number for all rows: one or two.

    Where some row's block was accepted whole, the others forget one token and read it again. A row
    whose text is one token has none to forget: then the draft reads on where it lacks two.
    """
    behind = [text.decoded - length for text, length in zip(texts, draft.lengths, strict=True)]
    count = max(behind)
    again = [count - number for number in behind]
    if any(more > length for more, length in zip(again, draft.lengths, strict=True)):
        # all rows read as many tokens; what the others read here they forget again
        unread = [text.newest(number)[:1] for text, number in zip(texts, behind, strict=True)]
        draft.extend(torch.tensor(unread))
        count = 1
    draft.rollback(again)
    return [text.newest(count) for text in texts]
