"""Two simulated days of requests: what a draft is worth that is frozen, aligned daily, or follows.

    OMP_NUM_THREADS=2 .venv/bin/python -m papers.drift.run

Day 1 begins with documentation to continue; from noon on, requests are questions in a chat. At noon
of day 2 the target is replaced by one that was fine-tuned on code. Each day has 20,000 requests and
16 rounds of `paceline follow`. The daily draft is aligned at the end of a day, for the seconds that
all rounds of the day together may train. A run that was stopped goes on when it is run again.
"""

from __future__ import annotations

import json
import math
import random
import re
import sysconfig
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from pyarrow import compute, parquet

from paceline.config import load_config, read_result
from paceline.follow import FollowConfig, Round, follow
from paceline.follow.judge import Judge
from paceline.records import atomic_write_text
from paceline.results import FIGURES
from paceline.train import AlignConfig, align
from papers.garden import ROOT
from papers.parallel_drafts.run import FOLDER as STARTS
from papers.parallel_drafts.run import TARGET, TEXT, aligned
from papers.statistics import PAPERS

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLDER, ROWS = ROOT / "drift", PAPERS / "drift" / "rows" / "garden-1.csv"
DAYS, REQUESTS, ROUNDS, SECONDS = 2, 20_000, 16, 60.0
NOON = ROUNDS // 2
ASKED = (
    "What does Python's `{}` do? Show it in a short example.",
    "Explain {} to someone who is new to Python.",
    "When should I use {} in Python, and when not?",
)
ALIGN = {
    "batch_size": 4,
    "mean": "token",
    "objective": [{"kind": "forward_kl"}],
    "finish": {"objective": "negative_log_acceptance", "begin": 0.7},
    "loss_vocabulary": {"frequent": 6144, "drawn": 1024},
    "freeze_embeddings": True,
    "freeze_layers": 1,
    "optimizer": {
        "kind": "adamw",
        "learning_rate": 1e-3,
        "betas": [0.9, 0.95],
        "warmup_fraction": 0.05,
        "schedule": {"kind": "linear"},
    },
}


def pieces(rng: random.Random, count: int) -> Iterator[dict[str, Any]]:
    """Different pieces of documentation, to be continued."""
    lines = (TEXT / "train.jsonl").read_text("utf-8").splitlines()
    texts = [text for line in lines if len(text := json.loads(line)["text"]) > 300]
    seen = set[str]()
    while len(seen) < count:
        text = rng.choice(texts)
        begin = text.rfind(" ", 0, rng.randrange(1, len(text) - 200)) + 1
        if (piece := text[begin : begin + 200]) not in seen:
            seen.add(piece)
            yield {"prompt": piece, "subject": "documentation"}


def questions(rng: random.Random, count: int) -> Iterator[dict[str, Any]]:
    """Different questions about names of the standard library."""
    names = set[str]()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        found = re.findall(r"^(?:def|class) ([a-zA-Z]\w+)", path.read_text("utf-8"), re.MULTILINE)
        names |= {f"{path.stem}.{name}" for name in found}
    asked = [form.format(name) for form in ASKED for name in sorted(names)]
    for content in rng.sample(asked, count):
        message = {"role": "user", "content": content}
        yield {"messages": [message], "subject": "questions"}


def write_stream(path: Path) -> None:
    """The requests of all days, in their order."""
    rng, half = random.Random(0), REQUESTS // 2
    texts, asked = pieces(rng, half), list(questions(rng, min(4000, half)))
    chats = [rng.choice(asked) for _ in range(DAYS * REQUESTS - half)]
    rows = [row | {"at": 86_400 * at / REQUESTS} for at, row in enumerate([*texts, *chats])]
    atomic_write_text(path, "".join(json.dumps(row) + "\n" for row in rows))


