"""One draw of Faster Cascades: a draft from nothing, and every rule on sums of its own.

    python -m papers.faster_cascades.run --garden 1 --draw 3

The target is the garden's. The draft's text, start and order of training, and the examples, are the
draw's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.bench import BenchConfig, bench
from paceline.config import validate
from papers.garden import STUDIES, folder_of, options, train, write_text
from papers.rows import lines_of, write

if TYPE_CHECKING:
    from pathlib import Path

NUM_EXAMPLES = 300
DRAFT = {"hidden_size": 128, "num_layers": 3, "num_heads": 2, "max_length": 96}
DRAFT_STEPS = 1000
SOME = [0.02, 0.05, 0.1, 0.2, 0.4]
LOSSY = [0.1, 0.3, 0.6, 0.9, 0.99]
GRID: dict[str, Any] = {
    "temperatures": [1.0],
    "num_speculative_tokens": [5],
    "rules": [
        {"rule": "lossless"},
        {"rule": "lossy", "alpha": LOSSY},
        {"rule": "lossy", "alpha": LOSSY, "beta": "tuned"},
        {"rule": "chow", "alpha": SOME},
        {"rule": "diff", "alpha": SOME},
        {"rule": "opt", "alpha": [0.1, 0.2, 0.4, 0.6, 0.8]},
        {"rule": "token_v3", "alpha": [0.5, 0.8, 0.9, 0.99]},
    ],
    "strategies": [
        {"strategy": "token_cascade", "alpha": [*SOME, 1.0]},
        {"strategy": "sequence_cascade", "alpha": [0.05, 0.1, 0.15, 0.2], "normalise": True},
        *(
            {"strategy": "oracle_cascade", "rule": {"rule": "diff", "alpha": alpha}}
            for alpha in [-0.1, -0.05, 0.0, 0.05]
        ),
    ],
}


def run(garden: int, number: int) -> Path:
    """Make the draft of a draw, and answer its examples in every way. -> the file of its rows."""
    study, folder = STUDIES["sums"], folder_of(garden) / "cascades" / f"draw-{number}"
    target, seed = str(folder_of(garden) / "sums" / "target" / "model"), 2000 * garden + number
    text = write_text(study, folder / "start.jsonl", "train", 32 * DRAFT_STEPS, seed)
    more = {"tokenizer": target, "seed": seed}
    draft = train(study, DRAFT, text, folder / "start", DRAFT_STEPS, **more)
    settings = {
        "target": target,
        "draft": str(draft),
        "task": study.task,
        "output": str(folder / "rows"),
        "num_examples": NUM_EXAMPLES,
        "num_timed": 1,
        "batch_size": NUM_EXAMPLES,
        "seed": seed,
        "max_new_tokens": study.answer,
        "grid": GRID,
    }
    rows = bench(validate(BenchConfig, settings)).rows
    path = folder / "rows.csv"
    write(path, lines_of(rows, garden=garden, draw=number))
    return path


if __name__ == "__main__":
    given = options(__doc__, "draw")
    run(given.garden, given.draw)
