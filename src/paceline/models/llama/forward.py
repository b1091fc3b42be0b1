"""A forward pass of Llama-like models in PyTorch, with fused projections for low overhead.

With one to eight tokens per pass, the modules of transformers spend a third of the time between
operators. This pass does the same arithmetic with packed weights: one product for query, key and
value, one for gate and up. It uses native/transformer.c for few tokens where that is possible.

Shape suffixes: B batch, N new tokens, W cache width, H heads, D head size.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.core.sampling import spread
from paceline.models.hf.base import warn_of_slower
from paceline.models.hf.cache import RoomyCache, RoomyLayer
from paceline.models.hf.draft_vocabulary import head_of
from paceline.models.llama.cpu import NativeLlama
from paceline.models.llama.cpu_weights import can_copy, window_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transformers import PreTrainedModel

    Rotation = tuple[Tensor, Tensor]  # cosines and sines
    MakeLinear = Callable[[Sequence[nn.Module]], Callable[[Tensor], Tensor]]

_MANY_ROWS = 8  # from here, plain products are twice as fast as the fused attention operator

_ARCHITECTURES = frozenset({"llama", "mistral", "qwen2", "qwen3"})


class LlamaDecoder:
    """The forward pass of a Llama-like model."""

    def __init__(
        self,
        hf: PreTrainedModel,
        make_linear: MakeLinear,
        draft_vocabulary: Tensor | None = None,
        *,
        int8_of: PreTrainedModel | None = None,
        change: float = 1e-3,
        compiled: bool = True,
        round_activations: bool = False,
    ) -> None:
        """Build the pass; `make_linear` makes one product of several linear layers, see packing.py.

        `int8_of` is the model that `hf` is a rounded copy of, see int8.py. `compiled` allows the
        compiled pass for few tokens; its logits may differ by `change`, relative to the largest.
        With `round_activations`, its products may round inputs to bfloat16.
        """
        body: Any = hf.base_model
        self.embed: nn.Module = body.embed_tokens
        self.rotary: nn.Module = body.rotary_emb
        self.norm = RmsNorm(body.norm)
        self.layers = [_Layer(layer, make_linear) for layer in body.layers]
        self.head = make_linear([head_of(hf, draft_vocabulary)])
        self.draft_vocabulary = draft_vocabulary
        self.vocab_size = len(head_of(hf).weight)
        self._listeners: list[Callable[[Tensor], None]] = []
        self.native: NativeLlama | None = None
        self._change = change
        int8 = int8_of is not None
        if compiled and hf.device.type == "cpu" and can_copy(hf, int8=int8):
            native = NativeLlama(
                int8_of or hf, draft_vocabulary, int8=int8, round_activations=round_activations
            )
            native.listeners = self._listeners
            if self._agrees_with(native):
                self.native = native
            else:
                fault = "the compiled pass gives different logits than PyTorch"
                warn_of_slower(hf.config.model_type, fault, stacklevel=2)

    @staticmethod
    def supports(hf: PreTrainedModel) -> bool:
        config = hf.config
        return config.model_type in _ARCHITECTURES and config.hidden_act == "silu"

    def listen(self, listener: Callable[[Tensor], None]) -> Callable[[], None]:
        self._listeners.append(listener)
        return functools.partial(self._listeners.remove, listener)

    @torch.inference_mode()
    def _agrees_with(self, native: NativeLlama) -> bool:
        """Compare both passes on one batch, because a compiler bug would go unnoticed otherwise."""
        tokens_BN = torch.arange(6).view(2, 3)
        wanted = self(tokens_BN, RoomyCache(), None, 0)
        got = native(tokens_BN, RoomyCache(), [3, 3], 0)
        largest = float(wanted[wanted.isfinite()].abs().max())
        return torch.allclose(wanted, got, rtol=0, atol=self._change * largest)

    def __call__(
        self, tokens_BN: Tensor, cache: RoomyCache, ends_B: Tensor | None, keep: int
    ) -> Tensor:
        """Logits of the last `keep` columns (0: all), [B, N, V]; tokens are right-aligned.

        `ends_B` is the length of each row after this pass; None if all rows have the full width.
        """
        count, device = tokens_BN.shape[1], tokens_BN.device
        width = cache.get_seq_length() + count
        positions_BN = torch.arange(width - count, width, device=device)[None]
        if ends_B is not None:
            ends_B = ends_B.to(device)
            positions_BN = (positions_BN + (ends_B - width)[:, None]).clamp(min=0)

        x = self.embed(tokens_BN).float()
        cos, sin = self.rotary(x, position_ids=positions_BN)
        half = cos.shape[-1] // 2
        sin[..., :half] *= -1  # rotate_half then becomes a roll by half the head size
        rotation = (cos[:, :, None], sin[:, :, None])
        windows = {layer.window for layer in self.layers}
        masks = {each: _mask(count, width, ends_B, each, device) for each in windows}
        for index, layer in enumerate(self.layers):
            # After its keys and values, the last layer computes only the columns that are kept.
            is_cut = layer is self.layers[-1] and not self._listeners
            x = layer(x, rotation, masks[layer.window], cache.layer(index), keep if is_cut else 0)
        x = self.norm(x)
        for listener in self._listeners:
            listener(x)
        logits = self.head(x[:, -keep:])
        if self.draft_vocabulary is None:
            return logits
        return spread(logits, self.draft_vocabulary, self.vocab_size)


class _Layer:
    def __init__(self, layer: Any, make_linear: MakeLinear) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.head_size = attention.head_dim
        self.scaling = attention.scaling
        self.query_heads = attention.q_proj.out_features // self.head_size
        self.key_heads = attention.k_proj.out_features // self.head_size
        self.window = window_of(attention)
        norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        self.query_norm, self.key_norm = (norm and RmsNorm(norm) for norm in norms)
        self.before_attention = RmsNorm(layer.input_layernorm)
        self.before_mlp = RmsNorm(layer.post_attention_layernorm)
        self.qkv = make_linear([attention.q_proj, attention.k_proj, attention.v_proj])
        self.out = make_linear([attention.o_proj])
        self.gate_up = make_linear([mlp.gate_proj, mlp.up_proj])
        self.down = make_linear([mlp.down_proj])

    def __call__(
        self, x: Tensor, rotation: Rotation, mask: Tensor | None, own: RoomyLayer, keep: int
    ) -> Tensor:
        """The last `keep` columns (0: all) of this layer's output, [B, keep or N, D]."""
        mixed = self._attend(self.before_attention(x), rotation, mask, own)
        if keep:
            x, mixed = x[:, -keep:], mixed[:, -keep:]
        x = x + self.out(mixed)
        gate, up = self.gate_up(self.before_mlp(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)

    def _attend(
        self, x: Tensor, rotation: Rotation, mask: Tensor | None, own: RoomyLayer
    ) -> Tensor:
        batch, count, _ = x.shape
        heads = self.query_heads
        mixed_BNHD = self.qkv(x).view(batch, count, -1, self.head_size)
        rotated_BNHD = mixed_BNHD[:, :, : heads + self.key_heads]
        if self.query_norm is not None and self.key_norm is not None:
            query, key = rotated_BNHD[:, :, :heads], rotated_BNHD[:, :, heads:]
            rotated_BNHD = torch.cat([self.query_norm(query), self.key_norm(key)], 2)
        cos, sin = rotation
        rotated_BNHD = rotated_BNHD * cos + rotated_BNHD.roll(self.head_size // 2, -1) * sin
        keys_BHWD, values_BHWD = own.update(
            rotated_BNHD[:, :, heads:].transpose(1, 2),
            mixed_BNHD[:, :, heads + self.key_heads :].transpose(1, 2),
        )
        query_BHND = rotated_BNHD[:, :, :heads].transpose(1, 2)
        if count == 1 and batch >= _MANY_ROWS:
            mixed_BHND = self._attend_in_groups(query_BHND, keys_BHWD, values_BHWD, mask)
        else:
            mixed_BHND = F.scaled_dot_product_attention(
                query_BHND,
                keys_BHWD,
                values_BHWD,
                attn_mask=mask,
                is_causal=mask is None and count > 1,
                scale=self.scaling,
                enable_gqa=heads > self.key_heads,
            )
        return mixed_BHND.transpose(1, 2).reshape(batch, count, -1)

    def _attend_in_groups(
        self, query_BHND: Tensor, keys_BKWD: Tensor, values_BKWD: Tensor, mask: Tensor | None
    ) -> Tensor:
        """Attention with plain products, one for all queries that share a key head."""
        batch, _, count, _ = query_BHND.shape
        query = (query_BHND * self.scaling).reshape(batch * self.key_heads, -1, self.head_size)
        scores = torch.bmm(query, keys_BKWD.flatten(0, 1).transpose(1, 2))
        scores = scores.view(batch, self.query_heads, count, -1)
        if mask is not None:
            scores.add_(mask)
        shares = scores.softmax(-1).view(len(query), query.shape[1], -1)
        return torch.bmm(shares, values_BKWD.flatten(0, 1)).view(query_BHND.shape)


def _mask(
    count: int, width: int, ends_B: Tensor | None, window: int | None, device: torch.device
) -> Tensor | None:
    """Additive mask [B or 1, 1, N, W], or None if a causal mask is sufficient."""
    reach = width if window is None else min(window, width)
    if ends_B is None and reach == width and count in (1, width):
        return None
    columns_W = torch.arange(width, device=device)
    rows_N1 = columns_W[width - count :, None]
    seen = (columns_W <= rows_N1) & (columns_W > rows_N1 - reach)
    if ends_B is None:
        seen = seen[None, None]
    else:
        seen = (seen & (columns_W >= (width - ends_B)[:, None, None]))[:, None]
    # Not -inf: columns before a row's first token attend to nothing and must stay finite.
    zeros = torch.zeros(seen.shape, device=device)
    return zeros.masked_fill_(~seen, torch.finfo(torch.float32).min)


class RmsNorm:
    """RMS normalisation in float32."""

    def __init__(self, norm: Any) -> None:
        self._weight = norm.weight.detach().float()
        self._eps = norm.variance_epsilon

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self._weight.shape, self._weight, self._eps)
