"""Scores text with both models: the acceptance probability of a draft token at each position.

Scoring is teacher-forced: one pass of each model over given text, usually sampled from the target.
Nothing is decoded, so the scores apply to any gamma.
"""

# B batch, T positions, V vocabulary
from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.core.sampling import (
    apply_repetition_penalty,
    as_list,
    mark_seen,
    proposal_params,
    seen_tokens,
    to_probs,
)
from paceline.core.text_scores import TextScores, score_tokens
from paceline.data.collate import batches_of_like_length
from paceline.decode.decoder import shared_context
from paceline.errors import UsageError
from paceline.models.admission.trial import check_finite
from paceline.models.compatibility import check_same_vocabulary
from paceline.models.contract import decoder_contexts, pad
from paceline.progress import Progress, silent
from paceline.results.row import Row, rounded

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.core.sampling import SamplingParams
    from paceline.models.contract import Model

    ForcedLogits = Callable[[Sequence[Sequence[int]], Tensor], Tensor]
    """Logits before each token of completions: B prompts, tokens [B, T] -> [B, T, V]."""

_MOST_LOGITS = 2**24  # of a model in one batch; about five tensors have as many
_MOST_LOGITS_CUDA = 2**28
_LEAST_TEXTS, _MOST_TEXTS = 4, 64


def check_longest(longest: int) -> None:
    """Raise UsageError if the longest text has no token that a block could draft."""
    if longest < 2:
        raise UsageError(
            "every text has 1 token, which comes from the target's prefill, so no block drafts; "
            "use other prompts or more new tokens"
        )


def most_drafted(budget: int) -> int:
    """The largest gamma of texts of so many tokens: neither the first nor the last is drafted."""
    return max(1, budget - 2)


def usable_gammas(gammas: Sequence[int], longest: int, budget: int) -> list[int]:
    """The gammas that fit the texts: blocks draft neither the first token nor the last of a budget.

    `longest`: number of tokens of the longest text; `budget`: maximum number of tokens of a text.
    """
    check_longest(longest)
    most = most_drafted(budget)
    usable = sorted({gamma for gamma in gammas if gamma <= most})
    if not usable:
        raise UsageError(
            f"blocks draft at most {most} tokens in texts of at most {budget} tokens, but the "
            f"smallest gamma is {min(gammas)}; ask for smaller gammas or more new tokens"
        )
    return usable


@dataclass(frozen=True)
class PairTexts:
    """Texts after their prompts, with the models and the sampling parameters that score them.

    Texts are cut where the shorter context of the two models ends: no draft serves what is behind.

    Attributes:
        written: Tokens of each text, before it is cut.
        draft_sampling: Sampling parameters of the draft; None: those of the target.
        max_new_tokens: Maximum number of tokens of a text; None: the length of the longest.
        gamma: Largest block of a parallel draft, whose places are scored one by one; 0: are not.
    """

    target: Model
    draft: Model
    prompts: Sequence[Sequence[int]]
    written: Sequence[Sequence[int]]
    sampling: SamplingParams
    draft_sampling: SamplingParams | None = None
    max_new_tokens: int | None = None
    gamma: int = 0

    @cached_property
    def completions(self) -> list[Sequence[int]]:
        """The texts, cut where the shorter context ends."""
        most = as_list(self.budgets)
        return [text[:count] for text, count in zip(self.written, most, strict=True)]

    @property
    def pair(self) -> tuple[Model, Model]:
        """The target and the draft."""
        return self.target, self.draft

    @cached_property
    def vocab_size(self) -> int:
        """Size of the shared vocabulary; raises UsageError if the models have none."""
        return check_same_vocabulary(*self.pair)

    @property
    def samplings(self) -> tuple[SamplingParams, SamplingParams]:
        """Sampling parameters of the target and of the draft."""
        return self.sampling, proposal_params(self.sampling, self.draft_sampling)

    @property
    def lengths(self) -> list[int]:
        return [len(completion) for completion in self.completions]

    @property
    def most(self) -> int:
        """Maximum number of tokens of a text."""
        longest = max(map(len, self.written), default=0)
        return longest if self.max_new_tokens is None else self.max_new_tokens

    @property
    def batch_size(self) -> int:
        """Number of texts that are scored at once, by the memory that their logits take."""
        device = getattr(self.target, "device", torch.device("cpu"))
        most = _MOST_LOGITS_CUDA if device.type == "cuda" else _MOST_LOGITS
        fitting = most // (max(self.lengths) * self.vocab_size)
        return min(max(fitting, _LEAST_TEXTS), _MOST_TEXTS)

    @property
    def budgets(self) -> Tensor:
        """Maximum number of tokens of each text within the shorter context, [B].

        At least 1: the first token takes no space beside its prompt.
        """
        longest = shared_context(*self.pair)
        contexts = decoder_contexts(self.target, self.prompts)
        free = [self.most if longest is None else longest - len(context) for context in contexts]
        return torch.tensor(free, dtype=torch.int64).clamp(1, self.most)


