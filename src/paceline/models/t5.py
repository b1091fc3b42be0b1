"""A pass of T5-like models with fused projections, for decoding on a CPU.

With one to eight tokens per pass, the modules of transformers spend most of the time between
operators. This pass does the same arithmetic in float32 between products: one product for query,
key and value, one for the two gated matrices, and one for the keys and values of all layers over
the source.

Shape suffixes: B batch, N new tokens, T text, W cache width, S source, H heads, C head size, D
hidden, L twice the longest distance.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.core.sampling import spread
from paceline.models.hf.draft_vocabulary import head_of
from paceline.models.hf.logit_map import logit_map
from paceline.models.hf.seq2seq import Seq2SeqPass

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn
    from transformers import PreTrainedModel

    from paceline.models.contract import Batch
    from paceline.models.hf.seq2seq import Seq2SeqCache

    Heads = tuple[Tensor, Tensor]  # keys and values, [B, H, W, C]
    Append = Callable[[Tensor, Tensor], Heads]  # takes those of new tokens, returns all

ARCHITECTURES = frozenset({"t5", "mt5", "umt5"})
_DISTANCES = 256  # of the first table of position biases
_MASKED = torch.finfo(torch.float32).min / 2  # two of these add up to a finite number

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_new": functools.partial(F.gelu, approximate="tanh"),
}


def is_t5_like(hf: PreTrainedModel) -> bool:
    config = hf.config
    return config.model_type in ARCHITECTURES and config.dense_act_fn in _ACTIVATIONS


class T5Pass(Seq2SeqPass):
    """The forward pass for decoding; the weights must not change."""

    def __init__(self, hf: PreTrainedModel, draft_vocabulary: Tensor | None = None) -> None:
        super().__init__(hf, draft_vocabulary)
        self._encoder = _Stack(hf.get_encoder())
        self._decoder = _Stack(hf.get_decoder())
        self._scaled = logit_map(hf).scaled
        self._head = _linear([head_of(hf, draft_vocabulary)])
        self._vocab_size = len(head_of(hf).weight)
        self._listeners: list[Callable[[Tensor], None]] = []

    def listen(self, listener: Callable[[Tensor], None]) -> Callable[[], None]:
        self._listeners.append(listener)
        return functools.partial(self._listeners.remove, listener)

    def encode(self, source: Batch) -> Tensor:
        return self._encoder.encode(source)

    def __call__(
        self, tokens_BN: Tensor, cache: Seq2SeqCache, ends_B: Tensor | None, keep: int
    ) -> Tensor:
        own, source = cache.self_attention_cache, cache.cross_attention_cache
        if not len(source):
            heads = self._decoder.read_source(cache.states_BSD.float())
            for index, (keys, values) in enumerate(heads):
                # copied into rows, because every pass reads them
                source.update(keys.contiguous(), values.contiguous(), index)
        count = tokens_BN.shape[1]
        width = cache.get_seq_length() + count
        padding: Tensor | None = None
        if ends_B is not None:  # the columns before each row's first token
            hidden_BW = torch.arange(width) < (width - ends_B)[:, None]
            padding = _additive(hidden_BW).to(tokens_BN.device)
        x_BND = self._decoder(
            tokens_BN,
            lambda positions: positions.causal(count, width),
            padding,
            [own.layer(index).update for index in range(len(self._decoder.layers))],  # pyright: ignore
            [(layer.keys, layer.values) for layer in source.layers],  # pyright: ignore
            _source_mask(cache.attention_BS),
        )
        x_BND = self._scaled(x_BND)
        for listener in self._listeners:
            listener(x_BND)
        logits = self._head(x_BND[:, -keep:])
        if self.draft_vocabulary is None:
            return logits
        return spread(logits, self.draft_vocabulary, self._vocab_size)


def _linear(layers: Sequence[Any]) -> Callable[[Tensor], Tensor]:
    """One product of several layers, in their dtype; several weights are copied."""
    weights = [layer.weight.detach() for layer in layers]
    weight = weights[0] if len(weights) == 1 else torch.cat(weights)
    return lambda x: F.linear(x.to(weight.dtype), weight)


def _norm(norm: Any) -> Callable[[Tensor], Tensor]:
    weight = norm.weight.detach().float()
    return lambda x: F.rms_norm(x.float(), weight.shape, weight, norm.variance_epsilon)


class _Stack:
    """An encoder or a decoder; shares the weights of the transformers module."""

    def __init__(self, stack: Any) -> None:
        self._embed: nn.Module = stack.embed_tokens
        self.layers = [_Layer(block, stack.config) for block in stack.block]
        self._norm = _norm(stack.final_layer_norm)
        crossing = [block.layer[1].EncDecAttention for block in stack.block if stack.is_decoder]
        parts = [part for attention in crossing for part in (attention.k, attention.v)]
        self._keys_of_source = _linear(parts) if parts else None

    def encode(self, source: Batch) -> Tensor:
        """The output of an encoder, [B, S, D]."""
        width = source.tokens_BT.shape[1]
        mask = _source_mask(source.attention_BT)
        return self(source.tokens_BT, lambda positions: positions.both_ways(width), mask)

    def read_source(self, states_BSD: Tensor) -> list[Heads]:
        """Keys and values of the encoder's output for each layer."""
        assert self._keys_of_source is not None, "an encoder reads no source"
        parts = self._keys_of_source(states_BSD)
        parts = parts.unflatten(-1, (2 * len(self.layers), -1, self.layers[0].head_size))
        heads = parts.permute(2, 0, 3, 1, 4).unbind()
        return list(zip(heads[::2], heads[1::2], strict=True))

    def __call__(
        self,
        tokens: Tensor,
        biases: Callable[[Positions], Tensor],
        padding: Tensor | None = None,
        caches: Sequence[Append] | None = None,
        sources: Sequence[Heads] | None = None,
        source_mask: Tensor | None = None,
    ) -> Tensor:
        """The output after the last norm, [B, N, D].

        `biases` are those of positions and masks, `padding` and `source_mask` are added to scores.
        """
        x = self._embed(tokens).float()
        mask: Tensor | None = None
        for index, layer in enumerate(self.layers):
            if layer.positions is not None:  # the others use the mask of the layer before
                mask = biases(layer.positions)[None]
                mask = mask if padding is None else mask + padding
            x = layer.attend(x, mask, None if caches is None else caches[index])
            if sources is not None:
                x = layer.attend_to_source(x, sources[index], source_mask)
            x = layer.transform(x)
        return self._norm(x)


