"""A library that computes wrong is found out when it is loaded, and not used."""

import ctypes
from typing import Any

import pytest

from paceline.errors import SlowerWarning
from paceline.native import compilation, compiled
from paceline.native.self_check import fault_of

pytestmark = pytest.mark.skipif(compiled() is None, reason="no C compiler with OpenMP")


class Faulty:
    """The library, one of whose functions is called with other numbers."""

    def __init__(self, name: str, spoil: Any) -> None:
        self._name, self._spoil = name, spoil

    def __getattr__(self, name: str) -> Any:
        function = getattr(compiled(), name)
        if name != self._name:
            return function
        return lambda *arguments: function(*self._spoil(*arguments))


def _warmer(*arguments: Any) -> tuple[Any, ...]:
    return (*arguments[:4], 0.8, *arguments[5:])


def _shorter(*arguments: Any) -> tuple[Any, ...]:
    return (*arguments[:2], arguments[2] - 16, *arguments[3:])


def _rows(*arguments: Any) -> tuple[Any, ...]:
    return (*arguments[:2], 1, *arguments[3:])


def _sure(block: Any, threads: int) -> tuple[Any, ...]:
    ctypes.cast(block._obj.accept_uniforms, ctypes.POINTER(ctypes.c_double))[1] = 0.0
    return block, threads


def _heavier(losses: Any, threads: int) -> tuple[Any, ...]:
    ctypes.cast(losses._obj.weights, ctypes.POINTER(ctypes.c_float))[0] = 1.01
    return losses, threads


def test_a_right_library_has_no_fault():
    assert fault_of(library_of_this_machine()) is None


def library_of_this_machine() -> ctypes.CDLL:
    library = compiled()
    assert library is not None
    return library


@pytest.mark.parametrize(
    ("name", "spoil", "fault"),
    [
        ("softmax", _warmer, "softmax"),
        ("best_tokens", _shorter, "drawing"),
        ("draw_tokens", _rows, "drawing"),
        ("judge", _sure, "judging"),
        ("losses_and_slopes", _heavier, "divergences"),
    ],
)
def test_every_fault_is_named(name: str, spoil: Any, fault: str):
    assert fault_of(Faulty(name, spoil)) == fault  # pyright: ignore[reportArgumentType]


def test_a_faulty_library_is_not_used(monkeypatch: pytest.MonkeyPatch):
    library = Faulty("softmax", _warmer)
    monkeypatch.setattr(compilation, "library_with", lambda _: library)
    with pytest.warns(SlowerWarning, match=r"other results than PyTorch \(softmax\), so PyTorch"):
        assert compiled.__wrapped__() is None
