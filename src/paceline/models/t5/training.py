"""Hidden states of T5-like models for training, with fused projections.

The modules of transformers compute projections one by one, attention in bfloat16 under autocast,
and GELU from its parts; all of these have slow gradients on a CPU. Weights are read at each call,
so that an optimizer may change them.

Shape suffixes: B batch, T text, D hidden.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from paceline.models.hf.logit_map import logit_map
from paceline.models.llama.packing import merged_product
from paceline.models.t5.layers import Decoder, Encoder, Make, source_mask

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor
    from transformers import PreTrainedModel

    from paceline.models.contract import Batch
    from paceline.models.t5.layers import Heads


class T5States:
    """The decoder's output for whole texts, without dropout. Differentiable.

    Args:
        hf: A T5-like model; see `layers.supports`.
        frozen: Its weights do not change. Those of fused projections become views of one tensor.
    """

    def __init__(self, hf: PreTrainedModel, *, frozen: bool) -> None:
        make = Make(merged_product if frozen else _live_linear, _live_norm)
        self._encoder = Encoder(hf, make)
        self._decoder = Decoder(hf, make)
        self._scaled = logit_map(hf).scaled
        self._dtype = hf.dtype

    def __call__(self, batch: Batch) -> Tensor:
        """The decoder's output, scaled for the head, [B, T, D].

        Columns of padded tokens have other values than in transformers.
        """
        assert batch.source is not None, "a batch of an encoder-decoder has sources"
        source = self._decoder.read_source(self._encoder(batch.source))
        of_source = source_mask(batch.source.attention_BT)
        x_BTD = self._decoder.embed(batch.tokens_BT).float()
        mask: Tensor | None = None
        for layer, positions, heads in zip(
            self._decoder.layers, self._decoder.positions, source, strict=True
        ):
            if positions is not None:  # the others use the mask of the layer before
                mask = positions.whole_text(x_BTD.shape[1])[None]
            x_BTD = layer(x_BTD, _unchanged, heads, mask, of_source)
        return self._scaled(self._decoder.norm(x_BTD)).to(self._dtype)


def _unchanged(keys: Tensor, values: Tensor) -> Heads:
    return keys, values


def _live_linear(layers: Sequence[Any]) -> Callable[[Tensor], Tensor]:
    def product(x: Tensor) -> Tensor:
        weights = [layer.weight for layer in layers]
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        return F.linear(x.to(weight.dtype), weight)

    return product


def _live_norm(norm: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: F.rms_norm(x, norm.weight.shape, norm.weight.float(), norm.variance_epsilon)
