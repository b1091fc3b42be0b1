"""How well the draft agrees with the target on held-out text that the target wrote."""

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
from paceline.core.fused import Head
from paceline.core.rule_base import Position
from paceline.core.rules import Lossless
from paceline.core.sampling import to_probs
from paceline.core.speed import block_efficiency_from_text
from paceline.core.vocabulary_subset import spread
from paceline.data.batching import batches_of_like_length
from paceline.data.collate import Row, collate
from paceline.data.completions import sample_completions
from paceline.models.loading import fingerprint
from paceline.records import atomic_write_text, locked, read_jsonl
from paceline.rng import named_generator

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from paceline.core.bootstrap import Interval
    from paceline.core.rule_base import Rule
    from paceline.core.sampling import SamplingParams
    from paceline.models.contract import TrainableModel
    from paceline.models.hf.causal import CausalModel
    from paceline.progress import Progress
    from paceline.train.align_config import Evaluation
    from paceline.train.loop import Figures

_UNDRAFTED = Lossless().num_undrafted
_ROWS = 8  # texts written or read at a time
_CHUNK = 256  # positions whose probabilities exist at a time


def held_out_text(
    target: CausalModel,
    prompts: Sequence[Sequence[int]],
    settings: Evaluation,
    cache: Path,
    *,
    seed: int,
    progress: Progress,
    shared: Path | None = None,
) -> list[Row]:
    """What the target writes after the prompts: once a run, then read from `cache`.

    Args:
        target: Who writes.
        prompts: Token ids each.
        settings: How many, how long, how drawn.
        cache: The run's own file of it.
        seed: Of what is drawn.
        progress: Called as texts are written.
        shared: A file for runs with the same target, prompts, settings and seed: written by the
            first of them while the others wait, and copied by these.
    """
    if not cache.exists():
        text = partial(_text, target, prompts, settings, seed, progress)
        if shared is None:
            atomic_write_text(cache, text())
        else:
            if not shared.exists():
                with locked(shared.parent, wait=True):
                    if not shared.exists():
                        atomic_write_text(shared, text())
            atomic_write_text(cache, shared.read_text(encoding="utf-8"))
    return [
        Row([*row["prompt"], *row["completion"]], len(row["prompt"])) for row in read_jsonl(cache)
    ]


def _text(
    target: CausalModel,
    prompts: Sequence[Sequence[int]],
    settings: Evaluation,
    seed: int,
    progress: Progress,
) -> str:
    """A line of JSON for each prompt and what the target wrote after it."""
    written: dict[int, list[int]] = {}
    for group in batches_of_like_length(list(map(len, prompts)), _ROWS):
        written |= _write(target, {index: prompts[index] for index in group}, settings, seed=seed)
        progress("held-out text", len(written), len(prompts))
    return "".join(
        json.dumps({"prompt": list(prompt), "completion": written[index]}) + "\n"
        for index, prompt in enumerate(prompts)
    )


def text_name(
    path: str | Path,
    target: CausalModel,
    prompts: Sequence[Sequence[int]],
    settings: Evaluation,
    seed: int,
) -> str:
    """A name for held-out text, of everything that it hangs on; `path` is the target's."""
    taken = [list(prompt) for prompt in prompts]
    drawn = settings.sampling.model_dump(mode="json")
    model = [fingerprint(path), str(target.dtype), target.device.type]
    parts = [model, taken, settings.max_new_tokens, drawn, seed]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _write(
    target: CausalModel, prompts: dict[int, Sequence[int]], settings: Evaluation, *, seed: int
) -> dict[int, list[int]]:
    """A completion of each prompt, both by the prompt's number.

    Each number has its own uniform stream, so a text does not depend on how prompts are batched.
    """
    uniforms = [
        torch.rand(
            settings.max_new_tokens,
            generator=named_generator(seed, "held-out text", index),
            dtype=torch.float64,
        )
        for index in prompts
    ]
    texts = sample_completions(
        target, list(prompts.values()), torch.stack(uniforms), sampling=settings.sampling
    )
    return dict(zip(prompts, texts, strict=True))


class PositionScores(NamedTuple):
    """For each position: sum_v min(p, q); min(1, q(y)/p(y)) of the text's token y; same argmax?

    Under a rule, if there is one: sum_v q(v) a(v), and the TVD of what it induces to p; else 0.
    """

    acceptance_N: Tensor
    survival_N: Tensor
    agreement_N: Tensor
    rule_acceptance_N: Tensor
    rule_tvd_N: Tensor


class AgreementEvaluator:
    """Compares drafts with the target on one set of texts; the target reads them once."""

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
        """The draft's figures on these texts.

        expected_acceptance: sum over positions of sum_v min(p, q), divided by the positions.
        greedy_agreement: part of the positions where both have the same likeliest token.
        block_efficiency: tokens a target pass at `gamma`, by prefix products behind a text's first
            token, which comes with the prompt; absent where every text has one token. A text shorter
            than `max_new_tokens` (None: than the longest) ended by itself.
        expected_acceptance_low and _high, greedy_agreement_low and _high: 95% intervals of the two over
            texts; absent where there is one text.
        rule_acceptance, rule_tvd: under a rule, the part of the draft's tokens that it keeps, and how
            far the text then is from the target's; absent where no rule was given.
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
        """Of a mean of shares over positions; texts are what is independent."""
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
        """What the rule keeps and how far it leads, [C] each; 0 without a rule."""
        if self.rule is None:
            none_C = target_log_probs_CV.new_zeros(len(target_log_probs_CV))
            return none_C, none_C
        both = target_log_probs_CV, draft_log_probs_CV
        p_CV, q_CV = (to_probs(logs, self.sampling) for logs in both)
        at = Position(p_CV, q_CV, *(logs.exp() for logs in both))
        kept_C = (q_CV * self.rule.accept(at)).sum(-1)
        return kept_C, total_variation(self.rule.induced(at), p_CV)

    @torch.no_grad()
    def _hidden(self, model: TrainableModel) -> Tensor:
        """Final hidden states where a text's token is predicted, text after text. -> [N, D]."""
        return torch.cat([model.hidden(batch)[batch.mask_BT] for batch in self.batches])

    def _log_probs(self, model: TrainableModel, hidden_CD: Tensor) -> Tensor:
        head = Head(model.head_weight, model.head_bias)
        if model.draft_vocabulary is None:
            return head.log_probs(hidden_CD, self.vocab_size)
        log_probs_CK = head.rows(model.draft_vocabulary).log_probs(hidden_CD)
        return spread(log_probs_CK, model.draft_vocabulary, self.vocab_size)

    def _drafted(self, values_N: Tensor) -> Tensor:
        """One row a text, behind its first token, 0 beyond its end. [N] -> [B, T - 1]."""
        rows_BT = pad_sequence(list(values_N.split(self.lengths)), batch_first=True)
        return rows_BT[:, _UNDRAFTED:]
