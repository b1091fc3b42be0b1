"""What commands print on a tiny pair has the words of the files, of the pair of `make demo`."""

import re
import shlex

import pytest

from support.outputs import COMMANDS, RECORDED, write_files
from support.processes import run_command
from support.runs import write_corpus, write_pair

_VERDICT = re.compile(r"\b(GO|NO-GO|UNDECIDED|PASSED|FAILED|passed|FAILED|caught|NOT CAUGHT)\b")
_NUMBER = re.compile(r"[-+]?(\d[\d,]*(\.\d+)?(e[-+]?\d+)?|∞)x?")
_OF_THE_MODEL = ("architecture", "stop tokens", "chat template", "exports", "a prompt")


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each command prints on the tiny pair."""
    folder = write_pair(tmp_path_factory.mktemp("outputs"))
    rows = [{"prompt": f"prompt number {number} is here"} for number in range(16)]
    write_corpus(folder / "prompts.jsonl", rows)
    write_files(folder)
    found: dict[str, str] = {}
    for name, command in COMMANDS.items():
        done = run_command(folder, *shlex.split(command))
        assert done.returncode in (0, 1, 3), f"{name}: {done.stderr}"
        found[name] = done.stdout
    return found


def frame(text: str) -> list[str]:
    """The lines of an output without numbers, the verdict and what follows from it."""
    lines: list[str] = []
    for line in text.splitlines():
        words = " ".join(_NUMBER.sub("#", _VERDICT.sub("VERDICT", line)).split())
        for start in ("next:", "better:", *_OF_THE_MODEL):
            words = start if words.startswith(start) else words
        lines.append(words)
    return lines


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_prints_the_lines_of_its_file(name: str, printed: dict[str, str]):
    recorded = (RECORDED / f"{name}.txt").read_text("utf-8").splitlines()
    assert recorded[0] == f"$ paceline {COMMANDS[name]}"
    assert frame(printed[name]) == frame("\n".join(recorded[1:]))
