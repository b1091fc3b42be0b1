"""Structures and enums shared with the C sources.

Names, sizes, offsets and values are compared with the library when it is loaded, so that a
difference between Python and C is an error and not a wrong result.
"""

from __future__ import annotations

import ctypes
from enum import IntEnum, auto
from typing import Any

_pointer, _int, _float = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_double = ctypes.c_double


def _typed(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class Block(ctypes.Structure):
    """A block to verify and its results; see speculation.h for shapes."""

    _fields_ = (
        *_typed(_int, "batch gamma places vocab"),
        *_typed(_pointer, "drafted num_drafted draft target"),
        *_typed(_pointer, "accept_uniforms next_uniforms num_accepted next_tokens"),
    )


class Matrix(ctypes.Structure):
    _fields_ = (("weights", _pointer), ("scales", _pointer), ("rounds", _int))


class Layer(ctypes.Structure):
    _fields_ = (
        *_typed(Matrix, "qkv out gate_up down"),
        *_typed(_pointer, "attention_norm mlp_norm query_norm key_norm qkv_bias"),
        ("window", _int),
    )


class Model(ctypes.Structure):
    _fields_ = (
        *_typed(_int, "num_layers hidden inner query_heads key_heads head_size head_rows vocab"),
        *_typed(_float, "norm_eps scaling"),
        *_typed(Matrix, "embeddings head"),
        *_typed(_pointer, "head_bias head_tokens final_norm layers"),
    )


class Pass(ctypes.Structure):
    _fields_ = (
        *_typed(_int, "threads batch count width keep compact"),
        *_typed(_pointer, "tokens lengths ends cos sin keys values"),
        ("columns", _int),
        *_typed(_pointer, "logits states workspace"),
    )


class Draft(ctypes.Structure):
    _fields_ = (
        *_typed(_int, "gamma places vocab"),
        ("temperature", _double),
        *_typed(_pointer, "uniforms tokens probs raw"),
    )


class DivergenceKind(IntEnum):
    """Divergences; same order as in divergences.h."""

    FORWARD_KL = 0
    REVERSE_KL = auto()
    JSD = auto()
    TVD = auto()
    NEGATIVE_LOG_ACCEPTANCE = auto()
    CROSS_ENTROPY = auto()


class Term(ctypes.Structure):
    """A weighted divergence; only the JSD uses beta."""

    _fields_ = (("kind", _int), ("weight", _double), ("beta", _double))


class Losses(ctypes.Structure):
    _fields_ = (
        ("terms", _pointer),
        *_typed(_int, "num_terms rows vocab bytes"),
        *_typed(_pointer, "target draft labels weights normalisers losses"),
    )


_STRUCTURES: tuple[type[ctypes.Structure], ...] = (
    *(Block, Draft, Matrix, Layer, Model, Pass, Term, Losses),
)


def python_layout() -> dict[str, int]:
    """Sizes in bytes, field offsets and enum values, by their names in C."""
    facts = {kind.name: int(kind) for kind in DivergenceKind}
    for structure in _STRUCTURES:
        name = structure.__name__
        facts[name] = ctypes.sizeof(structure)
        for field in structure._fields_:
            facts[f"{name}.{field[0]}"] = getattr(structure, field[0]).offset
    return facts


def c_layout(library: ctypes.CDLL) -> dict[str, int]:
    """`python_layout` as compiled into the library."""
    facts: dict[str, int] = {}
    for index in range(library.num_facts()):
        facts[ctypes.string_at(library.fact_name(index)).decode()] = library.fact_value(index)
    return facts


def layout_fault(python: dict[str, int], c: dict[str, int]) -> str | None:
    """Describe the first difference; None if the layouts are equal."""
    for name in [*python, *c]:
        if python.get(name) != c.get(name):
            return f"{name} is {python.get(name)} in Python and {c.get(name)} in C"
    return None
