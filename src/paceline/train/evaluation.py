"""Evaluates the agreement of draft and target on held-out text that the target generates."""

# B texts, T positions, N positions of all texts, C of a chunk, D hidden, V vocabulary
from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from paceline.core.bootstrap import ratio_interval
from paceline.core.fused import chunks
from paceline.core.sampling import spread, to_probs
from paceline.core.text_scores import TextScores, score_tokens
from paceline.data.collate import batches_of_like_length, collate
from paceline.data.sources import rows_of, sample_completions
from paceline.data.tokens import encode_prompts
from paceline.models.loading import tokenizer_of
from paceline.records import atomic_write_text, read_jsonl
from paceline.rng import named_generator
from paceline.train.parallel import Parallel, draw_places, packed_hidden

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from paceline.core.bootstrap import Interval
    from paceline.core.sampling import SamplingParams
    from paceline.data.collate import TokenRow
    from paceline.data.prompts import Record
    from paceline.models.hf.base import HfModel
    from paceline.progress import Progress
    from paceline.train.config import AlignConfig, Evaluation
    from paceline.train.loop import Figures
    from paceline.train.run import TrainingRun

_ROWS = 8  # texts per batch
_CHUNK = 256  # positions per chunk of probabilities


def held_out_evaluator(
    config: AlignConfig,
    run: TrainingRun,
    records: Sequence[Record],
    target: HfModel,
    vocab_size: int,
) -> AgreementEvaluator:
    """Evaluator on the target's answers to these records."""
    settings = config.evaluation
    prompts = encode_prompts(
        records[: settings.num_prompts],
        tokenizer_of(target, config.target),
        max_tokens=settings.max_prompt_tokens,
        encoder=target.decoder_prompt is not None,
        setting="evaluation.max_prompt_tokens",
    )
    cache = run.directory.path / "held_out.jsonl"
    rows = held_out_text(target, prompts, settings, cache, seed=config.seed, progress=run.progress)
    return AgreementEvaluator(
        target,
        rows,
        settings.sampling,
        gamma=settings.gamma,
        vocab_size=vocab_size,
        max_new_tokens=settings.max_new_tokens,
    )


def held_out_text(
    target: HfModel,
    prompts: Sequence[Sequence[int]],
    settings: Evaluation,
    cache: Path,
    *,
    seed: int,
    progress: Progress,
) -> list[TokenRow]:
    """The target's completions of the prompts, generated once and then read from `cache`.

    Of batching, the text depends on rounding only.
    """
    completions: dict[int, list[int]] = {}
    rng = named_generator(seed, "held-out text")
    seeds = torch.randint(2**31, (len(prompts),), generator=rng).tolist()
    for group in () if cache.exists() else batches_of_like_length([*map(len, prompts)], _ROWS):
        part = [prompts[index] for index in group]
        texts = sample_completions(
            *(target, part, [seeds[index] for index in group], settings.max_new_tokens),
            sampling=settings.sampling,
        )
        completions |= dict(zip(group, texts, strict=True))
        progress("held-out text", len(completions), len(prompts))
    if not cache.exists():
        lines = (
            json.dumps({"prompt": list(prompt), "completion": completions[index]}) + "\n"
            for index, prompt in enumerate(prompts)
        )
        atomic_write_text(cache, "".join(lines))
    read = read_jsonl(cache)
    return rows_of(target, *([row[key] for row in read] for key in ("prompt", "completion")))


