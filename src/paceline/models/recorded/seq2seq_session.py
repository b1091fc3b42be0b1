"""Sessions of encoder-decoders that replay CUDA graphs of the decoder.

The encoder and the decoder prompt are read by transformers' modules, once per source.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paceline.models.hf.seq2seq import Seq2SeqSession
from paceline.models.recorded.session import SPARE, GraphSession

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from paceline.models.hf.base import HfModel
    from paceline.models.recorded.session import GraphCaches


class GraphSeq2SeqSession(GraphSession):
    """A `GraphSession` whose prompts are encoder inputs; `lengths` count decoder tokens."""

    def __init__(self, caches: GraphCaches, model: HfModel) -> None:
        super().__init__(caches, model.vocab_size, model.max_length)
        self._model = model

    def _lengths_after(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        assert self._model.decoder_prompt is not None, "an encoder-decoder has a decoder prompt"
        return [len(self._model.decoder_prompt)] * len(prompts)

    @torch.inference_mode()
    def _prefill(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        reading = Seq2SeqSession(self._model)
        logits_BV = reading.prefill(tokens)
        encoded, width = reading.pass_cache, max(reading.lengths)
        attention_BS = encoded.attention
        cache = self._hold(len(tokens), width + SPARE, attention_BS.shape[1])
        assert cache.sources is not None, "the cache of an encoder-decoder has sources"
        cache.sources.fill(encoded.cross_attention_cache.layers, attention_BS)
        for index, mine in enumerate(cache.layers):
            keys, values = (part[:, :, :width] for part in reading.cache.layer(index).buffers)
            mine.write(slice(len(tokens)), keys, values)
        return logits_BV

    def _fresh(self) -> GraphSeq2SeqSession:
        return GraphSeq2SeqSession(self._caches, self._model)
