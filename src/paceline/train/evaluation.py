"""How well the draft agrees with the target on held-out text that the target wrote."""

# B texts, T positions, N positions of all texts, C positions of a chunk, D hidden, V vocabulary
from __future__ import annotations

import json
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from paceline.core.sampling import to_probs
from paceline.core.speed import block_efficiency_from_text
from paceline.data.collate import Row, collate
from paceline.data.generation import sample_completions
from paceline.records import atomic_write_text, read_jsonl
from paceline.rng import named_generator

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from paceline.core.sampling import SamplingParams
    from paceline.models.causal import CausalModel
    from paceline.progress import Progress
    from paceline.train.config import Evaluation

_ROWS = 8  # texts written or read at a time
_CHUNK = 256  # positions whose probabilities exist at a time

Figures = dict[str, float]


def held_out_text(
    target: CausalModel,
    prompts: Sequence[Sequence[int]],
    settings: Evaluation,
    cache: Path,
    *,
    seed: int,
    progress: Progress,
) -> list[Row]:
    """What the target writes after the prompts: once a run, then read from `cache`."""
    if not cache.exists():
        prompts = prompts[: settings.num_prompts]
        lines: list[str] = []
        for start in range(0, len(prompts), _ROWS):
            some = prompts[start : start + _ROWS]
            written = _write(target, some, settings, start=start, seed=seed)
            for prompt, completion in zip(some, written, strict=True):
                lines.append(json.dumps({"prompt": list(prompt), "completion": completion}))
            progress("held-out text", len(lines), len(prompts))
        atomic_write_text(cache, "\n".join(lines) + "\n")
    return [
        Row([*row["prompt"], *row["completion"]], len(row["prompt"])) for row in read_jsonl(cache)
    ]


def _write(
    target: CausalModel,
    prompts: Sequence[Sequence[int]],
    settings: Evaluation,
    *,
    start: int,
    seed: int,
) -> list[list[int]]:
    """One uniform stream a prompt, so that a text does not depend on how prompts are grouped."""
    uniforms = [
        torch.rand(
            settings.max_new_tokens,
            generator=named_generator(seed, "held-out text", start + index),
            dtype=torch.float64,
        )
        for index in range(len(prompts))
    ]
    return sample_completions(target, prompts, torch.stack(uniforms), sampling=settings.sampling)


class Evaluator:
    """Compares drafts with the target on one set of texts; the target reads them once."""

    def __init__(
        self,
        target: CausalModel,
        rows: Sequence[Row],
        sampling: SamplingParams,
        *,
        gamma: int,
        vocab_size: int,
    ) -> None:
        self.target = target
        self.rows = rows
        self.sampling = sampling
        self.gamma = gamma
        self.vocab_size = vocab_size
        self._target_hidden_ND: Tensor | None = None

    @torch.no_grad()
    def evaluate(self, draft: CausalModel) -> Figures:
        """The figures of DESIGN section 4 on these texts.

        expected_acceptance: sum over positions of sum_v min(p, q), divided by the positions.
        greedy_agreement: part of the positions where both have the same likeliest token.
        block_efficiency: tokens a target pass at `gamma`, by prefix products; absent where every
            text is shorter than gamma.
        Paper: Zhou et al. 2023, section 3.
        """
        if self._target_hidden_ND is None:
            self._target_hidden_ND = self._hidden(self.target)
        scores = self._scores(self._target_hidden_ND, self._hidden(draft), draft)
        figures = {
            "expected_acceptance": float(scores.acceptance_N.double().mean()),
            "greedy_agreement": float(scores.agreement_N.double().mean()),
            "num_tokens": float(len(scores.acceptance_N)),
        }
        lengths = [len(row.tokens) - row.trained_from for row in self.rows]
        if max(lengths) >= self.gamma:
            figures["block_efficiency"] = block_efficiency_from_text(
                pad_sequence(scores.acceptance_N.split(lengths), batch_first=True),
                pad_sequence(scores.survival_N.split(lengths), batch_first=True),
                pad_sequence([torch.ones(length) for length in lengths], batch_first=True),
                self.gamma,
            )
        return figures

    def _hidden(self, model: CausalModel) -> Tensor:
        """Final hidden states at the predicting positions of all texts, text after text."""
        parts: list[Tensor] = []
        for batch in self._batches():
            tokens_BT = batch.tokens_BT.to(model.device)
            attention = batch.attention_BT
            attention = None if attention is None else attention.to(model.device)
            parts.append(model.body(tokens_BT, attention)[batch.mask_BT.to(model.device)])
        return torch.cat(parts)

    def _batches(self) -> Iterator:
        for start in range(0, len(self.rows), _ROWS):
            yield collate(self.rows[start : start + _ROWS])
