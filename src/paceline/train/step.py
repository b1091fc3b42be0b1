"""One optimizer step: target scores, loss, gradient accumulation and update; what it trains."""

# B rows, T positions, N trained positions, D hidden
from __future__ import annotations

import contextlib
import dataclasses
import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from paceline.core.divergences import count_units, token_weights
from paceline.data.collate import TokenBatch, collate
from paceline.errors import UsageError
from paceline.models.drafts.layers import layer_lists
from paceline.train.loss import DraftLoss, Normalisers, places_of
from paceline.train.objectives import TVDPlusPlus, reads_target, reads_top, uniforms_of_terms
from paceline.train.optim import build_optimizer
from paceline.train.parallel import Places, draw_places

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from accelerate import Accelerator

    from paceline.data.collate import TokenRow
    from paceline.models.hf.base import HfModel
    from paceline.train.config import TrainSettings
    from paceline.train.loss import StepPlan
    from paceline.train.objectives import Objective

_CONSTANT = "SinusoidalPositionalEmbedding"  # modules whose weights are not trained


@dataclass(frozen=True, slots=True)
class StepFigures:
    """Figures of one step, over all processes; the loss is from before the update."""

    loss: float
    gradient_norm: float
    num_tokens: int
    chunk_tokens: int


class Stepper:
    """Runs optimizer steps on the parameters of `model` that require gradients.

    Without a target, the objective must use labels only. The model stays in evaluation mode, which
    disables dropout, as in Table B.1, and changes nothing else in decoder-only models.
    """

    def __init__(
        self,
        model: HfModel,
        target: HfModel | None,
        config: TrainSettings,
        accelerator: Accelerator,
        *,
        vocab_size: int,
        bfloat16: bool,
    ) -> None:
        self.model = model
        self.target = target
        self.config = config
        self.accelerator = accelerator
        self.vocab_size = vocab_size
        self._normalisers = Normalisers(vocab_size)
        model.hf.eval()
        # The padding token may be the end-of-text token, whose embedding must be trained. Masked
        # padding has no gradient anyway.
        for module in model.hf.modules():
            if isinstance(module, nn.Embedding):
                module.padding_idx = None
        if target is not None:
            target.hf.eval().requires_grad_(False)
        add_up = partial(_sum, accelerator)
        sizes = {"vocab_size": vocab_size, "bfloat16": bfloat16}
        self._draft_loss = DraftLoss(model, target, config.chunk_tokens, **sizes, add_up=add_up)
        self.loss: nn.Module = accelerator.prepare_model(self._draft_loss)
        self.parameters = [p for p in model.hf.parameters() if p.requires_grad]
        self.optimizer = build_optimizer(config.optimizer, self.parameters)

    def is_finite(self) -> bool:
        """True if all weights are finite, on every process."""
        finite = all(bool(weight.isfinite().all()) for weight in self.parameters)
        (num_bad,) = self._add_up(int(not finite))
        return num_bad == 0

    def step(
        self, rows: Sequence[TokenRow], learning_rate: float | Callable[[], float], plan: StepPlan
    ) -> StepFigures:
        """Accumulate gradients over parts of the rows, then update unless a gradient is not finite.

        A callable `learning_rate` is called on all processes once the gradient is computed. Losses
        are normalised by the whole step, so that its split into parts does not change the result.
        """
        rows = _ordered(rows, plan.terms)
        size = len(rows) // self.config.gradient_accumulation_steps
        parts = [rows[start : start + size] for start in range(0, len(rows), size)]
        batches = [self._batch(part, plan) for part in parts]
        weights, num_tokens = self._weights(batches)
        total = torch.zeros((), device=self.accelerator.device)
        for index, batch in enumerate(batches):
            last = index == len(batches) - 1
            with contextlib.nullcontext() if last else self.accelerator.no_sync(self.loss):
                scored = self._scored(parts[index], batch, plan)
                first = index * len(parts[index])
                uniforms = self._uniforms(first, batch, plan)
                places = self._places(first, batch, plan)
                loss = self.loss(batch, weights[index], scored, plan, uniforms, places)
                # data parallelism averages gradients over processes, but a sum is needed
                (loss * self.accelerator.num_processes).backward()
            total += loss.detach()
        (loss,) = self._add_up(total)
        return StepFigures(
            loss, self._update(learning_rate), num_tokens, self._draft_loss.chunk_size
        )

    def _weights(self, batches: Sequence[TokenBatch]) -> tuple[list[Tensor], int]:
        """Weights of each part in the mean of the whole step, and the number of its tokens."""
        mean, masks = self.config.mean, [batch.mask_BT for batch in batches]
        units, tokens = self._add_up(
            sum(count_units(mask_BT, mean) for mask_BT in masks),
            sum(mask_BT.sum() for mask_BT in masks),
        )
        # a step without positions, as of a draft that proposes other tokens: 0
        total = max(units, 1.0)
        return [token_weights(mask_BT, mean=mean, total=total) for mask_BT in masks], int(tokens)

    def _batch(self, rows: Sequence[TokenRow], plan: StepPlan) -> TokenBatch:
        """Collate the rows; mask positions without scores or labels that the terms need."""
        batch = collate(rows)
        batch = (batch.scored() if reads_top(plan.terms) else batch).to(self.accelerator.device)
        if plan.vocabulary is None or reads_target(plan.terms) or reads_top(plan.terms):
            return batch
        _, known_N = places_of(batch.labels_BT.flatten(), plan.vocabulary[0], self.vocab_size)
        known_BT = known_N.view_as(batch.labels_BT)
        return dataclasses.replace(batch, mask_BT=batch.mask_BT & known_BT)

    def _uniforms(self, first: int, batch: TokenBatch, plan: StepPlan) -> list[Tensor | None]:
        """Uniforms that depend on a row's index in the step, not on its process."""
        if not any(term.num_drawn for term in plan.terms):
            return [None] * len(plan.terms)
        assert plan.rng_of_row is not None, "draws need generators"
        rank, world_size = self.accelerator.process_index, self.accelerator.num_processes
        lengths = batch.mask_BT.sum(-1).tolist()
        rows = [
            (plan.rng_of_row(number * world_size + rank), length)
            for number, length in enumerate(lengths, first)
        ]
        return uniforms_of_terms(plan.terms, rows)

    def _places(self, first: int, batch: TokenBatch, plan: StepPlan) -> Places | None:
        """Masks of a parallel draft, which depend on a row's index in the step, as `_uniforms`."""
        if plan.parallel is None:
            return None
        assert plan.rng_of_row is not None, "draws need generators"
        rank, world_size = self.accelerator.process_index, self.accelerator.num_processes
        rng_of_row = plan.rng_of_row

        def rng_of(number: int) -> torch.Generator:
            return rng_of_row(number * world_size + rank)

        return draw_places(batch.mask_BT, plan.parallel, rng_of, first).to(batch.mask_BT.device)

    def _scored(
        self, rows: Sequence[TokenRow], batch: TokenBatch, plan: StepPlan
    ) -> Callable[[], tuple[Tensor | None, Tensor | None]]:
        """The target's scores; recorded states are fetched when they are asked for."""

        def scored() -> tuple[Tensor | None, Tensor | None]:
            hidden_ND = self.score(rows, batch, plan.terms)
            needed = any(term.counts_acceptance for term in plan.terms)
            needed |= plan.parallel is not None and plan.parallel.weighting == "efficiency"
            if hidden_ND is None or self.model.draft_vocabulary is None or not needed:
                return hidden_ND, None
            assert self.target is not None, "hidden states come from a target"
            lengths = batch.mask_BT.sum(-1).tolist()
            return hidden_ND, self._normalisers.of(rows, lengths, hidden_ND, self.target.head)

        if all(row.target_hidden_TD is not None for row in rows):
            return scored
        known = scored()  # before the draft's activations take the memory that the pass needs
        return lambda: known

    @torch.no_grad()
    def score(
        self, rows: Sequence[TokenRow], batch: TokenBatch, terms: Sequence[Objective]
    ) -> Tensor | None:
        """The target's hidden states at trained positions, [N, D]; None if only labels are used."""
        if not reads_target(terms):
            return None
        device = batch.tokens_BT.device
        recorded = [row.target_hidden_TD for row in rows if row.target_hidden_TD is not None]
        if not recorded:
            return self._target_hidden(batch)
        if len(recorded) == len(rows):
            whole_ND = torch.cat(recorded)
            if device.type == "cuda" and not whole_ND.is_cuda:
                whole_ND = whole_ND.pin_memory()  # else the copy waits for what the GPU is doing
            return whole_ND.to(device, non_blocking=True)
        part = collate([row for row in rows if row.target_hidden_TD is None]).to(device)
        computed = iter(self._target_hidden(part).split(part.mask_BT.sum(-1).tolist()))
        states = [
            next(computed) if row.target_hidden_TD is None else row.target_hidden_TD for row in rows
        ]
        return torch.cat([state.to(device) for state in states])

    def _target_hidden(self, batch: TokenBatch) -> Tensor:
        assert self.target is not None, "a divergence needs a target"
        return self.target.hidden(batch)[batch.mask_BT]

    def _update(self, learning_rate: float | Callable[[], float]) -> float:
        """Clip the gradient and update the weights. -> the gradient's norm before clipping."""
        limit = self.config.max_gradient_norm or torch.inf
        norm = float(nn.utils.clip_grad_norm_(self.parameters, limit))
        if callable(learning_rate):
            learning_rate = learning_rate()
        if math.isfinite(norm):
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def _add_up(self, *values: Tensor | int) -> list[float]:
        device = self.accelerator.device
        parts = [torch.as_tensor(value, dtype=torch.float32, device=device) for value in values]
        return _sum(self.accelerator, torch.stack(parts)).tolist()


