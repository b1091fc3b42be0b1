"""What llama.h and speculation.c read: a Llama-like model, one pass of it, and a draft to be drawn."""

from __future__ import annotations

import ctypes

_pointer, _int, _float = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_double = ctypes.c_double


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
