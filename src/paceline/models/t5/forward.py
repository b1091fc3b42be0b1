"""The forward pass of T5-like models for decoding, with fused projections for low overhead.

With one to eight tokens per pass, the modules of transformers spend most of the time between
operators. This pass does the same arithmetic with packed weights: one product for query, key and
value, one for the two gated matrices, and one for the keys and values of all layers over the
source.

Shape suffixes: B batch, N new tokens, D hidden.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from paceline.core.sampling import spread
from paceline.models.hf.draft_vocabulary import head_of
from paceline.models.hf.logit_map import logit_map
from paceline.models.hf.seq2seq import Seq2SeqPass
from paceline.models.llama.forward import RmsNorm
from paceline.models.t5.layers import Decoder, Encoder, Make, padding_mask, source_mask

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from transformers import PreTrainedModel

    from paceline.models.contract import Batch
    from paceline.models.hf.seq2seq_cache import Seq2SeqCache
    from paceline.models.llama.forward import MakeLinear


class T5Pass(Seq2SeqPass):
    """Encoder and decoder of a T5-like model; computes in float32 between products."""

    def __init__(
        self,
        hf: PreTrainedModel,
        make_linear: MakeLinear,
        draft_vocabulary: Tensor | None = None,
    ) -> None:
        """Build the pass; `make_linear` makes one product of several linear layers."""
        super().__init__(hf, draft_vocabulary)
        make = Make(make_linear, RmsNorm)
        self._encoder = Encoder(hf, make)
        self._decoder = Decoder(hf, make)
        self._scaled = logit_map(hf).scaled
        self._head = make_linear([head_of(hf, draft_vocabulary)])
        self._vocab_size = len(head_of(hf).weight)
        self._listeners: list[Callable[[Tensor], None]] = []

    def listen(self, listener: Callable[[Tensor], None]) -> Callable[[], None]:
        self._listeners.append(listener)
        return functools.partial(self._listeners.remove, listener)

    def encode(self, source: Batch) -> Tensor:
        return self._encoder(source)

    def __call__(
        self, tokens_BN: Tensor, cache: Seq2SeqCache, ends_B: Tensor | None, keep: int
    ) -> Tensor:
        if not len(cache.cross_attention_cache):
            self._read_source(cache)
        x_BND = self._decoder.embed(tokens_BN).float()
        count = tokens_BN.shape[1]
        width = cache.get_seq_length() + count
        padding = padding_mask(ends_B, width, x_BND.device)
        of_source = source_mask(cache.attention_BS)
        own: Any = cache.self_attention_cache
        mask: Tensor | None = None
        for index, layer in enumerate(self._decoder.layers):
            positions = self._decoder.positions[index]
            if positions is not None:  # the others use the mask of the layer before
                mask = positions.causal(count, width)[None]
                mask = mask if padding is None else mask + padding
            source: Any = cache.cross_attention_cache.layers[index]
            memory = source.keys, source.values
            x_BND = layer(x_BND, own.layer(index).append, memory, mask, of_source)
        x_BND = self._scaled(self._decoder.norm(x_BND))
        for listener in self._listeners:
            listener(x_BND)
        logits = self._head(x_BND[:, -keep:])
        if self.draft_vocabulary is None:
            return logits
        return spread(logits, self.draft_vocabulary, self._vocab_size)

    def _read_source(self, cache: Seq2SeqCache) -> None:
        """Compute keys and values of the source for all layers."""
        for index, heads in enumerate(self._decoder.read_source(cache.states_BSD.float())):
            # copied into rows, because every pass reads them
            keys, values = (x.contiguous() for x in heads)
            cache.cross_attention_cache.update(keys, values, index)
