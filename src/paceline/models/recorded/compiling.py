"""Compiles the modules of a model, one function for all layers of a kind.

Compiled code stays in the cache directory, by versions and shapes, so the next process loads it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import time
import warnings
from typing import TYPE_CHECKING, Any

import torch

from paceline.cache import cache_directory
from paceline.errors import StorageError, first_line
from paceline.models.admission.trial import FAULTS
from paceline.models.hf.architectures import (
    decoder_body,
    num_decoder_layers,
    outer_lists,
    set_number,
)
from paceline.models.hf.base import warn_of_slower
from paceline.models.recorded.fixed_cache import FixedCache

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

_log = logging.getLogger(__name__)

_MOST_VARIANTS = 64  # of one function: kinds of layers, one or several tokens and rows


def compiles_passes() -> bool:
    """Whether passes on a GPU are compiled: unless `PACELINE_COMPILE` is 0.

    With `PACELINE_COMPILE=tuned`, Inductor also tries several settings of each kernel, which takes
    several times as long.
    """
    return os.environ.get("PACELINE_COMPILE", "1") != "0"


class CompiledModules:
    """The layers of a model, its other parts and its head; compiled while `run` is called.

    If a pass cannot be compiled, a warning says so, and the modules run as they are.

    Attributes:
        usable: Whether passes are compiled.
    """

    def __init__(self, hf: Any, *, compiles: bool) -> None:
        """Without `compiles`, the modules are prepared alike and run as they are."""
        self.usable = compiles
        self._model_type = hf.config.model_type
        self._kinds: set[tuple[bool, ...]] = set()
        self._on = False
        body = decoder_body(hf)
        number = num_decoder_layers(hf.config)
        stacks = [layers for layers in outer_lists(body) if len(layers) == number]
        for layers in stacks:
            for index, layer in enumerate(layers):
                hook = functools.partial(_with_own_layer, index)
                layer.register_forward_pre_hook(hook, with_kwargs=True)
                set_number(layer, 0)  # code for one layer then fits the others
                self._switch(layer)
        tables = hf.get_input_embeddings(), getattr(body, "embed_tokens", None)
        apart = {id(part) for part in (*stacks, *tables)}
        for part in (*body.children(), hf.get_output_embeddings()):
            if id(part) not in apart:
                self._switch(part)

    def run(self, forward: Callable[[], Tensor], shape: tuple[int, int]) -> Tensor:
        """Call `forward`, a pass over tokens of this shape, with compiled modules."""
        if not self.usable:
            return forward()
        kind = tuple(size == 1 for size in shape)
        if kind not in self._kinds:
            self._kinds.add(kind)
            return self._first(forward, shape)
        return self._with_compiled(forward)

    def _first(self, forward: Callable[[], Tensor], shape: tuple[int, int]) -> Tensor:
        begin = time.perf_counter()
        try:
            got = self._with_compiled(forward)
        except torch.OutOfMemoryError:
            raise
        except FAULTS as error:
            self.usable = False
            fault = f"the compiled pass failed ({first_line(error)})"
            warn_of_slower(self._model_type, fault, stacklevel=2)
            return forward()
        spent = time.perf_counter() - begin
        what = f"{shape[0]} x {shape[1]} tokens"
        _log.info("compiled a pass of %s over %s: %.1f s", self._model_type, what, spent)
        return got

    def _with_compiled(self, forward: Callable[[], Tensor]) -> Tensor:
        _keep_in_cache()
        self._on = True
        try:
            limits = {"recompile_limit": _MOST_VARIANTS, "accumulated_recompile_limit": 1 << 12}
            with torch._dynamo.config.patch(limits), warnings.catch_warnings():
                warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")  # products are not
                return forward()
        finally:
            self._on = False

    def _switch(self, module: nn.Module) -> None:
        """Let the module run compiled while `self._on`."""
        if not self.usable:
            return
        plain = module.forward
        tuned = os.environ.get("PACELINE_COMPILE") == "tuned"
        options: dict[str, Any] | None = {"coordinate_descent_tuning": True} if tuned else None
        compiled = torch.compile(plain, options=options)

        @functools.wraps(plain)  # callers look for arguments in its signature
        def forward(*inputs: Any, **named: Any) -> Any:
            return (compiled if self._on else plain)(*inputs, **named)

        module.forward = forward


class _OwnLayer:
    """One layer of a cache under every number, because all layers have the same one."""

    def __init__(self, layer: Any) -> None:
        self.layers = [layer]

    def update(self, keys: Tensor, values: Tensor, *_args: Any, **_named: Any) -> Any:
        return self.layers[0].update(keys, values)

    def get_seq_length(self, _index: int = 0) -> Any:
        return self.layers[0].get_seq_length()


def _with_own_layer(
    index: int, _layer: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inputs of a layer with its own part of the cache."""

    def own(value: Any) -> Any:
        # layers that read the keys of an earlier layer have none in the cache
        if isinstance(value, FixedCache) and index < len(value.layers):
            return _OwnLayer(value.layers[index])
        return value

    return tuple(map(own, inputs)), {name: own(value) for name, value in named.items()}


@functools.cache
def _keep_in_cache() -> None:
    """Let compiled code be kept where no other user may write, unless the user chose a place."""
    with contextlib.suppress(StorageError):
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_directory("inductor")))
