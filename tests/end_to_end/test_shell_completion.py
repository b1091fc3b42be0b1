"""Completion in bash, which is asked with the script that the program gives it."""

import os
import shutil
import subprocess
import textwrap
from pathlib import Path

import pytest

from support.processes import write_program

pytestmark = pytest.mark.first

EXPECTED = {
    "paceline mea": ["measure"],
    "paceline measure --tim": ["--timed-prompts"],
    "paceline measure --dtype b": ["bfloat16"],
    "paceline validate meas": ["measure", "measure-engine"],
    "paceline measure --prompts tex": ["texts.jsonl"],
}
# bash calls the function that the script has registered, with the words of the line in COMP_WORDS;
# if it finds nothing, bash completes names of files, as -o default says.
_BASH = textwrap.dedent("""
    source <(paceline --show-completion)
    function=$(complete -p paceline | sed 's/.*-o default.*-F \\([^ ]*\\).*/\\1/')
    for line in "$@"; do
        read -ra COMP_WORDS <<< "$line"
        [[ $line == *' ' ]] && COMP_WORDS+=("")
        COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
        $function paceline "${COMP_WORDS[-1]}" "${COMP_WORDS[-2]}"
        echo "${COMPREPLY[@]:-$(compgen -f -- "${COMP_WORDS[-1]}")}"
    done
""")


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_completes_commands_options_values_and_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write_program(tmp_path / "bin")
    (tmp_path / "texts.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    command = ["bash", "-c", _BASH, "bash", *EXPECTED]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = [sorted(line.split()) for line in done.stdout.splitlines()]
    assert found == list(EXPECTED.values())
