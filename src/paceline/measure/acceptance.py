"""Both models over the same text: per position, would the draft's proposal have been accepted?

Teacher-forced: one pass of each model over text that the target sampled. Nothing is decoded, so
the figures hold for any gamma.
"""

# B batch, T positions, V vocabulary
from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from paceline.core.rules import Lossless
from paceline.core.sampling import (
    apply_repetition_penalty,
    mark_seen,
    proposal_params,
    seen_tokens,
    to_probs,
)
from paceline.core.speed import drafted_per_block, tokens_and_blocks
from paceline.data.batching import batches_of_like_length
from paceline.models.compatibility import check_same_vocabulary

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.core.sampling import SamplingParams
    from paceline.models.contract import Model
    from paceline.progress import Progress

_UNDRAFTED = Lossless().num_undrafted
# Rows scored together: [rows, 64 tokens, 50k vocabulary] of two models is about 200 MB at 8.
_ROWS = 4


class TextScores(NamedTuple):
    """What each position of each text says about the draft, [B, T]; 0 beyond a text's end.

    q is what the draft proposes. `acceptance`: sum_v min(p, q). `survival`: min(1, q(y)/p(y)) of the text's own token y.
    `greedy_draft`: p(argmax q), what an engine that drafts greedily gets. `agreement`: argmax q is
    argmax p, of the untempered distributions.
    """

    acceptance_BT: Tensor
    survival_BT: Tensor
    greedy_draft_BT: Tensor
    agreement_BT: Tensor
    mask_BT: Tensor

    @property
    def drafted(self) -> tuple[Tensor, Tensor, Tensor]:
        """Acceptance, survival and mask where blocks of a lossless engine draft."""
        scores = self.acceptance_BT, self.survival_BT, self.mask_BT
        acceptance_BT, survival_BT, mask_BT = (score[:, _UNDRAFTED:] for score in scores)
        return acceptance_BT, survival_BT, mask_BT

    def tokens_and_blocks(self, gamma: int, budget_B: Tensor) -> tuple[Tensor, Tensor]:
        """Expected tokens and blocks of each text in a lossless engine, [B] each.

        `budget_B`: the tokens that each text might have, as `budgets_of` gives them.
        """
        return tokens_and_blocks(*self.drafted, gamma, budget=budget_B - _UNDRAFTED)

    def drafted_per_block(self, gamma: int, budget_B: Tensor) -> float:
        """Mean number of tokens that a block drafts; less than gamma where the budget ends."""
        _, survival_BT, mask_BT = self.drafted
        return drafted_per_block(survival_BT, mask_BT, gamma, budget=budget_B - _UNDRAFTED)


