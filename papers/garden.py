"""Text and models of the studies: two tasks that small models solve, and a target for each.

    spelling    encoder-decoder (T5): digits to English words, in a style that each text draws
    sums        decoder-only (Llama): four or five numbers of one digit, step by step

A garden is one seed: texts and targets of another seed are another garden.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.bench import BenchConfig, bench
from paceline.config import validate
from paceline.records import atomic_write_text
from paceline.tasks import Task, build_task, write_examples
from paceline.train import PretrainConfig, pretrain
from papers.spelling import Spelling

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = Path("runs/papers")
NUM_GATE = 1000
SOLVED = 0.8  # accuracy from which a target counts as one that solves its task
NUM_TEXTS = 60_000  # that a target is trained on


class Study(NamedTuple):
    """A task with the shapes of its models."""

    task: Task
    target: dict[str, Any]
    draft: dict[str, Any]
    target_steps: int
    draft_steps: int
    prompt: int
    answer: int
    others: dict[str, Task]


SUMS = {"task": "arithmetic", "min_terms": 4, "max_terms": 5, "max_digits": 1}
STUDIES = {
    "spelling": Study(
        Spelling(),
        {
            "kind": "t5",
            "hidden_size": 192,
            "num_layers": 3,
            "num_encoder_layers": 3,
            "num_heads": 4,
        },
        {"kind": "t5", "hidden_size": 64, "num_layers": 1, "num_encoder_layers": 1, "num_heads": 2},
        *(3000, 800, 20, 40),
        {},
    ),
    "sums": Study(
        build_task(SUMS),
        {"hidden_size": 256, "num_layers": 6, "num_heads": 4, "max_length": 96},
        {"hidden_size": 64, "num_layers": 2, "num_heads": 2, "max_length": 96},
        *(2000, 800, 24, 48),
        {"six_terms": build_task(SUMS | {"min_terms": 6, "max_terms": 6})},
    ),
}


def folder_of(seed: int) -> Path:
    """Directory of a garden."""
    return ROOT / f"garden-{seed}"


def write_text(study: Study, path: Path, split: str, count: int, seed: int) -> Path:
    """Examples of a task as a file, unless it exists."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_examples(study.task, split, count, path, seed)
    return path


def train(
    study: Study, model: dict[str, Any], text: Path, output: Path, steps: int, **more: Any
) -> Path:
    """Pretrain a new model on pairs. -> the model's directory."""
    optimizer = {"kind": "adamw", "betas": [0.9, 0.98], "weight_decay": 0.05}
    optimizer |= {"learning_rate": 1.0e-3, "warmup_fraction": 0.05, "schedule": {"kind": "linear"}}
    settings: dict[str, Any] = {
        "model": model,
        "data": {"train": str(text)},
        "output": str(output),
        "num_steps": steps,
        "batch_size": 32,
        "chunk_tokens": 4096,
        "max_prompt_tokens": study.prompt,
        "max_completion_tokens": study.answer,
        "optimizer": optimizer,
    }
    pretrain(validate(PretrainConfig, settings | more), resume=True)
    return output / "model"


def make(seed: int, name: str) -> Path:
    """The target of a task. -> its directory."""
    study, folder = STUDIES[name], folder_of(seed) / name
    text = write_text(study, folder / "train.jsonl", "train", NUM_TEXTS, seed)
    tokenizer = {"vocab_size": 320}
    return train(
        study,
        study.target,
        text,
        folder / "target",
        study.target_steps,
        tokenizer=tokenizer,
        seed=seed,
    )


def quality(seed: int, name: str) -> dict[str, float]:
    """Accuracy of the target's samples, and of answers that need no model; the gate of a garden.

    constant: the answer that is most often right, of 50 of the training text; source: the
    prompt; random: an answer of the training text. The other tasks of the draft are not gated.
    """
    study, folder = STUDIES[name], folder_of(seed) / name
    examples = study.task.examples("test", NUM_GATE, seed)
    texts = [str(one.record.completion) for one in study.task.examples("train", 500, seed)]

    def accuracy(answers: Iterable[str]) -> float:
        pairs = zip(examples, answers, strict=False)
        return statistics.fmean(study.task.score(one, answer) for one, answer in pairs)

    found = {
        "target": target_accuracy(seed, name, study.task),
        "constant": max(accuracy(itertools.repeat(text)) for text in set(texts[:50])),
        "source": accuracy(str(one.record.text) for one in examples),
        "random": accuracy(itertools.cycle(texts)),
    }
    best = max(value for key, value in found.items() if key != "target")
    error = math.sqrt(found["target"] * (1 - found["target"]) / NUM_GATE)
    passes = found["target"] - best > 5 * error and found["target"] > SOLVED
    found |= {"standard_error": error, "passes": passes}
    found |= {
        label: target_accuracy(seed, name, task, label) for label, task in study.others.items()
    }
    atomic_write_text(folder / "quality.json", json.dumps(found, indent=2) + "\n")
    return found


def target_accuracy(seed: int, name: str, task: Task, label: str = "quality") -> float:
    """Accuracy of the target's samples, T=1."""
    folder = folder_of(seed) / name
    target = str(folder / "target" / "model")
    settings = {
        "target": target,
        "draft": target,
        "task": task,
        "output": str(folder / label),
        "num_examples": NUM_GATE,
        "num_timed": 1,
        "batch_size": 100,
        "max_new_tokens": STUDIES[name].answer,
        "seed": seed,
        "grid": {"temperatures": [1.0]},
    }
    (row,) = bench(validate(BenchConfig, settings)).rows
    return statistics.fmean(value or 0.0 for value in row.sums["score"])


def options(text: str | None, *flags: str) -> argparse.Namespace:
    """Options of a part: its garden, and those that it names of task, draw and tune."""
    parser = argparse.ArgumentParser(description=text)
    parser.add_argument("--garden", type=int, required=True)
    if "task" in flags:
        parser.add_argument("--task", choices=STUDIES, required=True)
    if "draw" in flags:
        parser.add_argument("--draw", type=int)
    if "tune" in flags:
        parser.add_argument("--tune", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    given = options(__doc__, "task")
    make(given.garden, given.task)
    if not (found := quality(given.garden, given.task))["passes"]:
        raise SystemExit(
            f"the target of {given.task} has accuracy {found['target']:.3f}: wanted more than "
            f"{SOLVED} and five standard errors above an answer without a model; make another "
            "garden, such as GARDEN=8"
        )
