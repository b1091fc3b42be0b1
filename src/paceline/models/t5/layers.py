"""Encoder and decoder layers of T5-like models, with fused projections.

They share the weights of a transformers model, and compute in float32 between products. The caller
chooses how products and norms are made: packed for decoding, differentiable for training.

Shape suffixes: B batch, N new tokens, W cache width, S source, H heads, C head size, D hidden, L
twice the longest distance.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn
    from transformers import PreTrainedModel

    from paceline.models.contract import Batch
    from paceline.models.llama.forward import MakeLinear

    MakeNorm = Callable[[Any], Callable[[Tensor], Tensor]]
    Heads = tuple[Tensor, Tensor]  # keys and values, [B, H, W, C]

_ARCHITECTURES = frozenset({"t5", "mt5", "umt5"})
_DISTANCES = 256  # of the first table of position biases
_MASKED = torch.finfo(torch.float32).min / 2  # two of these add up to a finite number

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_new": functools.partial(F.gelu, approximate="tanh"),
}


class Make(NamedTuple):
    """How to make one product of several linear layers, and a norm of a layer norm."""

    linear: MakeLinear
    norm: MakeNorm


def supports(hf: PreTrainedModel) -> bool:
    """True if these layers are those of the model."""
    config = hf.config
    return config.model_type in _ARCHITECTURES and config.dense_act_fn in _ACTIVATIONS


class Encoder:
    """The encoder."""

    def __init__(self, hf: PreTrainedModel, make: Make) -> None:
        stack: Any = hf.get_encoder()
        self._embed: nn.Module = stack.embed_tokens
        self._layers = [
            (
                _SelfAttention(block.layer[0], make),
                Positions.of(block.layer[0]),
                _Mlp(block.layer[1], stack.config, make),
            )
            for block in stack.block
        ]
        self._norm = make.norm(stack.final_layer_norm)

    def __call__(self, source: Batch) -> Tensor:
        """The encoder's output, [B, S, D]."""
        x_BSD = self._embed(source.tokens_BT).float()
        padding_mask = source_mask(source.attention_BT)
        mask: Tensor | None = None
        for attention, positions, mlp in self._layers:
            if positions is not None:  # the others use the mask of the layer before
                mask = positions.both_ways(x_BSD.shape[1])[None]
                mask = mask if padding_mask is None else mask + padding_mask
            query, key, value = attention.heads(x_BSD)
            x_BSD = x_BSD + attention.out(_attend(query, key, value, mask))
            x_BSD = x_BSD + mlp(x_BSD)
        return self._norm(x_BSD)


class Decoder:
    """The decoder's layers; `positions` has None where a layer uses those of the one before."""

    def __init__(self, hf: PreTrainedModel, make: Make) -> None:
        stack: Any = hf.get_decoder()
        self.embed: nn.Module = stack.embed_tokens
        self.layers = [DecoderLayer(block, hf.config, make) for block in stack.block]
        self.positions = [Positions.of(block.layer[0]) for block in stack.block]
        self.norm = make.norm(stack.final_layer_norm)
        attentions = [block.layer[1].EncDecAttention for block in stack.block]
        self._source = make.linear([part for x in attentions for part in (x.k, x.v)])

    def read_source(self, states_BSD: Tensor) -> list[Heads]:
        """Keys and values of the encoder's output for each layer."""
        parts = self._source(states_BSD).unflatten(-1, (2 * len(self.layers), -1, self.head_size))
        heads = parts.permute(2, 0, 3, 1, 4).unbind()
        return list(zip(heads[::2], heads[1::2], strict=True))

    @property
    def head_size(self) -> int:
        return self.layers[0].own.head_size


