"""A library that computes wrong is found out when it is loaded, and not used."""

import ctypes
import re
from typing import Any

import pytest

from paceline.compilation import SOURCES
from paceline.errors import SlowerWarning
from paceline.native import compiled
from paceline.native import library as in_use
from paceline.native.self_check import fault_of
from paceline.native.structures import DivergenceKind, Layer, Pass, Term

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
        ("best_tokens", _shorter, "sampling"),
        ("draw_tokens", _rows, "sampling"),
        ("verify", _sure, "verification"),
        ("losses_and_slopes", _heavier, "divergences"),
    ],
)
def test_every_fault_is_named(name: str, spoil: Any, fault: str):
    assert fault_of(Faulty(name, spoil)) == fault  # pyright: ignore[reportArgumentType]


def test_a_faulty_library_is_not_used(monkeypatch: pytest.MonkeyPatch):
    library = Faulty("softmax", _warmer)
    monkeypatch.setattr(in_use, "library_with", lambda _: library)
    monkeypatch.setattr(in_use, "kernels_folder", lambda: None)
    with pytest.warns(
        SlowerWarning, match=r"other results than PyTorch \(softmax\), so PyTorch is used"
    ):
        assert compiled.__wrapped__() is None


def test_the_kinds_of_divergences_have_the_order_of_the_header():
    header = (SOURCES / "divergences.h").read_text()
    (names,) = re.findall(r"enum \{ (.*) \};", header)
    assert names.split(", ") == [kind.name for kind in DivergenceKind]
    assert list(DivergenceKind) == [*range(len(DivergenceKind))]


def test_fields_are_those_of_the_headers():
    assert ctypes.sizeof(Term) == 24
    assert Term.beta.offset == 16
    assert [name for name, *_ in Layer._fields_][:5] == [
        "qkv",
        "out",
        "gate_up",
        "down",
        "attention_norm",
    ]
    assert Pass._fields_[-1] == ("workspace", ctypes.c_void_p)
