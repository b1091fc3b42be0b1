"""Llama-like models read a few tokens with as few calls into torch as possible.

At one to eight tokens a pass the transformers modules spend a third of the time between operators.
This is the same arithmetic with packed weights, query, key and value in one product, gate and up in
another. Where it can be compiled, native/transformer.c does better still for few tokens. Used by
`prepare_for_decoding`; everything else goes through transformers.

Shape suffixes: B batch, N new tokens, W cache width, H heads, D head size.
"""

from __future__ import annotations

import functools
import warnings
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.core.vocabulary_subset import spread
from paceline.errors import SlowerWarning
from paceline.models.hf.cache import RoomyCache
from paceline.models.llama.cpu import NativeLlama
from paceline.models.llama.cpu_weights import can_copy, window_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transformers import PreTrainedModel

    MakeLinear = Callable[[Sequence[nn.Module]], Callable[[Tensor], Tensor]]

# Rows from which plain products read a token twice as fast as the fused operator.
_MANY_ROWS = 8
_FEW_TOKENS = 16  # of a row, on a GPU: the scores of more would take too much memory

_ARCHITECTURES = frozenset({"llama", "mistral", "qwen2", "qwen3"})


class CacheLayer(Protocol):
    """Where a layer leaves its keys and values."""

    def append(self, keys_BHND: Tensor, values_BHND: Tensor) -> tuple[Tensor, Tensor]:
        """Add those of new tokens; all that these may look at, [B, H, W, D]."""
        ...


class Cache(Protocol):
    """What a pass asks of a cache."""

    def layer(self, index: int) -> CacheLayer: ...


