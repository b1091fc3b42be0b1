"""Packs a Llama-like model's weights for native/transformer.c, also rounded to 8 bits."""

from __future__ import annotations

import copy
import ctypes
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from paceline.models.hf.architectures import WINDOW_IN_CONFIG, untie_head
from paceline.native import compiled
from paceline.native.structures import Layer, Matrix, Model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

_LARGEST = 127  # of 8-bit weights
_PART = 4096  # rows converted at a time: a multiple of the packing block size of every library
_ARCHITECTURES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
_STATIC_ROPE = frozenset({"default", "linear", "llama3", "yarn"})  # angles depend on position only


class NativeWeights:
    """Owns packed copies of a model's weights; `model` is the C structure that points to them."""

    def __init__(
        self,
        library: ctypes.CDLL,
        hf: PreTrainedModel,
        draft_vocabulary: Tensor | None,
        *,
        int8: bool,
        round_activations: bool = False,
    ) -> None:
        """`round_activations`: products may round their inputs to bfloat16."""
        self._library = library
        self._int8 = int8
        self._round_activations = round_activations
        self._held: list[Tensor] = []
        body: Any = hf.base_model
        head: Any = hf.get_output_embeddings()
        first = body.layers[0].self_attn
        embeddings = self._bfloat16([body.embed_tokens.weight])
        # sorted, so that logits are written in memory order
        rows = None if draft_vocabulary is None else draft_vocabulary.sort().values
        tied = head.weight is body.embed_tokens.weight and rows is None and not int8
        bias = head.bias if rows is None or head.bias is None else head.bias[rows]
        self._layers = (Layer * len(body.layers))(*map(self._layer, body.layers))
        self.model = Model(
            num_layers=len(body.layers),
            hidden=head.in_features,
            inner=body.layers[0].mlp.gate_proj.out_features,
            query_heads=first.q_proj.out_features // first.head_dim,
            key_heads=first.k_proj.out_features // first.head_dim,
            head_size=first.head_dim,
            head_rows=len(head.weight if rows is None else rows),
            vocab=len(head.weight),
            norm_eps=body.norm.variance_epsilon,
            scaling=first.scaling,
            embeddings=embeddings,
            head=embeddings if tied else self._matrix([head.weight], rows),
            head_bias=self._float(bias),
            head_tokens=None if rows is None else self._hold(rows),
            final_norm=self._float(body.norm.weight),
            layers=ctypes.addressof(self._layers),
        )

    def _layer(self, layer: Any) -> Layer:
        attention, mlp = layer.self_attn, layer.mlp
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        biases = [projection.bias for projection in projections]
        norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        query_norm, key_norm = (None if norm is None else norm.weight for norm in norms)
        return Layer(
            qkv=self._matrix([projection.weight for projection in projections]),
            out=self._matrix([attention.o_proj.weight]),
            gate_up=self._matrix([mlp.gate_proj.weight, mlp.up_proj.weight]),
            down=self._matrix([mlp.down_proj.weight]),
            attention_norm=self._float(layer.input_layernorm.weight),
            mlp_norm=self._float(layer.post_attention_layernorm.weight),
            query_norm=self._float(query_norm),
            key_norm=self._float(key_norm),
            qkv_bias=None if biases[0] is None else self._float(*biases),
            window=window_of(attention) or 0,
        )

    def _matrix(self, weights: Sequence[Tensor], rows: Tensor | None = None) -> Matrix:
        if not self._int8:
            return self._bfloat16(weights, rows)
        numbers, scales_R = round_rows(_stacked(weights, rows))
        packed = self._buffer(len(numbers), numbers.shape[1], numbers.element_size())
        self._pack(numbers, packed)
        return Matrix(packed, self._hold(scales_R))

    def _bfloat16(self, weights: Sequence[Tensor], rows: Tensor | None = None) -> Matrix:
        weight = weights[0].detach() if len(weights) == 1 else _stacked(weights)
        count, size = len(weight if rows is None else rows), weight.shape[1]
        packed = self._buffer(count, size, 2)
        for start in range(0, count, _PART):  # embeddings may be large
            part = slice(start, start + _PART)
            chosen = weight[part if rows is None else rows[part]]
            self._pack(chosen.bfloat16(), packed + self._library.packed_size(start, size, 2))
        return Matrix(packed, None, self._round_activations)

    def _buffer(self, rows: int, size: int, num_bytes: int) -> int:
        total = self._library.packed_size(rows, size, num_bytes)
        return self._hold(torch.empty(total, dtype=torch.uint8))

    def _pack(self, weight: Tensor, packed: int) -> None:
        weight = weight.contiguous()
        self._library.pack(weight.data_ptr(), *weight.shape, weight.element_size(), packed)

    def _float(self, *weights: Tensor | None) -> int | None:
        """The address of the concatenated vectors; None if there are none."""
        given = [weight for weight in weights if weight is not None]
        return self._hold(_stacked(given).float()) if given else None

    def _hold(self, tensor: Tensor) -> int:
        """The tensor's address, valid while this object lives."""
        self._held.append(tensor.contiguous())
        return self._held[-1].data_ptr()


