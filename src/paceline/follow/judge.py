"""Compares drafts on the target's answers to requests that came later than their training.

A draft's figure on a text is the expected number of target calls that it takes to decode it, given
the target's probabilities from its states, or else the text alone.
"""

# N texts, B and T as in text_scores
from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from paceline.config import StrictModel
from paceline.core.betting import START, after, level_of, log_evidence
from paceline.core.text_scores import TextScores
from paceline.data.collate import batches_of_like_length, collate
from paceline.data.examples import Lengths, build_examples
from paceline.data.prompts import read_records
from paceline.engines.kinds import KINDS
from paceline.errors import PromptError
from paceline.measure.engine_costs import read_costs
from paceline.models import load_model
from paceline.models.compatibility import check_same_tokenizer, check_same_vocabulary
from paceline.models.loading import load_head, load_tokenizer
from paceline.results.row import Row, Source, rounded
from paceline.train.evaluation import AgreementEvaluator

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor

    from paceline.data.collate import TokenRow
    from paceline.follow.config import FollowConfig
    from paceline.models.hf.base import HfModel

_ROWS = 8  # texts per batch


class Judge:
    """Scores drafts on the target's recorded texts in a directory or file.

    Drafting is the engine's, which is greedy unless it always samples, as transformers does.
    """

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
                read_records(str(texts), skip_empty=True),
                self.tokenizer,
                Lengths(config.max_prompt_tokens, config.max_new_tokens),
                recorded_states=states,
            )
            if row.trained_from + 1 < len(row.tokens)
        ]
        if not self.rows:
            raise PromptError(f"no answer in {texts} has two tokens; look at the target's answers")

    def row(self, draft: Path | str, name: str) -> Row:
        """What the texts take with a draft; the texts of all drafts have the same order.

        With `judging.costs` the row has the costs of the engine's steps.
        """
        judging = self.config.judging
        gamma = judging.num_speculative_tokens
        # as an engine runs it: without the list of draft tokens
        model = load_model(draft, dtype="float32").without_draft_vocabulary()
        if not KINDS[self.config.serving.to].drafts_at_once:
            model.mask_token = None
        tokens_N, blocks_N, drafted_N = self._blocks(model, gamma)
        sums_N = {"emitted": tokens_N, "calls": blocks_N, "drafted": drafted_N}
        sums_N["accepted"] = tokens_N - blocks_N  # a block adds one token of the target
        row = Row(
            population="answers",
            units=tuple(range(len(tokens_N))),
            setting={"draft": name, "gamma": gamma} | judging.sampling.setting,
            sums={name: rounded(values_N) for name, values_N in sums_N.items()},
            totals={"drafted_per_block": float(drafted_N.sum() / blocks_N.sum())},
            source=Source.here("paceline follow"),
        )
        if judging.costs is None:
            return row
        return read_costs(judging.costs).step_costs([gamma], judging.concurrency).priced(row)

    def _blocks(self, model: HfModel, gamma: int) -> tuple[Tensor, Tensor, Tensor]:
        """Expected tokens, blocks and drafted tokens of each text, [N] each."""
        most, sampling = self.config.max_new_tokens, self.config.judging.sampling
        if self.head is None:
            check_same_tokenizer(self.tokenizer, model)
            scores, budget = _by_greedy_tokens(self.rows, model), torch.tensor([most])
            counts = scores.tokens_and_blocks(gamma, budget)
            return (*counts, scores.drafted_tokens(gamma, budget))
        evaluator = AgreementEvaluator(
            self.head,
            self.rows,
            sampling,
            gamma=gamma,
            vocab_size=check_same_vocabulary(self.head, model),
            max_new_tokens=most,
            draft_sampling=KINDS[self.config.serving.to].proposals("greedy", sampling),
        )
        return evaluator.blocks(model)


@torch.no_grad()
def _by_greedy_tokens(rows: Sequence[TokenRow], draft: HfModel) -> TextScores:
    """Survival of the tokens with greedy drafts: 1 where the draft's best token is the text's.

    It has the mean p(argmax q) over texts from p, whatever p is, so the target is not needed.
    """
    width = max(len(row.tokens) - row.trained_from for row in rows)
    survival_NT, mask_NT = torch.zeros(len(rows), width), torch.zeros(len(rows), width).bool()
    for group in batches_of_like_length([len(row.tokens) for row in rows], _ROWS):
        batch = collate([rows[index] for index in group]).to(draft.device)
        hidden_KD = draft.hidden(batch)[batch.mask_BT]
        best_K = draft.head.logits(hidden_KD, draft.vocab_size).argmax(-1)
        same_K = (best_K == batch.labels_BT[batch.mask_BT]).float().cpu()
        for index, values in zip(group, same_K.split(batch.mask_BT.sum(-1).tolist()), strict=True):
            survival_NT[index, : len(values)] = values
            mask_NT[index, : len(values)] = True
    return TextScores(survival_NT, survival_NT, survival_NT, survival_NT, mask_NT)


class Trial(StrictModel):
    """A sequential test whether `draft` needs fewer target calls than another one.

    Attributes:
        draft: Name of the draft.
        number: Number of the test; see `core.betting.level_of`.
        rounds: Number of rounds in it.
        log_capitals: Logarithms of the capitals that bet on the draft.
    """

    draft: str
    number: int
    rounds: int = 0
    log_capitals: tuple[float, ...] = START

    def with_texts(self, own: Row, other: Row, most: int) -> Trial:
        """The test after the texts of a round.

        A text bets on (calls with the other - calls with the draft) / most, which is in [-1, 1]:
        its mean is above 0 if, and only if, the draft saves target calls. `most`: tokens of a text.
        """
        pairs = zip(other.sums["calls"], own.sums["calls"], strict=True)
        saved = [((without or 0.0) - (needed or 0.0)) / most for without, needed in pairs]
        capitals = after(self.log_capitals, saved)
        return self.model_copy(update={"rounds": self.rounds + 1, "log_capitals": capitals})

    def evidence(self, error_rate: float) -> tuple[float, float]:
        """Logarithm of the capital, and what it needs."""
        return log_evidence(self.log_capitals), -math.log(level_of(self.number, error_rate))
