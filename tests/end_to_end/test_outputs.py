"""What commands print on a tiny pair has the words of the files, of the pair of `make demo`."""

import re
import shlex

import pytest

from support.data import write_lines
from support.outputs import COMMANDS, RECORDED, write_files
from support.outputs import printed as printed_lines
from support.processes import run_command
from support.runs import write_pair

_VERDICT = re.compile(r"\b(GO|NO-GO|UNDECIDED|TOO FEW|PASSED|FAILED|passed|NOT CAUGHT|caught)\b")
_NUMBER = re.compile(r"[-+]?(\d[\d,]*(\.\d+)?(e[-+]?\d+)?|∞|nan)[x*]?")
_OPTIONAL = re.compile(
    r", break-even #( \(# to #\))?|, relative quality # (\(#%: # to #\)|by proof)"
    r"|(?<=^chosen: )\w+( alpha #,)?(?= gamma #)|, (not shown to be fast|slow)er than no draft"
)
# what another pair, or another verdict, words otherwise
_OWN = (
    *("next", "MEASURED.json:", "fastest:", "no draft is", "warning:", "note:"),
    *("in bfloat#", "in float#", "lossless gamma", "the fastest of", "*:", "paceline: note:"),
    *("tokens by source", "stop tokens", "chat template", "exports"),
)
# texts of the model or of a prompt, from a line to another
_QUOTED = {"a prompt": "PASSED", "prompts:": "These checks"}


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each command prints on the tiny pair."""
    folder = write_pair(tmp_path_factory.mktemp("outputs"))
    rows = [{"prompt": f"prompt number {number} is here"} for number in range(16)]
    write_lines(folder / "prompts.jsonl", *rows)
    write_files(folder)
    found: dict[str, str] = {}
    for name, command in COMMANDS.items():
        done = run_command(folder, *shlex.split(command))
        assert done.returncode in (0, 1, 3), f"{name}: {done.stderr}"
        found[name] = "\n".join(printed_lines(done.stdout, done.stderr))
    return found


def frame(text: str) -> list[str]:
    """The lines of an output without numbers, the verdict and what follows from it."""
    lines: list[str] = []
    end = "raw prompt," if "\nraw prompt," in text else ""  # behind decoded text
    for line in text.splitlines():
        if end and not line.startswith(end):
            continue
        end = next((last for first, last in _QUOTED.items() if line.startswith(first)), "")
        words = " ".join(_NUMBER.sub("#", _VERDICT.sub("VERDICT", line)).split())
        if not words.startswith(_OWN):
            lines.append(_OPTIONAL.sub("", words))
    return lines


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_prints_the_lines_of_its_file(name: str, printed: dict[str, str]):
    recorded = (RECORDED / f"{name}.txt").read_text("utf-8").splitlines()
    assert recorded[0] == f"$ paceline {COMMANDS[name]}"
    assert frame(printed[name]) == frame("\n".join(recorded[1:]))
