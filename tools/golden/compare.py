"""Make a golden file, or check the present code against one: see README.md."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from paceline import processor

HERE = Path(__file__).parent
TESTS = HERE.parents[1] / "tests"  # the tiny models


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
        golden = record(settings)
        given.file.write_text(json.dumps(golden, indent=0, sort_keys=True), "utf-8")
        return
    golden = json.loads(given.file.read_text("utf-8"))
    chosen = {place: golden[place] for place in golden if place.split("/")[0] in settings}
    sys.exit(report(chosen, record(settings)))


def report(golden: dict[str, Any], found: dict[str, Any]) -> int:
    """Print what differs; -> 1 if anything does. What was added is listed and allowed."""
    missing = sorted(golden.keys() - found.keys())
    differing = sorted(p for p in golden.keys() & found.keys() if golden[p] != found[p])
    added = sorted(found.keys() - golden.keys())
    for name, places in (("missing", missing), ("differs", differing), ("added", added)):
        for place in places[:40]:
            was, is_now = (f"{values.get(place)!r:.80}" for values in (golden, found))
            print(f"{name}: {place}: {was} -> {is_now}")
    same = len(golden) - len(missing) - len(differing)
    print(f"{same} same, {len(differing)} differ, {len(missing)} missing, {len(added)} added")
    return int(bool(missing or differing))


def record(settings: list[str]) -> dict[str, Any]:
    """Every value of `record_models.py` under each setting, by its place."""
    values: dict[str, Any] = {}
    for setting in settings:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "recorded.json"
            command = [sys.executable, str(HERE / "record_models.py"), str(out)]
            subprocess.run(command, check=True, cwd=folder, env=environment(setting, folder))
            flatten(json.loads(out.read_text("utf-8")), setting, values)
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


def flatten(value: Any, place: str, into: dict[str, Any]) -> None:
    """One entry a number, word or digest."""
    if isinstance(value, dict | list):
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        for key, part in parts:
            flatten(part, f"{place}/{key}", into)
    else:
        into[place] = value


if __name__ == "__main__":
    main()
