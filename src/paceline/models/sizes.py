"""Refuses a model that its configuration makes larger than its files, before memory is taken."""

from __future__ import annotations

import contextlib
import functools
import math
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import huggingface_hub
from safetensors import safe_open
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

from paceline.errors import ModelLoadError
from paceline.models.weights import WEIGHTS, unpickled, weight_files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import torch

_PACKED = 8  # values in a stored one, of quantized weights
_COPIES = 4  # of a tied embedding, and parts of a fused weight, while a model is built
_MORE_TENSORS, _MORE_VALUES = 1000, 1 << 20
_MOST_TENSORS = 200_000  # of files that are not on this machine
_BUFFER_VALUES = 1 << 28  # masks and positions that a model computes itself


def with_weights(
    auto: Any, name: str, config: Any, source: str, dtype: torch.dtype, options: Mapping[str, Any]
) -> Any:
    """The model of transformers that `auto` reads, if it is `within` its files; and what it says.

    Args:
        auto: A class such as AutoModelForCausalLM.
        name: The model as the user named it.
        config: Its configuration.
        source: Its directory or hub id.
        dtype: Of the weights.
        options: Further arguments of `from_pretrained`.
    """
    with within(name, lambda: stored_size(source, config)):
        return auto.from_pretrained(
            source,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refuse_incomplete has a clearer message
            trust_remote_code=False,
            **options,
        )


class Size(NamedTuple):
    """Number of tensors, and of the values in them."""

    tensors: int
    values: int


def stored_size(source: str | Path, config: Any) -> Size | None:
    """What the weights of a directory or a hub id hold; None if they are not on this machine."""
    directory = Path(source)
    if not directory.is_dir():
        names = [name + end for name in WEIGHTS for end in ("", ".index.json")]
        found = [huggingface_hub.try_to_load_from_cache(str(source), name) for name in names]
        directories = [Path(file).parent for file in found if isinstance(file, str)]
        if not directories:
            return None
        directory = directories[0]
    packed = getattr(config, "quantization_config", None) is not None
    tensors = values = 0
    for file in weight_files(directory):
        counts = [count for _, count in shapes_in(file)]
        tensors += len(counts)
        values += min(sum(counts), 2 * file.stat().st_size)  # names may share values
    return Size(tensors, values * (_PACKED if packed else 1))


def shapes_in(file: Path) -> list[tuple[Sequence[int], int]]:
    """Shape of each tensor in a file of weights, and how many values are stored for it."""
    if file.suffix == ".safetensors":
        with safe_open(file, "pt") as weights:
            shapes = [weights.get_slice(key).get_shape() for key in list(weights.keys())]
        return [(shape, math.prod(shape)) for shape in shapes]
    # a tensor with a stride of 0 has more values than are stored
    return [
        (tensor.shape, min(tensor.numel(), tensor.untyped_storage().nbytes()))
        for tensor in unpickled(file).values()
    ]


@contextlib.contextmanager
def within(name: str, size: Callable[[], Size | None]) -> Iterator[None]:
    """Stop the construction of a model on the meta device that is larger than its files.

    Args:
        name: The model as the user named it.
        size: What its files hold; called once the first weight is made, after any download.

    Raises:
        ModelLoadError: it has more than 4 times their tensors and 1000, or more than 4 times their
            values and 2^20; or its buffers have more than 4 times their values and 2^28.
    """
    stored = functools.cache(size)
    made: Counter[str] = Counter()
    seen: dict[int, Any] = {}  # tied weights are registered again

    def count(kind: str, spare: int, tensor: Any) -> None:
        if tensor is None or not tensor.is_meta or id(tensor) in seen:
            return
        seen[id(tensor)] = tensor
        made[f"{kind}s"] += 1
        made[kind] += tensor.numel()
        held = stored() or Size(_MOST_TENSORS, 1 << 62)
        most = Size(_COPIES * held.tensors + _MORE_TENSORS, _COPIES * held.values + spare)
        if made[f"{kind}s"] > most.tensors or made[kind] > most.values:
            raise ModelLoadError(
                f"{name}: config.json and weights do not match: the configuration has at least "
                f"{made[f'{kind}s']:,} {kind}s with {made[kind]:,} values, and the files have "
                f"{held.tensors:,} with {held.values:,}; use the config.json that came with them"
            )

    hooks = [
        register_module_parameter_registration_hook(
            lambda _module, _name, new: count("weight", _MORE_VALUES, new)
        ),
        register_module_buffer_registration_hook(
            lambda _module, _name, new: count("buffer", _BUFFER_VALUES, new)
        ),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
