"""The command line in this process: fast, and its exit code, stdout and stderr can be looked at."""

import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.main import main
from support.runs import write_pair
from support.texts import Run


@pytest.fixture(scope="session")
def pair_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target, a tiny draft and a corpus, which tests read and leave as they are."""
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command line in this process. -> exit code, stdout, stderr."""

    def call(*arguments: Any) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["own.py", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            main()
        captured = capsys.readouterr()
        code = stop.value.code
        assert isinstance(code, int)
        return code, captured.out, captured.err

    return call
