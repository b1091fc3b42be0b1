"""Runs a program that a model wrote in a process of its own, with limits.

This protects against accidents: endless loops, full memory, lost files, messages sent by mistake.
It is no sandbox against a program that attacks the machine; a container or a virtual machine is.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Literal, NamedTuple

from paceline.errors import UsageError

_ISOLATED = ("unshare", "--user", "--map-root-user", "--net")
_WALL_FACTOR = 5  # a program may wait this many times as long as it may compute

# Runs in the new process. argv: CPU seconds, bytes of memory, file descriptor, mark of success.
# The program cannot end early with success: the mark is written after its last line.
_RUNNER = """
import os, resource, sys
seconds, memory, pipe, mark = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
sys.argv = ['program.py']
limits = [('CPU', seconds), ('AS', memory), ('FSIZE', 1 << 20), ('NPROC', 0), ('CORE', 0)]
for name, limit in limits:
    try:
        resource.setrlimit(getattr(resource, 'RLIMIT_' + name), (limit, limit))
    except (AttributeError, OSError, ValueError):
        pass  # the system has no such limit
source = compile(open('program.py', encoding='utf-8').read(), 'program.py', 'exec')
folder = os.path.realpath('.')
# ctypes opens a library when numpy imports it; what stays closed is the call of a function.
refused = ('socket.', 'ctypes.dlsym', 'ctypes.call', 'subprocess.', 'pty.', 'shutil.',
           'os.fork', 'os.exec', 'os.posix_spawn', 'os.spawn', 'os.system', 'os.kill',
           'os.remove', 'os.rename', 'os.rmdir', 'os.link', 'os.symlink', 'os.chmod', 'os.chown',
           'os.truncate')
writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
def check(event, arguments):
    if event.startswith(refused):
        raise PermissionError(event + ' is not allowed here')
    if event == 'open' and isinstance(arguments[0], (str, bytes)) and arguments[2] & writing:
        path = os.path.realpath(os.fsdecode(arguments[0]))
        if not path.startswith(folder + os.sep) and path != os.devnull:
            raise PermissionError('no file outside the working directory can be written')
sys.addaudithook(check)
exec(source, {})
os.write(pipe, mark.encode())
"""


class Limits(NamedTuple):
    """Limits of one program: seconds of processor time, and megabytes of memory."""

    seconds: int
    megabytes: int


def passes(program: str, limits: Limits) -> bool:
    """Whether the program runs to its last line without an exception and within the limits.

    It runs in an empty directory that is removed afterwards. It cannot start processes, open
    connections, remove files or write outside the directory. Its output is discarded.

    Raises:
        UsageError: the system cannot limit a process.
    """
    if os.name != "posix":
        raise UsageError(
            "this system cannot limit the memory and time of a process; run the code task on Linux"
        )
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
        # a surrogate cannot be written, nor compiled
        Path(folder, "program.py").write_text(program, encoding="utf-8", errors="replace")
        return _run(folder, limits)


def network_barrier() -> Literal["namespace", "interpreter"]:
    """What closes the network: the system, or only a check in the interpreter."""
    return "namespace" if _can_unshare() else "interpreter"


def _run(folder: str, limits: Limits) -> bool:
    mark = secrets.token_hex(16)
    reading, writing = os.pipe()
    numbers = [str(limits.seconds), str(limits.megabytes << 20), str(writing)]
    command = [sys.executable, "-I", "-B", "-c", _RUNNER, *numbers, mark]
    with open(reading, "rb") as result:  # noqa: PTH123 - a file descriptor
        try:
            process = subprocess.Popen(
                [*_ISOLATED, "--", *command] if _can_unshare() else command,
                cwd=folder,
                env={"PATH": os.defpath, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[writing],
                start_new_session=True,
            )
        finally:
            os.close(writing)
        try:
            process.wait(_WALL_FACTOR * limits.seconds)
        except subprocess.TimeoutExpired:
            return False
        finally:
            if process.returncode is None:  # it waits, or the user interrupted
                _end(process)
        return result.read() == mark.encode()


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@functools.cache
def _can_unshare() -> bool:
    if shutil.which(_ISOLATED[0], path=os.defpath) is None:
        return False
    tried = subprocess.run(
        [*_ISOLATED, "true"], env={"PATH": os.defpath}, capture_output=True, check=False
    )
    return tried.returncode == 0
