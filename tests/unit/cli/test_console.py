"""What a file gets to see of progress that a terminal sees as bars."""

import io
import logging
import sys
import warnings
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from paceline.cli import console
from paceline.cli.streaming import read_prompt
from paceline.cli.tables import printed
from paceline.view.tables import trajectory_tables
from support.reports import trajectory_row

HOSTILE = "a\x1b]0;title\x1b[31m\x9b2J\x7f\u202eb[red]c[/red]\td"
SHOWN = r"a\x1b]0;title\x1b[31m\x9b2J\x7f\u202eb[red]c[/red]"


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_gets_no_control_characters_of_others_and_a_file_the_text_as_it_is(
    terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    table = Table("name")
    table.add_row(HOSTILE)
    monkeypatch.setattr(console._Console, "is_terminal", terminal)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    console.echo(HOSTILE, fg="red", nl=False)
    assert (SHOWN in capsys.readouterr().out) == terminal
    console.stdout.print(HOSTILE)
    seen = capsys.readouterr().out
    assert (SHOWN in seen) == terminal
    assert "[red]c[/red]" in seen
    console.stdout.print(table)
    seen = capsys.readouterr().out
    assert (r"a\x1b]0;title\x1b" in seen) == terminal
    assert ("\x9b" not in seen) == terminal


def test_errors_warnings_and_logs_are_always_escaped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    console.show_warnings_in_one_line()
    warnings.showwarning("4 prompts [of 9] lose their beginning", UserWarning, "a.py", 3)
    line = "paceline: warning: 4 prompts [of 9] lose their beginning\n"
    assert capsys.readouterr().err == line
    console.say(HOSTILE + "\nsecond")
    warnings.showwarning(HOSTILE + "\nsecond", UserWarning, "a.py", 3)
    console.stderr.print(HOSTILE)
    console.echo(HOSTILE, err=True)
    said = capsys.readouterr().err
    assert said.count(SHOWN) == 4
    assert r"\nsecond" in said
    logging.basicConfig(force=True)  # as a library does, in its own form
    logging.getLogger("paceline.part").info(HOSTILE)
    logging.getLogger().handlers.clear()
    line = capsys.readouterr().err
    assert line.startswith("paceline: "), "once, and not as INFO:paceline.part"
    assert line.count("\n") == 1
    record = logging.LogRecord("name", logging.WARNING, "a.py", 3, HOSTILE, None, None)
    assert logging.lastResort is not None
    assert SHOWN in logging.lastResort.format(record)


def test_names_in_a_progress_bar_are_no_markup(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(console._Console, "is_terminal", True)
    with console.progress_line() as progress:
        progress("[b]", 1, 2, "[link=x]b[/link]\x1bc")
    said = capsys.readouterr().err
    assert "[b]" in said
    assert "[link=x]b[/link]\\" in said
    assert "\x1bc" not in said


def test_without_a_terminal_progress_is_a_line_each_tenth_from_five_seconds_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    clock = iter(range(100))  # a second for each call
    monkeypatch.setattr(console.time, "monotonic", lambda: next(clock))
    with console.progress_line(("first", "second")) as progress:
        for done in range(5):
            progress("first", done, 4)
        for done in range(41):
            progress("second", done, 40, "loss 1")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "paceline: 1/2 first 100%, 1/s"
    assert lines[1] == "paceline: 2/2 second 10%, 1/s, loss 1, 36 s left"
    assert len(lines) == 11


def test_a_stage_that_begins_again_is_shown_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr(console.time, "monotonic", lambda: next(clock))
    with console.progress_line() as progress:
        for count in (2, 2, 4):
            for done in range(count + 1):
                progress("requests", done, count)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[2] for line in lines] == (
        ["50%,", "100%,"] * 2 + ["20%,", "50%,", "70%,", "100%,"]
    )
    assert all(", 10 s each" in line for line in lines), "since the stage began the last time"


def test_colours_are_forced_into_a_file_by_the_environment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    shown: list[str] = []
    for name in (None, "FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv("FORCE_COLOR", raising=False)
        if name is not None:
            monkeypatch.setenv(name, "1")
        console.echo("text", fg="red")
        shown.append(capsys.readouterr().out)
    assert shown == ["text\n", "\x1b[31mtext\x1b[0m\n", "text\n"]


def test_a_prompt_file_is_the_prompt_without_its_last_line_break(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Once upon")))
    assert read_prompt(None, Path("-")) == "Once upon"
    path = tmp_path / "prompt.txt"
    path.write_bytes(b"\xef\xbb\xbfA b\r\nc\r\n")
    assert read_prompt(None, path) == "A b\nc"
    path.write_bytes(b"A\n\n")
    assert read_prompt(None, path) == "A\n"
    assert read_prompt("A\n", None) == "A\n"


def test_a_trajectory_is_a_table_a_task_and_sampling():
    rows = [
        trajectory_row("runs/pretrain", label, 100 * number, gamma, task=task, **sampling)
        for number, label in enumerate(("start", "step 16384", "end"))
        for task in ("documentation", "questions")
        for sampling in ({}, {"temperature": 0.6, "top_p": 0.9})
        for gamma in (3, 5)
    ]
    seen = StringIO()
    Console(file=seen, width=80).print(printed(*trajectory_tables(rows)))
    lines = seen.getvalue().splitlines()
    assert "…" not in seen.getvalue()
    assert max(map(len, lines)) <= 80
    titles = [line for line in lines if line.startswith(("documentation", "questions"))]
    assert len(titles) == len(set(titles)) == 4
    assert sum(line.startswith("pretrain") for line in lines) == len(rows) / 2 / 3 * 2
    assert sum(line.startswith("initial draft") for line in lines) == len(rows) / 2 / 3
    # 8 texts with a tau of 1.8 each; MBSU = 1.8 / (0.2 * 3 + 1)
    first, second, _, end = (line.split() for line in lines[3:7])
    assert first[2:] == ["0.500", "3", "1.80", "(1.80-1.80)", "-", "1.12"]
    assert second == ["5", "1.80", "(1.80-1.80)", "-", "0.90"]
    assert end == ["5", "1.80", "(1.80-1.80)", "1.00", "(1.00-1.00)", "0.90"]


def test_runs_of_one_name_are_told_apart_and_scored_answers_have_a_column():
    names, scores = ("gkd/seed-0", "seq_kd/seed-0"), {"score": (0.25, 0.5) * 4}
    rows = [trajectory_row(f"runs/{name}", "start", 0, 7) for name in names]
    rows += [trajectory_row(f"runs/{name}", "end", 9, 7, draft=name) for name in names]
    rows = [row.model_copy(update={"sums": row.sums | scores}) for row in rows]
    (table,) = trajectory_tables(rows)
    assert [line["draft"] for line in table.rows[2:]] == ["gkd/seed-0 end", "seq kd/seed-0 end"]
    assert {line["quality"].value for line in table.rows} == {0.375}  # pyright: ignore
