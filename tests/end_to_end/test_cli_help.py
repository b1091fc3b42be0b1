"""What the command line says of itself: help, version, keys with meanings, hardware."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

import paceline
from paceline.cli.defaults import describe_defaults, meaning_of
from paceline.cli.main import SCHEMAS, app, schema_of
from paceline.config import fields_of, models_in
from support.texts import Run, succeeded

COMMANDS = sorted(typer.main.get_command(app).commands)  # pyright: ignore


def test_the_list_of_commands_has_whole_sentences(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "80")
    out = succeeded(run, "-h")
    panels = out.partition("─ Make drafts and data ─")[2]
    listed = [line.strip("│ ") for line in panels.splitlines() if line.startswith("│")]
    assert sorted(line.split()[0] for line in listed) == COMMANDS
    assert all(line.endswith(".") and not line.endswith("...") for line in listed)


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


def test_keys_are_listed_with_default_and_meaning(run: Run):
    code, out, err = run("validate", "align", "--defaults")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert "target: (required)" in lines
    steps = lines.index("num_steps: null")
    assert lines[steps - 1].startswith("# Budget in optimizer steps")
    assert "batch_size: 32" in lines
    assert 'precision: "auto"  # one of auto, float32, bfloat16' in lines
    assert any("kind: jsd" in line for line in lines)


@pytest.mark.parametrize("kind", SCHEMAS)
def test_the_keys_of_every_kind_can_be_listed(kind: str):
    lines = describe_defaults(schema_of(kind)).splitlines()
    top = [line.partition(":")[0] for line in lines if not line.startswith((" ", "#"))]
    assert top == list(schema_of(kind).model_fields)


def test_env_shows_memory_and_gpus(run: Run):
    found = json.loads(run("env")[1])
    assert 1e8 < found["memory_bytes"] < 1e14
    assert isinstance(found["gpus"], list)
    assert 1 <= found["usable_cpus"] <= found["cpu_count"]


def test_tables_explain_their_columns(run: Run, pair_folder: Path):
    pair = ("--target", pair_folder / "target", "--draft", pair_folder / "draft")
    small = ("--set", "num_prompts=2", "--set", "max_new_tokens=6", "--set", "max_prompt_tokens=6")
    few = ("--set", "pass_repeats=1", "--set", "gammas=[1,2]")
    prompts = ("--prompts", pair_folder / "corpus.jsonl")
    _, out, _ = run("measure", *pair, *prompts, *small, *few, "--set", "timed_prompts=0")
    for word in ("tau", "MBSU:", "break-even acceptance:", "95% interval"):
        assert word in out
    _, out, _ = run("analyze", *pair, *prompts, *small, *few, "--set", "rules=[{rule: lossless}]")
    for word in ("surprisal (nats):", "tokens per target call (tau):", "output TVD:", "KL (nats):"):
        assert word in out
