"""The forward pass of transformers over a cache of fixed size, compiled layer by layer.

The pass runs a copy of the model that shares all weights. In the copy, products of the same input
are one product, and attention is that of attention.py. All layers of one kind share one compiled
function, so compiling takes seconds and not minutes. Prompts are processed by the model itself.

Shape suffixes: B rows, N new tokens, U lengths, V vocabulary.
"""

from __future__ import annotations

import copy
import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import DynamicCache

from paceline.core.sampling import spread
from paceline.models.hf.architectures import ropes_of
from paceline.models.hf.base import evaluating
from paceline.models.hf.cache import cache_argument, takes_positions
from paceline.models.hf.draft_vocabulary import head_of
from paceline.models.hf.spreading import is_spread
from paceline.models.recorded import attention
from paceline.models.recorded.compiling import CompiledModules
from paceline.models.recorded.fixed_cache import FixedCache

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transformers import PreTrainedModel

    from paceline.models.hf.base import HfModel
    from paceline.models.hf.cache import RoomyCache
    from paceline.models.recorded.recorder import Recordings

_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Linear layers of one module that get the same input, in the order of their calls."""


def can_record(model: HfModel) -> bool:
    """Whether passes may be recorded: of a decoder-only model whose rows roll back together.

    Rotary angles that depend on the length are computed by the host. A graph is on one device.
    """
    text = model.hf.config.get_text_config(decoder=True)
    lengths = any(rope.get("rope_type") in ("dynamic", "longrope") for rope in ropes_of(text))
    decoder_only = model.decoder_prompt is None
    return decoder_only and model.sessions == "batch" and not lengths and not is_spread(model.hf)


class FixedPass:
    """Logits of new tokens by a `FixedCache`; by other caches as transformers does.

    Attributes:
        listening: Number of listeners to hidden states, which recorded passes do not report.
        modules: The compiled modules.
        reads_counts: Whether the model's own pass, which reads prompts, asks the device for numbers
            of tokens per expert. That cannot be recorded.
    """

    def __init__(self, model: HfModel, *, compiled: bool) -> None:
        """`compiled`: compile passes over few tokens on first use."""
        self.hf = model.hf
        self.device = model.device  # transformers iterates over weights to find it
        self.listening = 0
        self._plain: Any = model.plain_pass(model.hf, model.draft_vocabulary)
        self._vocabulary = model.draft_vocabulary
        self._banned_K = model.banned_K
        self._num_logits = len(head_of(model.hf).weight)
        self._cache_argument = cache_argument(model.hf)
        self._takes_positions = takes_positions(model.hf)
        self.reads_counts = _reads_counts(model.hf)
        self._copy = _working_copy(model.hf, model.draft_vocabulary)
        self.modules = CompiledModules(self._copy, compiles=compiled)

    def __call__(
        self, tokens_BN: Tensor, cache: RoomyCache, ends_B: Tensor | None, keep: int
    ) -> Tensor:
        return self._plain(tokens_BN, cache, ends_B, keep)

    def listen(self, listener: Callable[[Tensor], None]) -> Callable[[], None]:
        self.listening += 1
        remove = self._plain.listen(listener)

        def stop() -> None:
            self.listening -= 1
            remove()

        return stop

    def new_cache(self, num_rows: int, num_columns: int, recordings: Recordings) -> FixedCache:
        return FixedCache(self._samples, num_rows, num_columns, recordings)

    def logits(
        self, cache: FixedCache, tokens_BN: Tensor, lengths_B: Tensor, *, few: bool = True
    ) -> Tensor:
        """Append tokens to rows of these lengths; logits after each token, [B, N, V].

        `few`: use compiled modules, and no host.
        """
        if self.reads_counts:
            own = self.hf.config.get_text_config()._experts_implementation
            self._copy.set_experts_implementation("batched_mm" if few else own)
        columns_BN = lengths_B[:, None] + torch.arange(tokens_BN.shape[1], device=self.device)

        def run() -> Tensor:
            cache.place(columns_BN)
            places = {"position_ids": columns_BN} if self._takes_positions else {}
            with evaluating(self._copy):
                return self._copy(
                    input_ids=tokens_BN,
                    attention_mask=cache.ones_BW,
                    use_cache=True,
                    **{self._cache_argument: cache},
                    **places,
                ).logits

        rows, count = tokens_BN.shape
        return self._possible(self.modules.run(run, (rows, count)) if few else run())

    def logits_of_prompts(
        self, cache: FixedCache, tokens_BN: Tensor, lengths_U: Tensor, places_B: Tensor
    ) -> Tensor:
        """Process left-aligned prompts in the first rows; logits after each prompt, [B, V].

        Row b has lengths_U[places_B[b]] tokens.
        """
        cache.place(None)
        with evaluating(self.hf):
            logits_BUV = self.hf(
                input_ids=tokens_BN,
                use_cache=True,
                logits_to_keep=lengths_U - 1,
                **{self._cache_argument: cache},
            ).logits
        logits_BV = logits_BUV[torch.arange(len(places_B), device=self.device), places_B]
        if self._vocabulary is not None:
            logits_BV = logits_BV[:, self._vocabulary]
        return self._possible(logits_BV)

    def _possible(self, logits: Tensor) -> Tensor:
        """Logits over all tokens, -inf for those that may not be drawn."""
        if self._vocabulary is not None:
            logits = spread(logits, self._vocabulary, self._num_logits)
        if self._banned_K is not None:
            logits = logits.index_fill(-1, self._banned_K, -torch.inf)
        return logits

    @functools.cached_property
    def _samples(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of one token in each layer."""
        token = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        cache: Any = DynamicCache()
        with torch.inference_mode(), evaluating(self.hf):
            self._plain(token, cache, None, 1)
        return [(layer.keys, layer.values) for layer in cache.layers]


