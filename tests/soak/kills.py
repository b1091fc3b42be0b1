"""Every command that writes, stopped at random: killed, on a full disk, on a read-only one.

    PYTHONPATH=tests .venv/bin/python -m soak.kills --count 1000

Each run is stopped at a random change of a file, killed at a later one, and goes on to the end. Its
results are compared with those of a run that was not stopped.
"""

from __future__ import annotations

import argparse
import errno
import random
import signal
import tempfile
from collections import Counter
from pathlib import Path

from end_to_end.test_stopped_commands import CASES, Ended, contents, stopped

WAYS = {
    "full disk": -errno.ENOSPC,
    "read-only disk": -errno.EROFS,
    "Ctrl-C": signal.SIGINT,
    "kill": signal.SIGKILL,
}
CODES = {"full disk": 3, "read-only disk": 3, "Ctrl-C": 130, "kill": -signal.SIGKILL}
STOPS = 6  # of each case at a time


def soak(count: int, seed: int) -> Counter[str]:
    """At least `count` stops, half of them kills of runs that continue. -> what came of them."""
    rng, found = random.Random(seed), Counter[str]()
    while found["stops"] < count:
        ways = {
            name: [(rng.random(), rng.choice(list(WAYS))) for _ in range(STOPS)] for name in CASES
        }
        stops = {name: [(at, int(WAYS[way])) for at, way in own] for name, own in ways.items()}
        with tempfile.TemporaryDirectory() as place:
            ended = stopped(Path(place) / "stopped", stops)
            for name, own in ways.items():
                whole = contents(ended.folder / name / "whole" / "out")
                for at, way in own:
                    found.update({"stops": 2, way: 1})
                    if said := wrong(ended, name, at, way, whole):
                        found["wrong"] += 1
                        print(f"{name} at {at} by {way}: {said}", flush=True)  # noqa: T201
        print(dict(found), flush=True)  # noqa: T201
    return found


def wrong(ended: Ended, name: str, at: float, way: str, whole: dict[str, object]) -> str:
    """What is wrong with a run that was stopped; "": nothing."""
    folder = ended.folder / name
    codes = ended.codes[f"{folder / str(at)}"]
    if codes[0] not in (CODES[way], 0) or codes[1] not in (-signal.SIGKILL, 0) or codes[2]:
        return f"codes {codes}"
    found = contents(folder / str(at) / "out")
    return ", ".join(key for key in found.keys() | whole if found.get(key) != whole.get(key))[:300]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    raise SystemExit(int(soak(given.count, given.seed)["wrong"] > 0))
