"""Checks of config.json and generation_config.json before transformers reads them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import huggingface_hub
import transformers
from transformers import CONFIG_MAPPING, AutoConfig

from paceline.errors import ModelLoadError, UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Mapping

_COUNTS = re.compile(r"^(?!.*(size|vocab)).*(layer|label|first_k)")
"""Settings of which transformers makes lists before it makes a model."""
_MOST, _MOST_LISTED = 10_000, 1 << 22  # such a setting, and any number in a list
_ADVICE = "copy or download the model again"


def read_config(name: str, source: str | Path, options: Mapping[str, Any]) -> Any:
    """The configuration of transformers, of a model that `refuse_unreadable` accepts."""
    directory = Path(source)
    if not directory.is_dir():
        offline = bool(options.get("local_files_only"))
        file = huggingface_hub.hf_hub_download(str(source), "config.json", local_files_only=offline)
        directory = Path(file).parent
    refuse_unreadable(name, directory)
    return AutoConfig.from_pretrained(source, **options, trust_remote_code=False)


def refuse_unreadable(name: str, directory: Path) -> None:
    """Refuse a model whose architecture is unknown, or whose settings would be lost.

    Args:
        name: The model as the user named it.
        directory: Its directory.

    Raises:
        UnsupportedModelError: transformers does not know the architecture.
        ModelLoadError: A file is not a configuration.
    """
    path = directory / "config.json"
    settings = json.loads(path.read_text("utf-8"))
    kind = settings.get("model_type") if isinstance(settings, dict) else None
    if kind is None:
        raise ModelLoadError(
            f"{path} has no model_type, so it is not a transformers configuration; use the "
            "config.json that came with the weights"
        )
    if kind not in CONFIG_MAPPING and "auto_map" in settings:
        raise needs_code(name)
    if kind not in CONFIG_MAPPING:
        raise UnsupportedModelError(
            f"{name} has the architecture {kind!r}, which transformers "
            f"{transformers.__version__} does not know; install a version that does, or correct "
            f"model_type in {path}"
        )
    if settings.get("transformers_weights") is not None:
        raise ModelLoadError(
            f"{path} names other files of weights (transformers_weights), which are not read; name "
            "them as transformers does, such as model.safetensors, and remove the key"
        )
    for key in ("attn_implementation", "_attn_implementation", "experts_implementation"):
        if "/" in str(settings.get(key)):
            raise ModelLoadError(
                f"{path} names code of the hub ({key}: {settings[key]}), which is not run; remove "
                "the key"
            )
    _refuse_counts(path, settings)
    _refuse_broken(directory / "generation_config.json")


def needs_code(name: str) -> UnsupportedModelError:
    """The error for a model that only its own code can read."""
    return UnsupportedModelError(
        f"{name} needs Python code that comes with it (auto_map in config.json), which Paceline "
        "does not run; if you trust it, load it with transformers in Python and pass it to "
        "paceline.wrap_model"
    )


def _refuse_counts(path: Path, value: Any, name: str = "", most: int | None = None) -> None:
    """Refuse counts of layers and labels, and numbers in lists, that no model has."""
    if isinstance(value, dict):
        for key, part in value.items():
            _refuse_counts(path, part, key, _MOST if _COUNTS.search(key) else None)
    elif isinstance(value, list):
        for part in value:
            _refuse_counts(path, part, name, _MOST_LISTED)
    elif isinstance(value, int) and most is not None and value > most:
        raise ModelLoadError(
            f"{path} has {name} = {str(value)[:20]}, and at most {most:,} are read; {_ADVICE}"
        )


def _refuse_broken(path: Path) -> None:
    """transformers would use other settings without a word."""
    try:
        is_right = not path.exists() or isinstance(json.loads(path.read_text("utf-8")), dict)
    except (ValueError, RecursionError):
        is_right = False
    if not is_right:
        raise ModelLoadError(
            f"{path} is not a JSON object, so the model's settings cannot be read; correct the "
            "file, or remove it"
        )