class _Layer:
    """A layer of the encoder or the decoder; its functions add to the residual stream."""

    def __init__(self, block: Any, config: Any) -> None:
        own, *crossing, mlp = block.layer
        attention, dense = own.SelfAttention, mlp.DenseReluDense
        self.head_size: int = attention.key_value_proj_dim
        self._norm = _norm(own.layer_norm)
        self._qkv = _linear([attention.q, attention.k, attention.v])
        self._out = _linear([attention.o])
        has_biases = attention.has_relative_attention_bias
        self.positions = Positions(attention) if has_biases else None
        for source in crossing:
            self._before_source = _norm(source.layer_norm)
            self._query = _linear([source.EncDecAttention.q])
            self._source_out = _linear([source.EncDecAttention.o])
        self._before_mlp = _norm(mlp.layer_norm)
        self._gated = hasattr(dense, "wi_0")
        self._up = _linear([dense.wi_0, dense.wi_1] if self._gated else [dense.wi])
        self._down = _linear([dense.wo])
        self._activation = _ACTIVATIONS[config.dense_act_fn]

    def attend(self, x: Tensor, mask: Tensor | None, append: Append | None) -> Tensor:
        parts = self._qkv(self._norm(x)).unflatten(-1, (3, -1, self.head_size))
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind()
        heads = (key, value) if append is None else append(key, value)
        return x + self._out(_attend(query, *heads, mask))

    def attend_to_source(self, x: Tensor, source: Heads, mask: Tensor | None) -> Tensor:
        query = self._query(self._before_source(x)).unflatten(-1, (-1, self.head_size))
        return x + self._source_out(_attend(query.transpose(1, 2), *source, mask))

    def transform(self, x: Tensor) -> Tensor:
        up = self._up(self._before_mlp(x))
        if not self._gated:
            return x + self._down(self._activation(up))
        gate, up = up.chunk(2, -1)
        return x + self._down(self._activation(gate) * up)


class Positions:
    """The position biases of a layer and those that follow; they depend on the distance alone."""

    def __init__(self, attention: Any) -> None:
        self._attention = attention
        self._past_HL: Tensor | None = None

    def both_ways(self, width: int) -> Tensor:
        """Biases of all positions to all, [H, S, S]."""
        return self._attention.compute_bias(width, width)[0].float()

    def causal(self, count: int, width: int) -> Tensor:
        """Biases of the last `count` of `width` positions to all, [H, N, W]; later ones masked.

        From a table, which is computed once; so the weights must not change.
        """
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
    heads = query_BHNC.float(), keys_BHWC.float(), values_BHWC.float()
    mixed = F.scaled_dot_product_attention(*heads, attn_mask=mask, scale=1.0)
    return mixed.transpose(1, 2).flatten(2)


def _source_mask(attention_BS: Tensor | None) -> Tensor | None:
    """Additive mask of padding, [B, 1, 1, S]."""
    return None if attention_BS is None else _additive(attention_BS == 0)


def _additive(hidden_BW: Tensor) -> Tensor:
    """Additive mask of hidden columns, [B, 1, 1, W]."""
    zeros = torch.zeros(hidden_BW.shape, device=hidden_BW.device)
    return zeros.masked_fill_(hidden_BW, _MASKED)[:, None, None]
