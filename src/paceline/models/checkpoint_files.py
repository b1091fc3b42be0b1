"""Checks of a model's files: its configuration, and that weights and configuration match.

A model with weights that are missing, damaged or of another model would give other texts without a
word.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    PreTrainedConfig,
)
from transformers.models.auto.modeling_auto import AutoModelForImageTextToText
from transformers.quantizers.auto import AutoHfQuantizer
from transformers.utils.import_utils import is_flash_attn_2_available
from transformers.utils.peft_utils import find_adapter_config_file

from paceline.errors import (
    ModelLoadError,
    PacelineError,
    UnsupportedModelError,
    first_line,
    is_out_of_memory,
)
from paceline.fingerprints import files_fingerprint
from paceline.models.hf.architectures import (
    is_encoder_decoder,
    is_quantized,
    nested_configs,
)
from paceline.places import TEMPLATES

if TYPE_CHECKING:
    from collections.abc import Generator

    from transformers import PreTrainedTokenizerBase

WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_READ = (".json", ".safetensors", ".bin", ".jinja", ".model", ".spm", ".txt")  # of a model
_HEADS = re.compile(r"^(eagle|hydra)$|Eagle3|^Eagle\w*ForCausalLM|medusa|speculator", re.IGNORECASE)
"""Architectures of heads that draft."""
_HEAD_KEYS = re.compile(r"medusa_num_heads|hydra_num_heads|speculators_")
_FUSED = "fc.weight"  # of EAGLE: from an embedding and hidden states to one state
# masks of older versions of transformers and scales of 8-bit caches, which no model reads
_CONSTANTS = re.compile(r"\.att(entio)?n\.(bias|masked_bias|causal_mask)$|\.([kqv]|output)_scale$")
_OWN = (None, "eager", "sdpa", "batched_mm", "grouped_mm")
"""Attention and products of experts that need no code of the hub."""


class ModelLocation(NamedTuple):
    """Where a model is read from.

    Attributes:
        name: The model as the user named it.
        source: Its directory or hub id.
    """

    name: str
    source: str

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of transformers' `from_pretrained`."""
        return {"local_files_only": True} if self.directory else {}

    @property
    def directory(self) -> Path | None:
        return Path(self.source) if Path(self.source).is_dir() else None


def read_config(location: ModelLocation) -> Any:
    """The configuration of transformers, if it is one that it can build a model of."""
    # transformers would attach an adapter of the hub
    if location.directory is None and find_adapter_config_file(location.source) is not None:
        raise ModelLoadError(
            f"{location.name} holds an adapter: hf download it, and name its local directory"
        )
    options = location.options
    settings, _ = PreTrainedConfig.get_config_dict(location.source, **options)
    if sign := _sign_of_head(settings):
        raise _head_alone(location.name, f"config.json has {sign}")
    config = AutoConfig.from_pretrained(location.source, **options, trust_remote_code=False)
    _forget_kernels(location.name, config)
    config.return_dict = config.get_text_config().return_dict = True  # else passes give tuples
    return config


def _forget_kernels(name: str, config: Any) -> None:
    for part, kind in itertools.product(nested_configs(config), ("attn", "experts")):
        asked = getattr(part, f"_{kind}_implementation", None)
        if asked in _OWN or (asked == "flash_attention_2" and is_flash_attn_2_available()):
            continue
        setattr(part, f"_{kind}_implementation", None)
        warnings.warn(
            f"the config.json of {name} asks for {kind}_implementation {asked!r}; PyTorch's is "
            "used instead, so that no code is loaded from the hub: remove the key",
            stacklevel=2,
        )


def _sign_of_head(settings: dict[str, Any]) -> str | None:
    """What in a config.json says that its weights are those of a head, such as EAGLE or Medusa."""
    stated = settings.get("model_type"), *(settings.get("architectures") or ())
    found = next((str(each) for each in stated if _HEADS.search(str(each))), None)
    return found or next((key for key in settings if _HEAD_KEYS.match(key)), None)


def _head_alone(name: str, sign: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{name} is a head that drafts from the hidden states of its target ({sign}), not a model; "
        "name a small language model with the target's tokenizer, or make one by paceline draft"
    )


def needs_code(name: str) -> UnsupportedModelError:
    """The error for a model that only its own code can read."""
    return UnsupportedModelError(
        f"{name} needs Python code that comes with it (auto_map in config.json), which Paceline "
        "does not run; if you trust it, load it with transformers in Python and pass it to "
        "paceline.wrap_model"
    )


def auto_class(config: Any) -> Any:
    """The class of transformers that loads a model of this configuration.

    That of a model of images and text reads text alone, too.
    """
    kinds: list[Any] = [AutoModelForCausalLM, AutoModelForImageTextToText]
    if is_encoder_decoder(config):
        kinds = [AutoModelForSeq2SeqLM]
    for auto in kinds:
        if type(config) in auto._model_mapping:
            return auto
    if hasattr(config, "auto_map"):
        raise needs_code(f"a model of type {config.model_type}")
    raise UnsupportedModelError(
        f"{config.model_type} is no language model that transformers loads with "
        f"{kinds[0].__name__}; name a model that reads and writes text"
    )


