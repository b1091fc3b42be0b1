"""Layers of a model: how they differ, and configurations of some of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from transformers import PreTrainedConfig

COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_decoder_layers")
COUNTS += ("num_encoder_layers", "encoder_layers", "decoder_layers", "num_blocks")
NUMBERS = ("layer_idx", "layer_id", "layer_index", "layer_number")
"""Attributes of modules that hold the number of their layer, by which caches are indexed."""
WINDOW_IN_CONFIG = frozenset({"mistral"})
"""Architectures whose layers read the sliding window from the configuration in each pass."""
_NOT_SETTINGS = {*NUMBERS, "training"}
# lists of the numbers of layers that are special
_NUMBERS = {"mlp_only_layers", "moe_layers", "full_attn_idxs", "cross_attention_layers"}
_NUMBERS |= {"hybrid_layer_ids", "attn_layer_indices", "ple_layer_ids"}
# lists of one value per layer whose names do not tell
_LISTS = {"attention_window", "intermediate_size"}
# how many layers come first that are of another kind
_FIRST = {"first_k_dense_replace", "num_dense_layers"}


def nested_configs(config: PreTrainedConfig) -> Iterator[Any]:
    """The configuration and those nested in it."""
    yield config
    for value in vars(config).values():
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            yield from nested_configs(value)


def outer_lists(model: nn.Module) -> Iterator[nn.ModuleList]:
    """The module lists of two or more modules that are not inside another list."""
    outer: list[str] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{other}.") for other in outer)
        if isinstance(module, nn.ModuleList) and len(module) > 1 and not inside:
            outer.append(name)
            yield module


def kind_of(layer: nn.Module) -> tuple[Any, ...]:
    """What distinguishes a layer from others: classes and plain settings, without its number."""
    return tuple(
        (name, type(module).__name__, *settings_of(module))
        for name, module in layer.named_modules()
    )


def settings_of(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Plain attributes of a module, such as its window or scale; not the number of its layer."""
    for name, value in sorted(vars(module).items()):
        plain = isinstance(value, bool | int | float | str) or value is None
        if plain and name not in _NOT_SETTINGS and not name.startswith("_"):
            yield name, value


def shorten_config(config: PreTrainedConfig, layers: Sequence[int]) -> None:
    """Keep only these layers in a configuration, also in what it says about single layers."""
    found: dict[str, Any] = dict(vars(config))
    sizes = {found[name] for name in COUNTS if isinstance(found.get(name), int)}
    sizes |= {getattr(config, "num_hidden_layers", -1)}  # a property of Nemotron-H
    changed: Any = config
    for key, value in found.items():
        if isinstance(value, list | tuple) and key in _NUMBERS:
            kept = [new for new, old in enumerate(layers) if old in value]
            setattr(changed, key, type(value)(kept))
        elif isinstance(value, list | tuple) and len(value) in sizes and _per_layer(key):
            setattr(changed, key, type(value)(value[index] for index in layers))
        elif key in _FIRST and isinstance(value, int):
            setattr(changed, key, sum(index < value for index in layers))
    if "attention_types" in found:  # GPT-Neo makes attention_layers from it
        changed.attention_types = [[[kind], 1] for kind in changed.attention_layers]
    _number_dense_layers(changed, found, layers)
    for name in COUNTS:
        if isinstance(found.get(name), int):
            setattr(changed, name, min(found[name], len(layers)))


def _per_layer(key: str) -> bool:
    return "layer" in key or key.endswith(("_types", "_pattern")) or key in _LISTS


def _number_dense_layers(config: Any, found: dict[str, Any], layers: Sequence[int]) -> None:
    """Qwen-MoE: every n-th layer has experts, unless it is listed."""
    step = found.get("decoder_sparse_step")
    if not isinstance(step, int) or step < 2:
        return
    listed = found.get("mlp_only_layers") or ()
    dense = [new for new, old in enumerate(layers) if old in listed or (old + 1) % step]
    config.decoder_sparse_step, config.mlp_only_layers = 1, dense
