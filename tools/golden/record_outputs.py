"""Record what commands print, as files that people read: tests/end_to_end/outputs.

    PYTHONPATH=tests python tools/golden/record_outputs.py FOLDER [NAME ...]

FOLDER has `target` and `draft`, the pair of `make demo`, and its prompts.jsonl. Run it on an idle
machine after a change of the output that is meant. tests/end_to_end/test_outputs.py runs the same
commands on a tiny pair, and compares the words.
"""

import shlex
import subprocess
import sys
from pathlib import Path

from support.outputs import COMMANDS, RECORDED, printed, write_files

PROGRAM = Path(sys.executable).with_name("paceline")


def record(folder: Path, name: str) -> int:
    """Run a command in the folder, and keep what it prints; -> its exit code."""
    command = [str(PROGRAM), *shlex.split(COMMANDS[name])]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    lines = [f"$ paceline {COMMANDS[name]}", *printed(done.stdout, done.stderr)]
    (RECORDED / f"{name}.txt").write_text("\n".join(lines) + "\n", "utf-8")
    return done.returncode


if __name__ == "__main__":
    place = Path(sys.argv[1])
    write_files(place)
    for each in sys.argv[2:] or COMMANDS:
        print(each, record(place, each), flush=True)
