"""Model directory for engines, with the target's vocabulary, tokenizer and context length."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from paceline.export.export_config import LICENCES
from paceline.export.rows import set_rows
from paceline.models.drafts.save import copy_tokenizer
from paceline.models.hf.draft_vocabulary import write_draft_vocabulary
from paceline.models.loading import model_directory
from paceline.models.silence import quiet
from paceline.places import copy_files

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.export.export_inputs import Sources
    from paceline.export.launch import Launch

_GENERATION = "generation_config.json"


def fit(sources: Sources) -> None:
    """Give a draft its target's number of embedding rows and context length, in place."""
    model, target = sources.model, sources.target
    if target is None:
        return
    only = model.draft_vocabulary if sources.config.draft_vocabulary == "bake" else None
    set_rows(model, target.num_rows, only=only)
    config: Any = model.hf.config.get_text_config(decoder=True)
    wanted = target.facts.max_length
    if extends_positions(sources) and wanted is not None:
        # at the draft's limit, engines would stop or draft nonsense
        config.max_position_embeddings = max(config.max_position_embeddings, wanted)


def extends_positions(sources: Sources) -> bool:
    """True if the draft can have its target's context: rotary positions without scaling."""
    config: Any = sources.model.hf.config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or {}
    has_limit = getattr(config, "max_position_embeddings", None) is not None
    return has_limit and isinstance(rope, dict) and rope.get("rope_type") == "default"


def write_directory(sources: Sources, launch: Launch | None, folder: Path) -> None:
    """Write the model, its tokenizer and its generation config into an empty folder."""
    hf: Any = sources.model.hf
    hf.to(sources.stored)
    with quiet():
        hf.save_pretrained(folder)
    for weights in folder.glob("*.safetensors"):
        # safetensors makes them private, but another user may serve them
        weights.chmod((folder / "config.json").stat().st_mode)
    copy_tokenizer(sources.tokenizer_source, folder)
    if sources.model.draft_vocabulary is not None:
        write_draft_vocabulary(folder, sources.model.draft_vocabulary)
    _write_generation_config(sources, launch, folder)


def copy_licence(sources: Sources, folder: Path) -> None:
    """Copy the licence files of the target, or of the model if it is exported alone."""
    source = model_directory(sources.tokenizer_source)
    copy_files((path for pattern in LICENCES for path in source.glob(pattern)), folder)


def _write_generation_config(sources: Sources, launch: Launch | None, folder: Path) -> None:
    """Copy the target's; transformers reads the number of drafted tokens from it."""
    path = folder / _GENERATION
    if sources.target is not None:
        copy_files([sources.target.directory / _GENERATION], folder)
    if sources.config.to != "transformers" or launch is None:
        return
    settings = json.loads(path.read_text("utf-8")) if path.exists() else {}
    settings |= {
        "num_assistant_tokens": launch.gamma,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    }
    path.write_text(json.dumps(settings, indent=2) + "\n", "utf-8")
