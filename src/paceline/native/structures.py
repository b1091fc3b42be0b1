"""Structures and enums of the C sources; the fields are read from the headers."""

from __future__ import annotations

import ctypes
import re
from enum import IntEnum, auto
from typing import Any

from paceline.compilation import SOURCES

_KINDS: dict[str, Any] = {
    "int64_t": ctypes.c_int64, "float": ctypes.c_float, "double": ctypes.c_double,
}  # fmt: skip


def _fields(header: str, name: str) -> list[tuple[str, Any]]:
    """Names and types of a structure's fields; all pointers have one type."""
    text = re.sub(r"/\*.*?\*/", "", (SOURCES / header).read_text("utf-8"), flags=re.DOTALL)
    (body,) = re.findall(rf"typedef struct {{([^}}]*)}} {name};", text)
    fields: list[tuple[str, Any]] = []
    for declaration in body.split(";")[:-1]:
        kind = ctypes.c_void_p if "*" in declaration else _KINDS[declaration.split()[0]]
        fields += [(each.split()[-1].lstrip("*"), kind) for each in declaration.split(",")]
    return fields


class Block(ctypes.Structure):
    _fields_ = _fields("speculation.h", "Block")


class Draft(ctypes.Structure):
    _fields_ = _fields("speculation.h", "Draft")


class Matrix(ctypes.Structure):
    _fields_ = _fields("transformer.h", "Matrix")


_KINDS["Matrix"] = Matrix


class Layer(ctypes.Structure):
    _fields_ = _fields("transformer.h", "Layer")


class Model(ctypes.Structure):
    _fields_ = _fields("transformer.h", "Model")


class Pass(ctypes.Structure):
    _fields_ = _fields("transformer.h", "Pass")


class Term(ctypes.Structure):
    _fields_ = _fields("divergences.h", "Term")


class Losses(ctypes.Structure):
    _fields_ = _fields("divergences.h", "Losses")


class DivergenceKind(IntEnum):
    """Divergences; same order as in divergences.h."""

    FORWARD_KL = 0
    REVERSE_KL = auto()
    JSD = auto()
    TVD = auto()
    NEGATIVE_LOG_ACCEPTANCE = auto()
    CROSS_ENTROPY = auto()
