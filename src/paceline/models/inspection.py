"""Inspects a model without loading its weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from safetensors import safe_open
from transformers import GenerationConfig

from paceline.models.checkpoint_files import (
    ModelLocation,
    read_config,
    weight_files,
    without_weights,
)
from paceline.models.gguf.conversion import is_gguf, read_gguf_header
from paceline.models.hf.architectures import (
    configured_prompt,
    context_length,
    is_encoder_decoder,
    num_decoder_layers,
    num_encoder_layers,
    source_length,
)
from paceline.models.hf.base import mask_token, named_tokens, stop_tokens
from paceline.models.hf.text_part import num_text_parameters
from paceline.models.loading import open_model, read_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ModelFacts(NamedTuple):
    """Facts about a model that is not loaded.

    Attributes that are not in `contract`:
        path: As given by the user.
        hf: The model of transformers on the meta device.
        architecture: The model_type; None if unknown.
        num_layers: Number of layers, of the decoder if there is an encoder.
        num_encoder_layers: Number of layers of the encoder; 0 for a decoder-only model.
        num_parameters: Distinct weights, by the configuration.
    """

    path: str
    hf: Any = None
    architecture: str | None = None
    num_layers: int = 0
    num_encoder_layers: int = 0
    eos_token_ids: tuple[int, ...] = ()
    decoder_prompt: tuple[int, ...] | None = None
    max_length: int | None = None
    max_source_length: int | None = None
    vocab_size: int = 0
    num_parameters: int = 0
    mask_token: int | None = None
    tokenizer: PreTrainedTokenizerBase | None = None


def inspect_model(path: str | Path) -> ModelFacts:
    """Read configuration, tokenizer and headers of weights; raises if the model cannot be loaded.

    Raises:
        ModelLoadError: The model does not exist, or cannot be read.
        UnsupportedModelError: The architecture is unknown.
    """
    hf, tokenizer = _read_header(path)
    config = hf.config
    text = config.get_text_config(decoder=True)
    encodes = is_encoder_decoder(config)
    return ModelFacts(
        str(path),
        hf=hf,
        architecture=config.model_type,
        num_layers=num_decoder_layers(config),
        num_encoder_layers=num_encoder_layers(config),
        eos_token_ids=stop_tokens(hf, tokenizer),
        decoder_prompt=configured_prompt(config, hf.generation_config) if encodes else None,
        max_length=context_length(config),
        max_source_length=source_length(config) if encodes else None,
        vocab_size=named_tokens(tokenizer, text.vocab_size),
        num_parameters=num_text_parameters(hf),
        mask_token=mask_token(hf),
        tokenizer=tokenizer,
    )


def _read_header(path: str | Path) -> tuple[Any, PreTrainedTokenizerBase | None]:
    """The model of transformers on the meta device, and its tokenizer."""
    if is_gguf(path):
        return read_gguf_header(Path(path).expanduser())
    with open_model(path) as location:
        config = read_config(location)
        tokenizer = read_tokenizer(location)
        hf = without_weights(config)
        hf.generation_config = _generation_config(location)
        for file in weight_files(location.directory) if location.directory else ():
            if file.suffix == ".safetensors":
                with safe_open(file, "pt"):  # raises if it was cut off
                    pass
    return hf, tokenizer


def _generation_config(location: ModelLocation) -> GenerationConfig:
    try:
        return GenerationConfig.from_pretrained(location.source, **location.options)
    except OSError:  # there is none; as transformers when it loads a model
        return GenerationConfig.from_pretrained(
            location.source, "config.json", _from_model_config=True, **location.options
        )