def _ordered(rows: Sequence[TokenRow], terms: Sequence[Objective]) -> Sequence[TokenRow]:
    """Rows of an encoder-decoder by length, so that each part has little padding.

    TVD++ normalises its rewards within a part, over all processes: its parts must not depend on
    how rows are distributed to processes.
    """
    if rows[0].source is None or any(isinstance(term, TVDPlusPlus) for term in terms):
        return rows
    return sorted(rows, key=lambda row: len(row.tokens) + len(row.source or ()))


def _sum(accelerator: Accelerator, values: Tensor) -> Tensor:
    summed = accelerator.reduce(values, "sum")
    assert isinstance(summed, Tensor)
    return summed


def train_all(model: HfModel) -> None:
    """Train all weights but constants, such as the positions of Marian, and unused embeddings.

    An encoder-decoder without shared embeddings has a shared table that no pass reads. Processes
    that train together wait for the gradient of every weight that is trained.
    """
    model.hf.requires_grad_(True)
    for module in model.hf.modules():
        if type(module).__name__.endswith(_CONSTANT):
            module.requires_grad_(False)
    if model.decoder_prompt is None:
        return
    tables = [m.weight for m in model.hf.modules() if isinstance(m, nn.Embedding)]
    tables = [weight for weight in tables if weight.requires_grad]
    hidden = model.hidden(model.trial_batch([1]))
    gradients = torch.autograd.grad(hidden.sum(), tables, allow_unused=True)
    for weight, gradient in zip(tables, gradients, strict=True):
        if gradient is None and weight is not model.head_weight:
            weight.requires_grad_(False)


def freeze_embeddings(draft: HfModel) -> None:
    """Freeze the input embeddings and the output head."""
    for module in (draft.hf.get_input_embeddings(), draft.hf.get_output_embeddings()):
        if module is not None:
            module.requires_grad_(False)


def freeze_layers(draft: HfModel, count: int) -> None:
    """Freeze the first `count` layers, of the decoder if there is an encoder."""
    if count == 0:
        return
    _, layers = layer_lists(draft.hf)["decoder"]
    if count >= len(layers):
        raise UsageError(
            f"freeze_layers is {count}, but the draft has {len(layers)} layers; "
            "leave at least one to train"
        )
    for layer in layers[:count]:
        layer.requires_grad_(False)