def budgets_of(writer: Model, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> Tensor:
    """The tokens that each text might have: what was asked for, or what the context has room for.

    A text that is shorter ended with an end-of-text token. -> [B].
    """
    room = [
        max_new_tokens if writer.max_length is None else writer.max_length - len(prompt)
        for prompt in prompts
    ]
    return torch.tensor(room).clamp(max=max_new_tokens)


@torch.inference_mode()
def score_texts(
    target: Model,
    draft: Model,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    sampling: SamplingParams,
    progress: Progress,
    draft_sampling: SamplingParams | None = None,
) -> TextScores:
    """Score every completion after its prompt; `draft_sampling`: how the draft draws, None: as the target.

    Shapes: B prompts, B completions of at least one token -> [B, T], T the longest completion.
    Paper: Zhou et al. 2023, section 3 (acceptance, on text of the target).
    """
    width = max(len(completion) for completion in completions)
    vocab_size = check_same_vocabulary(target, draft)
    samplings = sampling, proposal_params(sampling, draft_sampling)
    parts: list[list[Tensor]] = []
    done: list[int] = []
    limit = min((m.max_length for m in (target, draft) if m.max_length is not None), default=None)
    lengths = [list(map(len, texts)) for texts in (prompts, completions)]
    progress("scoring", 0, len(prompts))
    for rows in batches_of_like_length(lengths[0], _ROWS, lengths[1], limit):
        asked, written = ([part[row] for row in rows] for part in (prompts, completions))
        scores = _score_rows(target, draft, asked, written, samplings, vocab_size)
        parts.append([_widen(score, width) for score in scores])
        done += rows
        progress("scoring", len(done), len(prompts))
    as_given = torch.tensor(done).argsort()
    return TextScores(*(torch.cat(columns)[as_given] for columns in zip(*parts, strict=True)))


def _score_rows(
    target: Model,
    draft: Model,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    samplings: tuple[SamplingParams, SamplingParams],
    vocab_size: int,
) -> TextScores:
    sampling, draft_sampling = samplings
    width = max(len(completion) for completion in completions)
    tokens_BT = torch.zeros(len(prompts), width, dtype=torch.int64)
    mask_BT = torch.zeros(len(prompts), width, dtype=torch.bool)
    for row, completion in enumerate(completions):
        tokens_BT[row, : len(completion)] = torch.tensor(completion)
        mask_BT[row, : len(completion)] = True
    target_logits_BTV = _forced_logits(target, prompts, tokens_BT)[..., :vocab_size]
    draft_logits_BTV = _forced_logits(draft, prompts, tokens_BT)[..., :vocab_size]
    agreement_BT = draft_logits_BTV.argmax(-1) == target_logits_BTV.argmax(-1)
    seen_BTV = _seen(prompts, tokens_BT, vocab_size, sampling)
    p_BTV = to_probs(_penalised(target_logits_BTV, seen_BTV, sampling), sampling)
    q_BTV = to_probs(_penalised(draft_logits_BTV, seen_BTV, sampling), draft_sampling)
    # 1 - TVD, not the sum of minima: exactly 1 when both are equal, however the sum rounds. Where
    # they have nothing in common, rounding must not make it negative.
    acceptance_BT = (1 - 0.5 * (p_BTV - q_BTV).abs().sum(-1)).clamp(min=0)
    index_BT1 = tokens_BT[..., None].to(p_BTV.device)
    p_BT, q_BT = p_BTV.gather(-1, index_BT1), q_BTV.gather(-1, index_BT1)
    survival_BT = (q_BT / p_BT.clamp(min=1e-30)).clamp(max=1).squeeze(-1)
    greedy_BT = p_BTV.gather(-1, q_BTV.argmax(-1, keepdim=True)).squeeze(-1)
    scores = (acceptance_BT, survival_BT, greedy_BT, agreement_BT.float())
    acceptance, survival, greedy_draft, agreement = (score.cpu() * mask_BT for score in scores)
    return TextScores(acceptance, survival, greedy_draft, agreement, mask_BT)


@torch.inference_mode()
def forced_probs(
    target: Model,
    draft: Model,
    prompt: Sequence[int],
    tokens: Sequence[int],
    sampling: SamplingParams,
    vocab_size: int,
    draft_sampling: SamplingParams | None = None,
) -> tuple[Tensor, Tensor]:
    """Both models' exact distributions before each token of one text, [T, V] each."""
    proposed = proposal_params(sampling, draft_sampling)
    p_TV, q_TV = (
        to_probs(forced_logits(model, prompt, tokens, sampling, vocab_size), shaping)
        for model, shaping in ((target, sampling), (draft, proposed))
    )
    return p_TV, q_TV


@torch.inference_mode()
def forced_logits(
    model: Model,
    prompt: Sequence[int],
    tokens: Sequence[int],
    sampling: SamplingParams,
    vocab_size: int,
) -> Tensor:
    """A model's logits before each token of one text, penalised as the sampler does, [T, V]."""
    tokens_1T = torch.tensor([list(tokens)])
    logits_1TV = _forced_logits(model, [prompt], tokens_1T)[..., :vocab_size]
    seen_1TV = _seen([prompt], tokens_1T, vocab_size, sampling)
    return _penalised(logits_1TV, seen_1TV, sampling)[0]


def _forced_logits(model: Model, prompts: Sequence[Sequence[int]], tokens_BT: Tensor) -> Tensor:
    """Logits before each completion token, [B, T, V]."""
    session = model.start_session()
    first_BV = session.prefill(prompts)
    if tokens_BT.shape[1] == 1:
        return first_BV[:, None]
    return torch.cat([first_BV[:, None], session.extend(tokens_BT[:, :-1])], 1)


def _seen(
    prompts: Sequence[Sequence[int]], tokens_BT: Tensor, vocab_size: int, sampling: SamplingParams
) -> Tensor | None:
    """What stands before each position, [B, T, V]; None where no penalty asks."""
    if sampling.repetition_penalty == 1:
        return None
    return mark_seen(tokens_BT[:, :-1], seen_tokens(prompts, vocab_size))


def _penalised(logits_BTV: Tensor, seen_BTV: Tensor | None, sampling: SamplingParams) -> Tensor:
    if seen_BTV is None:
        return logits_BTV
    seen_BTV = seen_BTV.to(logits_BTV.device)
    return apply_repetition_penalty(logits_BTV, seen_BTV, sampling.repetition_penalty)


def _widen(score_BT: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(score_BT, (0, width - score_BT.shape[1]))