class AgreementEvaluator:
    """Compares drafts with the target on fixed texts; the target processes them once."""

    headline = "expected_acceptance"

    def __init__(
        self,
        target: HfModel,
        rows: Sequence[TokenRow],
        sampling: SamplingParams,
        *,
        gamma: int,
        vocab_size: int,
        max_new_tokens: int | None = None,
        draft_sampling: SamplingParams | None = None,
    ) -> None:
        """Read the texts. `draft_sampling`: that of drafts; None: the target's."""
        self.max_new_tokens = max_new_tokens
        self.draft_sampling = draft_sampling or sampling
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
        states = [row.target_hidden_TD for group in groups for row in group]
        recorded = [states_TD for states_TD in states if states_TD is not None]
        if len(recorded) == len(states):  # then the target may be its head alone
            self.target_hidden_ND = torch.cat(recorded).to(target.device, target.dtype)
        else:
            self.target_hidden_ND = self._hidden(target)

    def evaluate(self, model: HfModel) -> Figures:
        """Evaluate a draft on these texts.

        expected_acceptance: mean over positions of sum_v min(p, q).
        greedy_agreement: fraction of positions where both models have the same argmax.
        block_efficiency: tokens per target pass at `gamma`, by prefix products after a text's first
            token, which comes from the prompt's pass; absent if every text has one token. A text
            shorter than `max_new_tokens` (None: than the longest) ended with an end token.
        parallel_block_efficiency: the same where a draft with masks proposes a block in one pass.
        expected_acceptance_low and _high, greedy_agreement_low and _high: 95% intervals over texts;
            absent with a single text.
        Paper: Zhou et al. 2023, section 3.
        """
        scores = self._scores(model)
        mask_BT = scores.mask_BT
        figures = {
            "expected_acceptance": float(scores.acceptance_BT[mask_BT].double().mean()),
            "greedy_agreement": float(scores.agreement_BT[mask_BT].double().mean()),
            "num_tokens": float(len(self.labels_N)),
        }
        if len(self.lengths) > 1:
            for name, values_BT in (
                ("expected_acceptance", scores.acceptance_BT),
                ("greedy_agreement", scores.agreement_BT),
            ):
                interval = self._interval(values_BT.double())
                figures |= {f"{name}_low": interval.low, f"{name}_high": interval.high}
        if scores.drafted[-1].any():
            figures["block_efficiency"] = self._block_efficiency(scores)
            if model.mask_token is not None and self.gamma > 1:
                by_place = self._by_place(model, scores)
                figures["parallel_block_efficiency"] = self._block_efficiency(by_place)
        return figures

    def blocks(self, model: HfModel) -> tuple[Tensor, Tensor, Tensor]:
        """Expected tokens, blocks and drafted tokens of each text, [B] each, in a fixed order.

        A draft with masks proposes its blocks in one pass.
        """
        scores = self._scores(model)
        if model.mask_token is not None and self.gamma > 1:
            scores = self._by_place(model, scores)
        budget_B = self._budget
        tokens_B, blocks_B = scores.tokens_and_blocks(self.gamma, budget_B)
        return tokens_B, blocks_B, scores.drafted_tokens(self.gamma, budget_B)

    @property
    def _budget(self) -> Tensor:
        return torch.tensor([self.max_new_tokens or max(self.lengths)])

    def _block_efficiency(self, scores: TextScores) -> float:
        tokens_B, blocks_B = scores.tokens_and_blocks(self.gamma, self._budget)
        return float(tokens_B.sum() / blocks_B.sum())

    @torch.no_grad()
    def _by_place(self, model: HfModel, scores: TextScores) -> TextScores:
        """With the scores of a parallel draft at each place of a block at each position."""
        settings = Parallel(num_tokens=self.gamma, anchors=scores.mask_BT.shape[1])
        found_2BTG = torch.zeros(2, *scores.mask_BT.shape, self.gamma)
        found_2BTG[..., 0] = torch.stack([scores.acceptance_BT, scores.survival_BT])
        num_rows = num_scored = 0
        for batch in self.batches:
            mask_BT = batch.mask_BT
            places = draw_places(mask_BT, settings, lambda _: torch.Generator(), 0)
            places, real_BM = places.to(mask_BT.device), places.real.to(mask_BT.device)
            masks_KD = packed_hidden(model, batch, places)[1][real_BM]
            index_BT = num_scored - 1 + mask_BT.flatten().cumsum(0).view_as(mask_BT)
            columns_BM = places.columns.clamp(max=mask_BT.shape[1] - 1)
            sources_K = index_BT.gather(1, columns_BM)[real_BM]
            parts: list[Tensor] = []
            for chunk in chunks(len(sources_K), _CHUNK):
                read_C = sources_K[chunk]
                logs = (
                    self._log_probs(self.target, self.target_hidden_ND[read_C]),
                    self._log_probs(model, masks_KD[chunk]),
                )
                p_CV, q_CV = self._probs(*logs)
                parts.append(torch.stack(score_tokens(p_CV, q_CV, self.labels_N[read_C])[:2]))
            rows_K = real_BM.nonzero()[:, 0]
            starts_K = places.anchors_BM[real_BM] - mask_BT.long().argmax(-1)[rows_K]
            where = (num_rows + rows_K).cpu(), starts_K.cpu(), places.places_BM[real_BM].cpu()
            if parts:
                found_2BTG[:, *where] = torch.cat(parts, 1).cpu()
            num_rows, num_scored = num_rows + len(mask_BT), num_scored + int(mask_BT.sum())
        acceptance_BTG, survival_BTG = found_2BTG
        return scores._replace(acceptance_BTG=acceptance_BTG, survival_BTG=survival_BTG)

    def _interval(self, values_BT: Tensor) -> Interval:
        """Interval of a mean of values in [0, 1]; texts are the independent units."""
        return ratio_interval((values_BT.sum(-1), torch.tensor(self.lengths)), most=1.0)

    @torch.no_grad()
    def _scores(self, model: HfModel) -> TextScores:
        both = (self.target, self.target_hidden_ND), (model, self._hidden(model))
        parts: list[Tensor] = []
        for rows in chunks(len(self.labels_N), _CHUNK):
            logs = [self._log_probs(each, hidden_ND[rows]) for each, hidden_ND in both]
            p_CV, q_CV = self._probs(*logs)
            agreement_C = logs[0].argmax(-1) == logs[1].argmax(-1)
            columns = [*score_tokens(p_CV, q_CV, self.labels_N[rows]), agreement_C.float()]
            parts.append(torch.stack(columns, -1).cpu())
        whole = pad_sequence(list(torch.cat(parts).split(self.lengths)), batch_first=True)
        mask_BT = torch.arange(whole.shape[1]) < torch.tensor(self.lengths)[:, None]
        acceptance, survival, greedy_draft, agreement = whole.unbind(-1)
        return TextScores(acceptance, survival, greedy_draft, agreement, mask_BT)

    @torch.no_grad()
    def _hidden(self, model: HfModel) -> Tensor:
        """Final hidden states that predict the texts' tokens, in order. -> [N, D]."""
        return torch.cat([model.hidden(batch)[batch.mask_BT] for batch in self.batches])

    def _probs(self, target_logs_CV: Tensor, draft_logs_CV: Tensor) -> tuple[Tensor, Tensor]:
        """What both sample from."""
        own = to_probs(draft_logs_CV, self.draft_sampling)
        return to_probs(target_logs_CV, self.sampling), own

    def _log_probs(self, model: HfModel, hidden_CD: Tensor) -> Tensor:
        if model.draft_vocabulary is None:
            return model.head.log_probs(hidden_CD, self.vocab_size)
        log_probs_CK = model.head.rows(model.draft_vocabulary).log_probs(hidden_CD)
        return spread(log_probs_CK, model.draft_vocabulary, self.vocab_size)
