"""Which precision this machine multiplies fastest in, measured on products of a model's own shapes.

A flag of the processor does not tell: a machine that multiplies bfloat16 may multiply float32
faster. So products of the model's shapes are timed once per machine and shape, in well under a
second, and the times are kept in the cache. One thread is timed, by its own clock, so that other
programs on the machine do not decide. `PACELINE_PRECISION` overrides the measurement; `dtype` and
`precision` in a configuration override both.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch.nn import functional as F

from paceline.errors import StorageError, UsageError
from paceline.models.llama.packing import Packer, can_pack
from paceline.processor import level, processor_name
from paceline.records import atomic_write_text, cache_root

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from torch import Tensor, nn
    from transformers import PreTrainedConfig

    Shape = tuple[int, int]
    Product = Callable[[], object]

VARIABLE = "PACELINE_PRECISION"
Precision = Literal["float32", "bfloat16"]
Purpose = Literal["training", "reading", "decoding"]
"""Forward and backward products of a training step; products over texts; those of many rows of a
prepared model, where float32 means float16 weights times float32 activations."""

_FLOPS = 5e8  # of one timed product
_ROWS = {"training": (64, 1024), "reading": (64, 512), "decoding": (64, 64)}  # fewest, most
_LARGEST = 2048  # sides of a timed matrix: larger ones are multiplied in blocks
_REPEATS = 4
_HOPELESS = 3.0  # a precision this many times slower than the other is not timed to the end
_SIZES = {
    "inner": ("intermediate_size", "n_inner", "ffn_dim"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
}


class Choice(NamedTuple):
    """A precision, and the reason for it in words."""

    precision: Precision
    reason: str


def choose_precision(purpose: Purpose, shapes: Iterable[Shape], device: torch.device) -> Choice:
    """The precision in which the device multiplies matrices of these shapes fastest.

    bfloat16 where both take the same time, as it takes half the memory.

    Args:
        purpose: Which products are timed.
        shapes: [out, in] of the weights; see `shapes_of`.
        device: CUDA devices are not timed: bfloat16 where they compute in it.

    Raises:
        UsageError: `PACELINE_PRECISION` names no precision.
    """
    override = overridden()
    if override is not None:
        return override
    if device.type != "cpu":
        native = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        return Choice(
            "bfloat16" if native else "float32", f"what a {device.type} device computes in"
        )
    sides = {(min(out, _LARGEST), min(size, _LARGEST)) for out, size in shapes}
    return faster_of(_times(purpose, sorted(sides)), purpose)


def overridden() -> Choice | None:
    """What `PACELINE_PRECISION` says.

    Raises:
        UsageError: it names no precision.
    """
    match os.environ.get(VARIABLE):
        case None | "":
            return None
        case "float32" | "bfloat16" as precision:
            return Choice(precision, f"{VARIABLE} is set")
        case other:
            raise UsageError(f"{VARIABLE} is {other!r}, wanted float32 or bfloat16")


def faster_of(seconds: dict[str, float], what: str) -> Choice:
    """The faster of the two, bfloat16 where they are equal, with the measured times."""
    faster = "bfloat16" if seconds["bfloat16"] <= seconds["float32"] else "float32"
    measured = ", ".join(f"{name} {1e3 * each:.1f} ms" for name, each in seconds.items())
    return Choice(faster, f"measured for {what}: {measured}")


def shapes_of(config: PreTrainedConfig) -> list[Shape]:
    """[out, in] of the products that take a model's time, from its configuration."""
    text: Any = config.get_text_config(decoder=True)

    def size(name: str, default: int) -> int:
        found = (getattr(text, key, None) for key in _SIZES[name])
        return next((value for value in found if isinstance(value, int)), default)

    hidden = size("hidden", 768)
    inner = size("inner", 4 * hidden)
    return [(hidden, hidden), (inner, hidden), (hidden, inner), (int(text.vocab_size), hidden)]


