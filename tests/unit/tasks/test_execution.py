"""Programs of a model run within limits, in an empty directory, without the user's environment."""

import contextlib
import fcntl
import socket
import time
from pathlib import Path

import pytest

from paceline.errors import InputNote, PacelineError, UsageError
from paceline.tasks import code_problems as execution
from paceline.tasks.code_problems import has_no_network, passes

pytestmark = pytest.mark.slow

SECONDS = 1

PASSING = {
    "prints": "print('hello')",
    "writes here": "open('note', 'w').write('x'); assert open('note').read() == 'x'",
    "reads": "import json; open(json.__file__).read()",
    "imports": "import collections, heapq, itertools, math, random, re, string, typing",
    "imports what can start programs": "import asyncio, subprocess, urllib.request, unittest.mock",
    "imports numpy": "import numpy; numpy.ones(2) @ numpy.ones(2)",
    "recovers": "def f(): return f()\ntry:\n    f()\nexcept RecursionError:\n    pass",
    "defines types": "import dataclasses\n@dataclasses.dataclass\nclass A:\n    x: int = 1\nA()",
    "discards": "open('/dev/null', 'w').write('x')",
}
FAILING = {
    "raises": "assert False",
    "not Python": "def",
    "ends early": "import sys; sys.exit(0)",
    "ends with a number": "raise SystemExit(100)",
    "ends at once": "import os; os._exit(0)",
    "asks": "input()",
    "grows": "x = [0] * (1 << 28)",
    "writes much": "open('note', 'w').write('x' * (1 << 21))",
}


@pytest.fixture(params=["closed", "open"])
def network(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "open":
        monkeypatch.setattr(execution, "has_no_network", lambda: False)
    elif not has_no_network():
        pytest.skip("this system cannot close the network to a process")
    return request.param


def test_a_program_that_ends_passes(network: str):
    assert passes(f"for program in {[*PASSING.values()]!r}:\n    exec(program, {{}})", SECONDS)
    assert passes("x = '\ud800'", SECONDS)  # not text
    assert passes("assert __name__ != '__main__'", SECONDS)


@pytest.mark.parametrize("name", FAILING)
def test_a_program_that_fails_does_not_pass(name: str):
    assert not passes(FAILING[name], SECONDS)


def test_a_program_cannot_connect_where_the_system_closes_the_network(network: str):
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
        program = f"import socket; socket.create_connection(('localhost', {port}), 1)"
        assert passes(program, SECONDS) == (network == "open")


@pytest.mark.parametrize("end", ["", "time.sleep(100)"])
def test_no_process_remains_nor_delays(end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(execution, "_WALL_FACTOR", 1 if end else 50)
    monkeypatch.setattr(execution, "_START", execution._START.replace("NPROC=0, ", ""))
    lock = tmp_path / "lock"
    lock.touch()
    program = f"""
import fcntl, os, time
file = open({str(lock)!r}, 'r+')
fcntl.flock(file, fcntl.LOCK_EX)
if os.fork() == 0:
    time.sleep(100)
{end}"""
    start = time.monotonic()
    assert passes(program, SECONDS) == (end == "")
    assert time.monotonic() - start < 50
    with lock.open() as file:
        while True:  # a process ends a moment after its signal
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            assert time.monotonic() - start < 50


@pytest.mark.parametrize(
    ("factor", "program"), [(100, "while True: pass"), (1, "import time; time.sleep(1e6)")]
)
def test_a_loop_ends_at_its_time_and_so_does_a_program_that_waits(
    factor: int, program: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(execution, "_WALL_FACTOR", factor)
    assert not passes(program, SECONDS)


def test_nothing_of_the_environment_reaches_a_program(
    network: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SECRET_TOKEN", "x")
    monkeypatch.setenv("PYTHONPATH", "x")
    known = "{'PATH', 'OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'LC_CTYPE'}"
    assert passes(f"import os, sys; assert set(os.environ) <= {known}", SECONDS)
    assert passes("import sys; assert sys.argv == ['program.py']", SECONDS)


def test_the_directory_of_a_program_is_empty_and_removed(
    network: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(execution.tempfile, "tempdir", str(tmp_path))
    assert passes("import os; assert os.listdir() == []; open('note', 'w').write('x')", SECONDS)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("prefix", [("absent-tool",), ("false",), ("true",)])
def test_without_the_tool_or_what_it_needs_one_sentence_says_that_the_network_is_open(
    prefix: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
):
    has_no_network.cache_clear()
    monkeypatch.setattr(execution, "_WITHOUT_NETWORK", prefix)
    try:
        with pytest.warns(InputNote) as told:
            assert [passes("", SECONDS), passes("assert False", SECONDS)] == [True, False]
        (note,) = told
        assert "programs of the code task can use the network" in str(note.message)
    finally:
        has_no_network.cache_clear()


def test_a_process_that_does_not_start_is_no_verdict(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(execution, "has_no_network", lambda: True)
    monkeypatch.setattr(execution, "_WITHOUT_NETWORK", ("false",))
    with pytest.raises(PacelineError, match="a process for a program could not be started"):
        passes("", SECONDS)


def test_a_system_without_limits_is_one_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(execution.os, "name", "nt")
    with pytest.raises(UsageError, match="run the code task on Linux"):
        passes("", SECONDS)
