"""Programs of a model pass or fail within limits; accidents stay in their process."""

import contextlib
import os
import socket
from pathlib import Path

import pytest

from paceline.errors import UsageError
from paceline.tasks import execution
from paceline.tasks.execution import Limits, network_barrier, passes

pytestmark = pytest.mark.slow

LIMITS = Limits(seconds=1, megabytes=512)

PASSING = {
    "prints": "print('hello')",
    "writes here": "open('note', 'w').write('x'); assert open('note').read() == 'x'",
    "reads": "import json; open(json.__file__).read()",
    "imports": "import collections, heapq, itertools, math, random, re, string, typing",
    "recovers": "def f(): return f()\ntry:\n    f()\nexcept RecursionError:\n    pass",
    "not text": "x = '\ud800'",
    "not main": "assert __name__ != '__main__'",
}
FAILING = {
    "raises": "assert False",
    "not Python": "def",
    "ends early": "import sys; sys.exit(0)",
    "ends at once": "import os; os._exit(0)",
    "asks": "input()",
    "grows": "x = [0] * (1 << 28)",
    "writes much": "open('note', 'w').write('x' * (1 << 21))",
    "connects": "import socket; socket.create_connection(('localhost', {port}), 1)",
    "opens a socket": "import socket; socket.socket()",
    "forks": "import os; os.fork() or os._exit(0)",
    "calls": "import subprocess; subprocess.run(['true'], check=True)",
    "calls a shell": "import os; assert os.system('true') == 0",
    "calls C": "import ctypes; ctypes.CDLL(None).getpid()",
    "signals": "import os; os.kill(os.getppid(), 0)",
    "writes elsewhere": "open({outside!r}, 'w')",
    "appends elsewhere": "import os; os.open({outside!r}, os.O_RDWR | os.O_APPEND)",
    "removes": "import os; os.remove({outside!r})",
    "renames": "import os; os.rename({outside!r}, 'here')",
}


@pytest.mark.parametrize("name", PASSING)
def test_a_program_that_ends_passes(name: str):
    assert passes(PASSING[name], LIMITS)


@pytest.mark.parametrize("barrier", [True, False], ids=["namespace", "interpreter"])
@pytest.mark.parametrize("name", FAILING)
def test_a_program_that_fails_or_is_refused_does_not_pass(
    name: str, barrier: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    if not barrier:
        monkeypatch.setattr(execution, "_can_unshare", lambda: False)
    outside = tmp_path / "kept"
    outside.write_text("kept")
    with socket.create_server(("localhost", 0)) as server:
        program = FAILING[name]
        for key, value in {
            "port": server.getsockname()[1],
            "outside!r": repr(str(outside)),
        }.items():
            program = program.replace(f"{{{key}}}", str(value))
        assert not passes(program, LIMITS)
    assert outside.read_text() == "kept"


def test_a_loop_ends_at_its_time_and_so_does_a_program_that_waits(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(execution, "_WALL_FACTOR", 2)
    assert not passes("while True: pass", LIMITS)
    assert not passes("import time; time.sleep(1e6)", LIMITS)


def test_nothing_of_the_environment_reaches_a_program(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SECRET_TOKEN", "x")
    monkeypatch.setenv("PYTHONPATH", "x")
    known = "{'PATH', 'OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'LC_CTYPE'}"
    assert passes(f"import os; assert set(os.environ) <= {known}", LIMITS)


def test_the_directory_of_a_program_is_empty_and_removed(tmp_path: Path):
    assert passes("import os; assert os.listdir() == ['program.py']", LIMITS)
    monitor = tmp_path / "t"
    monitor.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(execution.tempfile, "tempdir", str(monitor))
        assert passes("open('note', 'w').write('x')", LIMITS)
    assert list(monitor.iterdir()) == []


def test_the_barrier_is_what_the_system_allows(monkeypatch: pytest.MonkeyPatch):
    assert network_barrier() in ("namespace", "interpreter")
    monkeypatch.setattr(execution, "_can_unshare", lambda: False)
    assert network_barrier() == "interpreter"


def test_without_the_tool_there_is_no_namespace(monkeypatch: pytest.MonkeyPatch):
    execution._can_unshare.cache_clear()
    monkeypatch.setattr(execution.shutil, "which", lambda *_, **__: None)
    try:
        assert not execution._can_unshare()
    finally:
        execution._can_unshare.cache_clear()


def test_a_system_without_limits_is_one_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(execution.os, "name", "nt")
    with pytest.raises(UsageError) as caught:
        passes("", LIMITS)
    monkeypatch.undo()
    assert str(caught.value) == (
        "this system cannot limit the memory and time of a process; run the code task on Linux"
    )


def test_no_descriptor_of_this_process_stays_open():
    def open_descriptors() -> list[int]:
        found: list[int] = []
        for number in range(256):
            with contextlib.suppress(OSError):
                os.fstat(number)
                found.append(number)
        return found

    before = open_descriptors()
    for program in ("", "assert False"):
        passes(program, LIMITS)
    assert open_descriptors() == before
