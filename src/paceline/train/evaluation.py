"""Evaluates the agreement of draft and target on held-out text that the target generates."""

# B texts, T positions, N positions of all texts, C of a chunk, D hidden, V vocabulary
from __future__ import annotations

import hashlib
import json
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from paceline.core.bootstrap import ratio_interval
from paceline.core.divergences import total_variation
from paceline.core.rule_base import Position, as_read
from paceline.core.rules import Lossless
from paceline.core.sampling import to_probs
from paceline.core.speed import block_efficiency_from_text
from paceline.core.vocabulary_subset import spread
from paceline.data.collate import batches_of_like_length, collate
from paceline.data.sources import rows_of, sample_completions
from paceline.models.loading import fingerprint
from paceline.records import atomic_write_text, locked, read_jsonl
from paceline.rng import named_generator

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from paceline.core.bootstrap import Interval
    from paceline.core.rule_base import Rule
    from paceline.core.sampling import SamplingParams
    from paceline.data.collate import Row
    from paceline.models.contract import TrainableModel
    from paceline.models.hf.base import HfModel
    from paceline.progress import Progress
    from paceline.train.align_config import Evaluation
    from paceline.train.loop import Figures

_UNDRAFTED = Lossless().num_undrafted
_ROWS = 8  # texts per batch
_CHUNK = 256  # positions per chunk of probabilities


def held_out_text(
    target: HfModel,
    prompts: Sequence[Sequence[int]],
    settings: Evaluation,
    cache: Path,
    *,
    seed: int,
    progress: Progress,
    shared: Path | None = None,
) -> list[Row]:
    """The target's completions of the prompts, generated once and then read from `cache`.

    Runs with the same target, prompts, settings and seed may have a `shared` file. The first run
    writes it while the others wait; each copies it to its cache.
    """
    if not cache.exists():
        text = partial(_text, target, prompts, settings, seed, progress)
        if shared is not None and not shared.exists():
            with locked(shared.parent, wait=True):
                if not shared.exists():
                    atomic_write_text(shared, text())
        atomic_write_text(cache, text() if shared is None else shared.read_text(encoding="utf-8"))
    read = read_jsonl(cache)
    return rows_of(target, *([row[key] for row in read] for key in ("prompt", "completion")))


def _text(
    target: HfModel,
    prompts: Sequence[Sequence[int]],
    settings: Evaluation,
    seed: int,
    progress: Progress,
) -> str:
    """JSON lines of prompt and completion; the text does not depend on batching."""
    completions: dict[int, list[int]] = {}
    for group in batches_of_like_length(list(map(len, prompts)), _ROWS):
        generators = [named_generator(seed, "held-out text", index) for index in group]
        uniforms = [
            torch.rand(settings.max_new_tokens, generator=rng, dtype=torch.float64)
            for rng in generators
        ]
        part = [prompts[index] for index in group]
        texts = sample_completions(target, part, torch.stack(uniforms), sampling=settings.sampling)
        completions |= dict(zip(group, texts, strict=True))
        progress("held-out text", len(completions), len(prompts))
    return "".join(
        json.dumps({"prompt": list(prompt), "completion": completions[index]}) + "\n"
        for index, prompt in enumerate(prompts)
    )


def text_name(
    path: str | Path,
    target: HfModel,
    prompts: Sequence[Sequence[int]],
    settings: Evaluation,
    seed: int,
) -> str:
    """Name of held-out text: a hash of everything it depends on. `path` is the target's."""
    tokens = [list(prompt) for prompt in prompts]
    sampling = settings.sampling.model_dump(mode="json")
    model = [fingerprint(path), str(target.dtype), target.device.type]
    parts = [model, tokens, settings.max_new_tokens, sampling, seed]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


class PositionScores(NamedTuple):
    """Scores per position; the last two are 0 without a rule."""

    acceptance_N: Tensor  # sum_v min(p, q)
    survival_N: Tensor  # min(1, q(y) / p(y)) for the text's token y
    agreement_N: Tensor  # True if both models have the same argmax
    rule_acceptance_N: Tensor  # sum_v q(v) a(v), a(v) the rule's acceptance probability
    rule_tvd_N: Tensor  # TVD between the distribution induced by the rule and p


