"""Saves a draft as a model directory with the target's tokenizer files."""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedConfig

from paceline.errors import ModelLoadError
from paceline.models.admission.tokenizer import TOKENIZER_FILES, tokenizer_paths
from paceline.models.hf.architectures import is_encoder_decoder, stores_head
from paceline.models.hf.draft_vocabulary import DRAFT_VOCABULARY, write_draft_vocabulary
from paceline.models.loading import model_directory
from paceline.places import copy_files
from paceline.records import atomic_directory

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    import torch
    from torch import Tensor
    from transformers import PreTrainedModel

    from paceline.models.hf.base import HfModel

_MODEL_FILES = ("config.json", "generation_config.json", DRAFT_VOCABULARY, *TOKENIZER_FILES)
_MODEL_FILES += ("*.safetensors", "*.safetensors.index.json")
"""Files that `save_draft` may write."""

_LENGTH = "original_max_position_embeddings"
_THETA, _PART = "rope_theta", "partial_rotary_factor"
_OLD_NAMES: dict[str, dict[str, str]] = {
    "gpt_neox": {_THETA: "rotary_emb_base", _PART: "rotary_pct"},
    "gpt_neox_japanese": {_THETA: "rotary_emb_base", _PART: "rotary_pct"},
    "gemma3_text": {},
    "gemma3n_text": {},
    "olmo3": {},
    "qwen3_moe": {"num_local_experts": "num_experts"},
}
"""Keys that transformers 4 calls otherwise, and its models with two kinds of rotations."""


def other_file(directory: Path, *more: str) -> str | None:
    """The name of a file in a directory that `save_draft` does not write; None without any.

    `more`: Patterns of further files that belong there.
    """
    known = {path for pattern in (*_MODEL_FILES, *more) for path in directory.glob(pattern)}
    return next((path.name for path in sorted(directory.iterdir()) if path not in known), None)


def save_draft(
    draft: HfModel, tokenizer_source: str | Path, out: Path, dtype: torch.dtype | None = None
) -> None:
    """Write a model directory atomically; an existing one is replaced.

    Args:
        draft: The draft.
        tokenizer_source: The target's directory, GGUF file or hub id; its tokenizer files are
            copied byte for byte.
        out: The directory to create.
        dtype: Dtype to store the weights in; None for their own.

    Raises:
        StorageError: The disk is full or the directory cannot be written.
    """
    files = tokenizer_files(tokenizer_source)
    hf = draft.hf if dtype is None else copy.deepcopy(draft.hf).to(dtype)  # pyright: ignore
    embeddings: Any = hf.get_input_embeddings()
    hf.config.get_text_config(decoder=True).vocab_size = embeddings.weight.shape[0]
    with atomic_directory(out) as scratch:
        write_model(hf, draft.draft_vocabulary, files, scratch)


def write_model(
    hf: PreTrainedModel, draft_vocabulary: Tensor | None, files: Iterable[Path], folder: Path
) -> None:
    """Write a model into an empty folder, with these files beside it."""
    hf.save_pretrained(folder)
    path = folder / "config.json"
    settings = json.loads(path.read_text("utf-8"))
    if stores_head(hf):
        _untie(hf, settings)
    add_old_keys(hf.config, settings)
    path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", "utf-8")
    for weights in folder.glob("*.safetensors"):
        # safetensors makes them private, but another user may serve them
        weights.chmod((folder / "config.json").stat().st_mode)
    if draft_vocabulary is not None:
        write_draft_vocabulary(folder, draft_vocabulary)
    copy_files(files, folder)


def _untie(hf: PreTrainedModel, settings: dict[str, Any]) -> None:
    """Let a config.json say that the head is stored: most readers drop it otherwise.

    Where encoder and decoder share embeddings by the same key, only those of T5 are read without.
    """
    if is_encoder_decoder(hf.config) and not hasattr(hf.config, "d_kv"):
        return
    settings["tie_word_embeddings"] = False
    for part in settings.values():
        if isinstance(part, dict) and "tie_word_embeddings" in part:
            part["tie_word_embeddings"] = False


def add_old_keys(config: PreTrainedConfig, settings: dict[str, Any]) -> None:
    """Add the names that transformers 4, and engines of its time, read to a config.json.

    They read other values for what they do not find, without an error.
    """
    for key, part in vars(config).items():
        if isinstance(part, PreTrainedConfig) and isinstance(settings.get(key), dict):
            add_old_keys(part, settings[key])
    names = _OLD_NAMES.get(config.model_type, {})
    renamed = {"dtype": "torch_dtype"} | names
    found = {old: settings[new] for new, old in renamed.items() if new in settings}
    rope = settings.get("rope_parameters") or {}
    if any(isinstance(each, dict) for each in rope.values()):
        if config.model_type in _OLD_NAMES:
            found["rope_local_base_freq"] = rope["sliding_attention"][_THETA]
            rope = rope["full_attention"]
        else:
            rope = {}  # of transformers 5 alone, which would read the old keys first
    scaling = dict(rope)
    for key in {_THETA, _PART} & rope.keys():
        found[names.get(key, key)] = scaling.pop(key)
    if _LENGTH in settings and scaling.get("rope_type") == "longrope":
        scaling |= {"type": scaling.pop("rope_type")}  # Phi-3 reads no other names
        del scaling[_LENGTH]
    if rope:
        found["rope_scaling"] = None if scaling == {"rope_type": "default"} else scaling
    settings |= {key: value for key, value in found.items() if key not in settings}


def tokenizer_files(source: str | Path) -> list[Path]:
    """A model's tokenizer files; raises a UsageError if it has none."""
    directory = model_directory(source)
    files = tokenizer_paths(directory)
    if not files:
        raise ModelLoadError(
            f"{source} has no tokenizer files to copy to the draft; name the target's own directory"
        )
    return files