class LlamaDecoder:
    """The whole forward pass of a Llama-like model; weights other than the matrices are shared."""

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
        """`int8_of`: the model that `hf` is the rounded copy of; see int8.py.

        `compiled`: read few tokens in a compiled pass where that can be done; `round_activations`: which may round
        what comes into products to bfloat16, where they are faster for it.

        `change`: how far `make_linear`'s products may move a logit, relative to the largest.
        """
        body: Any = hf.base_model
        self.embed: nn.Module = body.embed_tokens
        self.rotary: nn.Module = body.rotary_emb
        self.norm = _Norm(body.norm)
        self.layers = [_Layer(layer, make_linear) for layer in body.layers]
        self.head = make_linear([_head(hf, draft_vocabulary)])
        self.draft_vocabulary = draft_vocabulary
        self.head_weight = _head(hf, None).weight
        self.vocab_size = len(self.head_weight)
        self._listeners: list[Callable[[Tensor], None]] = []
        self.native: NativeLlama | None = None
        self._change = change
        int8 = int8_of is not None
        if compiled and self.device.type == "cpu" and can_copy(hf, int8=int8):
            native = NativeLlama(
                int8_of or hf, draft_vocabulary, int8=int8, round_activations=round_activations
            )
            native.listeners = self._listeners
            if self._agrees_with(native):
                self.native = native
            else:
                warnings.warn(
                    f"the compiled pass gives other logits than PyTorch for this {hf.config.model_type}; "
                    "it is not used, and the model runs more slowly: please report this, with the "
                    "output of paceline env",
                    SlowerWarning,
                    stacklevel=2,
                )

    @staticmethod
    def supports(hf: PreTrainedModel) -> bool:
        config = hf.config
        return config.model_type in _ARCHITECTURES and config.hidden_act == "silu"

    def listen(self, listener: Callable[[Tensor], None]) -> Callable[[], None]:
        self._listeners.append(listener)
        return functools.partial(self._listeners.remove, listener)

    @property
    def listening(self) -> bool:
        """Does anybody hear of passes?"""
        return bool(self._listeners)

    @property
    def device(self) -> torch.device:
        return self.head_weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.head_weight.dtype

    @torch.inference_mode()
    def _agrees_with(self, native: NativeLlama) -> bool:
        """Does it give what this pass gives? Compilers err, and nobody else would notice."""
        tokens_BN = torch.arange(6).view(2, 3)
        wanted = self(tokens_BN, RoomyCache(), None, 0)
        got = native(tokens_BN, RoomyCache(), [3, 3], 0)
        size = float(wanted[wanted.isfinite()].abs().max())
        return torch.allclose(wanted, got, rtol=0, atol=self._change * size)

    def __call__(
        self, tokens_BN: Tensor, cache: RoomyCache, ends_B: Tensor | None, keep: int
    ) -> Tensor:
        """Logits of the last `keep` columns (0: all), [B, N, V].

        Args:
            tokens_BN: New tokens, right-aligned.
            cache: What the rows hold; extended in place.
            ends_B: Length of each row after this pass; None if all rows fill the whole width.
            keep: How many columns to give logits for.
        """
        count, device = tokens_BN.shape[1], tokens_BN.device
        width = cache.get_seq_length() + count
        positions_BN = torch.arange(width - count, width, device=device)[None]
        if ends_B is not None:
            ends_B = ends_B.to(device)
            positions_BN = (positions_BN + (ends_B - width)[:, None]).clamp(min=0)

        def mask_of(window: int | None) -> Tensor | None:
            return _mask(count, width, ends_B, window, device)

        kept = 0 if self.listening else keep
        x = self.states(tokens_BN, positions_BN, cache, mask_of, kept)
        return self.logits(x[:, -keep:] if keep else x)

    def states(
        self,
        tokens_BN: Tensor,
        positions_BN: Tensor,
        cache: Cache,
        mask_of: Callable[[int | None], Tensor | None],
        keep: int = 0,
    ) -> Tensor:
        """Hidden states of the last `keep` columns (0: all) after the final norm, [B, N, D].

        `mask_of` gives 0 where a new token sees a column, by the window of a layer; None: plain causality.
        """
        x = self.embed(tokens_BN).float()
        cos, sin = self.rotary(x, position_ids=positions_BN)
        half = cos.shape[-1] // 2
        sin[..., :half] *= -1  # so that turning a vector by half its length is all that is left
        turn = (cos[:, :, None], sin[:, :, None])
        masks: dict[int | None, Tensor | None] = {}
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            if layer.window not in masks:
                masks[layer.window] = mask_of(layer.window)
            # Behind the last layer's keys and values, only columns that give logits matter.
            x = layer(x, turn, masks[layer.window], cache, index, keep if index == last else 0)
        x = self.norm(x)
        for listener in self._listeners:
            listener(x)
        return x

    def logits(self, states: Tensor) -> Tensor:
        """[..., D] -> [..., V]; -inf outside of the draft vocabulary."""
        logits = self.head(states)
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
        self.query_norm, self.key_norm = (norm and _Norm(norm) for norm in norms)
        self.before_attention = _Norm(layer.input_layernorm)
        self.before_mlp = _Norm(layer.post_attention_layernorm)
        self.qkv = make_linear([attention.q_proj, attention.k_proj, attention.v_proj])
        self.out = make_linear([attention.o_proj])
        self.gate_up = make_linear([mlp.gate_proj, mlp.up_proj])
        self.down = make_linear([mlp.down_proj])

    def __call__(
        self,
        x: Tensor,
        turn: tuple[Tensor, Tensor],
        mask: Tensor | None,
        cache: Cache,
        index: int,
        keep: int,
    ) -> Tensor:
        """The last `keep` columns (0: all) behind this layer, [B, keep or N, D]."""
        mixed = self._attend(self.before_attention(x), turn, mask, cache, index)
        if keep:
            x, mixed = x[:, -keep:], mixed[:, -keep:]
        x = x + self.out(mixed)
        gate, up = self.gate_up(self.before_mlp(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)

    def _attend(
        self,
        x: Tensor,
        turn: tuple[Tensor, Tensor],
        mask: Tensor | None,
        cache: Cache,
        index: int,
    ) -> Tensor:
        batch, count, _ = x.shape
        heads = self.query_heads
        mixed_BNHD = self.qkv(x).view(batch, count, -1, self.head_size)
        turned_BNHD = mixed_BNHD[:, :, : heads + self.key_heads]
        if self.query_norm is not None and self.key_norm is not None:
            query, key = turned_BNHD[:, :, :heads], turned_BNHD[:, :, heads:]
            turned_BNHD = torch.cat([self.query_norm(query), self.key_norm(key)], 2)
        cos, sin = turn
        turned_BNHD = turned_BNHD * cos + turned_BNHD.roll(self.head_size // 2, -1) * sin
        keys_BHWD, values_BHWD = cache.layer(index).append(
            turned_BNHD[:, :, heads:].transpose(1, 2),
            mixed_BNHD[:, :, heads + self.key_heads :].transpose(1, 2).to(turned_BNHD.dtype),
        )
        query_BHND = turned_BNHD[:, :, :heads].transpose(1, 2)
        if _few_queries(query_BHND, mask):
            mixed_BHND = self._attend_in_groups(query_BHND, keys_BHWD, values_BHWD, mask)
        else:
            mixed_BHND = F.scaled_dot_product_attention(
                query_BHND.to(keys_BHWD.dtype),
                keys_BHWD,
                values_BHWD,
                attn_mask=_as_precise(mask, keys_BHWD.dtype),
                is_causal=mask is None and count > 1,
                scale=self.scaling,
                enable_gqa=heads > self.key_heads,
            )
        return mixed_BHND.transpose(1, 2).reshape(batch, count, -1)

    def _attend_in_groups(
        self, query_BHND: Tensor, keys_BKWD: Tensor, values_BKWD: Tensor, mask: Tensor | None
    ) -> Tensor:
        """Few new tokens a row: the queries that share a key are the rows of a small product."""
        batch, _, count, _ = query_BHND.shape
        # scaled first: in 16 bits what comes out could be too large
        query = (query_BHND * self.scaling).reshape(batch * self.key_heads, -1, self.head_size)
        query = query.to(keys_BKWD.dtype)
        scores = torch.bmm(query, keys_BKWD.flatten(0, 1).transpose(1, 2)).float()
        scores = scores.view(batch, self.query_heads, count, -1)
        if mask is not None:
            scores.add_(mask)
        shares = scores.softmax(-1).to(values_BKWD.dtype).view(len(query), query.shape[1], -1)
        return torch.bmm(shares, values_BKWD.flatten(0, 1)).view(query_BHND.shape)


def _few_queries(query_BHND: Tensor, mask: Tensor | None) -> bool:
    """Are plain products faster than the fused operator, which is made for many queries a row?

    On a GPU that one is the fastest without a mask alone.
    """
    batch, _, count, _ = query_BHND.shape
    if query_BHND.device.type == "cuda":
        return mask is not None and count <= _FEW_TOKENS
    return count == 1 and batch >= _MANY_ROWS


def _as_precise(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The mask in that precision, still finite."""
    if mask is None or mask.dtype == dtype:
        return mask
    return mask.clamp(min=torch.finfo(dtype).min).to(dtype)


def _head(hf: PreTrainedModel, draft_vocabulary: Tensor | None) -> nn.Linear:
    """The output projection, or its rows of these tokens."""
    whole: Any = hf.get_output_embeddings()
    if draft_vocabulary is None:
        return whole
    rows = nn.Linear(whole.in_features, len(draft_vocabulary), bias=whole.bias is not None)
    rows.weight = nn.Parameter(whole.weight[draft_vocabulary], requires_grad=False)
    if whole.bias is not None:
        rows.bias = nn.Parameter(whole.bias[draft_vocabulary], requires_grad=False)
    return rows


def _mask(
    count: int, width: int, ends_B: Tensor | None, window: int | None, device: torch.device
) -> Tensor | None:
    """0 where a new token sees a column, [B or 1, 1, N, W]; None if plain causality says it all."""
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
    # Not -inf: before a row's first token nothing is seen, and what stands there must stay finite.
    zeros = torch.zeros(seen.shape, device=device)
    return zeros.masked_fill_(~seen, torch.finfo(torch.float32).min)


class _Norm:
    """Root-mean-square norm in float32."""

    def __init__(self, norm: Any) -> None:
        self._weight = norm.weight.detach().float()
        self._eps = norm.variance_epsilon

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self._weight.shape, self._weight, self._eps)
