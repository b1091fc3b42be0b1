"""Completion in bash, zsh and fish: each is asked, with the script that the program gives it."""

import os
import pty
import shutil
import subprocess
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from support.processes import write_program

pytestmark = pytest.mark.first

EXPECTED = {
    "paceline mea": ["measure"],
    "paceline measure --tim": ["--timed-prompts", "--timed-repeats"],
    "paceline measure --dtype b": ["bfloat16"],
    "paceline validate meas": ["measure", "measure-engine"],
    "paceline measure --prompts tex": ["texts.jsonl"],
}
# What the scripts of the other shells treat apart: a word with help, options, and files.
FEW = ["paceline mea", "paceline measure --tim", "paceline measure --prompts tex"]
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
_FISH = textwrap.dedent("""
    paceline --show-completion | source
    for line in $argv
        echo (complete -C $line | string replace -r '\\t.*' '')
    end
""")
_ZSH = (
    "PS1='READY> '; unsetopt prompt_sp; unset zle_bracketed_paste; autoload -U compinit; "
    "compinit -u -D; source <(paceline --show-completion); bindkey '^T' list-choices; print END\n"
)


def _words_of(command: list[str], lines: list[str]) -> list[list[str]]:
    done = subprocess.run([*command, *lines], capture_output=True, text=True, check=True)
    return [line.split() for line in done.stdout.splitlines()]


def _in_bash(lines: list[str]) -> list[list[str]]:
    return _words_of(["bash", "-c", _BASH, "bash"], lines)


def _in_fish(lines: list[str]) -> list[list[str]]:
    return _words_of(["fish", "--no-config", "-c", _FISH], lines)


def _in_zsh(lines: list[str]) -> list[list[str]]:
    """Only a zsh that edits a line completes it: it is given keys, and its list of choices read."""
    terminal, its = pty.openpty()
    found: list[list[str]] = []

    def answer(keys: str) -> str:
        os.write(terminal, keys.encode())
        said = ""
        while not said.partition("\r\nEND\r\n")[2].endswith("READY> "):
            said += os.read(terminal, 1 << 16).decode()
        return said

    with subprocess.Popen(
        ["zsh", "-f", "-i"],
        env=os.environ | {"TERM": "dumb"},  # no colours
        start_new_session=True,
        **dict.fromkeys(("stdin", "stdout", "stderr"), its),
    ):
        answer(_ZSH)
        for line in lines:
            listed = answer(f"{line}\x14\x15print END\n").split("READY> ")[0]  # list; kill the line
            rows = [row.split(" -- ")[0] for row in listed.splitlines()[1:]]
            found.append([word for row in rows for word in row.split()])
        os.write(terminal, b"exit\n")
    os.close(terminal)
    os.close(its)
    return found


@pytest.mark.parametrize(
    ("shell", "ask", "lines"),
    [("bash", _in_bash, [*EXPECTED]), ("zsh", _in_zsh, FEW), ("fish", _in_fish, FEW)],
)
def test_a_shell_completes_commands_options_values_and_files(
    shell: str,
    ask: Callable[[list[str]], list[list[str]]],
    lines: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    write_program(tmp_path / "bin")
    (tmp_path / "texts.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    found = [sorted(words) for words in ask(lines)]
    assert found == [EXPECTED[line] for line in lines]
