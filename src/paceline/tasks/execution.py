"""Runs a program that a model wrote in one child process with limits.

The limits are for accidents, such as endless loops. A program that attacks the machine is stopped
by the container or the virtual machine that the code task asks for.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import tempfile
import warnings

from paceline.errors import InputNote, PacelineError, UsageError
from paceline.processes import stop_groups

_WITHOUT_NETWORK = ("unshare", "--net", "--user")
MEGABYTES = 1024  # memory of a program
_AMPLE_S = 10  # processor time of a program that does nothing
_WALL_FACTOR = 5  # a program may wait this many times as long as it may compute
_PASSED, _FAILED = 100, 101  # no status that Python or a shell uses
# What the child runs; its input is the program, its arguments are seconds and bytes.
_START = f"""
import os, resource, sys
seconds, memory = map(int, sys.argv[1:])
sys.argv = ["program.py"]
program = sys.stdin.buffer.read().decode()
limits = dict(CPU=seconds, AS=memory, FSIZE=1 << 20, NPROC=0, CORE=0)
for name, limit in limits.items():
    try:
        resource.setrlimit(getattr(resource, "RLIMIT_" + name), (limit, limit))
    except (AttributeError, OSError, ValueError):
        pass  # the system has no such limit
try:
    exec(compile(program, "program.py", "exec"), {{}})
except BaseException:
    os._exit({_FAILED})
os._exit({_PASSED})
"""


def passes(program: str, max_seconds: int) -> bool:
    """Whether the program runs to its last line.

    Its output is discarded. The directory is empty, and removed afterwards.
    """
    if os.name != "posix":
        raise UsageError(
            "this system cannot limit the memory and time of a process; run the code task on Linux"
        )
    prefix = _WITHOUT_NETWORK if has_no_network() else ()
    status = _status(program, max_seconds, prefix)
    # of unshare and of Python that do not start
    if status in (1, 2) and _status("", _AMPLE_S, prefix) != _PASSED:
        raise PacelineError(
            "a process for a program could not be started; wait until fewer processes run, and "
            "run the command again"
        )
    return status == _PASSED


@functools.cache
def has_no_network() -> bool:
    """Whether the system closes the network to programs; warns once if it does not."""
    tool = shutil.which(_WITHOUT_NETWORK[0], path=os.defpath)
    if tool is not None and _status("", _AMPLE_S, _WITHOUT_NETWORK) == _PASSED:
        return True
    warnings.warn(
        "programs of the code task can use the network: `unshare --net --user` is missing or not "
        "allowed here; run them in a container without network",
        InputNote,
        stacklevel=2,
    )
    return False


def _status(program: str, max_seconds: int, prefix: tuple[str, ...]) -> int | None:
    """Exit status of the child; None if it takes too long."""
    numbers = (str(max_seconds), str(MEGABYTES << 20))
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
        process = subprocess.Popen(
            [*prefix, sys.executable, "-I", "-B", "-c", _START, *numbers],
            cwd=folder,
            env={"PATH": os.defpath, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            # a surrogate cannot be compiled
            process.communicate(program.encode("utf-8", "replace"), _WALL_FACTOR * max_seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            stop_groups([process])
            process.wait()
        return process.returncode
