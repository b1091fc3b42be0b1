"""Creates new models with random weights (Llama, T5, a smaller target), and BPE from text."""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import torch
from pydantic import BeforeValidator, Field, model_validator
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedTokenizerFast

from paceline.config import StrictModel
from paceline.errors import UnsupportedModelError, UsageError
from paceline.models.checkpoint_files import save_tokenizer
from paceline.models.drafts.save import tokenizer_files, write_model
from paceline.models.hf.architectures import (
    is_encoder_decoder,
    is_tied,
    num_decoder_layers,
    shorten_config,
    untie_head,
)
from paceline.models.loading import load_tokenizer
from paceline.records import atomic_directory
from paceline.rng import named_generator

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from transformers import PreTrainedConfig, PreTrainedModel

    from paceline.models.hf.base import HfModel

END_OF_TEXT, _PAD = "<|endoftext|>", "<pad>"
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


class NewT5(StrictModel):
    """Sizes of a new T5 v1.1: gated, with an untied head.

    Attributes:
        kind: Must be `t5`; without it, a new model is a Llama.
        hidden_size: Hidden size, a multiple of num_heads.
        intermediate_size: Size of the gated MLPs; None for 8/3 of hidden_size, rounded up to a
            multiple of 16.
        num_layers: Number of decoder layers.
        num_encoder_layers: Number of encoder layers; None for num_layers.
        num_heads: Attention heads of both.
    """

    kind: Literal["t5"]
    hidden_size: int = Field(default=256, ge=1)
    intermediate_size: int | None = Field(default=None, ge=1)
    num_layers: int = Field(default=4, ge=1)
    num_encoder_layers: int | None = Field(default=None, ge=1)
    num_heads: int = Field(default=4, ge=1)

    @model_validator(mode="after")
    def _heads_divide(self) -> NewT5:
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} must be a multiple of num_heads {self.num_heads}"
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
    loaded: Any
    if isinstance(tokenizer, str):
        loaded = load_tokenizer(tokenizer)
    else:
        loaded = _new_tokenizer(shape, tokenizer, texts)
    num_tokens = max(loaded.get_vocab().values()) + 1  # ids may have gaps
    new: Any = _new_llama if isinstance(shape, NewModel) else _new_t5
    hf = new(shape, loaded, num_tokens)
    draw_weights(hf, seed)
    files = tokenizer_files(tokenizer) if isinstance(tokenizer, str) else []
    with atomic_directory(out) as scratch:
        write_model(hf, None, files, scratch)
        if not files:
            save_tokenizer(loaded, scratch)


def _new_tokenizer(
    shape: NewModel | NewT5, spec: NewTokenizer, texts: Iterable[str]
) -> PreTrainedTokenizerFast:
    """A trained tokenizer; that of a T5 appends the end of text, as tokenizers of T5 do."""
    special = {"pad_token": _PAD} if isinstance(shape, NewT5) else {}
    special["eos_token"] = END_OF_TEXT
    backend = _train_bpe(spec, texts, list(special.values()))
    loaded = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    if "pad_token" in special:
        post: Any = loaded.backend_tokenizer
        post.post_processor = TemplateProcessing(
            single=f"$A {END_OF_TEXT}",
            pair=f"$A {END_OF_TEXT} $B {END_OF_TEXT}",
            special_tokens=[(END_OF_TEXT, loaded.eos_token_id)],
        )
    return loaded


def _new_llama(shape: NewModel, tokenizer: Any, num_tokens: int) -> PreTrainedModel:
    from transformers import LlamaConfig  # slow: it loads the compiler of torch

    config = LlamaConfig(
        vocab_size=num_tokens,
        hidden_size=shape.hidden_size,
        intermediate_size=_inner_size(shape),
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_key_value_heads or shape.num_heads,
        max_position_embeddings=shape.max_length,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)


def _new_t5(shape: NewT5, tokenizer: Any, num_tokens: int) -> PreTrainedModel:
    """Its decoder begins with the padding token, or with the end of text if there is none."""
    from transformers import T5Config  # slow: it loads the compiler of torch

    eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    settings: dict[str, Any] = {
        "tie_word_embeddings": False,
        "decoder_start_token_id": eos if pad is None else pad,
    }
    config = T5Config(
        vocab_size=num_tokens,
        d_model=shape.hidden_size,
        d_kv=shape.hidden_size // shape.num_heads,
        d_ff=_inner_size(shape),
        num_layers=shape.num_encoder_layers or shape.num_layers,
        num_decoder_layers=shape.num_layers,
        num_heads=shape.num_heads,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
        eos_token_id=eos,
        pad_token_id=pad,
        **settings,
    )
    hf = AutoModelForSeq2SeqLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    untie_head(hf)
    return hf


def _inner_size(shape: NewModel | NewT5) -> int:
    return shape.intermediate_size or 16 * math.ceil(shape.hidden_size / 6)


def draw_weights(hf: PreTrainedModel, seed: int) -> None:
    """Initialize matrices; norms start at 1, and sinusoidal positions are constants.

    With std 0.02, or less for projections into the residual stream. Those of a T5 as its authors
    do, and its untied head with D^-0.5: transformers initializes it with 1, so that the logits of a
    new model have a standard deviation of D^0.5.

    Paper: Radford et al. 2019, section 2.3 (1 / sqrt(residual layers)).
    """
    rng = named_generator(seed, "new model", 0)
    std_of = _t5_std if hasattr(hf.config, "d_kv") else _std
    with torch.no_grad():
        for name, weight in hf.named_parameters():
            if weight.ndim >= 2 and weight.requires_grad:
                weight.copy_(torch.randn(weight.shape, generator=rng) * std_of(name, hf.config))