@torch.inference_mode()
def score_texts(
    of: PairTexts,
    progress: Progress = silent,
    target_logits: ForcedLogits | None = None,
    *,
    with_cross_entropy: bool = False,
) -> TextScores:
    """Score each text after its prompt.

    `target_logits`: how to get the target's logits; None: by a pass of the target.
    Shapes: B texts of at least one token -> [B, T], T the longest.
    Paper: Zhou et al. 2023, section 3 (acceptance, on text of the target), figure C.18 (cross
    entropy).
    """
    width, count = max(of.lengths), len(of.prompts)
    target_logits = target_logits or partial(_forced_logits, of.target)
    forced = target_logits, partial(_forced_logits, of.draft)
    parts: dict[str, list[Tensor]] = {}
    done: list[int] = []
    limit = None  # prompts of an encoder-decoder take no space in its decoder
    if of.target.decoder_prompt is None:
        limit = shared_context(*of.pair)
    progress("scoring", 0, count)
    lengths = list(map(len, of.prompts))
    for rows in batches_of_like_length(lengths, of.batch_size, of.lengths, limit):
        scores = _score_batch(of, rows, forced, with_cross_entropy=with_cross_entropy)
        for name, score in scores._asdict().items():
            if score is not None:
                padding = *(0, 0) * (score.ndim - 2), 0, width - score.shape[1]
                parts.setdefault(name, []).append(F.pad(score, padding))
        done += rows
        progress("scoring", len(done), count)
    order = torch.tensor(done).argsort()
    return TextScores(**{name: torch.cat(found)[order] for name, found in parts.items()})


def _score_batch(
    of: PairTexts,
    rows: Sequence[int],
    forced: tuple[ForcedLogits, ForcedLogits],
    *,
    with_cross_entropy: bool,
) -> TextScores:
    sampling, draft_sampling = of.samplings
    prompts, completions = ([part[row] for row in rows] for part in (of.prompts, of.completions))
    tokens_BT = pad(completions).tokens_BT
    lengths_B1 = torch.tensor([[len(completion)] for completion in completions])
    mask_BT = torch.arange(tokens_BT.shape[1]) < lengths_B1
    target_logits_BTV, draft_logits_BTV = (
        logits(prompts, tokens_BT)[..., : of.vocab_size] for logits in forced
    )
    agreement_BT = draft_logits_BTV.argmax(-1) == target_logits_BTV.argmax(-1)
    contexts = decoder_contexts(of.target, prompts)
    seen_BTV = _seen(contexts, tokens_BT, of.vocab_size, sampling)
    p_BTV = to_probs(_penalised(target_logits_BTV, seen_BTV, sampling), sampling)
    q_BTV = to_probs(_penalised(draft_logits_BTV, seen_BTV, sampling), draft_sampling)
    scores = [*score_tokens(p_BTV, q_BTV, tokens_BT), agreement_BT.float()]
    if with_cross_entropy:
        own_BTV = target_logits_BTV.float().softmax(-1)
        terms_BTV = own_BTV * draft_logits_BTV.float().log_softmax(-1)
        # a token that the models may not write has the term 0 * -inf
        scores.append(-torch.where(own_BTV > 0, terms_BTV, 0).sum(-1))
    acceptance, survival, greedy_draft, agreement, *more = (
        torch.where(mask_BT, score.cpu(), 0) for score in scores
    )
    found = TextScores(acceptance, survival, greedy_draft, agreement, mask_BT, *more)
    if of.draft.mask_token is None or of.gamma < 1:
        return found
    acceptance_BTG, survival_BTG = _score_places(of, prompts, tokens_BT, p_BTV, seen_BTV)
    return found._replace(acceptance_BTG=acceptance_BTG, survival_BTG=survival_BTG)


