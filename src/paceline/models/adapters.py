"""Merges an adapter (LoRA, DoRA, IA3 …) into its base model with peft, once; kept in the cache.

An adapter is adapter_config.json with its weights, beside the weights of a model or alone.
"""

from __future__ import annotations

import json
import tempfile
import warnings
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import huggingface_hub
import torch

from paceline.cache import cached_directory
from paceline.errors import ModelLoadError, PacelineError, first_line
from paceline.models.admission.tokenizer import has_vocabulary, tokenizer_paths
from paceline.models.checkpoint_files import (
    ModelLocation,
    has_weights,
    model_fingerprint,
    read_config,
    refuse_incomplete,
    shapes_in,
    with_weights,
)
from paceline.models.hf.architectures import is_quantized, is_tied, untie_head
from paceline.models.silence import quiet
from paceline.places import copy_files

_FORMAT = 2  # increase when merged models change, so that old cache entries are not used
CONFIG = "adapter_config.json"
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")
_ADVICE = "merge it into its base model, and name the directory of the merged model"


def has_adapter(directory: Path) -> bool:
    """True if a directory holds an adapter, alone or beside a model."""
    return any((directory / name).exists() for name in (CONFIG, *_WEIGHTS))


def merged_adapter(directory: Path) -> Path:
    """The directory of the base model with the adapter merged; merges it if it is not in the cache.

    The base model is the one in the same directory, or else `base_model_name_or_path`.

    Raises:
        ModelLoadError: peft, the base model or a file is missing, or the adapter does not fit.
        StorageError: The disk is too full for the merged model.
    """
    settings = _settings_of(directory)
    kind = settings.get("peft_type", "unknown")
    if find_spec("peft") is None:
        raise ModelLoadError(
            f"{directory} holds an adapter ({kind}), which peft merges: pip install -e '.[peft]'; "
            f"or {_ADVICE}"
        )
    base = _base_of(directory, settings)
    name = f"{directory.name}-{_FORMAT}-{model_fingerprint(directory, base)}"
    entry = cached_directory("merged", name, lambda folder: _merge_into(folder, directory, base))
    if base == directory:
        warnings.warn(
            f"the {kind} adapter in {directory} is merged into the weights beside it; remove "
            f"{CONFIG} if they contain it already",
            stacklevel=2,
        )
    return entry


def _settings_of(directory: Path) -> dict[str, Any]:
    if not (directory / CONFIG).exists():
        raise ModelLoadError(
            f"{directory} holds the weights of an adapter without {CONFIG}; add it, or remove "
            "adapter_model.* to load the model without the adapter"
        )
    if not any((directory / name).exists() for name in _WEIGHTS):
        raise ModelLoadError(
            f"{directory} has {CONFIG} but no weights of an adapter; add {_WEIGHTS[0]}, or remove "
            f"{CONFIG} to load the model without the adapter"
        )
    settings = json.loads((directory / CONFIG).read_text("utf-8"))
    if not isinstance(settings, dict):
        raise ModelLoadError(f"{directory / CONFIG} is not the configuration of an adapter")
    # peft would import the module that megatron_core names, and load what adapters names
    for key in ("megatron_config", "adapters"):
        if settings.get(key):
            raise ModelLoadError(
                f"{directory / CONFIG} sets {key}, which names code or files outside of the "
                f"adapter; {_ADVICE}"
            )
    return settings


def _base_of(directory: Path, settings: dict[str, Any]) -> Path:
    if (directory / "config.json").exists():
        return directory
    name = settings.get("base_model_name_or_path")
    if not name:
        raise ModelLoadError(
            f"{directory / CONFIG} names no base_model_name_or_path; set it to a model directory"
        )
    for place in (Path(name).expanduser(), directory / name):
        if (place / "config.json").exists():
            return place
    with suppress(Exception):  # no hub id, or not in the cache
        options = {"revision": settings.get("revision"), "local_files_only": True}
        found = Path(huggingface_hub.snapshot_download(name, **options))
        if has_weights(found):
            return found
    raise ModelLoadError(
        f"{directory} holds an adapter of {name}, which is neither a directory nor in the cache of "
        f"the hub; download it, or set base_model_name_or_path in {CONFIG} to its directory"
    )


def _merge_into(scratch: Path, directory: Path, base: Path) -> None:
    """Write the merged model, with tokenizer and other files of the adapter, else of the base."""
    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = read_config(ModelLocation(str(base), str(base)))
        if is_quantized(config):
            raise ModelLoadError(
                f"{base} is quantized, so the adapter in {directory} cannot be merged into it; "
                "name the original model as its base"
            )
        hf = _load(base, config)
        _merge(hf, directory, base)
        stored = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
        hf.to(stored).save_pretrained(scratch)
    has_own = directory != base and has_vocabulary(directory)
    left_out = tokenizer_paths(base) if has_own else ()  # not parts of two tokenizers
    for folder in (directory, base):
        for file in folder.iterdir():
            is_ours = (scratch / file.name).exists() or file.name.startswith("adapter")
            is_weights = file.suffix in _WEIGHT_SUFFIXES or file.name.endswith(".index.json")
            if not is_ours and not is_weights and file not in left_out:
                copy_files([file], scratch)


def _load(base: Path, config: Any) -> Any:
    """The base model in float32."""
    with tempfile.TemporaryDirectory() as plain:
        for file in base.iterdir():
            if not file.name.startswith("adapter"):  # transformers would attach it
                (Path(plain) / file.name).symlink_to(file.resolve())
        hf, info = with_weights(ModelLocation(str(base), plain), config, torch.float32)
    refuse_incomplete(ModelLocation(str(base), str(base)), hf, info)
    return hf


def _resize(hf: Any, directory: Path, ends: list[Any]) -> None:
    """Give the embedding and a head of its own the rows that the adapter has whole ones of."""
    file = next(directory / name for name in _WEIGHTS if (directory / name).exists())
    stored = {key: list(shape) for key, (shape, _) in shapes_in(file).items()}
    count, width = ends[0].weight.shape
    whole = [key for key in stored if key.endswith(".weight") and stored[key][1:] == [width]]
    starts = [f"base_model.model.{name}." for name, part in hf.named_modules() if part in ends]
    found = ([stored[key][0] for key in whole if key.startswith(each)] for each in starts)
    rows = {max(sizes, default=0) for sizes in found}
    if len(rows) == 1 and not rows & {0, count}:  # tokens were added, or padding removed
        hf.resize_token_embeddings(rows.pop(), mean_resizing=False)


def _merge(hf: Any, directory: Path, base: Path) -> None:
    """Merge in place, and untie the head if its weights are then others than the embedding's."""
    peft: Any = import_module("peft")  # an optional dependency
    embedding, head = hf.get_input_embeddings(), hf.get_output_embeddings()
    tied = is_tied(hf)
    _resize(hf, directory, [embedding] if tied else [embedding, head])
    untie_head(hf)  # a change of the head is no change of the embedding
    try:
        config: Any = peft.PeftConfig.from_pretrained(str(directory))
        if config.is_prompt_learning:
            raise ModelLoadError(
                f"{directory} holds an adapter of virtual tokens ({config.peft_type.value}), which "
                "cannot be merged into weights; use a LoRA adapter"
            )
        model: Any = peft.PeftModel(hf, config)
        result = model.load_adapter(str(directory), "default")
        # peft writes modules to save a second time, by this name, if tokens were added
        others = [key for key in result.unexpected_keys if ".modules_to_save." not in key]
        odd = [*result.missing_keys, *others]
        if not odd:
            model.merge_and_unload(safe_merge=True)
    except PacelineError:
        raise
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
