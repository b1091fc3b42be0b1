"""What is said of the machine before long work."""

import subprocess
import sys
from pathlib import Path

import pytest

from paceline import environment
from paceline.data import input_checks
from paceline.errors import InputNote

_BUSY = "print(flush=True)\nwhile True: pass"


def test_programs_that_compute_are_counted():
    command = [sys.executable, "-c", _BUSY]
    busy = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
    try:
        for each in busy:
            assert each.stdout is not None
            each.stdout.readline()
        assert environment.busy_processors() >= 1
    finally:
        for each in busy:
            each.kill()
            each.communicate()


def test_a_system_without_proc_is_taken_as_idle(monkeypatch: pytest.MonkeyPatch):
    def missing(_path: Path) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", missing)
    assert environment.busy_processors() == 0


def test_a_busy_machine_is_said_before_the_work(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(input_checks, "busy_processors", lambda: 1)
    with pytest.warns(InputNote, match=r"other programs use 1 of \d+ processors"):
        input_checks.InputChecks().device("cpu")
