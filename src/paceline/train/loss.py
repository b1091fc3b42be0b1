"""The loss of a part of a step: the models' scores of its tokens, compared chunk by chunk.

A chunk is compared over the whole vocabulary, over the tokens that the draft proposes, or over a
sample of tokens per step, since the head is most of a small draft's cost. `ChunkLoss` computes its
losses and their gradient, in C if every term of the objective is implemented there.

A draft that proposes only tokens in K has the acceptance sum_K min(p, q), with p normalised over
the whole vocabulary. The loss receives the target's logits over K or a subset of K, and one number
per position, the target's log-sum-exp over all tokens. TVD, TVD++ and negative log acceptance use
both. KL(target || draft) would be infinite, because the draft's probability outside K is 0. KL and
JSD therefore use the target renormalised over K.
"""

# B rows, T positions, N trained positions, C tokens of a chunk, D hidden width, V compared tokens,
# S sampled tokens
from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.weak import WeakTensorKeyDictionary

from paceline.config import StrictModel
from paceline.core.fused import Head, chunked_loss, chunks
from paceline.core.text_scores import score_tokens
from paceline.core.top_k_tail import TopScores, among
from paceline.native.kernels import can_differentiate, losses_and_slopes
from paceline.train.objectives import Compared, native_terms, policies_of, token_losses
from paceline.train.parallel import among_trained, packed_hidden, place_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.autograd.graph import GradientEdge

    from paceline.data.collate import TokenBatch, TokenRow
    from paceline.models.hf.base import HfModel
    from paceline.native.structures import Term
    from paceline.train.objectives import AddUp, Objective, Policy
    from paceline.train.parallel import BlockPlaces, Parallel, Places

_PART = 2048  # rows of the head that are cast at a time for the loss in C
SMALLEST, _LARGEST = 256, 8192
_ENTRY_BYTES = 48  # per token, vocabulary entry and term
_SHARE = 0.5  # of free memory


class StepPlan(NamedTuple):
    """Objective of one step.

    Attributes:
        vocabulary: Tokens and logit offsets of `VocabularySample.draw`; None: all tokens.
        rng_of_row: Generator for a row's draws, by its index in the step over all processes.
        phase: Losses are comparable within a phase; a new objective starts a new phase.
        parallel: Blocks that a parallel draft learns; None: the draft proposes token by token.
    """

    terms: Sequence[Objective]
    vocabulary: tuple[Tensor, Tensor] | None = None
    rng_of_row: Callable[[int], torch.Generator] | None = None
    phase: int = 0
    parallel: Parallel | None = None


