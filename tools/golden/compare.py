"""Make a golden file, or check the present code against one: see README.md."""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from paceline import processor

HERE = Path(__file__).parent
TESTS = HERE.parents[1] / "tests"  # the tiny models
VARIES = "(varies between two runs of the same code)"
WORDS = "(words)"
# keys whose values hang on a clock, even where two runs happen to agree
CLOCK = re.compile(
    r"(seconds|_s$|_ms$|speedup|tokens_per_second|cost|latency|milliseconds|started|finished|pass_times"
    r"|best_gamma|verdict|break_even)"
)
# subtrees that hang on the clock, the machine or the commit as a whole
LEFT_OUT = re.compile(
    r"/(environment|choices|costs|key|context)(/|$)|/tune/(choosing|confirming|decoding|result)"
    r"|/measure[^/]*/figures/\d+/(\w*speedup|\w*_s|\w*cost_ratio|needed_block_efficiency)(/|$)"
    r"|/measure[^/]*/figures/\d+/(break_even_acceptance|engine_efficiency|measured_over_\w+)(/|$)"
    r"|/analyze[^/]*/rows/\d+/rejection_rate"  # the last: at the fastest gamma
)
# keys whose values are text of a model, not a sentence of ours
TEXT = ("text", "prompt", "completion", "answer", "question")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["make", "check"])
    parser.add_argument("file", type=Path)
    parser.add_argument(
        "--only", nargs="*", help="these settings alone, such as amx or no-compiler"
    )
    given = parser.parse_args()
    settings = given.only or [*processor.usable_levels(), "no-compiler"]
    if given.what == "make":
        first, second = record(settings), record(settings)
        golden = {place: value for place, value in first.items() if second.get(place) == value}
        varying = sorted((first.keys() | second.keys()) - golden.keys())
        golden |= dict.fromkeys(varying, VARIES)
        given.file.write_text(json.dumps(golden, indent=0, sort_keys=True), "utf-8")
        print(f"{len(golden) - len(varying)} values; {len(varying)} vary")
        return
    golden = json.loads(given.file.read_text("utf-8"))
    golden = {
        place: value
        for place, value in golden.items()
        if place.split("/")[0] in settings and not LEFT_OUT.search(place)
    }
    sys.exit(report(golden, record(settings)))


def report(golden: dict[str, Any], found: dict[str, Any]) -> int:
    """Print what differs; -> 1 if anything does. What was added is listed and allowed."""
    fixed = {place for place, value in golden.items() if value != VARIES}
    missing = sorted(fixed - found.keys())
    differing = sorted(p for p in fixed & found.keys() if golden[p] != found[p])
    added = sorted(found.keys() - golden.keys())
    for name, places in (("missing", missing), ("differs", differing), ("added", added)):
        for place in places[:40]:
            was, is_now = (f"{values.get(place)!r:.80}" for values in (golden, found))
            print(f"{name}: {place}: {was} -> {is_now}")
    same = len(fixed) - len(missing) - len(differing)
    print(f"{same} same, {len(differing)} differ, {len(missing)} missing, {len(added)} added")
    return int(bool(missing or differing))


def record(settings: list[str]) -> dict[str, Any]:
    """Every value of `record.py` under each setting, by its place."""
    values: dict[str, Any] = {}
    for setting in settings:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "recorded.json"
            command = [sys.executable, str(HERE / "record.py"), str(out)]
            subprocess.run(command, check=True, cwd=folder, env=environment(setting, folder))
            recorded = json.loads(out.read_text("utf-8"))
            flatten(recorded, setting, values, folder)
        print(f"{setting}: {sum(place.startswith(setting) for place in values)} values", flush=True)
    return values


def environment(setting: str, folder: str) -> dict[str, str]:
    fixed = {
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "passive",
        "PACELINE_PRECISION": "float32",
        "PACELINE_CACHE": str(Path(tempfile.gettempdir()) / f"paceline-golden-{setting}"),
        "HF_HUB_OFFLINE": "1",
        "COLUMNS": "100",
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
        "PYTHONWARNINGS": "ignore",
    }
    chosen = {"CC": "/bin/false"} if setting == "no-compiler" else {processor.VARIABLE: setting}
    if setting == "no-compiler":
        fixed["PACELINE_CACHE"] += f"-{os.getpid()}"
    return {**os.environ, **fixed, **chosen}


def flatten(value: Any, place: str, into: dict[str, Any], folder: str) -> None:
    """One entry a number, word or digest; clocks and sentences masked."""
    name = place.rpartition("/")[2]
    if LEFT_OUT.search(place):
        return
    if isinstance(value, dict):
        for key, part in value.items():
            flatten(part, f"{place}/{key.replace(folder, '')}", into, folder)
        into[f"{place}/#keys"] = sorted(key.replace(folder, "") for key in value)
    elif isinstance(value, list) and (len(value) <= 64 or isinstance(value[0], dict)):
        for index, part in enumerate(value):
            flatten(part, f"{place}/{index}", into, folder)
        into[f"{place}/#length"] = len(value)
    elif any(CLOCK.search(part) for part in place.split("/")[1:]) and not isinstance(value, str):
        into[place] = VARIES
    elif isinstance(value, str) and value.count(" ") > 2 and not name.startswith(TEXT):
        into[place] = WORDS
    else:
        into[place] = value.replace(folder, "") if isinstance(value, str) else value


if __name__ == "__main__":
    main()
