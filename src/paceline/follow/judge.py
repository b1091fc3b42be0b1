"""Compares drafts on the target's answers to requests that none of them was trained on.

A draft's figure on a text is the expected number of target calls that it takes to decode it, given
the target's states, or its log probabilities of the text's tokens.
"""

# N texts, B and T as in text_scores
from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from paceline.config import StrictModel
from paceline.core.betting import START, after, level_of, log_evidence
from paceline.core.bootstrap import Interval, ratio_interval
from paceline.core.text_scores import TextScores
from paceline.data.collate import batches_of_like_length, collate
from paceline.data.examples import Lengths, build_examples
from paceline.data.prompts import read_records
from paceline.errors import PromptError
from paceline.models import load_model
from paceline.models.compatibility import check_same_tokenizer, check_same_vocabulary
from paceline.models.loading import load_head, load_tokenizer
from paceline.train.evaluation import AgreementEvaluator

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor

    from paceline.data.collate import TokenRow
    from paceline.follow.config import FollowConfig
    from paceline.models.hf.base import HfModel

_ROWS = 8  # texts per batch


class Calls(NamedTuple):
    """Expected counts of each text with a draft, [N] each."""

    tokens_N: Tensor
    blocks_N: Tensor
    drafted_N: Tensor

    @property
    def block_efficiency(self) -> float:
        """Tokens per target call."""
        return float(self.tokens_N.sum() / self.blocks_N.sum())

    @property
    def accepted_share(self) -> float:
        """Accepted / drafted tokens, as engines count them."""
        accepted = self.tokens_N.sum() - self.blocks_N.sum()
        return float(accepted / self.drafted_N.sum().clamp(min=1e-9))


class Judge:
    """Scores drafts on the target's recorded texts in a directory."""

    def __init__(self, config: FollowConfig, texts: Path) -> None:
        """Read the texts, and the target's head if its states were recorded.

        Raises:
            PromptError: no text has a token to draft: its first one comes from the prompt's pass.
        """
        self.config = config
        states = config.writer.hidden_states
        self.head = load_head(config.target, dtype="float32") if states else None
        self.tokenizer = load_tokenizer(config.target, alone=True)
        self.rows = [
            row
            for row in build_examples(
                read_records(str(texts)),
                self.tokenizer,
                Lengths(config.max_prompt_tokens, config.max_new_tokens),
                recorded_states=states,
            )
            if row.trained_from + 1 < len(row.tokens)
        ]
        if not self.rows:
            raise PromptError(
                f"no answer in {texts} has two tokens; raise max_new_tokens, or log other requests"
            )

    def calls(self, draft: Path | str) -> Calls:
        """What the texts take with a draft; the texts of all drafts have the same order."""
        model = load_model(draft, dtype="float32")
        judging, budget = self.config.judging, self.config.max_new_tokens
        if self.head is None:
            check_same_tokenizer(self.tokenizer, model)
            scores = _by_log_probs(self.rows, model)
            given = judging.num_speculative_tokens, torch.tensor([budget])
            return Calls(*scores.tokens_and_blocks(*given), scores.drafted_tokens(*given))
        evaluator = AgreementEvaluator(
            self.head,
            self.rows,
            judging.sampling,
            gamma=judging.num_speculative_tokens,
            vocab_size=check_same_vocabulary(self.head, model),
            max_new_tokens=budget,
        )
        return Calls(*evaluator.blocks(model))