def with_weights(
    location: ModelLocation, config: Any, dtype: torch.dtype, place: Any = None
) -> Any:
    """The model of transformers, and what it says of the loading.

    `place`: the device that weights go straight to, or a `device_map`; None: the CPU.
    """
    auto = auto_class(config)
    if isinstance(place, torch.device):
        place = None if place.type == "cpu" else {"": place}
    with _quantized_weights(location.name, config):
        hf, info = auto.from_pretrained(
            location.source,
            config=config,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refuse_incomplete has a clearer message
            trust_remote_code=False,
            device_map=place,
            **location.options,
        )
    keep_cap(hf)
    if is_quantized(config) and not is_quantized(hf.config):
        hf._weight_conversions = None  # its weights are plain, and are saved as such
        wide = "|".join(hf._get_dtype_plan(dtype)) or "$^"
        for name, weight in hf.named_parameters():  # without scales, it is as it was stored
            weight.data = weight.data if re.search(wide, name) else weight.data.to(dtype)
    return hf, info


def keep_cap(hf: Any) -> None:
    """Have the scores of Gemma 2's attention capped: up to transformers 5.20, SDPA does not."""
    text = hf.config.get_text_config(decoder=True)
    if getattr(text, "attn_logit_softcapping", None) and text._attn_implementation == "sdpa":
        hf.set_attn_implementation("eager")


@contextlib.contextmanager
def _quantized_weights(name: str, config: Any) -> Generator[None]:
    """Raise an UnsupportedModelError where quantized weights cannot be read."""
    if not is_quantized(config):
        yield
        return
    settings = config.quantization_config
    settings = settings if isinstance(settings, dict) else settings.to_dict()
    method, reason = settings.get("quant_method", "an unnamed method"), ""
    try:
        if AutoHfQuantizer.supports_quant_method(settings):
            yield
            return
        reason = "transformers does not know it"
    except PacelineError:
        raise
    except (ImportError, RuntimeError, ValueError) as error:  # of quantizers
        if is_out_of_memory(error):
            raise
        reason = first_line(error)
    raise UnsupportedModelError(
        f"{name} is quantized by {method}, which cannot be read here ({reason}); install what it "
        'needs, or let vLLM serve it and record its hidden states (guide "A target behind a URL")'
    )


def without_weights(config: Any) -> Any:
    """The model of transformers on the meta device."""
    auto = auto_class(config)
    with torch.device("meta"):
        return auto.from_config(config, trust_remote_code=False)


def refuse_incomplete(location: ModelLocation, info: dict[str, Any]) -> None:
    """Raise a ModelLoadError unless weights and model match.

    Constants that the model computes itself may be in the files. `info`: what transformers says of
    the loading.
    """
    missing = info["missing_keys"]
    unexpected = [key for key in info["unexpected_keys"] if not _CONSTANTS.search(key)]
    if _FUSED in unexpected:
        raise _head_alone(location.name, f"its weights have {_FUSED}, as those of EAGLE")
    faults = {
        "are missing from the file": missing,
        "are in the file but not in the model": unexpected,
        "have a different size in the file": info["mismatched_keys"],
    }
    for fault, keys in faults.items():
        names = sorted(key if isinstance(key, str) else str(key[0]) for key in keys)
        if names:
            raise ModelLoadError(
                f"{location.name}: config.json and weights do not match: {len(names)} weights "
                f"{fault}, for example {names[0]}; use the config.json that came with them"
            )


def refuse_not_finite(name: str, hf: Any) -> None:
    """Raise a ModelLoadError that names a weight with NaN or infinite values."""
    for key, weight in hf.named_parameters():
        # 8-bit floats have scales of more bits
        plain = weight.is_floating_point() and weight.dtype.itemsize > 1
        if plain and not weight.isfinite().all():
            values = "NaN" if weight.isnan().any() else "infinite values"
            count = int((~weight.isfinite()).sum())
            raise ModelLoadError(
                f"{name} holds {values} in {key} ({count:,} of {weight.numel():,} values); copy it "
                "again, or go back to an earlier checkpoint"
            )


def model_fingerprint(*directories: Path) -> str:
    """Hash of all files that weights, settings and tokenizer are read from."""
    return files_fingerprint(
        file
        for directory in directories
        for file in sorted([*directory.iterdir(), *(directory / TEMPLATES).glob("*.jinja")])
        if file.suffix in _READ and not file.name.startswith(".")
    )


def weight_files(directory: Path) -> list[Path]:
    """The files of weights that transformers reads from a directory; empty if there are none."""
    for name in WEIGHTS:
        if (directory / name).exists():
            return [directory / name]
        index = directory / f"{name}.index.json"
        if index.exists():
            names = json.loads(index.read_text("utf-8"))["weight_map"].values()
            return [directory / shard for shard in sorted(set(names))]
    return []


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a tokenizer without a class of its own; transformers 4 does not know 5's name of it."""
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text("utf-8")) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text(json.dumps(settings, indent=2) + "\n", "utf-8")
