"""One draw of DistillSpec's recipes: a draft from nothing, aligned in each way, and measured.

    python -m papers.distillspec.run --garden 1 --task spelling --draw 3
    python -m papers.distillspec.run --garden 1 --task spelling --tune

All of a draw is its own: the text that the draft starts from, the pairs of alignment, the order of
training, the test examples. The recipes of a draw share them. `--tune` chooses the learning rate of
each recipe on two draws that are not used again.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from paceline.config import validate
from paceline.measure.trajectory import TrajectoryConfig, trajectory
from paceline.train import AlignConfig, align
from papers.garden import STUDIES, folder_of, options, train, write_text
from papers.rows import lines_of, write
from papers.tuning import best_rates

if TYPE_CHECKING:
    from pathlib import Path

JSD = {"objective": "jsd"}
FIXED = {"fixed_fraction": 1.0}
OWN = {"fixed_fraction": 0.0, "draft_fraction": 1.0}
TARGET = {"fixed_fraction": 0.0, "draft_fraction": 0.0}
COOL = {"sampling": {"temperature": 0.3}}
ARMS: dict[str, dict[str, Any]] = {
    # one divergence, five kinds of text
    "fixed": JSD | FIXED,
    "half": JSD | OWN | {"fixed_fraction": 0.5},
    "own": JSD | OWN,
    "mixed": JSD | OWN | {"draft_fraction": 0.5},
    "target": JSD | TARGET,
    # text of the target, soft and hard labels
    "forward_kl_target": {"objective": "forward_kl"} | TARGET,
    "cross_entropy_target": {"objective": "cross_entropy"} | TARGET,
    # the draft's own text, with `own` four divergences
    "forward_kl": {"objective": "forward_kl"} | OWN,
    "reverse_kl": {"objective": "reverse_kl"} | OWN,
    "tvd": {"objective": "tvd"} | OWN,
    # cool text
    "own_cool": JSD | OWN | COOL,
    "target_cool": JSD | TARGET | COOL,
}
ON_SPELLING_ALONE = ("forward_kl", "reverse_kl", "tvd", "own_cool", "target_cool")
FOLLOWED = ("fixed", "own")  # whose checkpoints are measured, too
RATES = (3.0e-4, 1.0e-3)  # in pilot draws larger ones were worse in every arm
TUNING_DRAWS = (100, 101)
NUM_STEPS = 100
BATCH = 16
NUM_PAIRS = NUM_STEPS * BATCH // 5  # five epochs
NUM_PROMPTS = 256
EVERYTHING = ({"temperature": 1.0}, {"temperature": 0.0})


def arms_of(task: str) -> list[str]:
    """The arms of a task: two cores have no time for all on both."""
    return [arm for arm in ARMS if task == "spelling" or arm not in ON_SPELLING_ALONE]


class Draw:
    """One draw of a task in a garden: its draft before alignment, and runs of alignment."""

    def __init__(self, garden: int, task: str, number: int) -> None:
        self.garden, self.task, self.number = garden, task, number
        self.study = STUDIES[task]
        self.folder = folder_of(garden) / task / f"draw-{number}"
        self.target = str(folder_of(garden) / task / "target" / "model")
        self.seed = 1000 * garden + number

    def start(self) -> None:
        """Make the draw's texts and its draft."""
        study, start = self.study, self.folder / "start"
        size = 32 * study.draft_steps
        text = write_text(study, self.folder / "start.jsonl", "train", size, self.seed)
        write_text(study, self.folder / "pairs.jsonl", "train", NUM_PAIRS, self.seed + 500)
        more = {"tokenizer": self.target, "seed": self.seed}
        train(study, study.draft, text, start, study.draft_steps, **more)

    def align(self, arm: str, rate: float) -> str:
        """Align the draft in one way. -> the run's directory."""
        output = self.folder / f"{arm} {rate:g}"
        every = NUM_STEPS // 4 if arm in FOLLOWED else NUM_STEPS
        settings = {
            "target": self.target,
            "draft": str(self.folder / "start" / "model"),
            "data": {"train": str(self.folder / "pairs.jsonl")},
            "output": str(output),
            "num_steps": NUM_STEPS,
            "batch_size": BATCH,
            "chunk_tokens": 4096,
            "max_prompt_tokens": self.study.prompt,
            "max_completion_tokens": self.study.answer,
            "mean": "token",
            "optimizer": {
                "kind": "adamw",
                "learning_rate": rate,
                "betas": [0.9, 0.98],
                "weight_decay": 0.01,
                "warmup_fraction": 0.05,
                "schedule": {"kind": "linear"},
            },
            "checkpoints": {"every_steps": every, "every_seconds": None, "keep": 4},
            "seed": self.seed,
        }
        align(validate(AlignConfig, settings | ARMS[arm]), resume=True)
        return str(output)

    def measure(self, runs: list[str], tasks: dict[str, Any], samplings: Any) -> list[Any]:
        """Rows of the runs' drafts on the draw's test examples."""
        settings = {
            "target": self.target,
            "runs": runs,
            "scored_tasks": tasks,
            "samplings": samplings,
            "gammas": [3, 5, 7],
            "num_prompts": NUM_PROMPTS,
            "max_new_tokens": self.study.answer,
            "seed": self.seed,
            "output": str(self.folder / "rows"),
        }
        return trajectory(validate(TrajectoryConfig, settings))


def tune(garden: int, task: str) -> None:
    """Choose the learning rate of each arm."""
    rows: list[Any] = []
    for number in TUNING_DRAWS:
        draw = Draw(garden, task, number)
        draw.start()
        runs = [draw.align(arm, rate) for arm in arms_of(task) for rate in RATES]
        rows += draw.measure(runs, {task: draw.study.task}, EVERYTHING[:1])
    best_rates([row for row in rows if row.has(gamma=5)], folder_of(garden) / task)


def run(garden: int, task: str, number: int) -> Path:
    """Make and measure the drafts of a draw. -> the file of its rows."""
    rates = json.loads((folder_of(garden) / task / "rates.json").read_text("utf-8"))["rates"]
    draw = Draw(garden, task, number)
    draw.start()
    runs = [draw.align(arm, rates[arm]) for arm in arms_of(task)]
    tasks = {task: draw.study.task} | draw.study.others
    rows = draw.measure(runs, tasks, EVERYTHING)
    path = draw.folder / "rows.csv"
    write(path, lines_of(rows, garden=garden, draw=number))
    return path


if __name__ == "__main__":
    given = options(__doc__, "task", "draw", "tune")
    if given.tune:
        tune(given.garden, given.task)
    else:
        run(given.garden, given.task, given.draw)
