"""Saves a draft as a model directory with the target's tokenizer files."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from paceline.errors import ModelLoadError
from paceline.models.admission.tokenizer import TOKENIZER_FILES, tokenizer_paths
from paceline.models.hf.draft_vocabulary import write_draft_vocabulary
from paceline.models.loading import model_directory
from paceline.models.silence import quiet
from paceline.places import copy_files, refuse_link_out
from paceline.records import atomic_directory

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    import torch
    from torch import Tensor
    from transformers import PreTrainedModel

    from paceline.models.hf.base import HfModel

_MODEL_FILES = ("config.json", "generation_config.json", "draft_vocabulary.json", *TOKENIZER_FILES)
_MODEL_FILES += ("*.safetensors", "*.safetensors.index.json")
"""Files that `save_draft` may write."""


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
    with quiet():
        hf.save_pretrained(folder)
    for weights in folder.glob("*.safetensors"):
        # safetensors makes them private, but another user may serve them
        weights.chmod((folder / "config.json").stat().st_mode)
    if draft_vocabulary is not None:
        write_draft_vocabulary(folder, draft_vocabulary)
    copy_files(files, folder)


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
