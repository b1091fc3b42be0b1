"""Measures whether float32 or bfloat16 matrix products are faster on this machine.

Processor flags are not sufficient: float32 may be faster on a machine with native bfloat16. The
products of a model's shapes are timed once per machine, in well under a second, and cached. They
run on one thread and are timed with its CPU clock, so that other programs matter less.
`PACELINE_PRECISION` overrides the measurement; `dtype` and `precision` in a configuration override
both.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from paceline.cache import cached_text, keep_text
from paceline.errors import UsageError
from paceline.fingerprints import short_hash
from paceline.models.hf.architectures import first_size
from paceline.models.llama.packing import Packer, can_pack
from paceline.processor import level, processor_name
from paceline.records import cache_root

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch import Tensor
    from transformers import PreTrainedConfig

    Shape = tuple[int, int]
    Product = Callable[[], object]

VARIABLE = "PACELINE_PRECISION"
_KIND = "precision"  # directory in the cache
Precision = Literal["float32", "bfloat16"]
Purpose = Literal["training", "reading", "decoding"]
"""Training: forward and backward products. Reading: forward products over long texts. Decoding:
products of a prepared model, where float32 means float16 weights times float32 activations."""

_FLOPS = 5e8  # of one timed product
_ROWS = {"training": (64, 1024), "reading": (64, 512), "decoding": (64, 64)}  # min, max
_LARGEST = 2048  # side of a timed matrix; larger matrices are multiplied in blocks anyway
_REPEATS = 4
_EARLY_STOP_RATIO = 3.0  # timing stops once one precision is this many times slower


class Choice(NamedTuple):
    """A precision, and the reason for it as a phrase."""

    precision: Precision
    reason: str


def choose_precision(purpose: Purpose, shapes: Iterable[Shape], device: torch.device) -> Choice:
    """Choose the precision in which the device multiplies matrices of these shapes fastest.

    A tie gives bfloat16, which needs half the memory. Only the CPU is timed; a CUDA device gives
    bfloat16 if it has native bfloat16. `shapes`: [out, in] of the weights; see `shapes_of`.

    Raises:
        UsageError: `PACELINE_PRECISION` is not a precision.
    """
    override = overridden()
    if override is not None:
        return override
    if device.type != "cpu":
        native = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        choice = "bfloat16" if native else "float32"
        return Choice(choice, f"the native precision of this {device.type} device")
    sides = {(min(out, _LARGEST), min(size, _LARGEST)) for out, size in shapes}
    return faster_of(_times(purpose, sorted(sides)), purpose)


def overridden() -> Choice | None:
    """The precision that `PACELINE_PRECISION` sets; raises a UsageError if it is invalid."""
    match os.environ.get(VARIABLE):
        case None | "":
            return None
        case "float32" | "bfloat16" as precision:
            return Choice(precision, f"{VARIABLE} is set")
        case other:
            raise UsageError(f"{VARIABLE} is {other!r}, wanted float32 or bfloat16")


def faster_of(seconds: dict[str, float], what: str) -> Choice:
    """The faster precision with the measured times; bfloat16 in a tie."""
    faster = "bfloat16" if seconds["bfloat16"] <= seconds["float32"] else "float32"
    measured = ", ".join(f"{name} {1e3 * each:.1f} ms" for name, each in seconds.items())
    return Choice(faster, f"measured for {what}: {measured}")


def shapes_of(config: PreTrainedConfig) -> list[Shape]:
    """[out, in] of a model's largest matrices, from its configuration."""
    text: Any = config.get_text_config(decoder=True)
    hidden = first_size(text, "hidden_size", "d_model") or 768
    inner = first_size(text, "intermediate_size", "n_inner", "ffn_dim") or 4 * hidden
    return [(hidden, hidden), (inner, hidden), (hidden, inner), (int(text.vocab_size), hidden)]


def measured_precisions() -> list[dict[str, Any]]:
    """The cached measurements of this machine at its current processor level."""
    found: list[dict[str, Any]] = []
    for path in sorted((cache_root() / _KIND).glob("*.json")):
        with contextlib.suppress(ValueError):
            record = json.loads(cached_text(_KIND, path.name) or "")
            if {key: record.get(key) for key in _machine()} == _machine():
                found.append(record)
    return found


def _times(purpose: Purpose, shapes: list[Shape]) -> dict[str, float]:
    """Seconds in each precision, from the cache if possible."""
    facts = {**_machine(), "purpose": purpose, "shapes": [list(shape) for shape in shapes]}
    key = short_hash([json.dumps(facts, sort_keys=True)])
    with contextlib.suppress(ValueError, KeyError):
        seconds = json.loads(cached_text(_KIND, f"{key}.json") or "")["seconds"]
        return {name: float(seconds[name]) for name in ("float32", "bfloat16")}
    times = _measure(purpose, shapes)
    keep_text(_KIND, f"{key}.json", json.dumps(facts | {"seconds": times}, indent=2) + "\n")
    return times


def _machine() -> dict[str, Any]:
    return {"processor": processor_name(), "level": level(), "torch": torch.__version__}


def _measure(purpose: Purpose, shapes: list[Shape]) -> dict[str, float]:
    """The minimum seconds of each product, summed over the shapes."""
    totals = {"float32": 0.0, "bfloat16": 0.0}
    rng = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        for out, size in shapes:
            fewest, most = _ROWS[purpose]
            rows = max(fewest, min(most, int(_FLOPS / (2 * out * size))))
            x, weight = (torch.randn(n, size, generator=rng) for n in (rows, out))
            best = fastest_of(_products(purpose, x, weight.bfloat16().float()))
            totals = {name: totals[name] + seconds for name, seconds in best.items()}
            if _one_is_far_slower(totals):
                break
    return totals


def _products(purpose: Purpose, x: Tensor, weight: Tensor) -> dict[str, Product]:
    x_16, weight_16 = x.bfloat16(), weight.bfloat16()
    if purpose == "training":
        gradient = F.linear(x, weight)
        gradient_16 = gradient.bfloat16()
        return {
            "float32": lambda: _step(x, weight, gradient),
            "bfloat16": lambda: _step(x_16, weight_16, gradient_16),
        }
    if purpose == "reading":
        return {
            "float32": lambda: F.linear(x, weight),
            "bfloat16": lambda: F.linear(x_16, weight_16),
        }
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight.data = weight
    packed = Packer(1.0)([layer]) if can_pack() else layer
    return {
        "float32": lambda: packed(x),
        "bfloat16": lambda: F.linear(x.bfloat16(), weight_16).float(),
    }


def _step(x: Tensor, weight: Tensor, gradient: Tensor) -> None:
    torch.mm(x, weight.t())
    torch.mm(gradient, weight)
    torch.mm(gradient.t(), x)


def fastest_of(products: Mapping[str, Product]) -> dict[str, float]:
    """The minimum CPU seconds of each product on one thread; the products are interleaved."""
    best = dict.fromkeys(products, float("inf"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for _ in range(1 + _REPEATS):  # the first call is a warm-up
            best = {name: min(best[name], _seconds(product)) for name, product in products.items()}
            if _one_is_far_slower(best) and max(best.values()) > 0.1:
                break
    finally:
        torch.set_num_threads(threads)
    return best


def _one_is_far_slower(seconds: dict[str, float]) -> bool:
    return max(seconds.values()) > _EARLY_STOP_RATIO * min(seconds.values())


def _seconds(product: Product) -> float:
    begin = time.thread_time()
    product()
    return time.thread_time() - begin
