"""Completion in a shell: bash itself is asked, with the script that the program gives it."""

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.first,
    pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash"),
]

_PROGRAM = f"#!{sys.executable}\nfrom paceline.cli.main import main\nmain()\n"
# bash calls the function that the script has registered, with the words of the line in COMP_WORDS
_ASK = textwrap.dedent("""
    source <(paceline --show-completion)
    function=$(complete -p paceline | sed 's/.*-F \\([^ ]*\\).*/\\1/')
    for line in "$@"; do
        read -ra COMP_WORDS <<< "$line"
        [[ $line == *' ' ]] && COMP_WORDS+=("")
        COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
        $function paceline "${COMP_WORDS[-1]}" "${COMP_WORDS[-2]}"
        echo "${COMPREPLY[@]}"
    done
""")


def test_bash_completes_commands_options_and_values(tmp_path: Path):
    (tmp_path / "paceline").write_text(_PROGRAM)
    (tmp_path / "paceline").chmod(0o755)
    expected = {
        "paceline mea": ["measure"],
        "paceline measure --tim": ["--timed-prompts", "--timed-repeats"],
        "paceline measure --dtype b": ["bfloat16"],
        "paceline validate meas": ["measure", "measure-engine"],
    }
    done = subprocess.run(
        ["bash", "-c", _ASK, "bash", *expected],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )
    found = [line.split() for line in done.stdout.splitlines()]
    assert dict(zip(expected, map(sorted, found), strict=True)) == expected