class AgreementEvaluator:
    """Compares drafts with the target on fixed texts; the target processes them once."""

    headline = "expected_acceptance"

    def __init__(
        self,
        target: TrainableModel,
        rows: Sequence[Row],
        sampling: SamplingParams,
        *,
        gamma: int,
        vocab_size: int,
        rule: Rule | None = None,
        max_new_tokens: int | None = None,
    ) -> None:
        self.rule = rule
        self.max_new_tokens = max_new_tokens
        self.target = target
        self.sampling = sampling
        self.gamma = gamma
        self.vocab_size = vocab_size
        groups = [
            [rows[index] for index in group]
            for group in batches_of_like_length([len(row.tokens) for row in rows], _ROWS)
        ]
        self.batches = [collate(group).to(target.device) for group in groups]
        self.labels_N = torch.cat([batch.labels_BT[batch.mask_BT] for batch in self.batches])
        self.lengths = [len(row.tokens) - row.trained_from for group in groups for row in group]
        self.target_hidden_ND = self._hidden(target)

    def evaluate(self, draft: TrainableModel) -> Figures:
        """Evaluate a draft on these texts.

        expected_acceptance: mean over positions of sum_v min(p, q).
        greedy_agreement: fraction of positions where both models have the same argmax.
        block_efficiency: tokens per target pass at `gamma`, by prefix products after a text's first
            token, which comes from the prompt's pass; absent if every text has one token. A text
            shorter than `max_new_tokens` (None: than the longest) ended with an end token.
        expected_acceptance_low and _high, greedy_agreement_low and _high: 95% intervals over texts;
            absent with a single text.
        rule_acceptance, rule_tvd: fraction of draft tokens that the rule accepts, and TVD of its
            induced distribution from the target; absent without a rule.
        Paper: Zhou et al. 2023, section 3.
        """
        scores = self._scores(draft)
        figures = {
            "expected_acceptance": float(scores.acceptance_N.double().mean()),
            "greedy_agreement": float(scores.agreement_N.double().mean()),
            "num_tokens": float(len(self.labels_N)),
        }
        if len(self.lengths) > 1:
            for name, values_N in (
                ("expected_acceptance", scores.acceptance_N),
                ("greedy_agreement", scores.agreement_N),
            ):
                interval = self._interval(values_N.double())
                figures |= {f"{name}_low": interval.low, f"{name}_high": interval.high}
        if self.rule is not None:
            figures["rule_acceptance"] = float(scores.rule_acceptance_N.double().mean())
            figures["rule_tvd"] = float(scores.rule_tvd_N.double().mean())
        if max(self.lengths) > _UNDRAFTED:
            budget = self.max_new_tokens or max(self.lengths)
            figures["block_efficiency"] = block_efficiency_from_text(
                self._drafted(scores.acceptance_N),
                self._drafted(scores.survival_N),
                self._drafted(torch.ones(len(self.labels_N))),
                self.gamma,
                budget=budget - _UNDRAFTED,
            )
        return figures

    def _interval(self, values_N: Tensor) -> Interval:
        """Interval of a mean of values in [0, 1]; texts are the independent units."""
        sums_B = torch.stack([part.sum() for part in values_N.split(self.lengths)])
        rng = named_generator(0, "intervals of an evaluation")
        return ratio_interval(sums_B, torch.tensor(self.lengths), rng=rng, most=1.0)

    @torch.no_grad()
    def _scores(self, draft: TrainableModel) -> PositionScores:
        draft_hidden_ND = self._hidden(draft)
        parts: list[tuple[Tensor, ...]] = []
        for start in range(0, len(self.labels_N), _CHUNK):
            rows = slice(start, start + _CHUNK)
            target_log_probs_CV = self._log_probs(self.target, self.target_hidden_ND[rows])
            draft_log_probs_CV = self._log_probs(draft, draft_hidden_ND[rows])
            agreement_C = target_log_probs_CV.argmax(-1) == draft_log_probs_CV.argmax(-1)
            target_probs_CV = to_probs(target_log_probs_CV, self.sampling)
            draft_probs_CV = to_probs(draft_log_probs_CV, self.sampling)
            acceptance_C = torch.minimum(target_probs_CV, draft_probs_CV).sum(-1)
            labels_C1 = self.labels_N[rows, None]
            label_probs_C1 = target_probs_CV.gather(-1, labels_C1).clamp(min=1e-30)
            ratio_C1 = draft_probs_CV.gather(-1, labels_C1) / label_probs_C1
            survival_C = ratio_C1.squeeze(-1).clamp(max=1)
            under_rule = self._under_rule(target_log_probs_CV, draft_log_probs_CV)
            parts.append((acceptance_C, survival_C, agreement_C, *under_rule))
        columns = zip(*parts, strict=True)
        return PositionScores(*(torch.cat(column).cpu() for column in columns))

    def _under_rule(
        self, target_log_probs_CV: Tensor, draft_log_probs_CV: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The rule's acceptance and its TVD from the target, [C] each; 0 without a rule."""
        if self.rule is None:
            zeros_C = target_log_probs_CV.new_zeros(len(target_log_probs_CV))
            return zeros_C, zeros_C
        both = target_log_probs_CV, draft_log_probs_CV
        p_CV, q_CV = (to_probs(logs, self.sampling) for logs in both)
        at = Position(p_CV, q_CV, *(logs.exp() for logs in both))
        at = as_read(self.rule, at, self.sampling)
        acceptance_C = (q_CV * self.rule.accept(at)).sum(-1)
        return acceptance_C, total_variation(self.rule.induced(at), p_CV)

    @torch.no_grad()
    def _hidden(self, model: TrainableModel) -> Tensor:
        """Final hidden states that predict the texts' tokens, in order. -> [N, D]."""
        return torch.cat([model.hidden(batch)[batch.mask_BT] for batch in self.batches])

    def _log_probs(self, model: TrainableModel, hidden_CD: Tensor) -> Tensor:
        if model.draft_vocabulary is None:
            return model.head.log_probs(hidden_CD, self.vocab_size)
        log_probs_CK = model.head.rows(model.draft_vocabulary).log_probs(hidden_CD)
        return spread(log_probs_CK, model.draft_vocabulary, self.vocab_size)

    def _drafted(self, values_N: Tensor) -> Tensor:
        """One zero-padded row per text, without its first token. [N] -> [B, T - 1]."""
        rows_BT = pad_sequence(list(values_N.split(self.lengths)), batch_first=True)
        return rows_BT[:, _UNDRAFTED:]
