"""A library that computes wrong is found out when it is loaded, and not used."""

import ctypes
from typing import Any

import pytest

from paceline.errors import SlowerWarning
from paceline.native import compiled
from paceline.native import library as in_use
from paceline.native.self_check import fault_of
from paceline.native.structures import c_layout, layout_fault, python_layout

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


def test_structures_and_kinds_are_laid_out_alike_in_python_and_in_c():
    found = c_layout(library_of_this_machine())
    assert found == python_layout()
    assert {"Block", "Block.target", "Model.layers", "CROSS_ENTROPY"} <= found.keys()


@pytest.mark.parametrize(
    ("name", "value", "fault"),
    [
        ("Term.beta", 8, "Term.beta is 8 in Python and 16 in C"),
        ("Block", 120, "Block is 120 in Python and"),
        ("TVD", 4, "TVD is 4 in Python and 3 in C"),
        ("Block.fresh", 128, "Block.fresh is 128 in Python and None in C"),
        ("JSD", None, "JSD is None in Python and 2 in C"),
    ],
)
def test_a_field_or_a_kind_that_one_side_alone_has_changed_is_a_fault(
    name: str, value: int | None, fault: str
):
    changed = python_layout() | ({} if value is None else {name: value})
    if value is None:
        del changed[name]
    found = layout_fault(changed, c_layout(library_of_this_machine()))
    assert found is not None
    assert found.startswith(fault)