def _std(name: str, config: PreTrainedConfig) -> float:
    residual = name.endswith(("o_proj.weight", "down_proj.weight", "c_proj.weight"))
    num_layers = config.get_text_config(decoder=True).num_hidden_layers
    return _STD / math.sqrt(2 * num_layers) if residual else _STD


def _t5_std(name: str, config: Any) -> float:
    stds = {
        ".q.weight": (config.d_model * config.d_kv) ** -0.5,
        ".o.weight": (config.num_heads * config.d_kv) ** -0.5,
        ".wo.weight": config.d_ff**-0.5,
        "shared.weight": 1.0,
    }
    return next((std for end, std in stds.items() if name.endswith(end)), config.d_model**-0.5)


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


def new_like(hf: PreTrainedModel, config: PreTrainedConfig) -> PreTrainedModel:
    """A new model of the same kind, whose head is untied if that of `hf` is.

    transformers 5 ties the heads of new encoder-decoders to the embeddings, whatever the config
    says, but leaves them alone when it loads weights that differ. New weights are not quantized.
    """
    vars(config).pop("quantization_config", None)
    new = type(hf)(config)
    if not is_tied(hf):
        untie_head(new)
    return new


_STEPS = (64, 16, 1)  # hidden sizes are multiples of the first that divides the target's
_ROUND = 16  # inner sizes are multiples of this
_FULL = "full_attention"
_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads")


def derive_draft(
    target: HfModel, share: float, *, num_layers: int | None = None, seed: int = 0
) -> HfModel:
    """Create the widest draft with at most `share` of the target's parameters, in float32.

    Inner size, heads and key heads are in proportion to the target's; the head size is the same.

    Args:
        target: Gives architecture, tokenizer and proportions.
        share: In (0, 1).
        num_layers: Number of layers; None for an eighth of the target's.
        seed: Seed of the random weights.

    Raises:
        UsageError: No draft with this vocabulary is so small, or the target has fewer layers.
        UnsupportedModelError: The target is an encoder-decoder, or its config lacks the usual names
            of sizes.
    """
    config = target.hf.config
    if is_encoder_decoder(config):
        raise UnsupportedModelError(
            f"{config.model_type} is an encoder-decoder, which gets no smaller copy with random "
            "weights; use a subset of its layers"
        )
    if any(getattr(config, name, None) is None for name in _SIZES):
        raise UnsupportedModelError(
            f"the config of {config.model_type} lacks one of {', '.join(_SIZES)}; use a subset of "
            "its layers"
        )
    by_layer = getattr(config, "is_heterogeneous", False)  # Gemma 4; a list: Gemma 3n
    if by_layer or isinstance(getattr(config, "intermediate_size", None), list):
        raise UnsupportedModelError(
            f"the sizes of {config.model_type} differ by layer, so it gets no narrower copy; use a "
            "subset of its layers, or a smaller model with its tokenizer"
        )
    count = num_decoder_layers(config)
    depth = max(1, round(count / 8)) if num_layers is None else num_layers
    if not 1 <= depth <= count:
        raise UsageError(f"got {depth} layers; wanted 1 to the target's {count}")
    hf = _widest(target, depth, share * target.num_parameters)
    draw_weights(hf, seed)
    hf.generation_config = target.hf.generation_config
    return target.rewrap(hf.eval())


def _widest(target: HfModel, depth: int, most: float) -> PreTrainedModel:
    """The widest model with at most `most` parameters; its weights are not initialized."""
    smallest = None
    for width in reversed(_widths(target.hf.config)):
        config = _narrowed(target.hf.config, width, depth)
        with torch.device("meta"):
            size = new_like(target.hf, config).num_parameters()
        if size <= most:
            return new_like(target.hf, config).float().to(target.device)  # pyright: ignore
        smallest = size
    share = 1.0 if smallest is None else smallest / target.num_parameters
    raise UsageError(
        f"the smallest draft of {depth} layers with this vocabulary has {share:.1%} of the "
        "target's parameters; request more, or reduce the target's vocabulary first"
    )


def _widths(config: PreTrainedConfig) -> range:
    """Candidate hidden sizes: multiples of a step, or of a group of heads if these add up to it."""
    if getattr(config, "head_dim", None) is None:
        step = _group(config) * config.hidden_size // config.num_attention_heads
    else:
        step = next(step for step in _STEPS if config.hidden_size % step == 0)
    return range(step, config.hidden_size + 1, step)


def _narrowed(config: PreTrainedConfig, width: int, depth: int) -> PreTrainedConfig:
    """The config with fewer and narrower layers, of heads of the same size in complete groups."""
    new: Any = copy.deepcopy(config)
    count = new.num_hidden_layers
    shorten_config(new, [(layer + 1) * count // depth - 1 for layer in range(depth)])
    # with sliding windows only, the draft would never attend to the beginning of a text
    types = getattr(config, "layer_types", None) or ()
    if _FULL in types and _FULL not in new.layer_types:
        new.layer_types[-1] = _FULL
    group = _group(config)
    groups = max(1, round(new.num_attention_heads // group * width / new.hidden_size))
    if getattr(new, "num_key_value_heads", None) is not None:
        new.num_key_value_heads = groups
    inner = getattr(new, "intermediate_size", None)
    if inner is not None:
        new.intermediate_size = _ROUND * max(1, round(inner * width / new.hidden_size / _ROUND))
    new.hidden_size, new.num_attention_heads = width, groups * group
    return new


def _group(config: PreTrainedConfig) -> int:
    """Query heads per key head."""
    key_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return config.num_attention_heads // key_heads
