"""What Python hands to the C sources: structures, and numbers of rules and divergences.

Compared with the compiled library by name, size, offset and number each time that it is loaded: a
field or a kind that is added on one side alone is a fault, not a wrong result.
"""

from __future__ import annotations

import ctypes
from enum import IntEnum, auto

_pointer, _int, _float = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_double = ctypes.c_double


class Kind(IntEnum):
    """Rules, numbered as in rules.h."""

    LOSSLESS = 0
    LENIENT_LINEAR = auto()
    LENIENT_SQUARE = auto()
    LENIENT_EXPONENTIAL = auto()
    LOSSY = auto()
    LOSSY_TUNED = auto()
    BILD = auto()
    CHOW = auto()
    CHOW_LOG = auto()
    DIFF = auto()
    DIFF_LOG = auto()
    OPT = auto()
    OPT_LOG = auto()
    TOKEN_V1 = auto()
    TOKEN_V2 = auto()
    TOKEN_V3 = auto()


class NativeRule(ctypes.Structure):
    """A rule as rules.c reads it."""

    _fields_ = (("kind", _int), ("alpha", _double), ("beta", _double))

    @property
    def needs_draft_at_bonus(self) -> bool:
        return self.kind >= Kind.LOSSY_TUNED


class Block(ctypes.Structure):
    """What is judged, and where the verdict goes; verification.h tells the shapes."""

    _fields_ = (
        ("rule", NativeRule),
        *((name, _int) for name in ("batch", "gamma", "places", "vocab")),
        *((name, _pointer) for name in ("drafted", "num_drafted", "draft", "draft_raw")),
        *((name, _pointer) for name in ("target", "target_raw")),
        *((name, _pointer) for name in ("accept_uniforms", "next_uniforms", "room")),
        *((name, _pointer) for name in ("num_accepted", "next_tokens")),
    )


class Matrix(ctypes.Structure):
    _fields_ = (("weights", _pointer), ("scales", _pointer), ("rounds", _int))


class Layer(ctypes.Structure):
    _fields_ = (
        *((name, Matrix) for name in ("qkv", "out", "gate_up", "down")),
        *((name, _pointer) for name in ("attention_norm", "mlp_norm", "query_norm", "key_norm")),
        ("qkv_bias", _pointer),
        ("window", _int),
    )


class Model(ctypes.Structure):
    _fields_ = (
        *((name, _int) for name in ("num_layers", "hidden", "inner", "query_heads", "key_heads")),
        *((name, _int) for name in ("head_size", "head_rows", "vocab")),
        *((name, _float) for name in ("norm_eps", "scaling")),
        ("embeddings", Matrix),
        ("head", Matrix),
        *((name, _pointer) for name in ("head_bias", "head_tokens")),
        *((name, _pointer) for name in ("final_norm", "layers")),
    )


class Pass(ctypes.Structure):
    _fields_ = (
        *((name, _int) for name in ("threads", "batch", "count", "width", "keep", "compact")),
        *(
            (name, _pointer)
            for name in ("tokens", "lengths", "ends", "cos", "sin", "keys", "values")
        ),
        ("room", _int),
        *((name, _pointer) for name in ("logits", "states", "workspace")),
    )


class Draft(ctypes.Structure):
    _fields_ = (
        *((name, _int) for name in ("gamma", "places", "vocab")),
        ("temperature", _double),
        *((name, _pointer) for name in ("uniforms", "tokens", "probs", "raw")),
    )


class DivergenceKind(IntEnum):
    """Numbered as in divergences.h."""

    FORWARD_KL = 0
    REVERSE_KL = auto()
    JSD = auto()
    TVD = auto()
    NEGATIVE_LOG_ACCEPTANCE = auto()
    CROSS_ENTROPY = auto()


class Term(ctypes.Structure):
    """A weighted divergence; beta is the JSD's."""

    _fields_ = (("kind", _int), ("weight", _double), ("beta", _double))


class Losses(ctypes.Structure):
    _fields_ = (
        ("terms", _pointer),
        *((name, _int) for name in ("num_terms", "rows", "vocab", "bytes")),
        *((name, _pointer) for name in ("target", "draft", "labels", "weights")),
        *((name, _pointer) for name in ("normalisers", "losses")),
    )


_STRUCTURES: dict[str, type[ctypes.Structure]] = {
    "Rule": NativeRule,
    **{one.__name__: one for one in (Block, Draft, Matrix, Layer, Model, Pass, Term, Losses)},
}


def python_layout() -> dict[str, int]:
    """Sizes in bytes, offsets of fields, numbers of kinds, by their names in C."""
    facts = {kind.name: int(kind) for kinds in (Kind, DivergenceKind) for kind in kinds}
    for name, structure in _STRUCTURES.items():
        facts[name] = ctypes.sizeof(structure)
        for field in structure._fields_:
            facts[f"{name}.{field[0]}"] = getattr(structure, field[0]).offset
    return facts


def c_layout(library: ctypes.CDLL) -> dict[str, int]:
    """The same, as the library was compiled."""
    facts: dict[str, int] = {}
    for index in range(library.num_facts()):
        facts[ctypes.string_at(library.fact_name(index)).decode()] = library.fact_value(index)
    return facts


def layout_fault(python: dict[str, int], c: dict[str, int]) -> str | None:
    """The first difference, in words; None if there is none."""
    for name in [*python, *c]:
        if python.get(name) != c.get(name):
            return f"{name} is {python.get(name)} in Python and {c.get(name)} in C"
    return None
