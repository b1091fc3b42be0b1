"""What a file gets to see of progress that a terminal sees as bars."""

import warnings

import pytest

from paceline.cli import console
from paceline.processes import keep_freed_memory


def test_a_file_gets_a_line_every_half_minute(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    now = 0.0
    monkeypatch.setattr(console.time, "monotonic", lambda: now)
    with console.progress_bars() as progress:
        for second in range(100):
            now = float(second)
            progress("training", second, 100, f"loss {second}")
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["training 30% loss 30", "training 60% loss 60", "training 90% loss 90"]


def test_a_warning_is_one_line_without_source(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    console.show_warnings_in_one_line()
    warnings.showwarning("4 prompts [of 9] lose their beginning", UserWarning, "a.py", 3)
    seen = capsys.readouterr().err
    assert seen == "paceline: warning: 4 prompts [of 9] lose their beginning\n"


def test_names_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]):
    console.stdout.print("runs/[v2]/draft, [/v2] and :smile:")
    assert capsys.readouterr().out == "runs/[v2]/draft, [/v2] and :smile:\n"


def test_keeping_freed_memory_changes_nothing_that_a_program_sees():
    keep_freed_memory()
    keep_freed_memory()
