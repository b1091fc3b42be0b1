"""What a file gets to see of progress that a terminal sees as bars."""

import warnings
from typing import Any

import pytest

from paceline.cli import console
from paceline.processes import keep_freed_memory


class Script:
    """An event whose waiting is over at once, after telling the listener what comes next."""

    def __init__(self, listener: console._OccasionalLines, told: list[tuple[Any, ...]]) -> None:
        self.listener, self.told = listener, told
        self.pauses: list[float] = []

    def wait(self, pause: float) -> bool:
        self.pauses.append(pause)
        if len(self.pauses) > len(self.told):
            return True
        if self.told[len(self.pauses) - 1]:
            self.listener(*self.told[len(self.pauses) - 1])
        return False


def test_a_file_gets_a_line_in_the_first_second_and_then_now_and_then(
    capsys: pytest.CaptureFixture[str],
):
    """Also while the work is busy and tells nothing new."""
    lines = console._OccasionalLines()
    script = Script(lines, [(), ("training", 30, 100, "loss 3"), (), ("training", 60, 100)])
    lines._ended = script  # pyright: ignore[reportAttributeAccessIssue]
    lines.run()
    assert capsys.readouterr().err.splitlines() == [
        "starting",
        "training 30% loss 3",
        "training 30% loss 3",
        "training 60%",
    ]
    assert script.pauses == [console._FIRST_S, *[console._QUIET_S] * 4]
    assert console._FIRST_S < 1


def test_work_that_ends_prints_nothing_more(capsys: pytest.CaptureFixture[str]):
    with console.progress_bars() as progress:
        progress("training", 1, 2)
    assert capsys.readouterr().err == ""


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