class _First(nn.Module):
    """The product of several linear layers with one input; returns the first layer's part."""

    def __init__(self, layers: Sequence[Any]) -> None:
        super().__init__()
        self.product = _merged_product(layers)
        self.sizes = [layer.out_features for layer in layers]
        self.rest: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        first, *self.rest = self.product(x).split(self.sizes, -1)
        return first


class _Later(nn.Module):
    """The part of a later layer."""

    def __init__(self, first: _First, index: int) -> None:
        super().__init__()
        self._first = [first]  # in a list: not a module of its own
        self._index = index

    def forward(self, _x: Tensor) -> Tensor:
        (first,) = self._first
        part = first.rest[self._index]
        if self._index == len(first.rest) - 1:
            first.rest = []  # a compiled function would return what it keeps
        return part


def _reads_counts(hf: Any) -> bool:
    """Whether PyTorch's grouped products of experts read the size of each group from the device.

    They do not in bfloat16 on cards of compute capability 9.0 and 10.0.
    """
    if not hf._can_set_experts_implementation():
        return False
    groups_there = hf.device.type != "cuda" or torch.cuda.get_device_capability(hf.device) in (
        (9, 0),
        (10, 0),
    )
    return not (hf.dtype == torch.bfloat16 and groups_there)


def _working_copy(hf: PreTrainedModel, draft_vocabulary: Tensor | None) -> Any:
    """A copy with the attention of attention.py and merged products; it shares all tensors.

    Weights that are multiplied together become views of one tensor, also in `hf`.
    """
    attention.register()
    shared = {id(tensor): tensor for tensor in (*hf.parameters(), *hf.buffers())}
    made: Any = copy.deepcopy(hf, shared)  # pyright: ignore[reportArgumentType]
    for module in list(made.modules()):
        if hasattr(module, "config"):
            module.config._attn_implementation = attention.NAME
        for names in _TOGETHER:
            layers = [getattr(module, name, None) for name in names]
            if all(type(layer) is nn.Linear for layer in layers):
                first = _First(layers)
                parts = [first, *(_Later(first, index) for index in range(len(names) - 1))]
                for name, part in zip(names, parts, strict=True):
                    setattr(module, name, part)
    if draft_vocabulary is not None:
        made.set_output_embeddings(head_of(hf, draft_vocabulary))
    return made


def _merged_product(layers: Sequence[Any]) -> Callable[[Tensor], Tensor]:
    """One product of several layers, in their dtype; shares the weights."""
    weight, bias = _merged(layers), _stacked_bias(layers)
    return lambda x: F.linear(x.to(weight.dtype), weight, bias)


def _merged(layers: Sequence[Any]) -> Tensor:
    """The concatenated weights; the layers' weights become views of the result."""
    if (merged := _already_merged([layer.weight for layer in layers])) is not None:
        return merged
    weight = torch.cat([layer.weight.detach() for layer in layers])
    parts = weight.split([len(layer.weight) for layer in layers])
    for layer, part in zip(layers, parts, strict=True):
        layer.weight.data = part
    return weight


def _already_merged(weights: Sequence[Tensor]) -> Tensor | None:
    """The tensor of which these weights are consecutive views, or None."""
    first = weights[0]
    end = first.data_ptr()
    for weight in weights:
        if weight.data_ptr() != end or not weight.is_contiguous() or weight.dtype != first.dtype:
            return None
        end += weight.numel() * weight.itemsize
    if first.untyped_storage().data_ptr() + first.untyped_storage().nbytes() < end:
        return None  # separate tensors that happen to be adjacent
    rows = sum(len(weight) for weight in weights)
    return first.detach().as_strided((rows, first.shape[1]), first.stride(), first.storage_offset())


def _stacked_bias(layers: Sequence[Any]) -> Tensor | None:
    if all(layer.bias is None for layer in layers):
        return None
    biases = [x.weight.new_zeros(len(x.weight)) if x.bias is None else x.bias for x in layers]
    return torch.cat([bias.detach() for bias in biases])
