"""Tiny runs of align: a target and a draft on disk, a corpus, and a configuration of them."""

import json
from pathlib import Path
from typing import Any

import torch

from paceline.config import validate
from paceline.records import read_jsonl
from paceline.train.config import AlignConfig
from tiny import tiny_pair

_SENTENCES = (
    "the cat sat on the mat and then another cat sat there",
    "in an inn near the river the other man ran in the rain",
    "an answer then came after the thin thread was in the needle",
    "there is nothing in the tin and nothing in the pan",
    "the red hen ran and the other hen ate the grain in the barn",
    "a hat, a pan and a tin; then another and another",
    "when the rain came the men ran in and sat near the fire",
)


def write_pair(folder: Path, *, rounded_to: torch.dtype = torch.bfloat16, **overrides: Any) -> Path:
    """`folder/target` and `folder/draft`, ordinary model directories; `folder/corpus.jsonl`.

    Weights are those of a 16-bit checkpoint, which have a compiled pass where there is a compiler.
    Rounded to float32 they have none: such a pair is several times slower.
    """
    folder.mkdir(exist_ok=True)
    for model, name in zip(tiny_pair(**overrides), ("target", "draft"), strict=True):
        model.hf.to(rounded_to).float().save_pretrained(folder / name)
        assert model.tokenizer is not None
        model.tokenizer.save_pretrained(folder / name)
    write_corpus(folder / "corpus.jsonl", [{"text": text} for text in _SENTENCES])
    return folder


def write_corpus(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def align_config(folder: Path, output: Path, **changes: Any) -> AlignConfig:
    """Ten steps of four short rows, in float32 on the CPU."""
    values: dict[str, Any] = {
        "target": str(folder / "target"),
        "draft": str(folder / "draft"),
        "output": str(output),
        "data": {"train": str(folder / "corpus.jsonl")},
        "num_steps": 10,
        "batch_size": 4,
        "max_prompt_tokens": 5,
        "max_completion_tokens": 11,
        "optimizer": {"kind": "adamw", "learning_rate": 3e-3},
        "precision": "float32",
        "device": "cpu",
    }
    return validate(AlignConfig, values | changes)


def held_out(folder: Path, **settings: Any) -> dict[str, Any]:
    """Settings of a run with evaluation on a little text."""
    corpus = str(folder / "corpus.jsonl")
    small = {"num_prompts": 3, "max_prompt_tokens": 4, "max_new_tokens": 6, "gamma": 2}
    return {"data": {"train": corpus, "held_out": corpus}, "evaluation": small | settings}


def losses(run: Path) -> list[float]:
    """The loss of every step, in order."""
    rows = [row for row in read_jsonl(run / "metrics.jsonl") if "loss" in row]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return [row["loss"] for row in rows]
