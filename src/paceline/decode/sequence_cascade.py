"""Sequence-level cascade: the target answers again if the draft's response is improbable."""

# B batch, V vocabulary
from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from paceline.core.lists import as_list
from paceline.core.sampling import UNTEMPERED, SamplingParams, sample, seen_tokens, to_probs
from paceline.decode.arguments import check_models, real
from paceline.decode.autoregressive import AutoregressiveDecoder
from paceline.decode.decoder import Decoder, shared_context
from paceline.models.compatibility import check_same_vocabulary

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline.decode.result import Block
    from paceline.decode.text import Text
    from paceline.models.contract import Model


class SequenceCascade(Decoder):
    """Keeps the draft's response if q(response) >= 1 - alpha; else the target generates its own.

    q(response) is the product of the untempered probabilities of its tokens, or with `normalise`
    their geometric mean, which does not depend on the length.

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
        real("alpha", alpha, 0, 1)
        check_models(target=target, draft=draft)
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

    def _usable_length(self) -> int | None:
        return shared_context(self.target, self.draft)

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
                if response.is_kept(self.alpha, normalise=self.normalise):
                    yield text, text.add_unverified(response.tokens, None)
                else:
                    deferred.append(text)
        if deferred:
            yield from self._rewriter.blocks(deferred, batch_size)

    def _draft_responses(self, texts: Sequence[Text]) -> list[_Response]:
        session = self._start_session(self.draft)
        responses = [_Response() for _ in texts]
        rows = list(range(len(texts)))
        logits_BV = session.prefill([text.prompt for text in texts])
        while True:
            live = [(texts[row], responses[row]) for row in rows]
            if self.sampling.repetition_penalty != 1:
                tokens = [text.context + response.tokens for text, response in live]
                logits_BV = self._penalized(logits_BV, seen_tokens(tokens, logits_BV.shape[-1]))
            numbers = [text.draw_draft(1)[0] for text, _ in live]
            uniforms_B = torch.tensor(numbers, dtype=torch.float64)
            tokens_B = sample(to_probs(logits_BV, self.sampling), uniforms_B.to(logits_BV.device))
            probs_BV = to_probs(logits_BV, UNTEMPERED)
            logs = as_list(probs_BV.gather(-1, tokens_B[:, None])[:, 0].log())
            for (text, response), token, log in zip(live, as_list(tokens_B), logs, strict=True):
                forced = text.forced(len(response.tokens))
                response.tokens.append(token if forced is None else forced)
                response.log_prob += log if forced is None else 0.0
            kept = [at for at, (text, one) in enumerate(live) if not text.ends_within(one.tokens)]
            if not kept:
                return responses
            if len(kept) < len(rows):
                session.keep_rows(kept)
                rows = [rows[at] for at in kept]
            newest_B1 = torch.tensor([[responses[row].tokens[-1]] for row in rows])
            logits_BV = session.extend(newest_B1)[:, -1]


class _Response:
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.log_prob = 0.0

    def is_kept(self, alpha: float, *, normalise: bool) -> bool:
        score = self.log_prob / len(self.tokens) if normalise else self.log_prob
        # compare logarithms, because the probability of a long text underflows
        return score >= (math.log1p(-alpha) if alpha < 1 else -math.inf)
