"""What can be known of a model in a fraction of a second: everything but its weights."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from safetensors import safe_open
from transformers import AutoConfig

from paceline.errors import ModelLoadError
from paceline.models.hf.architectures import context_length, refuse_by_name
from paceline.models.hf.base import named_tokens
from paceline.models.loading import find_place, read_tokenizer, reading, refuse_unknown
from paceline.models.silence import quiet

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GGUF = b"GGUF"


class ModelFacts(NamedTuple):
    """A model that has not been loaded.

    Attributes:
        path: As the user named it.
        architecture: Its model_type; None for a GGUF file, which is read only when it is converted.
        num_layers: Its depth.
        max_length: Its context in tokens; None where nothing limits it or it is not known yet.
        vocab_size: Tokens that it can name.
        num_parameters: From the headers of its safetensors files; 0 where there are none.
        tokenizer: The one beside its weights; None if there is none or it is not known yet.
    """

    path: str
    architecture: str | None = None
    num_layers: int = 0
    max_length: int | None = None
    vocab_size: int = 0
    num_parameters: int = 0
    tokenizer: PreTrainedTokenizerBase | None = None


def inspect_model(path: str | Path) -> ModelFacts:
    """Read configuration, tokenizer and the headers of the weights, and refuse what cannot be loaded.

    Raises:
        ModelLoadError: Nothing there, or something that cannot be read.
        UnsupportedModelError: The architecture is unknown, or cannot roll back.
    """
    local = Path(path).expanduser()
    if local.is_file() and local.suffix == ".gguf":
        with local.open("rb") as stream:
            if stream.read(len(_GGUF)) != _GGUF:
                raise ModelLoadError(f"{path} is not a GGUF file; download it again")
        return ModelFacts(str(path))
    with quiet():
        place = find_place(path)
        with reading(place):
            refuse_unknown(place)
            config = AutoConfig.from_pretrained(place.source, **place.options)
            refuse_by_name(config)
            text = config.get_text_config(decoder=True)
            tokenizer = read_tokenizer(place)
            count = 0 if place.directory is None else _num_parameters(place.directory)
    return ModelFacts(
        str(path),
        architecture=config.model_type,
        num_layers=text.num_hidden_layers,
        max_length=context_length(config),
        vocab_size=named_tokens(tokenizer, text.vocab_size),
        num_parameters=count,
        tokenizer=tokenizer,
    )


def _num_parameters(directory: Path) -> int:
    """From the headers, which also tell a file that was cut off."""
    count = 0
    for file in sorted(directory.glob("model*.safetensors")):
        with safe_open(file, "pt") as weights:
            names = weights.keys()
            count += sum(math.prod(weights.get_slice(name).get_shape()) for name in names)
    return count
