"""Saves a draft as a model directory with the target's tokenizer files."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from paceline.errors import ModelLoadError
from paceline.models.admission.tokenizer import tokenizer_paths
from paceline.models.hf.draft_vocabulary import write_draft_vocabulary
from paceline.models.loading import model_directory
from paceline.models.silence import quiet
from paceline.places import copy_files, refuse_link_out
from paceline.records import atomic_directory

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from paceline.models.hf.base import HfModel

_MODEL_FILES = ("config.json", "generation_config.json", "draft_vocabulary.json")
_MODEL_FILES += ("*.safetensors", "*.safetensors.index.json")


def other_file(directory: Path, *more: str) -> str | None:
    """The name of a file in a directory that `save_draft` does not write; None without any.

    `more`: Patterns of further files that belong there.
    """
    known = {path for pattern in (*_MODEL_FILES, *more) for path in directory.glob(pattern)}
    known.update(tokenizer_paths(directory))
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
    with quiet(), atomic_directory(out) as scratch:
        hf.save_pretrained(scratch)
        for weights in scratch.glob("*.safetensors"):
            # safetensors sets owner-only permissions, but another user may serve the model
            weights.chmod((scratch / "config.json").stat().st_mode)
        if draft.draft_vocabulary is not None:
            write_draft_vocabulary(scratch, draft.draft_vocabulary)
        copy_files(files, scratch)


def copy_tokenizer(source: str | Path, out: Path) -> None:
    """Copy a model's tokenizer files byte for byte; raises a ModelLoadError if it has none."""
    copy_files(tokenizer_files(source), out)


def tokenizer_files(source: str | Path) -> list[Path]:
    """A model's tokenizer files; raises a UsageError if it has none, or one is a link out of it."""
    directory = model_directory(source)
    files = tokenizer_paths(directory)
    for path in files:
        refuse_link_out(path, directory)
    if not files:
        raise ModelLoadError(
            f"{source} has no tokenizer files to copy to the draft; name the target's own directory"
        )
    return files
