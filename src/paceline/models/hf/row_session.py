"""Sessions of models that cannot read a batch of rows of different lengths, or cannot roll back.

Each row has a session of its own, so nothing depends on the other rows. A model whose cache is not
keys and values of each token (recurrent, convolutional or compressed layers) keeps the cache that
transformers makes for `generate`; it then cannot roll back.

Shape suffixes: B batch, N new tokens, K kept logits, R rows, V vocabulary.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from transformers.generation.configuration_utils import GenerationMode

from paceline.core.sampling import limited
from paceline.models.compatibility import check_rollback
from paceline.models.contract import ModelSession
from paceline.models.hf.base import evaluating
from paceline.models.hf.cache import takes_positions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from paceline.models.hf.base import HfModel


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
    """One text with the cache of `generate`, which cannot be rolled back.

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
        self._kwargs: dict[str, Any] = {"use_cache": True}

    def _prefill(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        (row,) = tokens
        return self._read(torch.tensor([row]), keep=1)[:, 0]

    def _extend(self, tokens_BN: Tensor) -> Tensor:
        parts = tokens_BN.split(1, -1) if self._one_by_one else (tokens_BN,)
        return torch.cat([self._read(x, keep=x.shape[1]) for x in parts], 1)

    @torch.inference_mode()
    def _read(self, new_1N: Tensor, keep: int) -> Tensor:
        """Logits after the last `keep` new tokens, [1, keep, V]."""
        count, first = new_1N.shape[1], not self._tokens_1T.shape[1]
        self._tokens_1T = torch.cat([self._tokens_1T, new_1N.to(self._tokens_1T.device)], 1)
        if first:
            self._make_cache()
        self._kwargs["attention_mask"] = torch.ones_like(self._tokens_1T)
        if self._takes_positions:  # Bamba would count from the start of each pass
            width, device = self._tokens_1T.shape[1], self._tokens_1T.device
            self._kwargs["position_ids"] = torch.arange(width, device=device)[None]
        with evaluating(self._model.hf):
            inputs = self._hf.prepare_inputs_for_generation(
                self._tokens_1T,
                next_sequence_length=None if first else count,
                is_first_iteration=first,
                **self._kwargs,
            )
            output = self._hf(**inputs | {"logits_to_keep": keep}, return_dict=True)
        self._kwargs = self._hf._update_model_kwargs_for_generation(output, self._kwargs)
        logits_1KV = output.logits[:, -keep:].float()
        if logits_1KV.shape[1] < keep:
            raise ValueError(f"got logits of {logits_1KV.shape[1]} of {keep} tokens")
        if self._model.banned_K is not None:
            logits_1KV[..., self._model.banned_K] = -torch.inf
        listed = self._model.draft_vocabulary
        return logits_1KV if listed is None else limited(logits_1KV, listed)

    def _make_cache(self) -> None:
        """Make the cache that `generate` makes, under the name that the model expects."""
        settings = copy.deepcopy(self._hf.generation_config)
        settings.cache_implementation, settings.use_cache = None, True
        mode = GenerationMode.GREEDY_SEARCH
        self._hf._prepare_cache_for_generation(settings, self._kwargs, mode, 1, self.max_length)

    def _rollback(self, counts: Sequence[int]) -> None:
        check_rollback(self._model)

    def _refill(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> Tensor:
        raise AssertionError("a row of its own is not refilled")

    def _keep_rows(self, rows: Sequence[int]) -> None:
        raise AssertionError("a row of its own is the only one")
