"""Creates new models and tokenizers: a Llama or T5 with random weights, and BPE trained on text."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, cast

import torch
from pydantic import BeforeValidator, Field, model_validator
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from paceline.config import StrictModel
from paceline.models.drafts.save import copy_tokenizer
from paceline.models.drafts.scratch_t5 import PAD, NewT5, end_with_eos, new_t5
from paceline.models.loading import load_tokenizer
from paceline.models.silence import quiet
from paceline.records import atomic_directory
from paceline.rng import named_generator

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

END_OF_TEXT = "<|endoftext|>"
_BYTES = 256
# Words, single digits, and runs of punctuation, each with a preceding space; other white space.
_PIECES = r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_STD = 0.02


class NewModel(StrictModel):
    """Sizes of a new Llama with tied embeddings.

    Attributes:
        hidden_size: Hidden size, an even multiple of num_heads.
        intermediate_size: Size of the MLPs; None for 8/3 of hidden_size, rounded up to a multiple
            of 16.
        num_layers: Number of layers.
        num_heads: Attention heads.
        num_key_value_heads: Key-value heads, a divisor of num_heads; None for num_heads.
        max_length: Context length in tokens.
    """

    kind: Literal["llama"] = "llama"
    hidden_size: int = Field(default=256, ge=1)
    intermediate_size: int | None = Field(default=None, ge=1)
    num_layers: int = Field(default=4, ge=1)
    num_heads: int = Field(default=4, ge=1)
    num_key_value_heads: int | None = Field(default=None, ge=1)
    max_length: int = Field(default=512, ge=2)

    @model_validator(mode="after")
    def _heads_divide(self) -> NewModel:
        if self.hidden_size % (2 * self.num_heads):
            raise ValueError(
                f"hidden_size {self.hidden_size} must be an even multiple of num_heads "
                f"{self.num_heads}"
            )
        if self.num_key_value_heads and self.num_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_heads {self.num_heads} must be a multiple of num_key_value_heads "
                f"{self.num_key_value_heads}"
            )
        return self


class NewTokenizer(StrictModel):
    """Byte-level BPE trained on the training text; every digit is a separate token.

    Attributes:
        vocab_size: Maximum number of tokens, including the end of text and the 256 bytes.
    """

    kind: Literal["bpe"] = "bpe"
    vocab_size: int = Field(default=4096, gt=_BYTES)


def _default_to_llama(value: Any) -> Any:
    if isinstance(value, dict) and "kind" not in value:
        return {"kind": "llama", **value}
    return value


AnyNewModel: TypeAlias = Annotated[
    Annotated[NewModel | NewT5, Field(discriminator="kind")] | str,
    BeforeValidator(_default_to_llama),
]
"""Sizes of a new model, by default a Llama; or the path of an existing one."""


def write_new_model(
    shape: NewModel | NewT5,
    tokenizer: NewTokenizer | str,
    texts: Iterable[str],
    out: Path,
    *,
    seed: int,
) -> None:
    """Write a model directory with random float32 weights, atomically.

    Args:
        shape: Sizes of the model.
        tokenizer: A tokenizer to train on `texts`, or a model whose tokenizer files are copied.
        texts: Training text of a new tokenizer, otherwise unused.
        out: The directory to create.
        seed: Seed of the weights.

    Raises:
        ModelLoadError: the tokenizer to copy cannot be read.
        StorageError: the disk is full or the directory cannot be written.
    """
    if isinstance(tokenizer, str):
        loaded = load_tokenizer(tokenizer)
    else:
        loaded = _new_tokenizer(shape, tokenizer, texts)
    match shape:
        case NewModel():
            hf = _new_llama(shape, loaded, seed)
        case NewT5():
            hf = new_t5(shape, loaded, seed)
    with quiet(), atomic_directory(out) as scratch:
        hf.save_pretrained(scratch)
        if isinstance(tokenizer, str):
            copy_tokenizer(tokenizer, scratch)
        else:
            loaded.save_pretrained(scratch)


def _new_tokenizer(
    shape: NewModel | NewT5, spec: NewTokenizer, texts: Iterable[str]
) -> PreTrainedTokenizerFast:
    if isinstance(shape, NewModel):
        backend = _train_bpe(spec, texts, [END_OF_TEXT])
        return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END_OF_TEXT)
    backend = _train_bpe(spec, texts, [PAD, END_OF_TEXT])
    loaded = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END_OF_TEXT, pad_token=PAD)
    end_with_eos(loaded)
    return loaded


def _new_llama(shape: NewModel, tokenizer: PreTrainedTokenizerBase, seed: int) -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size or 16 * math.ceil(shape.hidden_size / 6),
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_key_value_heads or shape.num_heads,
        max_position_embeddings=shape.max_length,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=cast("int | None", tokenizer.eos_token_id),
        pad_token_id=None,
    )
    hf = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    draw_weights(hf, seed)
    return hf


def draw_weights(hf: PreTrainedModel, seed: int) -> None:
    """Initialize matrices with std 0.02, or less for projections into the residual stream.

    Paper: Radford et al. 2019, section 2.3 (1 / sqrt(residual layers)).
    """
    rng = named_generator(seed, "new model", 0)
    num_layers = hf.config.get_text_config(decoder=True).num_hidden_layers
    with torch.no_grad():
        for name, weight in hf.named_parameters():
            if weight.ndim < 2 or not weight.requires_grad:
                continue  # norms start at 1, sinusoidal positions are constants
            residual = name.endswith(("o_proj.weight", "down_proj.weight", "c_proj.weight"))
            std = _STD / math.sqrt(2 * num_layers) if residual else _STD
            weight.copy_(torch.randn(weight.shape, generator=rng) * std)


def _train_bpe(spec: NewTokenizer, texts: Iterable[str], special: list[str]) -> Tokenizer:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=spec.vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return bpe