class DraftLoss(nn.Module):
    """The draft's forward pass and loss as one module, for data parallelism."""

    def __init__(
        self,
        draft: HfModel,
        target: HfModel | None,
        chunk_tokens: int | Literal["auto"],
        *,
        vocab_size: int,
        bfloat16: bool,
        add_up: AddUp,
    ) -> None:
        super().__init__()
        self.hf = draft.hf
        self.draft = draft
        self.target = target
        self.chunk_tokens: int | Literal["auto"] = chunk_tokens
        self.chunk_size = 0  # of the last loss
        self.vocab_size = vocab_size
        self.autocast = bfloat16
        self.add_up = add_up

    def forward(
        self,
        batch: TokenBatch,
        weights_BT: Tensor,
        scored: Callable[[], tuple[Tensor | None, Tensor | None]],
        plan: StepPlan,
        uniforms: Sequence[Tensor | None],
        places: Places | None = None,
    ) -> Tensor:
        """Sum over trained positions, and masks at `places`, of weight times loss.

        `scored` gives the hidden states and normalisers of `TargetScores`, and is called once the
        draft's pass has been launched, so that a GPU does not wait for states in main memory.
        """
        autocast = partial(
            torch.autocast, batch.tokens_BT.device.type, torch.bfloat16, enabled=self.autocast
        )
        trained = batch.mask_BT.nonzero(as_tuple=True)  # waits for the GPU, so before the pass
        blocks = None
        with autocast():
            if places is None or plan.parallel is None:
                hidden_ND = self.draft.hidden(batch)[trained]
            else:
                blocks = among_trained(places, batch.mask_BT, weights_BT, plan.parallel)
                hidden_BTD, masks_BMD = packed_hidden(self.draft, batch, places)
                hidden_ND = torch.cat([hidden_BTD[trained], masks_BMD[places.real]])
        given = Given(*scored(), batch.labels_BT[trained], weights_BT[trained], batch.top, uniforms)
        if blocks is not None:
            given = given.with_masks(blocks)
        target_hidden_ND, normalisers_N, labels_N, weights_N, top_N, uniforms = given
        reads_target = all(term.reads_target for term in plan.terms)
        draft_head = self.draft.head if reads_target else self.draft.plain_head
        target_head = None if self.target is None else self.target.head
        vocab_size, known_N = self.vocab_size, torch.ones_like(labels_N, dtype=torch.bool)
        if plan.vocabulary is not None:
            tokens_S, offsets_S = plan.vocabulary
            draft_head = draft_head.rows(tokens_S).raised(offsets_S)
            if target_head is not None:
                target_head = target_head.rows(tokens_S).raised(offsets_S)
            labels_N, known_N = places_of(labels_N, tokens_S, vocab_size)
            top_N = None if top_N is None else among(top_N, tokens_S, vocab_size)
            vocab_size = len(tokens_S)
        loss = ChunkLoss(
            terms=plan.terms,
            native=native_terms(plan.terms),
            draft_head=draft_head.rows(slice(vocab_size)).detached(),
            target=TargetScores(target_hidden_ND, target_head, vocab_size, normalisers_N),
            labels_N=labels_N,
            weights_N=weights_N,
            top_N=top_N,
        )
        with autocast():
            width = len(loss.draft_head.weight_VD)
            size = chunk_size(self.chunk_tokens, hidden_ND.device, width, len(plan.terms))
            self.chunk_size = size
            if blocks is not None and plan.parallel is not None:
                scores = partial(loss.scores, hidden_ND, known_N, size)
                weights_N = blocks.weighted(weights_N, place_weights(plan.parallel, blocks, scores))
                loss = loss._replace(weights_N=weights_N)
            inputs = hidden_ND, draft_head
            sizes = {"chunk_size": size, "vocab_size": vocab_size}
            if loss.native is not None and can_differentiate(hidden_ND):
                # One buffer for all chunks: allocating one per chunk fragments the heap.
                dtype = torch.bfloat16 if self.autocast else draft_head.weight_VD.dtype
                shape = min(size, len(hidden_ND)), width
                in_c = partial(loss.in_c, hidden_ND.new_empty(shape, dtype=dtype))
                return chunked_loss(*inputs, in_c, weights_N, **sizes, part_size=_PART)
            seen = (
                (loss.target.served_log_probs(rows), loss.draft_head.log_probs(hidden_ND[rows]))
                for rows in chunks(len(hidden_ND), size)
            )
            loss = loss._replace(policies=policies_of(plan.terms, uniforms, seen, self.add_up))
            return chunked_loss(*inputs, loss.by_autograd, weights_N, **sizes)


