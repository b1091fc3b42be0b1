"""Sessions of models that cannot read a batch of rows of different lengths, or cut their cache.

Each row has a session of its own, so nothing depends on the other rows. A model whose cache is not
keys and values of each token (recurrent, convolutional or compressed layers) keeps the cache that
transformers makes for `generate`, and copies of it, from which it goes on after a rollback.

Shape suffixes: B batch, N new tokens, K kept logits, R rows, V vocabulary.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.generation.configuration_utils import GenerationMode

from paceline.core.sampling import limited
from paceline.models.contract import ModelSession
from paceline.models.hf.base import evaluating
from paceline.models.hf.cache import takes_positions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from paceline.models.hf.base import HfModel

MOST_READ_AGAIN = {"cpu": 4, "cuda": 16}
"""Kept tokens that a pass reads beside new ones after rollbacks; more have a pass of their own.

About sqrt(2 k / s): k tokens are kept of a block, each token adds s of a pass to a pass (0.2 on two
cores, 0.01 to 0.02 where weights take the time).
"""
MOST_SNAPSHOTS = 8
"""Of one row. A draft makes one for each token that it drafts."""
_REPLACING = (DynamicLayer.update, DynamicSlidingWindowLayer.update)


class RowSession(ModelSession):
    """One session per row; passes of rows run one after the other."""

    def __init__(self, model: HfModel, start: Callable[[HfModel], ModelSession]) -> None:
        super().__init__(model.vocab_size, model.max_length)
        self._model = model
        self._start = start
        self._unread = start(model)  # knows lengths and limits of prompts
        self._rows: list[ModelSession] = []

    def _prefill(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        self._rows = [self._start(self._model) for _ in tokens]
        return torch.cat([row.prefill([x]) for row, x in zip(self._rows, tokens, strict=True)])

    def _lengths_after(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        return self._unread._lengths_after(prompts)

    def _check_prompts(self, prompts: Sequence[Sequence[int]]) -> None:
        self._unread._check_prompts(prompts)

    def _extend(self, tokens_BN: Tensor) -> Tensor:
        if not self._rows:
            self._rows = [self._start(self._model) for _ in tokens_BN]
        pairs = zip(self._rows, tokens_BN.split(1), strict=True)
        return torch.cat([row.extend(tokens_1N) for row, tokens_1N in pairs])

    def rollback(self, counts: Sequence[int]) -> None:
        super().rollback(counts)
        for row in self._rows:
            row.rollback([0])  # what it has read stays

    def _rollback(self, counts: Sequence[int]) -> None:
        for row, count in zip(self._rows, counts, strict=True):
            row.rollback([count])

    def _refill(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> Tensor:
        logits: list[Tensor] = []
        for index, prompt in zip(rows, prompts, strict=True):
            self._rows[index] = self._start(self._model)
            logits.append(self._rows[index].prefill([prompt]))
        return torch.cat(logits)

    def _keep_rows(self, rows: Sequence[int]) -> None:
        self._rows = [self._rows[index] for index in rows]


class RecurrentRow(ModelSession):
    """One text with the cache of `generate`, which can only be rolled back to copies of itself.

    A copy, a snapshot, is made before a pass. After a rollback, decoding goes on from the last one
    that has kept tokens alone, and the next pass reads the kept tokens behind it before the new
    ones. Without any, the whole text is read again. A call of `rollback`, also of no token, says
    that the kept tokens stay, so snapshots but the last one before them are dropped.

    `one_by_one`: New tokens are read one by one, as `generate` does.
    """

    def __init__(self, model: HfModel, *, one_by_one: bool = False) -> None:
        super().__init__(model.vocab_size, model.max_length)
        self._model = model
        self._one_by_one = one_by_one
        decoder: Any = model.decoder
        self._hf: Any = decoder.hf
        self._takes_positions = takes_positions(self._hf)
        self._tokens_1T = torch.zeros(1, 0, dtype=torch.int64, device=model.device)
        self._state = _State(0, {"use_cache": True})
        self._snapshots: list[_State] = []
        self._most_snapshots = 1  # behind the prompt; more once tokens have been taken back

    def _prefill(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        self._add(torch.tensor(tokens))
        return self._read(self._tokens_1T.shape[1], keep=1)[:, 0]

    @torch.inference_mode()
    def _extend(self, tokens_BN: Tensor) -> Tensor:
        wanted = tokens_BN.shape[1]
        unread = self._tokens_1T.shape[1] - self._state.length
        self._add(tokens_BN)
        first = not self._state.length
        many = unread > MOST_READ_AGAIN.get(self._tokens_1T.device.type, 16)
        alone = unread if first or (many and not self._one_by_one) else 0
        rest = unread - alone + wanted
        counts = [alone] * (alone > 0) + ([1] * rest if self._one_by_one else [rest])
        parts = [self._read(count, keep=min(count, wanted)) for count in counts]
        return torch.cat(parts, 1)[:, -wanted:]

    def _add(self, tokens_1N: Tensor) -> None:
        self._tokens_1T = torch.cat([self._tokens_1T, tokens_1N.to(self._tokens_1T.device)], 1)

    @torch.inference_mode()
    def _read(self, count: int, keep: int) -> Tensor:
        """Read the next tokens of the text; logits after the last `keep` of them, [1, keep, V]."""
        start, kwargs = self._state
        if start and len(self._snapshots) < self._most_snapshots:
            self._snapshots.append(_State(start, _copied(kwargs)))
        tokens_1T = self._tokens_1T[:, : start + count]
        if not start:
            self._make_cache(kwargs)
        kwargs["attention_mask"] = torch.ones_like(tokens_1T)
        if self._takes_positions:  # Bamba would count from the start of each pass
            positions = torch.arange(tokens_1T.shape[1], device=tokens_1T.device)
            kwargs["position_ids"] = positions[None]
        with evaluating(self._model.hf):
            inputs = self._hf.prepare_inputs_for_generation(
                tokens_1T,
                next_sequence_length=count if start else None,
                is_first_iteration=not start,
                **kwargs,
            )
            output = self._hf(**inputs | {"logits_to_keep": keep}, return_dict=True)
        kwargs = self._hf._update_model_kwargs_for_generation(output, kwargs)
        self._state = _State(start + count, kwargs)
        logits_1KV = output.logits[:, -keep:].float()
        if logits_1KV.shape[1] < keep:
            raise ValueError(f"got logits of {logits_1KV.shape[1]} of {keep} tokens")
        if self._model.banned_K is not None:
            logits_1KV[..., self._model.banned_K] = -torch.inf
        listed = self._model.draft_vocabulary
        return logits_1KV if listed is None else limited(logits_1KV, listed)

    def _make_cache(self, kwargs: dict[str, Any]) -> None:
        """Make the cache that `generate` makes, under the name that the model expects."""
        settings = copy.deepcopy(self._hf.generation_config)
        settings.cache_implementation, settings.use_cache = None, True
        mode = GenerationMode.GREEDY_SEARCH
        self._hf._prepare_cache_for_generation(settings, kwargs, mode, 1, self.max_length)

    def rollback(self, counts: Sequence[int]) -> None:
        super().rollback(counts)
        self._most_snapshots = MOST_SNAPSHOTS
        before = [state for state in self._snapshots if state.length < self._state.length]
        self._snapshots = before[-1:]  # the next call may take back a token more

    def _rollback(self, counts: Sequence[int]) -> None:
        (count,) = counts
        kept = self._tokens_1T.shape[1] - count
        self._tokens_1T = self._tokens_1T[:, :kept]
        begun = _State(0, {"use_cache": True})
        states = [begun, *self._snapshots, self._state]
        self._state = next(state for state in reversed(states) if state.length <= kept)

    def _refill(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> Tensor:
        raise AssertionError("a row of its own is not refilled")

    def _keep_rows(self, rows: Sequence[int]) -> None:
        raise AssertionError("a row of its own is the only one")


class _State(NamedTuple):
    """A number of tokens, and arguments of the next pass: the cache that has read them, others."""

    length: int
    kwargs: dict[str, Any]


def _copied(kwargs: dict[str, Any]) -> dict[str, Any]:
    """A copy. Keys and values that each pass replaces, and does not change in place, are shared."""
    layers = [layer for value in kwargs.values() for layer in getattr(value, "layers", ())]
    shared: dict[int, Tensor] = {}
    for layer in layers:
        if getattr(type(layer), "update", None) in _REPLACING:
            shared |= {id(own): own for own in (layer.keys, layer.values) if own is not None}
    return copy.deepcopy(kwargs, shared)
