"""The forward pass of T5-like models in PyTorch, with fused projections for low overhead.

With one to eight tokens per pass, the modules of transformers spend most of the time between
operators. This pass does the same arithmetic with packed weights: one product for query, key and
value, one for the two gated matrices, and one for the keys and values of all layers over the
source.

Shape suffixes: B batch, N new tokens, W cache width, S source, H heads, C head size, D hidden, L
twice the longest distance.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.core.vocabulary_subset import spread
from paceline.models.hf.draft_vocabulary import head_of
from paceline.models.hf.seq2seq import Seq2SeqPass, output_scale
from paceline.models.llama.forward import RmsNorm

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn
    from transformers import PreTrainedModel

    from paceline.models.contract import Batch
    from paceline.models.hf.seq2seq_cache import Seq2SeqCache
    from paceline.models.llama.forward import MakeLinear

_ARCHITECTURES = frozenset({"t5", "mt5", "umt5"})
_DISTANCES = 256  # of the first table of position biases
_MASKED = torch.finfo(torch.float32).min / 2  # two of these add up to a finite number

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_new": functools.partial(F.gelu, approximate="tanh"),
}


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
        self._encoder = _Encoder(hf.get_encoder(), make_linear)
        stack: Any = hf.get_decoder()
        self._embed: nn.Module = stack.embed_tokens
        self._layers = [_DecoderLayer(block, hf.config, make_linear) for block in stack.block]
        attentions = [block.layer[1].EncDecAttention for block in stack.block]
        self._source = make_linear([part for x in attentions for part in (x.k, x.v)])
        self._norm = RmsNorm(stack.final_layer_norm)
        self._scale = output_scale(hf)
        self._head = make_linear([head_of(hf, draft_vocabulary)])
        self._vocab_size = len(head_of(hf).weight)
        self._listeners: list[Callable[[Tensor], None]] = []

    @staticmethod
    def supports(hf: PreTrainedModel) -> bool:
        config = hf.config
        return config.model_type in _ARCHITECTURES and config.dense_act_fn in _ACTIVATIONS

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
        x_BND = self._embed(tokens_BN).float()
        count = tokens_BN.shape[1]
        width = cache.get_seq_length() + count
        padding_mask = _padding_mask(ends_B, width, x_BND.device)
        source_mask = _source_mask(cache.attention_BS)
        mask: Tensor | None = None
        for index, layer in enumerate(self._layers):
            if layer.positions is not None:  # the others use the mask of the layer before
                mask = layer.positions.causal(count, width)[None]
                mask = mask if padding_mask is None else mask + padding_mask
            x_BND = layer(x_BND, cache, index, mask, source_mask)
        x_BND = self._scale * self._norm(x_BND)
        for listener in self._listeners:
            listener(x_BND)
        logits = self._head(x_BND[:, -keep:])
        if self.draft_vocabulary is None:
            return logits
        return spread(logits, self.draft_vocabulary, self._vocab_size)

    def _read_source(self, cache: Seq2SeqCache) -> None:
        """Compute keys and values of the source for all layers."""
        parts = self._source(cache.states_BSD.float()).chunk(2 * len(self._layers), -1)
        for index, layer in enumerate(self._layers):
            # copied into rows, because every pass reads them
            keys, values = (
                x.unflatten(-1, (-1, layer.head_size)).transpose(1, 2).contiguous()
                for x in parts[2 * index : 2 * index + 2]
            )
            cache.cross_attention_cache.update(keys, values, index)


class _Encoder:
    def __init__(self, stack: Any, make_linear: MakeLinear) -> None:
        self._embed: nn.Module = stack.embed_tokens
        self._layers = [
            (
                _SelfAttention(block.layer[0], make_linear),
                _Positions.of(block.layer[0]),
                _Mlp(block.layer[1], stack.config, make_linear),
            )
            for block in stack.block
        ]
        self._norm = RmsNorm(stack.final_layer_norm)

    def __call__(self, source: Batch) -> Tensor:
        """The encoder's output, [B, S, D]."""
        x_BSD = self._embed(source.tokens_BT).float()
        padding_mask = _source_mask(source.attention_BT)
        mask: Tensor | None = None
        for attention, positions, mlp in self._layers:
            if positions is not None:
                mask = positions.both_ways(x_BSD.shape[1])[None]
                mask = mask if padding_mask is None else mask + padding_mask
            query, key, value = attention.heads(x_BSD)
            x_BSD = x_BSD + attention.out(_attend(query, key, value, mask))
            x_BSD = x_BSD + mlp(x_BSD)
        return self._norm(x_BSD)


