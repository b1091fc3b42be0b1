"""A process that judges one program: `execution.py` starts this file, with no package.

The tests run in this process, and the program runs in a child of it. The tests call the function
of the program by a message, and get plain data back. The exit status of this process is the
verdict. So the process of the program holds neither the tests nor anything that means success.
"""

from __future__ import annotations

import builtins
import os
import sys

from paceline.tasks.barriers import confine, drop_privileges, end_with_parent, enter_own_root

TYPE_CHECKING = False  # typing takes longer to import than most programs to run
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import IO, Any, NoReturn

PASSED, FAILED, UNFIT = 100, 101, 102  # no status that Python or a shell uses

_SCALARS: dict[str, tuple[Callable[[Any], str], Callable[[str], Any]]] = {
    "none": (str, lambda text: None),
    "bool": (str, lambda text: text == "True"),
    "int": (hex, lambda text: int(text, 16)),
    "float": (float.hex, float.fromhex),
    "complex": (
        lambda value: f"{float.hex(value.real)} {float.hex(value.imag)}",
        lambda text: complex(*map(float.fromhex, text.split())),
    ),
    "str": (
        lambda value: value.encode("utf-8", "surrogatepass").hex(),
        lambda text: bytes.fromhex(text).decode("utf-8", "surrogatepass"),
    ),
    "bytes": (bytes.hex, bytes.fromhex),
    "bytearray": (bytearray.hex, bytearray.fromhex),
}
_CONTAINERS = {
    **{kind.__name__: kind for kind in (list, tuple, set, frozenset, dict)},
    "iterator": iter,
}


def _name_of(value: Any) -> str:
    if value is None:
        return "none"
    kinds = (bool, int, float, complex, str, bytes, bytearray, list, tuple, set, frozenset, dict)
    for kind in kinds:
        if isinstance(value, kind):
            return kind.__name__
    if hasattr(type(value), "__next__"):
        return "iterator"
    raise TypeError(f"{type(value).__name__} is no plain data")


def pack(value: Any) -> str:
    """The value as lines of text; values of numpy and of subclasses become plain ones.

    Raises:
        TypeError: it contains something other than plain data.
    """
    if getattr(value, "ndim", None) == 0:
        value = value.item()
    name = _name_of(value)
    if name in _SCALARS:
        return f"{name} {_SCALARS[name][0](value)}\n"
    items = [pack(item) for item in (value.items() if name == "dict" else value)]
    return "".join((f"{name} {len(items)}\n", *items))


def unpack(lines: Iterator[str]) -> Any:
    """What `pack` was given, from the next lines."""
    name, _, text = next(lines).rstrip("\n").partition(" ")
    if name in _SCALARS:
        return _SCALARS[name][1](text)
    return _CONTAINERS[name]([unpack(lines) for _ in range(int(text))])


def _send(stream: IO[str], value: Any) -> None:
    stream.write(pack(value))
    stream.flush()


def serve(requests: IO[str], replies: IO[str]) -> None:
    """Run the program, then call its function as often as it is asked to."""
    namespace: dict[str, Any] = {}
    program, function = unpack(requests)
    exec(compile(program, "program.py", "exec"), namespace)
    _send(replies, None)
    called, known = eval(function, namespace), set(map(id, vars(builtins).values()))
    while True:
        arguments, named = unpack(requests)
        changed = (*arguments, *named.values())
        try:
            result = called(*arguments, **named)
        except Exception as error:
            names = [kind.__name__ for kind in type(error).__mro__ if id(kind) in known]
            told = [part if isinstance(part, int | str) else str(part) for part in error.args]
            _send(replies, ("raised", (names[0], told), changed))
        else:
            _send(replies, ("returned", result, changed))


class Candidate:
    """The function of the program, which the tests call as if it were theirs."""

    def __init__(self, requests: IO[str], replies: IO[str]):
        self._requests, self._replies = requests, replies

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        try:
            request = pack((arguments, named))
        except TypeError:
            os._exit(UNFIT)
        except RecursionError:  # part of an earlier result can be this deep
            os._exit(FAILED)
        try:
            self._requests.write(request)
            self._requests.flush()
            outcome, result, changed = unpack(self._replies)
            self._change((*arguments, *named.values()), changed)
            if outcome == "returned":
                return result
            name, told = result
            error = vars(builtins).get(name)
        except Exception:  # the program ended, or answers something else
            os._exit(FAILED)
        if not (isinstance(error, type) and issubclass(error, Exception)):
            error = RuntimeError
        if issubclass(error, StopIteration):  # it would end a loop of the tests, as of map()
            error = RuntimeError
        raise error(*told)

    @staticmethod
    def _change(arguments: tuple[Any, ...], changed: tuple[Any, ...]) -> None:
        """Let the arguments be what the function made of them."""
        for old, new in zip(arguments, changed, strict=True):
            if isinstance(old, list | bytearray):
                old[:] = new
            elif isinstance(old, set | dict):
                old.clear()
                old.update(new)


def judge(requests: IO[str], replies: IO[str]) -> NoReturn:
    """Hand over the program, run the tests, and exit with the verdict."""
    program, checks = unpack(sys.stdin)
    tests, function, setup = checks or ("", "None", "")
    _send(requests, (program, function))
    unpack(replies)  # it ran to its last line
    if checks:
        namespace: dict[str, Any] = {}
        try:
            codes = compile(setup, "setup.py", "exec"), compile(tests, "tests.py", "exec")
        except (SyntaxError, ValueError):
            os._exit(UNFIT)
        exec(codes[0], namespace)
        candidate = namespace[function] = Candidate(requests, replies)
        exec(codes[1], namespace)
        namespace["check"](candidate)
    os._exit(PASSED)


def main(own_root: bool, seconds: int, memory: int) -> NoReturn:
    """Divide into two processes."""
    sys.argv = ["program.py"]
    if own_root:
        enter_own_root(os.getcwd())
    drop_privileges()
    to_child, to_judge = os.pipe(), os.pipe()
    null = os.open(os.devnull, os.O_RDWR)
    child = os.fork()
    reading, writing = (to_child[0], to_judge[1]) if child == 0 else (to_judge[0], to_child[1])
    if child == 0:
        os.dup2(null, 0)  # the tests
        end_with_parent()
    for descriptor in {null, *to_child, *to_judge} - {reading, writing}:
        os.close(descriptor)
    with open(reading) as received, open(writing, "w") as sent:
        try:
            confine(seconds, memory)
            serve(received, sent) if child == 0 else judge(sent, received)
        finally:
            os._exit(FAILED)


if __name__ == "__main__":
    main(sys.argv[1] == "namespace", int(sys.argv[2]), int(sys.argv[3]))
