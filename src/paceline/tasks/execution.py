"""Runs a program that a model wrote, and its tests, in two processes with limits.

The process of the program never holds the tests or the verdict, so that a program passes by what
its function returns and by nothing else. `judge.py` has both processes, and `barriers.py` what is
closed to them.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import shutil
import subprocess
import sys
import tempfile
from typing import Literal, NamedTuple

from paceline.errors import PacelineError, PromptError, UsageError
from paceline.processes import stop_groups
from paceline.tasks import barriers, judge

_ISOLATED = ("unshare", "--user", "--map-root-user", "--net", "--ipc", "--mount")
_ISOLATED += ("--pid", "--fork", "--kill-child")
# Runs the compiled code that Python keeps: to compile a file takes longer than most programs.
_START = """
import sys; from importlib.machinery import SourceFileLoader
def run(name, names): exec(SourceFileLoader(name, sys.argv.pop(1)).get_code(name), names)
name = "paceline.tasks.barriers"
run(name, vars(sys.modules.setdefault(name, type(sys)(name))))
run("__main__", globals())
"""
_WALL_FACTOR = 5  # a program may wait this many times as long as it may compute


class Limits(NamedTuple):
    """Limits of one program: seconds of processor time, and megabytes of memory."""

    seconds: int
    megabytes: int


_AMPLE = Limits(10, 1024)  # of a program that does nothing


class Checks(NamedTuple):
    """Tests of a function: text that defines `check`, which is called with the function.

    Attributes:
        tests: The text.
        function: Expression for the function, in the program.
        setup: Text that runs before the tests: what the prompt has before the function.
    """

    tests: str
    function: str
    setup: str = ""


def passes(program: str, limits: Limits, checks: Checks | None = None) -> bool:
    """Whether the program runs to its last line, and its function passes the tests.

    The limits hold for the program and for the tests. Arguments and results are copies of plain
    data; a result of another type fails. Output is discarded. The directory is empty, and removed
    afterwards.

    Without checks there is only the program's own word that it reached its last line.

    Raises:
        UsageError: the system cannot limit a process.
        PromptError: the tests do not compile, or pass an argument that is not plain data.
        PacelineError: the processes cannot be started.
    """
    if os.name != "posix":
        raise UsageError(
            "this system cannot limit the memory and time of a process; run the code task on Linux"
        )
    status = _status(program, limits, checks, _can_unshare())
    if status == judge.UNFIT:
        raise PromptError(
            "the tests do not compile, or pass something other than numbers, texts, lists, "
            "tuples, sets, dictionaries and None; correct them or leave the row out"
        )
    # of unshare and of Python, and of unshare when the judge is killed, as at a limit
    if status in (1, 2) and _status("", _AMPLE, None, _can_unshare()) != judge.PASSED:
        raise PacelineError(
            "a process for a program could not be started; wait until fewer processes run, and "
            "run the command again"
        )
    return status == judge.PASSED


def network_barrier() -> Literal["namespace", "interpreter"]:
    """Whether a program has name spaces of its own, or only a process that refuses."""
    return "namespace" if _can_unshare() else "interpreter"


def _status(program: str, limits: Limits, checks: Checks | None, own_root: bool) -> int | None:
    """Exit status of the judge; None if it takes too long."""
    # a surrogate cannot be compiled
    program = program.encode("utf-8", "replace").decode("utf-8")
    numbers = [str(limits.seconds), str(limits.megabytes << 20)]
    command = [sys.executable, "-I", "-B", "-c", _START]
    command += [str(barriers.__file__), str(judge.__file__)]
    command += ["namespace" if own_root else "interpreter", *numbers]
    with (
        tempfile.TemporaryDirectory(prefix="paceline-") as folder,
        tempfile.TemporaryFile("w+") as texts,
    ):
        texts.write(judge.pack((program, checks)))
        texts.seek(0)
        process = subprocess.Popen(
            [*_ISOLATED, "--", *command] if own_root else command,
            cwd=folder,
            env={"PATH": os.defpath, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            stdin=texts,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return _wait(process, _WALL_FACTOR * limits.seconds)
        finally:
            stop_groups([process])
            process.wait()


def _wait(process: subprocess.Popen[bytes], seconds: int) -> int | None:
    if not hasattr(os, "pidfd_open"):
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(seconds)
        return None
    descriptor = os.pidfd_open(process.pid)  # Popen.wait sleeps up to 50 ms too long
    try:
        ended = select.poll()
        ended.register(descriptor, select.POLLIN)
        ended.poll(1000 * seconds)
    finally:
        os.close(descriptor)
    return process.poll()


@functools.cache
def _can_unshare() -> bool:
    if shutil.which(_ISOLATED[0], path=os.defpath) is None:
        return False
    return _status("", _AMPLE, None, own_root=True) == judge.PASSED