class _DecoderLayer:
    def __init__(self, block: Any, config: Any, make_linear: MakeLinear) -> None:
        own, source, dense = block.layer
        self.own = _SelfAttention(own, make_linear)
        self.positions = _Positions.of(own)
        self.head_size = self.own.head_size
        self.before_source = RmsNorm(source.layer_norm)
        self.query = make_linear([source.EncDecAttention.q])
        self.out = make_linear([source.EncDecAttention.o])
        self.mlp = _Mlp(dense, config, make_linear)

    def __call__(
        self,
        x_BND: Tensor,
        cache: Seq2SeqCache,
        index: int,
        mask: Tensor | None,
        source_mask: Tensor | None,
    ) -> Tensor:
        query, key, value = self.own.heads(x_BND)
        own: Any = cache.self_attention_cache
        keys, values = own.layer(index).append(key, value)
        x_BND = x_BND + self.own.out(_attend(query, keys, values, mask))
        query = self.query(self.before_source(x_BND)).unflatten(-1, (-1, self.head_size))
        source: Any = cache.cross_attention_cache.layers[index]
        mixed = _attend(query.transpose(1, 2), source.keys, source.values, source_mask)
        x_BND = x_BND + self.out(mixed)
        return x_BND + self.mlp(x_BND)


class _SelfAttention:
    def __init__(self, layer: Any, make_linear: MakeLinear) -> None:
        attention = layer.SelfAttention
        self.head_size = attention.key_value_proj_dim
        self.norm = RmsNorm(layer.layer_norm)
        self.qkv = make_linear([attention.q, attention.k, attention.v])
        self.out = make_linear([attention.o])

    def heads(self, x: Tensor) -> tuple[Tensor, ...]:
        """Query, key and value, [B, H, N, C] each."""
        parts = self.qkv(self.norm(x)).unflatten(-1, (3, -1, self.head_size))
        return parts.permute(2, 0, 3, 1, 4).unbind()


class _Mlp:
    def __init__(self, layer: Any, config: Any, make_linear: MakeLinear) -> None:
        dense = layer.DenseReluDense
        self.norm = RmsNorm(layer.layer_norm)
        self.gated = hasattr(dense, "wi_0")
        self.up = make_linear([dense.wi_0, dense.wi_1] if self.gated else [dense.wi])
        self.down = make_linear([dense.wo])
        self.activation = _ACTIVATIONS[config.dense_act_fn]

    def __call__(self, x: Tensor) -> Tensor:
        x = self.up(self.norm(x))
        if not self.gated:
            return self.down(self.activation(x))
        gate, up = x.chunk(2, -1)
        return self.down(self.activation(gate) * up)


class _Positions:
    """The position biases of a layer and those that follow; they depend on the distance alone."""

    def __init__(self, attention: Any) -> None:
        self._attention = attention
        self._past_HL: Tensor | None = None

    @classmethod
    def of(cls, layer: Any) -> _Positions | None:
        """None for a layer that uses the biases of the one before."""
        attention = layer.SelfAttention
        return cls(attention) if attention.has_relative_attention_bias else None

    def both_ways(self, width: int) -> Tensor:
        """Biases of all positions to all, [H, S, S]."""
        return self._attention.compute_bias(width, width)[0].float()

    def causal(self, count: int, width: int) -> Tensor:
        """Biases of the last `count` of `width` positions to all, [H, N, W]; later ones masked."""
        if self._past_HL is None or 2 * width > self._past_HL.shape[1]:
            self._past_HL = self._past(max(_DISTANCES, 2 * width))
        longest = self._past_HL.shape[1] // 2
        starts = range(longest - width + count - 1, longest - width - 1, -1)
        return torch.stack([self._past_HL[:, start : start + width] for start in starts], 1)

    def _past(self, longest: int) -> Tensor:
        """Column l has the biases of distance `longest` - 1 - l, and masks from `longest` on.

        The biases of one position to all others are then a slice.
        """
        biases = self._attention.compute_bias(1, longest, past_seen_tokens=longest - 1)
        past_HL = biases[0, :, 0].float()
        return torch.cat([past_HL, torch.full_like(past_HL, _MASKED)], 1)


def _attend(
    query_BHNC: Tensor, keys_BHWC: Tensor, values_BHWC: Tensor, mask: Tensor | None
) -> Tensor:
    """Attention without scaling, [B, N, H * C]."""
    mixed = F.scaled_dot_product_attention(
        query_BHNC, keys_BHWC, values_BHWC, attn_mask=mask, scale=1.0
    )
    return mixed.transpose(1, 2).flatten(2)


def _padding_mask(ends_B: Tensor | None, width: int, device: torch.device) -> Tensor | None:
    """Additive mask of the columns before each row's first token, [B, 1, 1, W]."""
    if ends_B is None:
        return None
    return _additive(torch.arange(width) < (width - ends_B)[:, None]).to(device)


def _source_mask(attention_BS: Tensor | None) -> Tensor | None:
    """Additive mask of padding, [B, 1, 1, S]."""
    return None if attention_BS is None else _additive(attention_BS == 0)


def _additive(hidden_BW: Tensor) -> Tensor:
    zeros = torch.zeros(hidden_BW.shape, device=hidden_BW.device)
    return zeros.masked_fill_(hidden_BW, _MASKED)[:, None, None]