def round_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize to int8 in [-127, 127] with one scale per row: weight = numbers * scales.

    A scale is the row's largest absolute weight / 127, rounded up to four significant bits, so that
    float16 represents the products. Half the memory traffic of 16 bits; errors cost speed alone.

    [R, D] -> [R, D], [R].
    """
    largest_R = weight.detach().float().abs().amax(-1)
    mantissa_R, exponent_R = torch.frexp(largest_R / _LARGEST)
    scales_R = torch.ldexp((16 * mantissa_R).ceil() / 16, exponent_R)
    scales_R = torch.where(largest_R > 0, scales_R, 1.0)
    numbers = (weight.detach().float() / scales_R[:, None]).round().clamp(-_LARGEST, _LARGEST)
    return numbers.to(torch.int8), scales_R


@torch.no_grad()
def rounded_copy(hf: PreTrainedModel) -> PreTrainedModel:
    """A float32 copy of the model whose linear layers are rounded; embeddings are not rounded.

    It holds exactly the weights of the 8-bit pass, so measurements on it also hold for that pass.
    """
    rounded = copy.deepcopy(hf).float()
    untie_head(rounded)
    rounded.config.tie_word_embeddings = False
    for layer in rounded.modules():
        if isinstance(layer, nn.Linear):
            numbers, scales = round_rows(layer.weight)
            layer.weight.copy_(numbers * scales[:, None])
    return rounded


def is_llama_like(hf: PreTrainedModel) -> bool:
    return hf.config.model_type in _ARCHITECTURES and hf.config.hidden_act == "silu"


def can_copy(hf: PreTrainedModel, *, int8: bool = False, in_training: bool = False) -> bool:
    """True if the compiled pass supports this Llama-like model without loss of precision.

    `int8` permits rounding linear layers to 8 bits, `in_training` rounding weights to bfloat16.
    """
    body: Any = hf.base_model
    kinds = nn.Embedding if int8 else nn.Linear | nn.Embedding
    layers = [layer for layer in hf.modules() if isinstance(layer, kinds)]
    attention, mlp = body.layers[0].self_attn, body.layers[0].mlp
    plain = [attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    sizes = (attention.o_proj.in_features, mlp.down_proj.in_features, hf.config.hidden_size)
    return (
        all(size % 16 == 0 for size in sizes)
        and attention.head_dim % 8 == 0
        and all(layer.bias is None for layer in plain)
        and getattr(body.rotary_emb, "rope_type", None) in _STATIC_ROPE
        and getattr(hf.config, "partial_rotary_factor", 1.0) in (None, 1.0)
        and (in_training or all(_is_bfloat16(layer.weight) for layer in layers))
        and compiled() is not None
    )


def window_of(attention: Any) -> int | None:
    """The sliding window that transformers applies in this layer.

    It is an attribute of the module, except in `WINDOW_IN_CONFIG`. Other architectures ignore
    `sliding_window` in a configuration.
    """
    in_config = attention.config.model_type in WINDOW_IN_CONFIG
    holder = attention.config if in_config else attention
    return getattr(holder, "sliding_window", None)


def _stacked(weights: Sequence[Tensor], rows: Tensor | None = None) -> Tensor:
    stacked = torch.cat([weight.detach() for weight in weights])
    return stacked if rows is None else stacked[rows]


def _is_bfloat16(weight: Tensor) -> bool:
    if weight.dtype == torch.float32:
        return bool((weight.bfloat16().float() == weight).all())
    return weight.dtype == torch.bfloat16
