"""Reads and writes the list of tokens that a draft may propose, a file in its model directory.

The weights still include the full head, for engines that ignore the list. With a lossless rule, the
restriction may reduce acceptance but does not change the output distribution.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from paceline.errors import ModelLoadError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DRAFT_VOCABULARY = "draft_vocabulary.json"
EXPORTED = "paceline_export.json"
"""Marks an export; tells whether the draft vocabulary is baked into its head."""


def write_draft_vocabulary(directory: Path, tokens_K: Tensor) -> None:
    (directory / DRAFT_VOCABULARY).write_text(json.dumps({"tokens": tokens_K.tolist()}), "utf-8")


def is_draft_vocabulary(tokens: Any, vocab_size: int) -> bool:
    """Whether these are distinct token ids below `vocab_size`, [K] int64."""
    return (
        isinstance(tokens, Tensor)
        and tokens.dtype == torch.int64
        and tokens.ndim == 1
        and 0 < len(tokens) == len(tokens.unique())
        and 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size
    )


def read_draft_vocabulary(directory: Path, vocab_size: int) -> Tensor | None:
    """The list of a model directory, most likely first, [K]; None if there is none."""
    path = directory / DRAFT_VOCABULARY
    if not path.exists():
        return None
    try:
        tokens = torch.tensor(json.loads(path.read_text("utf-8"))["tokens"])
    except (ArithmeticError, ValueError, KeyError, TypeError, RuntimeError):
        tokens = None
    if not is_draft_vocabulary(tokens, vocab_size):
        raise ModelLoadError(
            f'{path} is damaged: wanted {{"tokens": [...]}} with distinct token ids below '
            f"{vocab_size}; create the draft again, or delete the file to draft from all tokens"
        )
    return tokens


def is_baked(path: str | Path) -> bool:
    """True for an export (its directory or a file in it) whose head is limited to listed tokens."""
    local = Path(path).expanduser()
    marker = (local if local.is_dir() else local.parent) / EXPORTED
    return marker.exists() and (
        json.loads(marker.read_text("utf-8")).get("draft_vocabulary") == "bake"
    )


def head_of(hf: PreTrainedModel, draft_vocabulary: Tensor | None = None) -> nn.Linear:
    """The output projection, with the rows of these tokens only unless they are None."""
    whole: Any = hf.get_output_embeddings()
    if draft_vocabulary is None:
        return whole
    rows = nn.Linear(whole.in_features, len(draft_vocabulary), bias=whole.bias is not None)
    rows.weight = nn.Parameter(whole.weight[draft_vocabulary], requires_grad=False)
    if whole.bias is not None:
        rows.bias = nn.Parameter(whole.bias[draft_vocabulary], requires_grad=False)
    return rows