def fine_tuned() -> Path:
    """The target after an hour-long fine-tuning on code, in miniature."""
    overrides = [f"target={TARGET}", f"draft={TARGET}", f"output={FOLDER / 'target'}"]
    overrides += [f"data.train={TEXT / 'code.jsonl'}", "data.chat=false", "batch_size=8"]
    overrides += ["data.held_out_from_train=null", "objective=cross_entropy", "finish=null"]
    overrides += ["loss_vocabulary=null", "freeze_layers=0", "fixed_fraction=1.0"]
    overrides += ["target_rounds=null", "optimizer.learning_rate=1.0e-4", "max_seconds=300"]
    align(load_config(AlignConfig, Path("configs/align/quick.yaml"), overrides), resume=True)
    return FOLDER / "target" / "draft"


def config(target: str | Path, draft: Path, seconds: float) -> FollowConfig:
    """One round of the stream."""
    return FollowConfig.model_validate(
        {
            "target": str(target),
            "draft": str(draft),
            "log": {"path": str(FOLDER / "stream.jsonl"), "slice": "subject", "time": "at"},
            "output": FOLDER / "follow",
            "align": ALIGN | {"max_seconds": seconds},
            "store": {"max_texts": 256},
            "serving": {"to": "transformers"},
            "num_answers": 128,
            "requests_per_round": REQUESTS // ROUNDS,
            "max_prompt_tokens": 96,
            "max_new_tokens": 48,
        }
    )


def daily(settings: FollowConfig, start: Path, day: int) -> Path:
    """The draft that is aligned at the end of a day, on what the store has then."""
    output = FOLDER / f"daily-{day}"
    if (output / "result.json").exists():  # the store has changed since
        return output / "draft"
    align(settings.align_config(start, FOLDER / "follow" / "store.parquet", output), resume=True)
    return output / "draft"


def line_of(found: Round, drafts: dict[str, Path], settings: FollowConfig) -> dict[str, Any]:
    """Tokens per target call on the answers of a round: as served, and of the other drafts."""
    number, texts = found.number, FOLDER / "round.parquet"
    table = parquet.read_table(FOLDER / "follow" / "store.parquet")
    parquet.write_table(table.filter(compute.field("round") == number), texts)
    judge = Judge(settings, texts)
    line = {"round": number, "requests": found.num_requests, "decision": found.decision}
    rows = {name: judge.row(path, name) for name, path in drafts.items()}
    rows["followed"] = found.compared[0]
    tau = FIGURES["block_efficiency"]
    return line | {"serving": found.serving} | {name: tau.value(row) for name, row in rows.items()}


def run() -> None:
    """All rounds. Each appends its line to the rows."""
    if not (FOLDER / "stream.jsonl").exists():
        write_stream(FOLDER / "stream.jsonl")
    ROWS.parent.mkdir(exist_ok=True)
    first = aligned(FOLDER / "first", STARTS / "start-4", 360, 0)
    code = fine_tuned()
    lines = pd.read_csv(ROWS).to_dict("records") if ROWS.exists() else []
    drafts = {"frozen": first, "daily": first}
    for number in range(1, DAYS * ROUNDS + 1):
        target = TARGET if number <= ROUNDS + NOON else code
        settings = config(target, first, SECONDS)
        if number % ROUNDS == 1 and number > 1:
            end = config(target, first, SECONDS * ROUNDS)
            drafts["daily"] = daily(end, drafts["daily"], number // ROUNDS)
        if len(lines) >= number:
            continue
        file = FOLDER / "follow" / "rounds" / f"{number:06d}" / "round.json"
        if file.exists():  # stopped before its line was written
            found, seconds = read_result(Round, file, "paceline follow"), math.nan
        else:
            start = time.monotonic()
            (found,) = follow(settings)
            seconds = time.monotonic() - start
        lines.append(line_of(found, drafts, settings) | {"seconds": round(seconds, 1)})
        pd.DataFrame(lines).to_csv(ROWS, index=False)


if __name__ == "__main__":
    run()
