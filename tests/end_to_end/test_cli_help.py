"""What the command line says of itself: help, completion, version, keys, hardware."""

import json
import os
import re
import shutil
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

import paceline
from paceline.cli.defaults import meaning_of
from paceline.cli.main import SCHEMAS, app, schema_of
from paceline.config import fields_of, models_in
from support.processes import write_program
from support.texts import Run, succeeded

COMMANDS = sorted(typer.main.get_command(app).commands)  # pyright: ignore


@pytest.mark.parametrize("command", COMMANDS)
def test_short_help_is_the_help(run: Run, command: str):
    short = run(command, "-h")
    assert short == run(command, "--help")
    assert f"Usage: paceline {command}" in short[1]


def test_the_version_is_the_packages(run: Run):
    code, out, err = run("--version")
    assert (code, err) == (0, "")
    assert re.fullmatch(rf"paceline {paceline.__version__}\n", out)


def configurations(model: type[Any], seen: set[type]) -> Iterator[type[Any]]:
    """A configuration and all that it may hold."""
    if model not in seen:
        seen.add(model)
        yield model
        for field in fields_of(model).values():
            for inner in models_in(field.annotation):
                yield from configurations(inner, seen)


@pytest.mark.parametrize("kind", SCHEMAS)
def test_every_key_has_a_meaning(kind: str):
    without = [
        f"{model.__name__}.{name}"
        for model in configurations(schema_of(kind), set())
        for name in fields_of(model)
        if not meaning_of(model, name)
    ]
    assert without == []


@pytest.mark.parametrize("kind", SCHEMAS)
def test_the_keys_of_every_kind_can_be_listed(run: Run, kind: str):
    out = succeeded(run, "validate", kind, "--defaults")
    top = [line.partition(":")[0] for line in out.splitlines() if line[:1] not in (" ", "#", "")]
    assert top == list(schema_of(kind).model_fields)
    assert kind != "align" or {"target: (required)", "batch_size: 32"} < set(out.splitlines())


def test_env_shows_memory_and_gpus(run: Run):
    found = json.loads(run("env")[1])
    assert 1e8 < found["memory_bytes"] < 1e14
    assert isinstance(found["gpus"], list)
    assert 1 <= found["usable_cpus"] <= found["cpu_count"]


EXPECTED = {
    "paceline mea": ["measure"],
    "paceline measure --tim": ["--timed-prompts"],
    "paceline measure --dtype b": ["bfloat16"],
    "paceline validate meas": ["measure", "measure-engine", "measure-speculative-config"],
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


@pytest.mark.first
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