@torch.no_grad()
def _by_log_probs(rows: Sequence[TokenRow], draft: HfModel) -> TextScores:
    """Survival of the texts' tokens, from the target's log probabilities of them.

    For a token y from p, min(1, q(y)/p(y)) has the mean sum_v min(p, q). A token that is not among
    the recorded ones gets the probability of the last of them, which is at least its own.
    """
    width = max(len(row.tokens) - row.trained_from for row in rows)
    survival_NT, mask_NT = torch.zeros(len(rows), width), torch.zeros(len(rows), width).bool()
    for group in batches_of_like_length([len(row.tokens) for row in rows], _ROWS):
        batch = collate([rows[index] for index in group]).to(draft.device)
        if batch.top is None:
            raise PromptError("a text has no top_tokens; set writer.top_logprobs")
        labels_K = batch.labels_BT[batch.mask_BT]
        draft_logs_K = _log_prob_of(draft, draft.hidden(batch)[batch.mask_BT], labels_K)
        is_it_KC = batch.top.tokens_NK == labels_K[:, None]
        unused_KC = batch.top.tokens_NK < 0
        least_K = batch.top.log_probs_NK.masked_fill(unused_KC, math.inf).amin(-1)
        own_K = batch.top.log_probs_NK.masked_fill(~is_it_KC, -math.inf).amax(-1)
        own_K = torch.where(is_it_KC.any(-1), own_K, least_K)
        ratios = (draft_logs_K - own_K).clamp(max=0).exp().nan_to_num(0.0)
        lengths = batch.mask_BT.sum(-1).tolist()
        for index, values in zip(group, ratios.split(lengths), strict=True):
            survival_NT[index, : len(values)] = values.cpu()
            mask_NT[index, : len(values)] = True
    return TextScores(survival_NT, survival_NT, survival_NT, survival_NT, mask_NT)


def _log_prob_of(draft: HfModel, hidden_KD: Tensor, tokens_K: Tensor) -> Tensor:
    """The draft's log probability of each token; -inf for one that it does not propose."""
    limit = draft.draft_vocabulary
    if limit is None:
        logs_KV = draft.head.log_probs(hidden_KD, draft.vocab_size)
        return logs_KV.gather(-1, tokens_K[:, None])[:, 0]
    places_KL = limit[None] == tokens_K[:, None]
    logs_KL = draft.head.rows(limit).log_probs(hidden_KD)
    return logs_KL.masked_fill(~places_KL, -math.inf).amax(-1)


class Trial(StrictModel):
    """A sequential test whether `draft` needs fewer target calls than another one.

    Attributes:
        draft: Name of the draft.
        number: Number of the test; see `core.betting.level_of`.
        rounds: Number of rounds in it.
        num_texts: Number of texts in it.
        log_for: Logarithms of the capitals that bet on the draft.
        log_against: The same of those that bet against it.
    """

    draft: str
    number: int
    rounds: int = 0
    num_texts: int = 0
    log_for: tuple[float, ...] = START
    log_against: tuple[float, ...] = START

    def with_texts(self, own: Calls, other: Calls, most: int) -> Trial:
        """The test after the texts of a round.

        A text bets on (calls with the other - calls with the draft) / most, which is in [-1, 1]:
        its mean is above 0 if, and only if, the draft saves target calls. `most`: tokens of a text.
        """
        saved = ((other.blocks_N - own.blocks_N) / most).tolist()
        return self.model_copy(
            update={
                "rounds": self.rounds + 1,
                "num_texts": self.num_texts + len(saved),
                "log_for": after(self.log_for, saved),
                "log_against": after(self.log_against, [-one for one in saved]),
            }
        )

    def evidence(self, error_rate: float) -> tuple[float, float]:
        """Logarithm of the capital that bets on the draft, and what it needs."""
        return log_evidence(self.log_for), -math.log(level_of(self.number, error_rate))

    def is_better(self, error_rate: float) -> bool:
        """True if it is shown, at the level of the test, that the draft saves target calls."""
        found, needed = self.evidence(error_rate)
        return found >= needed

    def is_worse(self, error_rate: float) -> bool:
        """True if it is shown at this rate, in this test alone, that it costs target calls."""
        return log_evidence(self.log_against) >= -math.log(error_rate)


def calls_ratio(own: Calls, other: Calls) -> Interval:
    """Target calls with a draft / with the other on the same texts, with its 95% interval."""
    return ratio_interval((own.blocks_N, other.blocks_N))
