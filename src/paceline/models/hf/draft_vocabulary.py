"""The file beside a draft's weights that lists the tokens which it may propose.

The model directory stays an ordinary one with the whole head, for engines that do not know the list.
Any draft distribution leaves the text exactly the target's, so the list costs acceptance, never
exactness.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.errors import ModelLoadError

_FILE = "draft_vocabulary.json"
EXPORTED = "paceline_export.json"
"""Marks an export, and says whether the draft vocabulary is baked into its head."""


def write_draft_vocabulary(directory: Path, tokens_K: Tensor) -> None:
    """Put it beside the weights."""
    (directory / _FILE).write_text(json.dumps({"tokens": tokens_K.tolist()}), "utf-8")


def read_draft_vocabulary(directory: Path, vocab_size: int) -> Tensor | None:
    """What a model directory says, likeliest first, [K]; None if it says nothing.

    Raises:
        ModelLoadError: The file is damaged or belongs to another model.
    """
    path = directory / _FILE
    if not path.exists():
        return None
    try:
        found: Any = json.loads(path.read_text("utf-8"))["tokens"]
        tokens = torch.tensor(found, dtype=torch.int64)
        valid = tokens.ndim == 1 and 0 < len(tokens) == len(tokens.unique())
        valid = valid and int(tokens.min()) >= 0 and int(tokens.max()) < vocab_size
    except (ValueError, KeyError, TypeError, RuntimeError):
        valid = False
    if not valid:
        raise ModelLoadError(
            f'{path} is damaged: wanted {{"tokens": [...]}} with different token numbers below '
            f"{vocab_size}; make the draft again, or delete the file to draft from all tokens"
        )
    return tokens  # pyright: ignore[reportPossiblyUnboundVariable]


def is_baked(path: str | Path) -> bool:
    """Is this an export, a directory or a file in one, whose head only finds listed tokens likeliest?"""
    place = Path(path).expanduser()
    marker = (place if place.is_dir() else place.parent) / EXPORTED
    if not marker.exists():
        return False
    try:
        return dict(json.loads(marker.read_text("utf-8"))).get("draft_vocabulary") == "bake"
    except (ValueError, TypeError) as error:
        raise ModelLoadError(
            f"{marker} is damaged ({error}); export the draft again with --overwrite"
        ) from None
