"""Encoder-decoder transformers models: T5, mT5, UMT5, BART, Marian and similar ones.

Prompts are encoder inputs. The decoder's text begins with `decoder_prompt`, which is not part of a
generation. Rows of the decoder are right-aligned (see causal.py). Sources are padded on the right;
the encoder reads each once, and the decoder computes their keys and values in its first pass.

Shape suffixes: B batch, N new tokens, T text, S source, D hidden, V vocabulary.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from paceline.errors import ContextLengthError
from paceline.models.contract import Texts, pad
from paceline.models.hf.architectures import body_of
from paceline.models.hf.base import HfModel, evaluating
from paceline.models.hf.cache import RoomyCache
from paceline.models.hf.causal import CausalSession, HfDecoder, for_head
from paceline.models.hf.row_session import RowSession

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transformers import PreTrainedModel

    from paceline.core.fused import Head
    from paceline.models.contract import Batch
    from paceline.models.hf.base import Sessions, StartSession


class Seq2SeqCache(EncoderDecoderCache):
    """The keys and values of the decoder's own tokens, and of the encoded sources.

    Attributes:
        states_BSD: Output of the encoder.
        attention_BS: 1 = token, 0 = padding; None if no source is padded.
    """

    def __init__(
        self, own: RoomyCache, states_BSD: Tensor, attention_BS: Tensor | None = None
    ) -> None:
        super().__init__(own, DynamicCache())
        self.states_BSD = states_BSD
        self.attention_BS = attention_BS

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only the sources of these rows, in this order."""
        index = torch.tensor(rows)  # on the CPU: layers may be on several devices
        self._set_attention(None if self.attention_BS is None else self.attention_BS[index])
        self.states_BSD = self.states_BSD[index]
        for layer in self._layers:
            layer.keys, layer.values = layer.keys[index], layer.values[index]

    def adopt(self, rows: Sequence[int], other: Seq2SeqCache) -> None:
        """Replace the sources of these rows by those of another cache."""
        width = max(self.states_BSD.shape[1], other.states_BSD.shape[1])

        def joined(old: Tensor, new: Tensor, dim: int) -> Tensor:
            wide = (
                F.pad(x, [0, 0] * (x.ndim - 1 - dim) + [0, width - x.shape[dim]])
                for x in (old, new)
            )
            return next(wide).index_copy(0, torch.tensor(rows, device=old.device), next(wide))

        self._set_attention(joined(self.attention, other.attention, 1))
        self.states_BSD = joined(self.states_BSD, other.states_BSD, 1)
        for mine, theirs in zip(self._layers, other._layers, strict=True):
            mine.keys = joined(mine.keys, theirs.keys, 2)
            mine.values = joined(mine.values, theirs.values, 2)

    @property
    def _layers(self) -> list[Any]:
        return self.cross_attention_cache.layers

    @property
    def attention(self) -> Tensor:
        """`attention_BS`, also if no source is padded."""
        if self.attention_BS is not None:
            return self.attention_BS
        return torch.ones(self.states_BSD.shape[:2], dtype=torch.int64).to(self.states_BSD.device)

    def _set_attention(self, attention_BS: Tensor | None) -> None:
        padded = attention_BS is not None and not bool(attention_BS.all())
        self.attention_BS = attention_BS if padded else None


class Seq2SeqPass(HfDecoder):
    """The forward pass of transformers; `encode` is its encoder."""

    def encode(self, source: Batch) -> Tensor:
        """The encoder's output, [B, S, D]."""
        return _encoded(self.hf, source)

    def _inputs(
        self, tokens_BN: Tensor, cache: Seq2SeqCache, keep: int, **ragged: Tensor
    ) -> dict[str, Any]:
        return {
            "encoder_outputs": BaseModelOutput(cache.states_BSD),  # pyright: ignore
            "attention_mask": cache.attention_BS,
            "decoder_input_ids": tokens_BN,
            "decoder_attention_mask": ragged.get("attention_mask"),
        }


class Seq2SeqSession(CausalSession):
    """A session whose prompts are encoder inputs; `lengths` count decoder tokens."""

    def __init__(self, model: HfModel) -> None:
        assert model.decoder_prompt is not None, "an encoder-decoder has a decoder prompt"
        super().__init__(model)
        decoder: Any = model.decoder
        self._encode: Callable[[Texts], Tensor] = decoder.encode
        self._decoder_prompt = model.decoder_prompt
        self._sources: Seq2SeqCache | None = None

    @property
    def pass_cache(self) -> Seq2SeqCache:
        assert self._sources is not None, "prefill encodes the sources"
        return self._sources

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
        self._sources = Seq2SeqCache(self.cache, states_BSD, source.attention_BT)
        return super()._prefill([self._decoder_prompt] * len(tokens))

    def _refill(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> Tensor:
        fresh = Seq2SeqSession(self.model)
        logits_RV = fresh._prefill(prompts)
        self.cache.adopt(rows, fresh.cache, len(self.lengths))
        self.pass_cache.adopt(rows, fresh.pass_cache)
        return logits_RV

    def _keep_rows(self, rows: Sequence[int]) -> None:
        super()._keep_rows(rows)
        self.pass_cache.keep(rows)


class Seq2SeqModel(HfModel):
    """An encoder-decoder and its tokenizer."""

    plain_pass = Seq2SeqPass
    session_kinds: ClassVar[dict[Sessions, StartSession]] = {
        "batch": Seq2SeqSession,
        "rows": functools.partial(RowSession, start=Seq2SeqSession),
    }

    @property
    def plain_head(self) -> Head:
        bias_1V = getattr(self.hf, "final_logits_bias", None)
        head = super().plain_head
        return head if bias_1V is None else head._replace(bias_V=bias_1V[0])

    def hidden(self, batch: Batch) -> Tensor:
        assert batch.source is not None, "a batch of an encoder-decoder has sources"
        hidden_BTD = body_of(self.hf)(
            input_ids=batch.tokens_BT,
            attention_mask=batch.attention_BT,
            encoder_hidden_states=_encoded(self.hf, batch.source),
            encoder_attention_mask=batch.source.attention_BT,
            use_cache=False,
        ).last_hidden_state
        return for_head(hidden_BTD, self.hf)

    def plain_logits(self, batch: Batch) -> Tensor:
        assert batch.source is not None, "a batch of an encoder-decoder has sources"
        return self.hf(
            input_ids=batch.source.tokens_BT,
            attention_mask=batch.source.attention_BT,
            decoder_input_ids=batch.tokens_BT,
            decoder_attention_mask=batch.attention_BT,
            use_cache=False,
        ).logits


def _encoded(hf: PreTrainedModel, source: Batch) -> Tensor:
    encoder: Any = hf.get_encoder()
    states = encoder(input_ids=source.tokens_BT, attention_mask=source.attention_BT)
    return states.last_hidden_state.to(source.tokens_BT.device)