def measured_precisions() -> list[dict[str, Any]]:
    """What was measured on this machine at its present level."""
    found: list[dict[str, Any]] = []
    for path in sorted(_folder().glob("*.json")):
        with contextlib.suppress(OSError, ValueError):
            record = json.loads(path.read_text(encoding="utf-8"))
            if {key: record.get(key) for key in _machine()} == _machine():
                found.append(record)
    return found


def _times(purpose: Purpose, shapes: list[Shape]) -> dict[str, float]:
    """Seconds of a round of products in each precision: from the cache, or measured and kept."""
    facts = {**_machine(), "purpose": purpose, "shapes": [list(shape) for shape in shapes]}
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    path = _folder() / f"{key}.json"
    with contextlib.suppress(OSError, ValueError, KeyError):
        seconds = json.loads(path.read_text(encoding="utf-8"))["seconds"]
        return {name: float(seconds[name]) for name in ("float32", "bfloat16")}
    times = _measure(purpose, shapes)
    with contextlib.suppress(StorageError):  # then it is measured again
        atomic_write_text(path, json.dumps(facts | {"seconds": times}, indent=2) + "\n")
    return times


def _machine() -> dict[str, Any]:
    return {
        "processor": processor_name(),
        "level": level(),
        "torch": torch.__version__,
    }


def _folder() -> Path:
    return cache_root() / "precision"


def _measure(purpose: Purpose, shapes: list[Shape]) -> dict[str, float]:
    """The least seconds of each product, summed over the shapes; the precisions take turns."""
    totals = {"float32": 0.0, "bfloat16": 0.0}
    rng = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        for out, size in shapes:
            fewest, most = _ROWS[purpose]
            rows = max(fewest, min(most, int(_FLOPS / (2 * out * size))))
            x, weight = (torch.randn(n, size, generator=rng) for n in (rows, out))
            best = fastest_of(_products(purpose, x, weight.bfloat16().float()))
            totals = {name: totals[name] + seconds for name, seconds in best.items()}
            if _one_is_hopeless(totals):
                break
    return totals


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _products(purpose: Purpose, x: Tensor, weight: Tensor) -> dict[str, Product]:
    """One round of products in each precision."""
    x_16, weight_16 = x.bfloat16(), weight.bfloat16()
    match purpose:
        case "training":
            slope = F.linear(x, weight)
            slope_16 = slope.bfloat16()
            return {
                "float32": lambda: _step(x, weight, slope),
                "bfloat16": lambda: _step(x_16, weight_16, slope_16),
            }
        case "reading":
            return {
                "float32": lambda: F.linear(x, weight),
                "bfloat16": lambda: F.linear(x_16, weight_16),
            }
        case "decoding":
            packed = _packed(weight)
            return {
                "float32": lambda: packed(x),
                "bfloat16": lambda: F.linear(x.bfloat16(), weight_16).float(),
            }


def _step(x: Tensor, weight: Tensor, slope: Tensor) -> None:
    """A product, and both products of its backward pass."""
    torch.mm(x, weight.t())
    torch.mm(slope, weight)
    torch.mm(slope.t(), x)


def _packed(weight: Tensor) -> Callable[[Tensor], Tensor]:
    if not can_pack():
        return lambda x: F.linear(x, weight)
    layer: nn.Linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight.data = weight
    return Packer(1.0)([layer])


def fastest_of(products: dict[str, Product]) -> dict[str, float]:
    """The least seconds that each takes one thread, by the thread's own clock; they take turns."""
    best = dict.fromkeys(products, float("inf"))
    with _one_thread():
        for _ in range(1 + _REPEATS):  # the first call of each prepares its kernel
            best = {name: min(best[name], _seconds(product)) for name, product in products.items()}
            if _one_is_hopeless(best) and max(best.values()) > 0.1:
                break
    return best


def _one_is_hopeless(seconds: dict[str, float]) -> bool:
    return max(seconds.values()) > _HOPELESS * min(seconds.values())


def _seconds(product: Product) -> float:
    begin = time.thread_time()
    product()
    return time.thread_time() - begin
