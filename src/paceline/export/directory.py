"""Model directory for engines, with the target's rows, tokenizer and context length."""

# V rows, D hidden width, K tokens of the draft vocabulary; weights [V, D], a bias [V]
from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from paceline.engines.assisted import assisted_settings
from paceline.errors import UsageError
from paceline.models.drafts.save import tokenizer_files, write_model
from paceline.models.loading import LICENCES, config_at
from paceline.places import copy_files

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.export.card import Launch
    from paceline.export.export_inputs import Inputs
    from paceline.models.hf.base import HfModel


_GENERATION = "generation_config.json"


def fit(inputs: Inputs) -> None:
    """Give a draft its target's number of embedding rows and context length, in place."""
    model, target = inputs.model, inputs.target
    if target is None:
        return
    only = model.draft_vocabulary if inputs.config.draft_vocabulary == "bake" else None
    num_rows = config_at(target.path).get_text_config(decoder=True).vocab_size
    set_rows(model, num_rows, only=only)
    config: Any = model.hf.config.get_text_config(decoder=True)
    rope, limit = getattr(config, "rope_parameters", None), target.max_length
    if isinstance(rope, dict) and rope.get("rope_type") == "default" and limit is not None:
        # at the draft's limit, engines would stop or draft nonsense
        config.max_position_embeddings = max(config.max_position_embeddings, limit)


def write_directory(inputs: Inputs, launch: Launch | None, folder: Path) -> None:
    """Write the model, its tokenizer and its generation config into an empty folder."""
    hf: Any = inputs.model.hf
    hf.to(inputs.stored)
    files = tokenizer_files(inputs.source)
    write_model(hf, inputs.model.draft_vocabulary, files, folder)
    _write_generation_config(inputs, launch, folder)


def copy_licence(inputs: Inputs, folder: Path) -> None:
    """Copy the licence files of the target, or of the model if it is exported alone."""
    files = (path for pattern in LICENCES for path in inputs.directory.glob(pattern))
    copy_files(files, folder)


def _write_generation_config(inputs: Inputs, launch: Launch | None, folder: Path) -> None:
    """Copy the target's; an engine may read the number of drafted tokens from it."""
    path = folder / _GENERATION
    if inputs.target is not None:
        copy_files([inputs.directory / _GENERATION], folder)
    if not inputs.config.kind.in_process or launch is None:
        return
    settings = json.loads(path.read_text("utf-8")) if path.exists() else {}
    settings |= assisted_settings(launch.gamma)
    path.write_text(json.dumps(settings, indent=2) + "\n", "utf-8")


def set_rows(model: HfModel, num_rows: int, *, only: Tensor | None = None) -> None:
    """Give embedding and head `num_rows` rows.

    New rows of the head, and values of its bias, are the mean of the others, so the logit of a new
    token is the mean of the other logits and never the largest.

    Args:
        model: Changed in place, as memory may not suffice for a copy.
        num_rows: At least the number of tokens in the tokenizer.
        only: Draft vocabulary, [K]. The head's rows of all other tokens become the mean of these
            rows, so greedy drafting never proposes them. The head is then no longer tied to the
            embedding.
    """
    if num_rows < model.vocab_size:
        raise UsageError(
            f"the target's config has vocab_size {num_rows}, but the tokenizer has "
            f"{model.vocab_size} tokens; use the files of one model"
        )
    hf: Any = model.hf
    head = hf.get_output_embeddings()
    if model.decoder_prompt is not None:
        if num_rows == head.weight.shape[0] and only is None:
            return
        raise UsageError(
            f"{hf.config.model_type} is an encoder-decoder, whose embeddings cannot be resized: it "
            f"has {head.weight.shape[0]} rows and the target {num_rows}; build the draft from the "
            "target, and leave draft_vocabulary=bake out"
        )
    tied = head.weight is hf.get_input_embeddings().weight
    known = min(num_rows, head.weight.shape[0], model.vocab_size)
    head_VD = _resized(head.weight, num_rows, known)
    bias_V = None if head.bias is None else _resized(head.bias, num_rows, known)
    if only is not None:
        head_VD = _limited_to(head_VD, only)
        bias_V = None if bias_V is None else _limited_to(bias_V, only)
    embedding = hf.get_input_embeddings()
    embedding.weight = nn.Parameter(_resized(embedding.weight, num_rows, known))
    embedding.num_embeddings = num_rows
    tied = tied and only is None
    head.weight = embedding.weight if tied else nn.Parameter(head_VD)
    head.bias = None if bias_V is None else nn.Parameter(bias_V)
    head.out_features = num_rows
    hf.vocab_size = num_rows
    text = hf.config.get_text_config(decoder=True)
    text.vocab_size = num_rows


def _resized(weight: Tensor, num_rows: int, known: int) -> Tensor:
    """The first `known` rows, followed by copies of their mean. [V, ...] -> [num_rows, ...]."""
    kept = weight.detach()[:known]
    mean = kept.float().mean(0, keepdim=True).to(weight.dtype)
    return torch.cat([kept, mean.expand(num_rows - known, *kept.shape[1:])])


def _limited_to(weight: Tensor, tokens_K: Tensor) -> Tensor:
    mean = weight[tokens_K].float().mean(0).to(weight.dtype)
    limited = mean.expand_as(weight).clone()
    limited[tokens_K] = weight[tokens_K]
    return limited
