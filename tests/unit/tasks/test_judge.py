"""A program passes its tests by what its function returns, and cannot forge a pass."""

import pytest

from paceline.errors import PromptError
from paceline.tasks.execution import Checks, Limits, passes

pytestmark = pytest.mark.slow

LIMITS = Limits(seconds=1, megabytes=512)

# Each passes if it finds out the tests, stands for any value, or replaces a part of the tests.
CHECKS = Checks(
    function="f",
    setup="def helped(x): return x",
    tests="""
def check(candidate):
    def near():
        assert abs(candidate(2) - 4) < 1e-6
    def equal():
        assert candidate(2) == 4, "needle"
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
LYING = {
    "equals all": "class A:\n    __eq__ = lambda *_: True\ndef f(x): return A()",
    "is a number": "class A(int):\n    __eq__ = lambda *_: True\ndef f(x): return A()",
    "is any": "from unittest.mock import ANY\ndef f(x): return ANY",
    "is near": "class A:\n    __sub__ = lambda *_: 0\ndef f(x): return A()",
    "replaces builtins": "import builtins; builtins.abs = lambda _: 0\ndef f(x): return 0",
    "replaces a function": "def helped(x): return 4\ndef f(x): return 0",
    "replaces tests": "def check(f): pass\ndef f(x): return 0",
}
# By what a process can do, from which it is kept apart.
FORGING = {
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


@pytest.mark.parametrize("name", LYING)
def test_a_program_passes_by_what_its_function_returns_and_not_by_what_it_stands_for(name: str):
    assert not passes(LYING[name], LIMITS, CHECKS)


@pytest.mark.parametrize("name", FORGING)
def test_a_program_cannot_reach_its_tests(name: str, barrier: str):
    assert not passes(FORGING[name], LIMITS, CHECKS)


def test_a_function_that_returns_what_the_tests_want_passes(barrier: str):
    assert passes("def f(x): return 2 * x", LIMITS, CHECKS)
    assert passes("def f(x): return 4 if x == 2 else f", LIMITS, CHECKS)
    assert not passes("def f(x): return x", LIMITS, CHECKS)


SAME = """
import math
def check(candidate):
    values = [None, True, 1, -2.5, 1 << 80, 'x\\ud800', [1, (2, 3)], {1: 'a', (1, 2): [None]}]
    values += [{1, 2}, frozenset('ab'), b'ab', bytearray(b'c'), math.inf, -0.0, 1j, {}, [], ()]
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
    bytes_ = bytearray(b"ab")
    candidate(9, list_, dict_, set_, more=bytes_)
    assert (list_, dict_, set_, bytes_) == ([1, 2, 3], {1: [2, 3]}, {1, 4}, b"abc")
    try:
        candidate(-1, list_, dict_, set_)
    except ValueError:
        assert list_ == [1, 2, 3, 3]
"""
    program = """
class Own(RuntimeError): pass
class Other(Exception): pass
def f(number, *changed, more=None):
    if not changed:
        raise [ValueError, KeyError, Own, Other][number]('why')
    changed[0].sort(); changed[0].append(3)
    changed[1][1].append(3)
    changed[2].add(4)
    if number < 0:
        raise ValueError
    more.append(99)
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
    with pytest.raises(PromptError) as caught:
        passes("def f(x): return x", LIMITS, checks)
    assert str(caught.value) == (
        "the tests do not compile, or pass something other than numbers, texts, lists, tuples, "
        "sets, dictionaries and None; correct them or leave the row out"
    )


def test_a_result_that_brings_the_tests_to_a_limit_fails(barrier: str):
    checks = Checks("def check(candidate):\n    for _ in range(candidate()): pass", "f")
    assert not passes("def f(): return 10 ** 9", LIMITS, checks)


@pytest.mark.parametrize(
    ("tests", "body"),
    [
        ("assert all(a == b for a, b in zip(map(candidate, 'ab'), 'cd'))", "raise StopIteration"),
        (
            "deep = candidate(0)\n    for _ in range(99): deep = [deep]\n    candidate(deep)",
            "for _ in range(450): x = [x]\n    return x",
        ),
    ],
)
def test_a_function_neither_ends_a_loop_of_the_tests_nor_makes_them_unfit(tests: str, body: str):
    checks = Checks(f"def check(candidate):\n    {tests}", "f")
    assert not passes(f"def f(x):\n    {body}", LIMITS, checks)
