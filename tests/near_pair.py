"""A target and a draft that agrees with it now and then, to be measured in an engine."""

import itertools
import json
from pathlib import Path
from typing import Any

from aligning import write_pair
from paceline.config import validate
from paceline.measure.served_runs import ServedConfig
from paceline.models import CausalModel, load_model
from paceline.permissions import given

GAMMA = 3


def write_near_pair(folder: Path) -> tuple[CausalModel, CausalModel]:
    """Both models, in `folder/target` and `folder/near`."""
    write_pair(folder)
    target = load_model(folder / "target", dtype="float32")
    # the target itself with one layer scaled
    draft = load_model(folder / "target", dtype="float32")
    draft.hf.model.layers[2].mlp.down_proj.weight.data.mul_(0.25)
    draft.hf.save_pretrained(folder / "near")
    assert draft.tokenizer is not None
    draft.tokenizer.save_pretrained(folder / "near")
    return target, draft


def served_config(folder: Path, engine: dict[str, Any], **changes: Any) -> ServedConfig:
    values = {
        "target": str(folder / "target"),
        "draft": str(folder / "near"),
        "prompts": str(many_prompts(folder)),
        "num_prompts": 10,
        "max_new_tokens": 24,
        "num_speculative_tokens": GAMMA,
        "dtype": "float32",
        "device": "cpu",
        "engine": engine,
    }
    return validate(ServedConfig, given(values | changes))


def many_prompts(folder: Path) -> Path:
    """64 different short prompts."""
    path = folder / "many.jsonl"
    words = ["the", "a", "in", "and"]
    rows = [{"prompt": " ".join((*three, "cat"))} for three in itertools.product(words, repeat=3)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
