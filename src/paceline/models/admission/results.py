"""Keeps results of comparisons in the cache, by what they depend on.

A result belongs to the class and configuration of a model, to the code that reads it, and to the
versions of the libraries. The cache is optional: without it, the comparisons run again.
"""

from __future__ import annotations

import contextlib
import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

from paceline.cache import cached_text, keep_text
from paceline.fingerprints import short_hash
from paceline.models.hf.architectures import is_tied, nested_configs
from paceline.native import compiled
from paceline.processor import level

if TYPE_CHECKING:
    from paceline.models.hf.base import HfModel

_CODE = ("admission/model.py", "admission/trial.py", "admission/twin.py", "contract.py", "t5.py")
_CODE += ("hf/*.py", "llama/*.py", "recorded/*.py", "prepare.py")
_known: dict[str, dict[str, Any]] = {}


def key_of(model: HfModel, *facts: str) -> str:
    """What a comparison of this model depends on, with further facts, as one name."""
    hf: Any = model.hf
    settings = hf.config.to_dict()
    config = {name: value for name, value in settings.items() if not name.startswith("_name")}
    chosen = [
        [getattr(part, f"_{name}_implementation", None) for name in ("attn", "experts")]
        for part in nested_configs(hf.config)
    ]
    parts = [
        *(f"{type(hf).__module__}.{type(hf).__qualname__}", str(is_tied(hf)), str(chosen)),
        *(json.dumps(config, sort_keys=True, default=str), str(model.decoder_prompt)),
        *(str(model.sessions), _code(), level(), Path(getattr(compiled(), "_name", "")).name),
        *(transformers.__version__, torch.__version__, *facts),
    ]
    return short_hash(["\n".join(parts)])


@functools.cache
def _code() -> str:
    """Hash of the trials and of the passes that they compare; the C library's name has its own."""
    models = Path(__file__).parents[1]
    files = sorted(file for part in _CODE for file in models.glob(part))
    return short_hash(file.read_bytes() for file in files)


def recall(key: str) -> dict[str, Any] | None:
    if key not in _known:
        with contextlib.suppress(TypeError, ValueError):
            _known[key] = dict(json.loads(cached_text("admission", f"{key}.json") or ""))
    return _known.get(key)


def remember(key: str, result: dict[str, Any]) -> None:
    """Keep a result; a cache that cannot be written is no error."""
    _known[key] = result
    keep_text("admission", f"{key}.json", json.dumps(result) + "\n")
