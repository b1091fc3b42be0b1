"""One draw of Direct Alignment: pretraining, the target's answers, alignment in each way.

    python -m papers.direct_alignment.run --garden 1 --draw 3
    python -m papers.direct_alignment.run --garden 1 --tune

The draft is cut from the target once. The text of pretraining and its order, the prompts that the
target answers, the order of alignment and the test prompts are the draw's. `--tune` chooses the
learning rate of each objective on two draws that are not used again.
"""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

from paceline.config import validate
from paceline.data.distillation_data import generate_data
from paceline.data.requests import GenerateDataConfig
from paceline.measure.trajectory import TrajectoryConfig, trajectory
from paceline.records import atomic_write_text
from paceline.train import AlignConfig, PretrainConfig, align, pretrain
from papers.garden import ROOT, folder_of, options
from papers.rows import lines_of, write
from papers.tuning import best_rates

if TYPE_CHECKING:
    from pathlib import Path

TARGET = ".cache/SmolLM2-135M-Instruct.Q4_1.gguf"
TEXT = ROOT / "documentation"  # of `paceline corpus`
START = ROOT / "start"  # of `paceline draft`
PRETRAINING_STEPS, ALIGNMENT_STEPS = 48, 16
ARMS: dict[str, dict[str, Any]] = {
    "kld": {"objective": "forward_kl"},
    "tvd": {"objective": "tvd"},
    # over the whole vocabulary, all tokens weighed alike
    "tvd_plus_plus": {
        "objective": {"kind": "tvd_plus_plus", "estimator": "uniform"},
        "loss_vocabulary": None,
    },
    "not_pretrained": {"objective": "forward_kl"},
    "longer": {"objective": "forward_kl"},  # not pretrained, in the steps of both parts
}
RATES = (5.0e-4, 1.5e-3)
LOW_RATES = (1.5e-5, 5.0e-5)  # of TVD++: in earlier gardens 5e-5 was better than 1.5e-4
TUNING_DRAWS = (100, 101)
OPTIMIZER: dict[str, Any] = {"kind": "adamw", "betas": [0.9, 0.95], "warmup_fraction": 0.05}
OPTIMIZER |= {"schedule": {"kind": "linear"}}


class Draw:
    """One draw: its texts, the target's answers, the pretrained draft, runs of alignment."""

    def __init__(self, garden: int, number: int) -> None:
        self.number = number
        self.folder = folder_of(garden) / "direct" / f"draw-{number}"
        self.seed = 3000 * garden + number

    def text(self, name: str, count: int) -> str:
        """Documents of a file of `paceline corpus`, drawn for this draw.

        Test prompts of tuning and of other draws are of two halves of the file.
        """
        path = self.folder / f"{name}.jsonl"
        if not path.exists():
            lines = (TEXT / path.name).read_text("utf-8").splitlines(keepends=True)
            if name == "held_out":
                lines = lines[self.number in TUNING_DRAWS :: 2]
            drawn = random.Random(f"{name} {self.seed}").sample(lines, min(count, len(lines)))
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic_write_text(path, "".join(drawn))
        return str(path)

    def prepare(self) -> None:
        """Pretrain the draft, and let the target answer prompts."""
        settings = {
            "model": str(START),
            "output": str(self.folder / "pretrain"),
            "data": {"train": self.text("pretraining", 4_000), "streaming": True},
            "max_prompt_tokens": 128,
            "max_completion_tokens": 128,
            "batch_size": 8,
            "chunk_tokens": 1024,
            "num_steps": PRETRAINING_STEPS,
            "optimizer": OPTIMIZER | {"learning_rate": 2.0e-3, "weight_decay": 0.1},
            "seed": self.seed,
        }
        pretrain(validate(PretrainConfig, settings), resume=True)
        settings = {
            "target": TARGET,
            "output": str(self.folder / "answers"),
            "prompts": self.text("beginnings", 64),
            "chat": False,
            "num_per_prompt": 1,
            "temperatures": [0.0, 0.3, 0.7, 1.0],
            "top_p": 0.95,
            "max_prompt_tokens": 32,
            "max_new_tokens": 64,
            "seed": self.seed,
        }
        generate_data(validate(GenerateDataConfig, settings), resume=True)

    def align(self, arm: str, rate: float) -> str:
        """Align in one way; `longer` has the steps of pretraining, too."""
        output, alone = self.folder / f"{arm} {rate:g}", arm in ("not_pretrained", "longer")
        settings: dict[str, Any] = {
            "target": TARGET,
            "draft": str(START if alone else self.folder / "pretrain" / "model"),
            "data": {
                "train": str(self.folder / "answers" / "data"),
                "pretraining": self.text("pretraining", 4_000),
                "pretraining_fraction": 0.1,
                "keep_states_gb": 1.0,
            },
            "loss_vocabulary": {"frequent": 6144, "drawn": 1024},
            "output": str(output),
            "num_steps": ALIGNMENT_STEPS + (PRETRAINING_STEPS if arm == "longer" else 0),
            "batch_size": 8,
            "chunk_tokens": 1024,
            "max_prompt_tokens": 32,
            "max_completion_tokens": 64,
            "mean": "token",
            "optimizer": OPTIMIZER | {"learning_rate": rate},
            "seed": self.seed,
        }
        align(validate(AlignConfig, settings | ARMS[arm]), resume=True)
        return str(output)

    def measure(self, runs: list[str], files: dict[str, int]) -> list[Any]:
        """Rows of the runs' drafts on prompts of these files."""
        settings = {
            "target": TARGET,
            "runs": runs,
            "tasks": {name: self.text(name, count) for name, count in files.items()},
            "samplings": [{"temperature": 0.6, "top_p": 0.9}],
            "gammas": [3, 5],
            "num_prompts": max(files.values()),
            "max_prompt_tokens": 32,
            "max_new_tokens": 48,
            "seed": self.seed,
            "output": str(self.folder / "rows"),
        }
        return trajectory(validate(TrajectoryConfig, settings))


def tune(garden: int) -> None:
    """Choose the learning rate of each objective."""
    rows: list[Any] = []
    for number in TUNING_DRAWS:
        draw = Draw(garden, number)
        draw.prepare()
        runs = [
            draw.align(arm, rate)
            for arm in ARMS
            for rate in (LOW_RATES if arm == "tvd_plus_plus" else RATES)
        ]
        rows += draw.measure(runs, {"held_out": 64})
    best_rates([row for row in rows if row.has(gamma=3)], folder_of(garden) / "direct")


def run(garden: int, number: int) -> Path:
    """Make and measure the drafts of a draw. -> the file of its rows."""
    text = (folder_of(garden) / "direct" / "rates.json").read_text("utf-8")
    rates = json.loads(text)["rates"]
    draw = Draw(garden, number)
    draw.prepare()
    runs = [draw.align(arm, rates[arm]) for arm in ARMS]
    rows = draw.measure(runs, {"held_out": 64})
    path = draw.folder / "rows.csv"
    write(path, lines_of(rows, garden=garden, draw=number))
    return path


if __name__ == "__main__":
    given = options(__doc__, "draw", "tune")
    if given.tune:
        tune(given.garden)
    else:
        run(given.garden, given.draw)