class Given(NamedTuple):
    """What is compared with the draft at the trained positions; None where it is not needed."""

    target_hidden_ND: Tensor | None
    normalisers_N: Tensor | None
    labels_N: Tensor
    weights_N: Tensor
    top_N: TopScores | None
    uniforms: Sequence[Tensor | None]  # of each term, [N, K]

    def with_masks(self, blocks: BlockPlaces) -> Given:
        """Behind the positions the masks, each with what is given where the text predicts it."""
        sources_K = blocks.sources_K
        order_X = torch.cat([torch.arange(len(self.labels_N)).to(sources_K), sources_K])

        def there(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[order_X.to(values.device)]

        top_N = self.top_N
        return Given(
            there(self.target_hidden_ND),
            there(self.normalisers_N),
            self.labels_N[order_X],
            torch.cat([self.weights_N, blocks.weights_K]),
            None if top_N is None else TopScores(*(values[order_X] for values in top_N)),
            list(map(there, self.uniforms)),
        )


class ChunkLoss(NamedTuple):
    """The losses of a chunk of tokens, [C], and the gradient of their weighted sum, [C, V].

    `in_c` and `by_autograd` compute the same from the same: the draft's hidden states at the
    positions `rows`, [C, D], and the target's scores, the labels and the weights there. The
    gradient is by the projection of the draft's head.
    """

    terms: Sequence[Objective]
    native: Sequence[Term] | None
    draft_head: Head  # of the compared tokens
    target: TargetScores
    labels_N: Tensor  # indices among the compared tokens
    weights_N: Tensor
    top_N: TopScores | None
    policies: Sequence[Policy | None] = ()  # of each term

    @torch.no_grad()
    def scores(
        self, hidden_ND: Tensor, known_N: Tensor, size: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Acceptance, survival and the target's probability of each label, [N] each.

        Labels that are not among the compared tokens (`known_N`) do not survive.
        """
        found: list[Tensor] = []
        for rows in chunks(len(hidden_ND), size):
            target_CV = self.target.served_log_probs(rows)
            assert target_CV is not None, "checked before training"
            labels_C1 = self.labels_N[rows][:, None]
            draft_CV = self.draft_head.log_probs(hidden_ND[rows])
            # logits of sampled tokens stand for others, too, and may exceed the whole mass
            target_CV = target_CV - target_CV.logsumexp(-1, keepdim=True).clamp(min=0)
            p_CV, q_CV = target_CV.exp(), draft_CV.exp()
            acceptance_C, survival_C, _ = score_tokens(p_CV, q_CV, labels_C1[:, 0])
            acceptance_C += (p_CV.sum(-1) - 1) / 2  # p may have less than its whole mass here
            survival_C = survival_C * known_N[rows]
            confidence_C = p_CV.gather(-1, labels_C1)[:, 0] * known_N[rows]
            found.append(torch.stack([acceptance_C, survival_C, confidence_C]))
        acceptance_N, survival_N, confidence_N = torch.cat(found, 1)
        return acceptance_N, survival_N, confidence_N

    def by_autograd(self, hidden_CD: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """Losses and gradient of any objective."""
        with torch.enable_grad():
            losses_C, projection = self._losses(hidden_CD.detach().requires_grad_(), rows)
            total = (losses_C * self.weights_N[rows]).sum()
        if not total.requires_grad:  # a divergence of a user that is the same for all drafts
            return losses_C, hidden_CD.new_zeros(len(hidden_CD), len(self.draft_head.weight_VD))
        (gradient_CV,) = torch.autograd.grad(total, projection)
        return losses_C.detach(), gradient_CV

    def _losses(self, hidden_CD: Tensor, rows: slice) -> tuple[Tensor, GradientEdge]:
        """Differentiable losses, and where the gradient of the projection arrives."""
        projected_CV = self.draft_head.projected(hidden_CD)
        projection = get_gradient_edge(projected_CV)
        draft_log_probs_CV = self.draft_head.logits_of(projected_CV).float().log_softmax(-1)
        del projected_CV  # so that it takes no memory while the terms are computed
        target_log_probs_CV, log_coverage_C = self.target.log_probs(rows)
        compared = Compared(
            target_log_probs_CV,
            draft_log_probs_CV,
            self.labels_N[rows],
            log_coverage_C=log_coverage_C,
            top=None if self.top_N is None else self.top_N.rows(rows),
        )
        policies = [policy and policy.rows(rows) for policy in self.policies]
        return token_losses(self.terms, compared, policies), projection

    def in_c(self, buffer_CV: Tensor, hidden_CD: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """Losses and gradient of an objective with native terms, in a buffer for all chunks."""
        assert self.native is not None, "the caller checks"
        logits_CV = buffer_CV[: len(hidden_CD)]
        for part in chunks(len(self.draft_head.weight_VD), _PART):
            head = self.draft_head.rows(part).to(hidden_CD.dtype)
            logits_CV[:, part] = head.logits(hidden_CD)
        slopes_CV = self.draft_head.slopes(logits_CV)
        losses_C = losses_and_slopes(
            self.native,
            self.target.logits(rows),
            logits_CV,
            self.labels_N[rows],
            self.weights_N[rows],
            self.target.normalisers(rows),
        )
        if slopes_CV is not None:
            logits_CV *= slopes_CV
        return losses_C, logits_CV


class TargetScores(NamedTuple):
    """The target's scores of the compared tokens."""

    hidden_ND: Tensor | None  # None if the objective uses labels only
    head: Head | None  # restricted to the compared tokens
    vocab_size: int | None  # number of valid rows of the head; None: all
    normalisers_N: Tensor | None  # log-sum-exp over all tokens; None if all are compared

    @torch.no_grad()
    def logits(self, rows: slice) -> Tensor | None:
        """Logits at these positions, [C, V]."""
        if self.hidden_ND is None:
            return None
        assert self.head is not None, "hidden states come from a target"
        return self.head.logits(self.hidden_ND[rows], self.vocab_size)

    def normalisers(self, rows: slice) -> Tensor | None:
        return None if self.normalisers_N is None else self.normalisers_N[rows]

    def log_probs(self, rows: slice) -> tuple[Tensor | None, Tensor | None]:
        """Log-probabilities over the compared tokens, [C, V], and their log total mass, [C]."""
        logits_CV = self.logits(rows)
        if logits_CV is None:
            return None, None
        logits_CV = logits_CV.float()
        normalisers_C = self.normalisers(rows)
        log_coverage_C = None if normalisers_C is None else logits_CV.logsumexp(-1) - normalisers_C
        return logits_CV.log_softmax(-1), log_coverage_C

    def served_log_probs(self, rows: slice) -> Tensor | None:
        """Log-probabilities normalised over the whole vocabulary, [C, V]."""
        log_probs_CV, log_coverage_C = self.log_probs(rows)
        if log_probs_CV is None or log_coverage_C is None:
            return log_probs_CV
        return log_probs_CV + log_coverage_C[:, None]


class Normalisers:
    """The target's log-sum-exp over its whole vocabulary, cached for cached hidden states."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._cache = WeakTensorKeyDictionary()

    @torch.no_grad()
    def of(
        self, rows: Sequence[TokenRow], lengths: Sequence[int], hidden_ND: Tensor, head: Head
    ) -> Tensor:
        """Log-sum-exp at the hidden states of these rows, `lengths` per row. -> [N], float32.

        Cost: a product with the target's whole head for states that are not cached.
        """
        found: list[Tensor] = []
        for row, states_TD in zip(rows, hidden_ND.split(list(lengths)), strict=True):
            key = row.target_hidden_TD
            values_T = None if key is None else self._cache.get(key)
            if values_T is None:
                values_T = self._compute(states_TD, head)
                if key is not None:
                    self._cache[key] = values_T
            found.append(values_T)
        return torch.cat(found)

    def _compute(self, hidden_TD: Tensor, head: Head) -> Tensor:
        parts = [
            head.logits(hidden_TD[part], self._vocab_size).float().logsumexp(-1)
            for part in chunks(len(hidden_TD), SMALLEST)
        ]
        return torch.cat(parts)


class LossVocabulary(StrictModel):
    """Number of most frequent tokens in every step, and of other tokens drawn per step."""

    frequent: int = Field(default=6144, ge=1)
    drawn: int = Field(default=1024, ge=1)


class VocabularySample:
    """Draws the tokens of each step: the most frequent of the training text, and some others.

    The logits of the others are raised by log(others / drawn), so that the softmax denominator is
    unbiased. Both models use the same tokens, so a draft equal to its target has a loss of 0.
    """

    def __init__(self, config: LossVocabulary, ranking: Tensor) -> None:
        """`ranking` has all tokens to draw from, most frequent first."""
        self.frequent_F = ranking[: config.frequent]
        self.others_O = ranking[config.frequent :]
        self.num_drawn = min(config.drawn, len(self.others_O))

    def draw(self, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """Token ids and offsets of their logits, [S] each."""
        picks = torch.randperm(len(self.others_O), generator=rng)[: self.num_drawn]
        tokens_S = torch.cat([self.frequent_F, self.others_O[picks]])
        offsets_S = torch.zeros(len(tokens_S))
        if self.num_drawn:
            offsets_S[len(self.frequent_F) :] = math.log(len(self.others_O) / self.num_drawn)
        return tokens_S, offsets_S


def places_of(labels_N: Tensor, tokens_S: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Indices of labels among these tokens, and whether they are among them; else 0. [N] each."""
    places_V = torch.full((vocab_size,), -1, device=labels_N.device)
    places_V[tokens_S.to(labels_N.device)] = torch.arange(len(tokens_S), device=labels_N.device)
    places_N = places_V[labels_N]
    return places_N.clamp(min=0), places_N >= 0


def chunk_size(
    configured: int | Literal["auto"], device: torch.device, num_entries: int, num_terms: int
) -> int:
    """Number of tokens per chunk, for a loss with this many terms over these vocabulary entries.

    Small chunks leave a GPU waiting for kernels to start: with a target of 1B parameters, 256
    tokens gave 37,100 tokens/s where 8,192 gave 60,900, with 4.4 and 22 GiB (H200). On two cores of
    an AMD EPYC (avx512_bf16), 1,024 and 2,048 gave medians of 1.05 to 1.10 times the speed of 256
    over ten rounds in turns, each between 0.86 and 1.5, so CPUs keep 256.

    A term of the objective needs at most 12 float32 numbers for each token and entry of the
    vocabulary: logits and log-probabilities of both models, and what autograd keeps and makes of
    them (forward KL 22 bytes, JSD 40, a rule 48). The tests count them. On a GPU, `auto` is as many
    tokens as half of the free memory holds, from 256 to 8,192.
    """
    if configured != "auto":
        return configured
    if device.type != "cuda":
        return SMALLEST
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    tokens = int(_SHARE * free / (_ENTRY_BYTES * num_entries * num_terms))
    return max(SMALLEST, min(_LARGEST, tokens // SMALLEST * SMALLEST))
