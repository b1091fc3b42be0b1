"""Memory that stays flat: the same work again and again in one process.

    PYTHONPATH=tests .venv/bin/python -m soak.memory --seconds 7200     an equal part for each
    PYTHONPATH=tests .venv/bin/python -m soak.memory --rows 1000000     a report of many rows

The resident memory after each repetition is noted. It may not grow from the second quarter of the
time to the last one by more than 2%.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.data.distillation_data import generate_data
from paceline.decode import SpeculativeDecoder
from paceline.follow import FollowConfig, follow
from paceline.models import load_model
from support.data import generation, write_lines
from support.processes import COMMAND_LINE
from support.reports import bench_run
from support.runs import write_pair

if TYPE_CHECKING:
    from collections.abc import Callable

MOST_GROWTH = 1.02


def resident() -> float:
    """Resident memory of this process in 10^6 bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def generating(folder: Path) -> Callable[[], None]:
    """44 answers with two models and recorded states."""

    def work() -> None:
        writer = {"kind": "model", "hidden_states": True}
        config = generation(folder, folder / "out", draft=str(folder / "draft"), writer=writer)
        generate_data(config)
        shutil.rmtree(folder / "out")

    return work


def following(folder: Path) -> Callable[[], None]:
    """One round of a log that grows."""
    log, number = folder / "log.jsonl", 0
    values = {name: str(folder / name) for name in ("target", "draft")}
    align = {"num_steps": 4, "batch_size": 4}
    values |= {"log": str(log), "output": str(folder / "followed"), "align": align}
    values |= {"num_answers": 16, "least_requests": 8, "max_prompt_tokens": 12}
    config = FollowConfig.model_validate(
        values | {"max_new_tokens": 10, "store": {"max_texts": 64}}
    )

    def work() -> None:
        nonlocal number
        with log.open("a") as stream:
            for _ in range(16):
                number += 1
                stream.write(json.dumps({"prompt": f"the {number} ran"}) + "\n")
        assert follow(config)

    return work


def decoding(folder: Path) -> Callable[[], None]:
    """64 requests in a batch of 8 whose rows are refilled."""
    target, draft = (load_model(folder / name, dtype="float32") for name in ("target", "draft"))
    decoder = SpeculativeDecoder(target, draft, gamma=3)
    prompts = [[3 + (7 * number) % 250, 9, 4 + number % 5] for number in range(64)]

    def work() -> None:
        decoder.generate(prompts, 24, seed=1, batch_size=8)

    return work


PARTS = {"generate-data": generating, "follow": following, "decode": decoding}


def grows(work: Callable[[], None], seconds: float) -> tuple[int, float, float]:
    """Repetitions, and the median memory of the second and the last quarter of the time."""
    begin, noted = time.monotonic(), list[tuple[float, float]]()
    while (passed := time.monotonic() - begin) < seconds:
        work()
        noted.append((passed / seconds, resident()))
    quarters = (0.25, 0.5), (0.75, 1.0)
    found = [statistics.median(mb for at, mb in noted if a <= at < b) for a, b in quarters]
    return len(noted), found[0], found[1]


def many_rows(count: int, folder: Path) -> dict[str, float]:
    """Seconds and peak memory of `paceline report` for a bench of `count` rows."""
    run = bench_run(folder / "run")
    rows = (run / "rows.jsonl").read_text().splitlines()
    with (run / "rows.jsonl").open("w") as stream:
        for number in range(count):
            row = json.loads(rows[number % len(rows)])
            row["setting"]["alpha"] = number / count
            stream.write(json.dumps(row) + "\n")
    start = time.monotonic()
    command = [sys.executable, "-c", COMMAND_LINE, "report", str(run)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e6
    return {"code": done.returncode, "seconds": time.monotonic() - start, "peak GB": peak}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--rows", type=int)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    failed = False
    with tempfile.TemporaryDirectory() as place:
        if given.rows:
            found = many_rows(given.rows, Path(place))
            failed = found["code"] != 0
            print(found)  # noqa: T201
        else:
            folder = write_pair(Path(place) / "pair")
            write_lines(folder / "prompts.jsonl", *[{"prompt": f"the {n}"} for n in range(11)])
            for name, part in PARTS.items():
                count, before, after = grows(part(folder), given.seconds / len(PARTS))
                failed = failed or after > MOST_GROWTH * before
                print(f"{name}: {count} times, {before:.0f} MB, then {after:.0f} MB", flush=True)  # noqa: T201
    raise SystemExit(int(failed))