class DecoderLayer:
    """One layer of the decoder."""

    def __init__(self, block: Any, config: Any, make: Make) -> None:
        own, source, dense = block.layer
        self.own = _SelfAttention(own, make)
        self._before_source = make.norm(source.layer_norm)
        self._query = make.linear([source.EncDecAttention.q])
        self._out = make.linear([source.EncDecAttention.o])
        self._mlp = _Mlp(dense, config, make)

    def __call__(
        self,
        x_BND: Tensor,
        own: Callable[[Tensor, Tensor], Heads],
        source: Heads,
        mask: Tensor | None,
        source_mask: Tensor | None,
    ) -> Tensor:
        """Read the tokens; `own` takes their keys and values, and returns those of the text."""
        query, key, value = self.own.heads(x_BND)
        x_BND = x_BND + self.own.out(_attend(query, *own(key, value), mask))
        query = self._query(self._before_source(x_BND)).unflatten(-1, (-1, self.own.head_size))
        x_BND = x_BND + self._out(_attend(query.transpose(1, 2), *source, source_mask))
        return x_BND + self._mlp(x_BND)


class _SelfAttention:
    def __init__(self, layer: Any, make: Make) -> None:
        attention = layer.SelfAttention
        self.head_size: int = attention.key_value_proj_dim
        self.norm = make.norm(layer.layer_norm)
        self.qkv = make.linear([attention.q, attention.k, attention.v])
        self.out = make.linear([attention.o])

    def heads(self, x: Tensor) -> tuple[Tensor, ...]:
        """Query, key and value, [B, H, N, C] each."""
        parts = self.qkv(self.norm(x)).unflatten(-1, (3, -1, self.head_size))
        return parts.permute(2, 0, 3, 1, 4).unbind()


class _Mlp:
    def __init__(self, layer: Any, config: Any, make: Make) -> None:
        dense = layer.DenseReluDense
        self.norm = make.norm(layer.layer_norm)
        self.gated = hasattr(dense, "wi_0")
        self.up = make.linear([dense.wi_0, dense.wi_1] if self.gated else [dense.wi])
        self.down = make.linear([dense.wo])
        self.activation = _ACTIVATIONS[config.dense_act_fn]

    def __call__(self, x: Tensor) -> Tensor:
        x = self.up(self.norm(x))
        if not self.gated:
            return self.down(self.activation(x))
        gate, up = x.chunk(2, -1)
        return self.down(self.activation(gate) * up)


class Positions:
    """The position biases of a layer and those that follow; they depend on the distance alone."""

    def __init__(self, attention: Any) -> None:
        self._attention = attention
        self._past_HL: Tensor | None = None

    @classmethod
    def of(cls, layer: Any) -> Positions | None:
        """None for a layer that uses the biases of the one before."""
        attention = layer.SelfAttention
        return cls(attention) if attention.has_relative_attention_bias else None

    def both_ways(self, width: int) -> Tensor:
        """Biases of all positions to all, [H, S, S]. Differentiable."""
        return self._attention.compute_bias(width, width)[0].float()

    def whole_text(self, width: int) -> Tensor:
        """Biases of all positions to all, later ones masked, [H, W, W]. Differentiable."""
        biases_HWW = self.both_ways(width)
        return biases_HWW + torch.full_like(biases_HWW[0], _MASKED).triu(1)

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
    """Attention without scaling, [B, N, H * C].

    In float32 also under autocast: its gradients take seven times as long in bfloat16 on a CPU.
    """
    heads = query_BHNC.float(), keys_BHWC.float(), values_BHWC.float()
    device = query_BHNC.device.type
    in_float32 = contextlib.nullcontext()
    if torch.is_autocast_enabled(device):
        in_float32 = torch.autocast(device, enabled=False)
    with in_float32:
        mixed = F.scaled_dot_product_attention(*heads, attn_mask=mask, scale=1.0)
    return mixed.transpose(1, 2).flatten(2)


def padding_mask(ends_B: Tensor | None, width: int, device: torch.device) -> Tensor | None:
    """Additive mask of the columns before each row's first token, [B, 1, 1, W]."""
    if ends_B is None:
        return None
    return _additive(torch.arange(width) < (width - ends_B)[:, None]).to(device)


def source_mask(attention_BS: Tensor | None) -> Tensor | None:
    """Additive mask of padding, [B, 1, 1, S]."""
    return None if attention_BS is None else _additive(attention_BS == 0)


def _additive(hidden_BW: Tensor) -> Tensor:
    zeros = torch.zeros(hidden_BW.shape, device=hidden_BW.device)
    return zeros.masked_fill_(hidden_BW, _MASKED)[:, None, None]
