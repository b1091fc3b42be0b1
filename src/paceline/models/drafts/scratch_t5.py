"""Creates new T5 models with random weights, in the form of T5 v1.1 (gated, untied head)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from pydantic import Field, model_validator
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForSeq2SeqLM, T5Config

from paceline.config import StrictModel
from paceline.models.drafts.heads import untie_head
from paceline.rng import named_generator

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

PAD = "<pad>"


class NewT5(StrictModel):
    """Sizes of a new T5 v1.1.

    Attributes:
        kind: Must be `t5`; without it, a new model is a Llama.
        hidden_size: Hidden size, a multiple of num_heads.
        intermediate_size: Size of the gated MLPs; None for 8/3 of hidden_size, rounded up to a
            multiple of 16.
        num_layers: Number of decoder layers.
        num_encoder_layers: Number of encoder layers; None for num_layers.
        num_heads: Attention heads of both.
        max_distance: Distance from which all relative positions are the same.
    """

    kind: Literal["t5"]
    hidden_size: int = Field(default=256, ge=1)
    intermediate_size: int | None = Field(default=None, ge=1)
    num_layers: int = Field(default=4, ge=1)
    num_encoder_layers: int | None = Field(default=None, ge=1)
    num_heads: int = Field(default=4, ge=1)
    max_distance: int = Field(default=128, ge=32)

    @model_validator(mode="after")
    def _heads_divide(self) -> NewT5:
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} must be a multiple of num_heads {self.num_heads}"
            )
        return self


def new_t5(shape: NewT5, tokenizer: Any, seed: int) -> PreTrainedModel:
    """A T5 v1.1 with random weights.

    Its decoder begins with the padding token, as in T5, or with the end of text if there is none.
    """
    eos = cast("int | None", tokenizer.eos_token_id)
    pad = cast("int | None", tokenizer.pad_token_id)
    start = eos if pad is None else pad
    settings: dict[str, Any] = {"tie_word_embeddings": False, "decoder_start_token_id": start}
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=shape.hidden_size,
        d_kv=shape.hidden_size // shape.num_heads,
        d_ff=shape.intermediate_size or 16 * math.ceil(shape.hidden_size / 6),
        num_layers=shape.num_encoder_layers or shape.num_layers,
        num_decoder_layers=shape.num_layers,
        num_heads=shape.num_heads,
        relative_attention_max_distance=shape.max_distance,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
        eos_token_id=eos,
        pad_token_id=pad,
        **settings,
    )
    hf = AutoModelForSeq2SeqLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    untie_head(hf)
    draw_t5_weights(hf, seed)
    return hf


def draw_t5_weights(hf: PreTrainedModel, seed: int) -> None:
    """Initialize the matrices of a T5 as its authors do, and an untied head with D^-0.5.

    transformers initializes an untied head with 1, so that the logits of a new model have a
    standard deviation of D^0.5.
    """
    config: Any = hf.config
    hidden = config.d_model
    stds = {
        ".q.weight": (hidden * config.d_kv) ** -0.5,
        ".o.weight": (config.num_heads * config.d_kv) ** -0.5,
        ".wo.weight": config.d_ff**-0.5,
        "shared.weight": 1.0,
    }
    rng = named_generator(seed, "new model", 0)
    with torch.no_grad():
        for name, weight in hf.named_parameters():
            if weight.ndim < 2:
                continue  # norms start at 1
            std = next((std for end, std in stds.items() if name.endswith(end)), hidden**-0.5)
            weight.copy_(std * torch.randn(weight.shape, generator=rng))


def end_with_eos(tokenizer: PreTrainedTokenizerFast) -> None:
    """Append the end-of-text token to encoder inputs, as tokenizers of T5 do."""
    eos = tokenizer.eos_token
    backend: Any = tokenizer.backend_tokenizer
    backend.post_processor = TemplateProcessing(
        single=f"$A {eos}",
        pair=f"$A {eos} $B {eos}",
        special_tokens=[(eos, tokenizer.eos_token_id)],
    )
