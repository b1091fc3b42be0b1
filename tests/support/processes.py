"""Commands in this process and in processes of their own, and the processors of this machine."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.cli.main import main
from paceline.processor import GENERIC, compile_flags, usable_levels

COMMAND_LINE = "from paceline.cli.main import main; main()"
"""The program `paceline`."""


def write_program(folder: Path) -> None:
    """Write the program `paceline` of this Python into a new or existing folder."""
    folder.mkdir(exist_ok=True)
    (folder / "paceline").write_text(f"#!{sys.executable}\n{COMMAND_LINE}\n")
    (folder / "paceline").chmod(0o755)


def run_command(cwd: Path, *arguments: Any) -> subprocess.CompletedProcess[str]:
    """The command line of Paceline, in this process, started by a file of another name."""
    command, out, err = ["paceline", *map(str, arguments)], StringIO(), StringIO()
    with chdir(cwd), redirect_stdout(out), redirect_stderr(err), pytest.MonkeyPatch.context() as m:
        m.setattr(sys, "argv", ["own.py", *command[1:]])
        with pytest.raises(SystemExit) as stop:
            main()
    assert isinstance(stop.value.code, int)
    return subprocess.CompletedProcess(command, stop.value.code, out.getvalue(), err.getvalue())


def start(
    program: str,
    *arguments: Any,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> subprocess.Popen[str]:
    """A Python program, as text, in a process of its own; `finish` waits for its end."""
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    """Wait for its end. -> its exit code, and what it wrote."""
    out, err = process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


LEVEL_FLAGS = {level: compile_flags(level) for level in (*usable_levels(), GENERIC)}
"""Compiler flags for each level that this machine can run, and for a processor without AVX."""


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Let torch and the C library compute with so many threads; the tests have one."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
