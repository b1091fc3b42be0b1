"""Merges an adapter (LoRA, DoRA, IA3 …) into its base model with peft, once; kept in the cache."""

from __future__ import annotations

import json
import warnings
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import huggingface_hub
import torch

from paceline.cache import cached_directory
from paceline.errors import ModelLoadError, first_line
from paceline.models.admission.tokenizer import has_vocabulary, tokenizer_paths
from paceline.models.checkpoint_files import (
    ModelLocation,
    model_fingerprint,
    read_config,
    refuse_incomplete,
    with_weights,
)
from paceline.models.hf.architectures import is_tied, untie_head
from paceline.models.silence import quiet
from paceline.places import copy_files

_FORMAT = 4  # increase when merged models change, so that old cache entries are not used
CONFIG = "adapter_config.json"


def merged_adapter(directory: Path) -> Path:
    """The directory of the base model with the adapter merged; merges it if it is not in the cache.

    The base model is `base_model_name_or_path`: a directory, or in the cache of the hub.
    """
    settings = json.loads((directory / CONFIG).read_text("utf-8"))
    if find_spec("peft") is None:
        raise ModelLoadError(
            f"{directory} holds an adapter, which peft merges: pip install -e '.[peft]'"
        )
    # peft would import the module that megatron_core names, and load what adapters names
    if fault := next((key for key in ("megatron_config", "adapters") if settings.get(key)), None):
        raise ModelLoadError(
            f"{directory / CONFIG} sets {fault}, which names code or files outside of the adapter; "
            "merge it into its base model, and name the merged model"
        )
    base = _base_of(settings)
    if (base / CONFIG).exists():
        raise ModelLoadError(f"{directory} is an adapter of another, {base}; merge that one first")
    name = f"{directory.name}-{_FORMAT}-{model_fingerprint(directory, base)}"
    return cached_directory("merged", name, lambda folder: _merge_into(folder, directory, base))


def _base_of(settings: dict[str, Any]) -> Path:
    name = str(settings.get("base_model_name_or_path"))
    if (base := Path(name).expanduser()).is_dir():
        return base
    options = {"revision": settings.get("revision"), "local_files_only": True}
    return Path(huggingface_hub.snapshot_download(name, **options))


def _merge_into(scratch: Path, directory: Path, base: Path) -> None:
    """Write the merged model, with the tokenizer of the adapter, else that of the base."""
    location = ModelLocation(str(base), str(base))
    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = read_config(location)
        hf, info = with_weights(location, config, torch.float32)
        refuse_incomplete(location, hf, info)
        _merge(hf, directory, base)
        stored = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
        hf.to(stored).save_pretrained(scratch)
    copy_files(tokenizer_paths(directory if has_vocabulary(directory) else base), scratch)


def _merge(hf: Any, directory: Path, base: Path) -> None:
    """Merge in place, and untie the head if its weights are then others than the embedding's."""
    peft: Any = import_module("peft")  # an optional dependency
    tied = is_tied(hf)
    untie_head(hf)  # a change of the head is no change of the embedding
    place = str(directory.absolute())  # peft takes other names for those of the hub, too
    try:
        model: Any = peft.PeftModel(hf, peft.PeftConfig.from_pretrained(place))
        result = model.load_adapter(place, "default")
        odd = [*result.missing_keys, *result.unexpected_keys]
        if not odd:
            model.merge_and_unload(safe_merge=True)
    except Exception as error:
        raise ModelLoadError(
            f"peft cannot merge the adapter in {directory} into {base} ({first_line(error)}); "
            "check that it belongs to this base model"
        ) from error
    if odd:
        raise ModelLoadError(
            f"the adapter in {directory} does not fit {base}: {len(odd)} of its weights are "
            f"missing or unknown, for example {odd[0]}; name the base model that it was trained for"
        )
    if tied and torch.equal(hf.get_output_embeddings().weight, hf.get_input_embeddings().weight):
        hf.tie_weights()
    elif tied:
        hf.config.tie_word_embeddings = False
        hf.config.get_text_config(decoder=True).tie_word_embeddings = False
