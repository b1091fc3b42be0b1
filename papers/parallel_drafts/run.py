"""One draw of parallel drafts and ordinary ones, aligned for equal minutes of one core.

    python -m papers.parallel_drafts.run --garden 1 --layers 4 --minutes 12 --draw 3

The draft is cut from the chat model once. An ordinary draft is aligned for all of the minutes; a
parallel one for half of them as an ordinary draft, then with masks. The order of the training text,
the answers of the target, the draft and the sampled blocks are the draw's.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.config import load_config
from paceline.measure import MeasureConfig, measure
from paceline.results import FIGURES
from paceline.train import AlignConfig, align
from papers.garden import ROOT, folder_of
from papers.rows import lines_of, write
from papers.statistics import PAPERS

if TYPE_CHECKING:
    from paceline.results import Row

TARGET = ".cache/SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER = ROOT / "parallel"
TEXT = FOLDER / "text"  # of `paceline corpus`
SETTINGS = Path("configs/align/quick.yaml")
LAYERS = {4: "0,1,2,29", 12: "0,1,2,5,8,11,14,17,20,23,26,29"}
WEIGHTS = ("constant", "geometric", "confidence")  # beside efficiency, the default
GAMMAS = (1, 2, 3, 4, 5, 6, 8)


def aligned(output: Path, draft: Path, seconds: float, seed: int, *settings: str) -> Path:
    """Align a draft. -> the aligned one."""
    overrides = [f"target={TARGET}", f"draft={draft}", f"output={output}", f"seed={seed}"]
    overrides += [f"data.train={TEXT / 'beginnings.jsonl'}", "data.chat=false"]
    overrides += ["data.held_out_from_train=null"]
    overrides += [f"max_seconds={seconds}", "max_prompt_tokens=32", *settings]
    align(load_config(AlignConfig, SETTINGS, overrides), resume=True)
    return output / "draft"


def measured(draft: Path, temperature: float, seed: int, *, parallel: bool) -> list[Row]:
    """Rows of a draft at each gamma, and of decoded requests."""
    settings: dict[str, Any] = {
        "target": TARGET,
        "draft": str(draft),
        "prompts": str(TEXT / "prompts.jsonl"),
        "chat": False,
        "max_prompt_tokens": 32,
        "max_new_tokens": 64,
        "batch_size": 32,
        "num_prompts": 64,
        "timed_prompts": 32,
        "draft_weights": "int8",
        "sampling": {"temperature": temperature},
        "gammas": list(GAMMAS),
        "parallel": parallel,
        "seed": seed,
    }
    return measure(MeasureConfig.model_validate(settings)).rows


def parallel_arms(layers: int, minutes: float) -> dict[str, list[str]]:
    """Settings of each parallel draft: tokens of a block, and weights of its places."""
    counts = (4,) if layers == 4 else (4, 8)
    arms = {f"parallel {count}": [f"parallel.num_tokens={count}"] for count in counts}
    if (layers, minutes) == (4, 12):
        for name in WEIGHTS:
            arms[f"{name} weights"] = [*arms["parallel 4"], f"parallel.weighting={name}"]
    return arms


def folder_of_draw(garden: int, layers: int, minutes: float, draw: int) -> Path:
    """Directory of a draw."""
    return folder_of(garden) / "parallel" / f"{layers}-layers-{minutes:g}-minutes" / f"draw-{draw}"


def rows_of_draw(garden: int, layers: int, minutes: float, draw: int) -> Path:
    """The file of a draw's rows, which is committed."""
    name = f"garden-{garden}-{layers}-layers-{minutes:g}-minutes-draw-{draw}.csv"
    return PAPERS / "parallel_drafts" / "rows" / name


def run(garden: int, layers: int, minutes: float, draw: int) -> None:
    """Make and measure the drafts of a draw, and write its rows."""
    folder, seed = folder_of_draw(garden, layers, minutes, draw), 4000 * garden + draw
    start, seconds = FOLDER / f"start-{layers}", 60 * minutes
    drafts = {"ordinary": aligned(folder / "ordinary", start, seconds, seed)}
    half = aligned(folder / "half", start, seconds / 2, seed)
    for name, settings in parallel_arms(layers, minutes).items():
        # other text than the first half of the minutes had
        drafts[name] = aligned(folder / name, half, seconds / 2, seed + 500, *settings)
    lines: list[dict[str, Any]] = []
    for name, path in drafts.items():
        for parallel in (False,) if name == "ordinary" else (True, False):
            for temperature in (1.0, 0.0):
                rows = measured(path, temperature, seed, parallel=parallel)
                labels = {"garden": garden, "draw": draw, "layers": layers, "minutes": minutes}
                made = lines_of(rows, **labels, arm=name, parallel=parallel)
                lines += [line | timed(row) for line, row in zip(made, rows, strict=True)]
    write(rows_of_draw(garden, layers, minutes, draw), lines)


def timed(row: Row) -> dict[str, Any]:
    """What lines need beside sums: costs of a block, and the speedup of decoded requests."""
    speedup = FIGURES["speedup"]
    return {
        "timed": row.setting.get("timed"),
        "target_pass_s": row.totals.get("target_pass_s"),
        "draft_pass_s": row.totals.get("draft_pass_s"),
        "block_cost": row.totals.get("block_cost"),
        "block_cost_ratio": row.totals.get("block_cost_ratio"),
        "speedup": speedup.value(row) if speedup.is_in(row) else None,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--garden", type=int, required=True)
    parser.add_argument("--layers", type=int, choices=LAYERS, required=True)
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--draw", type=int, required=True)
    given = parser.parse_args()
    run(given.garden, given.layers, given.minutes, given.draw)
