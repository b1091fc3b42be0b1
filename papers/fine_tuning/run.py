"""After a target is fine-tuned: what its draft is still worth, and what minutes of alignment give.

    python -m papers.fine_tuning.run --kind full-strong --source target --minutes 3 --draw 1

The target is SmolLM2-135M, fine-tuned on Python functions by an adapter or in full, mildly or
strongly; `original` is not fine-tuned. The draft of four layers was aligned with the original. It
is aligned again, on functions, on text of this source: completions of their beginnings by the
target or the draft, or the functions themselves (`fixed`). Figures before and after are of answers
of the target to held-out functions; order, texts and held-out functions are the draw's.
"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from paceline.config import load_config
from paceline.train import AlignConfig, align
from papers.garden import ROOT
from papers.parallel_drafts.run import FOLDER as STARTS
from papers.parallel_drafts.run import SETTINGS, TARGET, TEXT, aligned
from papers.rows import write
from papers.statistics import PAPERS

if TYPE_CHECKING:
    from pathlib import Path

FOLDER = ROOT / "fine-tuning"
CODE = TEXT / "code.jsonl"
KINDS = {
    "lora-mild": ["lora.rank=16", "optimizer.learning_rate=2.0e-4", "num_steps=60"],
    "lora-strong": ["lora.rank=16", "optimizer.learning_rate=2.0e-3", "num_steps=240"],
    "full-mild": ["optimizer.learning_rate=2.0e-5", "num_steps=60"],
    "full-strong": ["optimizer.learning_rate=3.0e-4", "num_steps=240"],
}
SOURCES = {
    "target": [],
    "draft": ["target_rounds=null", "draft_fraction=1.0"],
    "fixed": ["target_rounds=null", "fixed_fraction=1.0"],
}
PLAN = [("target", kind, (1, 3, 10) if "strong" in kind else (1, 3)) for kind in KINDS]
PLAN += [("target", "original", (3,)), ("draft", "full-strong", (1, 3, 10))]
PLAN += [("fixed", "full-strong", (1, 3, 10))]
DRAWS = 3
SHARED = ["data.chat=false", f"data.train={CODE}", "max_prompt_tokens=32"]


def target_of(kind: str) -> str:
    """The target, which is fine-tuned first by cross entropy on the functions."""
    if kind == "original":
        return TARGET
    output = FOLDER / kind
    overrides = [f"target={TARGET}", f"draft={TARGET}", f"output={output}", *SHARED]
    overrides += ["data.held_out_from_train=null", "objective=cross_entropy", "finish=null"]
    overrides += ["loss_vocabulary=null", "freeze_embeddings=false", "freeze_layers=0"]
    overrides += ["fixed_fraction=1.0", "target_rounds=null", "max_seconds=null", "batch_size=8"]
    align(load_config(AlignConfig, SETTINGS, [*overrides, *KINDS[kind]]), resume=True)
    return str(output / "draft")


def start() -> Path:
    """The draft that was aligned with the original target."""
    return aligned(FOLDER / "start", STARTS / "start-4", 360, 0)


def file_of(kind: str, source: str, minutes: float, draw: int) -> Path:
    """The file of a draw's rows, which is committed."""
    name = f"{kind}-{source}-{minutes:g}-minutes-draw-{draw}.csv"
    return PAPERS / "fine_tuning" / "rows" / name


def run(kind: str, source: str, minutes: float, draw: int) -> None:
    """Align the draft with a target, and write its figures before and after."""
    file = file_of(kind, source, minutes, draw)
    output = FOLDER / kind / file.stem
    overrides = [f"target={target_of(kind)}", f"draft={start()}", f"output={output}", *SHARED]
    overrides += [f"max_seconds={60 * minutes}", f"seed={6000 + draw}", *SOURCES[source]]
    overrides += ["data.held_out_from_train=48", "evaluation.num_prompts=48"]
    overrides += ["evaluation.max_prompt_tokens=32", "evaluation.max_new_tokens=48"]
    align(load_config(AlignConfig, SETTINGS, overrides), resume=True)
    result = json.loads((output / "result.json").read_text("utf-8"))
    labels = {"kind": kind, "source": source, "minutes": minutes, "draw": draw}
    write(file, [labels | {"when": when} | result[when] for when in ("before", "after")])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=[*KINDS, "original"], required=True)
    parser.add_argument("--source", choices=SOURCES, help="without it, the target alone is made")
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--draw", type=int)
    parser.add_argument("--garden", help="not used: there is one")
    given = parser.parse_args()
    if given.source is None:
        target_of(given.kind) if given.kind in KINDS else start()
    else:
        run(given.kind, given.source, given.minutes, given.draw)