def _score_places(
    of: PairTexts,
    prompts: Sequence[Sequence[int]],
    tokens_BT: Tensor,
    p_BTV: Tensor,
    seen_BTV: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Acceptance and survival of a parallel draft, by the start of a block and the place in it.

    Cost: two draft passes per position. 0 where the draft's context or the texts end.
    Shapes: tokens [B, T], p [B, T, V], seen tokens [B, T, V] -> [B, T, G] each.
    """
    sampling, draft_sampling = of.samplings
    session, (batch, width) = of.draft.start_session(), tokens_BT.shape
    newest_BV = session.prefill(prompts)
    columns: list[tuple[Tensor, Tensor]] = []
    limit = of.draft.max_length
    for start in range(width):
        free = of.gamma if limit is None else limit - max(session.lengths)
        places = min(of.gamma, width - start, free + 1)
        logits_BGV = newest_BV[:, None]
        if places > 1:
            masks = torch.full((batch, places - 1), of.draft.mask_token or 0)
            logits_BGV = torch.cat([logits_BGV, session.extend(masks)], 1)
            session.rollback([places - 1] * batch)
        seen_B1V = None if seen_BTV is None else seen_BTV[:, start, None]
        q_BGV = _penalised(logits_BGV[..., : of.vocab_size], seen_B1V, sampling)
        read = slice(start, start + places)
        scores = score_tokens(p_BTV[:, read], to_probs(q_BGV, draft_sampling), tokens_BT[:, read])
        padded = (F.pad(score.cpu(), (0, of.gamma - places)) for score in scores[:2])
        columns.append((next(padded), next(padded)))
        if start + 1 < width:
            newest_BV = session.extend(tokens_BT[:, start, None])[:, -1]
    acceptance_BTG, survival_BTG = (torch.stack(part, 1) for part in zip(*columns, strict=True))
    return acceptance_BTG, survival_BTG


def rows_of_texts(
    texts: PairTexts, scores: TextScores, gammas: Sequence[int], **fields: Any
) -> list[Row]:
    """The row of scored texts, then one per usable gamma, ascending, with the expected blocks.

    Args:
        texts: The texts.
        scores: Their scores.
        gammas: Drafted tokens per block.
        fields: Other fields of the rows.
    """
    budget_B = texts.budgets
    parts = {
        "tokens": scores.mask_BT,
        "acceptance": scores.acceptance_BT,
        "greedy_acceptance": scores.greedy_draft_BT,
        "agreement": scores.agreement_BT,
        "cross_entropy": scores.cross_entropy_BT,
    }
    known = {name: part_BT for name, part_BT in parts.items() if part_BT is not None}
    sums = {name: rounded(part_BT.sum(-1)) for name, part_BT in known.items()}
    rows = [Row(sums=sums, **fields)]
    for gamma in usable_gammas(gammas, max(texts.lengths), int(budget_B.max())):
        tokens_B, blocks_B = scores.tokens_and_blocks(gamma, budget_B)
        blocks = {"emitted": rounded(tokens_B), "calls": rounded(blocks_B)}
        drafted = float(scores.drafted_tokens(gamma, budget_B).sum() / blocks_B.sum())
        setting: dict[str, float] = {"gamma": gamma}
        if scores.acceptance_BTG is not None:  # one pass drafts the block
            setting["parameter_ratio"] = float(rows[0].setting["parameter_ratio"]) / gamma
        of_gamma = rows[0].extended({}, {"drafted_per_block": drafted}, **setting)
        rows.append(of_gamma.model_copy(update={"sums": sums | blocks}))
    return rows


@torch.inference_mode()
def forced_logits(
    model: Model,
    prompt: Sequence[int],
    tokens: Sequence[int],
    sampling: SamplingParams,
    vocab_size: int,
) -> Tensor:
    """Logits of a model before each token of one text, repetition penalty applied, [T, V]."""
    logits_1TV = _forced_logits(model, [prompt], torch.tensor([list(tokens)]))
    return penalised_text(model, prompt, tokens, logits_1TV[0, :, :vocab_size], sampling)


def penalised_text(
    model: Model,
    prompt: Sequence[int],
    tokens: Sequence[int],
    logits_TV: Tensor,
    sampling: SamplingParams,
) -> Tensor:
    """Logits before each token of one text, with the repetition penalty, [T, V]."""
    contexts, tokens_1T = decoder_contexts(model, [prompt]), torch.tensor([list(tokens)])
    seen_1TV = _seen(contexts, tokens_1T, logits_TV.shape[-1], sampling)
    return _penalised(logits_TV[None], seen_1TV, sampling)[0]


def _forced_logits(model: Model, prompts: Sequence[Sequence[int]], tokens_BT: Tensor) -> Tensor:
    """Logits before each completion token, [B, T, V]."""
    session = model.start_session()
    first_BV = session.prefill(prompts)
    if tokens_BT.shape[1] == 1:
        return first_BV[:, None]
    logits_BTV = torch.cat([first_BV[:, None], session.extend(tokens_BT[:, :-1])], 1)
    check_finite([model], list(zip(prompts, as_list(tokens_BT), strict=True)), logits_BTV)
    return logits_BTV


def _seen(
    contexts: Sequence[Sequence[int]], tokens_BT: Tensor, vocab_size: int, sampling: SamplingParams
) -> Tensor | None:
    """Tokens that occur before each position, [B, T, V]; None without a repetition penalty."""
    if sampling.repetition_penalty == 1:
        return None
    return mark_seen(tokens_BT[:, :-1], seen_tokens(contexts, vocab_size))


def _penalised(logits_BTV: Tensor, seen_BTV: Tensor | None, sampling: SamplingParams) -> Tensor:
    if seen_BTV is None:
        return logits_BTV
    seen_BTV = seen_BTV.to(logits_BTV.device)
    return apply_repetition_penalty(logits_BTV, seen_BTV, sampling.repetition_penalty)
