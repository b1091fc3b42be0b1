"""Sessions of encoder-decoders: the encoder processes each source once.

Rows of the decoder are those of `CausalSession`. They begin with the model's decoder prompt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from paceline.errors import ContextLengthError
from paceline.models.contract import Texts, pad
from paceline.models.hf.base import evaluating
from paceline.models.hf.cache import RoomyCache
from paceline.models.hf.seq2seq_cache import Seq2SeqCache
from paceline.models.hf.session import CausalSession

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from paceline.models.hf.base import HfModel


class Seq2SeqSession(CausalSession):
    """A session whose prompts are encoder inputs; `lengths` count decoder tokens."""

    def __init__(self, model: HfModel) -> None:
        assert model.decoder_prompt is not None, "an encoder-decoder has a decoder prompt"
        super().__init__(model)
        decoder: Any = model.decoder
        self._encode: Callable[[Texts], Tensor] = decoder.encode
        self._decoder_prompt = model.decoder_prompt
        self._memory: Seq2SeqCache | None = None

    @property
    def _pass_cache(self) -> Seq2SeqCache:
        assert self._memory is not None, "prefill encodes the sources"
        return self._memory

    def _lengths_after(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        return [len(self._decoder_prompt)] * len(prompts)

    def _check_prompts(self, prompts: Sequence[Sequence[int]]) -> None:
        super()._check_prompts(prompts)
        longest, limit = max(len(prompt) for prompt in prompts), self.model.max_source_length
        if limit is not None and longest > limit:
            raise ContextLengthError(
                f"got a source of {longest} tokens, but the encoder holds {limit}; shorten it, or "
                "set max_prompt_tokens where there is one"
            )

    def _prefill(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        source = pad(tokens).to(self._device)
        with torch.inference_mode(), evaluating(self.model.hf):
            states_BSD = self._encode(source)
        self.cache = RoomyCache()
        self._memory = Seq2SeqCache(self.cache, states_BSD, source.attention_BT)
        return super()._prefill([self._decoder_prompt] * len(tokens))

    def _refill(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> Tensor:
        fresh = Seq2SeqSession(self.model)
        logits_RV = fresh._prefill(prompts)
        self.cache.adopt(rows, fresh.cache, len(self.lengths))
        self._pass_cache.adopt(rows, fresh._pass_cache)
        return logits_RV

    def _keep_rows(self, rows: Sequence[int]) -> None:
        super()._keep_rows(rows)
        self._pass_cache.keep(rows)
