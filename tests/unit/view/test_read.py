"""Runs are recognised by their files, and everything else is refused in one line."""

import functools
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import paceline.view
from paceline.cli.main import app
from paceline.errors import UsageError
from paceline.view.read import read_page
from support import reports


@pytest.mark.parametrize("kind", reports.RUNS)
def test_the_command_writes_the_page_beside_the_rows_and_prints_its_verdict(
    kind: str, tmp_path: Path
):
    run = reports.RUNS[kind](tmp_path / "run")
    beside = run / "report.html" if run.is_dir() else run.with_suffix(".html")
    shown = CliRunner().invoke(app, ["report", str(run)])
    assert shown.exit_code == 0, shown.output
    assert shown.output.splitlines()[-1] == str(beside)
    assert beside.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    if kind == "verify":
        assert shown.output.startswith("PASSED: 5 of 5 greedy texts equal the target's")


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("list.json", "[1, 2]", "is not a result that has a report"),
        (
            "verified.json",
            '{"kind": "verify", "greedy": 1}',
            "is not what `paceline verify --json` writes",
        ),
    ],
)
def test_other_files_are_refused_in_one_line(name: str, text: str, reason: str, tmp_path: Path):
    (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=reason) as error:
        read_page(tmp_path / name)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("Export", "which has no report"),
        ("Tune", "has no result.json yet"),
        ("Trajectory", "has no rows yet"),
        ("Align", "has no metrics yet"),
        ("Bench", "has no result rows"),
    ],
)
def test_a_run_without_rows_says_what_is_missing(kind: str, reason: str, tmp_path: Path):
    reports.manifest(tmp_path, kind)
    with pytest.raises(UsageError, match=reason):
        read_page(tmp_path)


def test_a_missing_library_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(paceline.view, "find_spec", lambda name: None if name == "altair" else 1)
    with pytest.raises(UsageError) as error:
        paceline.view.require()
    assert str(error.value).startswith("reports need altair: pip install 'altair>=")


def _changed(value: Any, draw: random.Random) -> Any:
    """The value with one part of it dropped, or of another kind."""
    if isinstance(value, dict | list) and value and draw.random() < 0.9:
        places = list(value) if isinstance(value, dict) else list(range(len(value)))
        place = draw.choice(places)
        copy: Any = value.copy()
        if draw.random() < 0.1:
            del copy[place]
        else:
            copy[place] = _changed(value[place], draw)
        return copy
    deep: Any = functools.reduce(lambda inner, _: [inner], range(900), 0)
    return draw.choice([[], {}, "x", math.inf, None, deep, -1, 10**30, [None], {"a": 1}])


@pytest.mark.parametrize("kind", reports.RUNS)
def test_values_that_no_command_writes_are_one_line(kind: str, tmp_path: Path):
    """Random changes, the same each time."""
    run = reports.RUNS[kind](tmp_path / "run")
    files = [run] if run.is_file() else sorted(run.glob("*.json*"))
    draw = random.Random(kind)
    for file in (files * 4)[:4]:
        old = file.read_text()
        first, rest = old.split("\n", 1) if file.suffix == ".jsonl" else (old, "")
        file.write_text(json.dumps(_changed(json.loads(first), draw)) + "\n" + rest)
        shown = CliRunner().invoke(app, ["report", str(run)])
        if not isinstance(shown.exception, SystemExit | None):
            assert isinstance(shown.exception, UsageError), shown.exception
            assert "\n" not in str(shown.exception)
        file.write_text(old)


def test_a_report_is_written_where_it_is_asked_for(tmp_path: Path):
    run = reports.losslessness(tmp_path)
    other = tmp_path / "made" / "here.html"
    shown = CliRunner().invoke(app, ["report", str(run), "--html", str(other)])
    assert (shown.exit_code, shown.output.splitlines()[-1]) == (0, str(other))
    for _ in range(2):
        assert CliRunner().invoke(app, ["report", str(run)]).exit_code == 0
    assert run.with_suffix(".html").read_bytes() == other.read_bytes()
