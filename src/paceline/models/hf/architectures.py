"""What a configuration says about an architecture: its context, its layers, its decoder prompt.

Layers of one model may differ; configurations list how.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from torch import nn

from paceline.errors import UnsupportedModelError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

_CONTEXT_NAMES = ("max_seq_len", "max_decoder_position_embeddings")  # of MPT and LED
GGUF_CONTEXT = "gguf_context_length"
"""Setting of a model of a GGUF file."""
_ORIGINAL = "original_max_position_embeddings"
COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_decoder_layers")
COUNTS += ("num_encoder_layers", "encoder_layers", "decoder_layers", "num_blocks")
# attributes of modules that hold the number of their layer, by which caches are indexed
_LAYER_NUMBERS = ("layer_idx", "layer_id", "layer_index", "layer_number")
WINDOW_IN_CONFIG = frozenset({"mistral"})
"""Architectures whose layers read the sliding window from the configuration in each pass."""
_NOT_SETTINGS = {*_LAYER_NUMBERS, "training"}
# lists of the numbers of layers that are special
_NUMBERS = {"mlp_only_layers", "moe_layers", "full_attn_idxs", "cross_attention_layers"}
_NUMBERS |= {"hybrid_layer_ids", "attn_layer_indices", "ple_layer_ids"}
# lists of one value per layer whose names do not tell
_LISTS = {"attention_window", "intermediate_size"}
# how many layers come first that are of another kind
_FIRST = {"first_k_dense_replace", "num_dense_layers"}


def context_length(config: PreTrainedConfig) -> int | None:
    """The context length, or None if there is no limit: vLLM's default (max_model_len).

    yarn: factor x original length; llama3: as configured; longrope: the original length; other
    scalings: factor x configured length, but of Gemma 3, which configures the product. Differs:
    dynamic is the original length, too. As with longrope, a longer text rescales all positions in
    transformers, and the cache would differ from a pass without a cache. A model of a GGUF file has
    the file's context_length, as in llama.cpp (n_ctx_train).

    Source: vLLM, `_get_and_verify_max_len` in vllm/config/model.py.
    """
    text = config.get_text_config(decoder=True)
    length = first_size(text, GGUF_CONTEXT, "max_position_embeddings", *_CONTEXT_NAMES)
    if length is None or hasattr(text, GGUF_CONTEXT):
        return length
    for rope in ropes_of(text):
        kind, factor, name = rope.get("rope_type"), rope.get("factor"), _ORIGINAL
        original = rope.get(name) or getattr(text, name, None) or length
        if kind in ("longrope", "dynamic"):
            length = min(length, original)
        elif factor and kind != "llama3" and "gemma3" not in text.model_type:
            return int(factor * (original if kind == "yarn" else length))
    return length


def body_of(hf: PreTrainedModel) -> Any:
    """The module whose output the head reads; of an encoder-decoder, its decoder."""
    body: Any = hf.get_decoder() if is_encoder_decoder(hf.config) else hf.base_model
    if body is not hf:
        return body
    embedding = hf.get_input_embeddings()  # Llama 4 names its body otherwise than it says
    parts = (part for part in hf.children() if part is not embedding)
    return next((part for part in parts if embedding in part.modules()), hf)


def decoder_body(hf: PreTrainedModel) -> Any:
    """The module that holds the layers of a decoder."""
    body = body_of(hf)
    parts = list(body.children())
    return parts[0] if len(parts) == 1 else body  # BART's decoder without an encoder is wrapped


def is_quantized(config: Any) -> bool:
    """True if a model of this configuration has packed weights, or weights with scales."""
    return getattr(config, "quantization_config", None) is not None


def is_encoder_decoder(config: PreTrainedConfig) -> bool:
    return bool(getattr(config, "is_encoder_decoder", False))


def is_tied(hf: Any) -> bool:
    """Whether the head has the weight of the input embeddings."""
    return getattr(hf.get_output_embeddings(), "weight", None) is hf.get_input_embeddings().weight


def stores_head(hf: Any) -> bool:
    """True if the weight of the head is that of no other module."""
    weight = getattr(hf.get_output_embeddings(), "weight", None)
    weights = [each for _, each in hf.named_parameters(remove_duplicate=False)]
    return sum(each is weight for each in weights) == 1


def untie_head(hf: Any) -> None:
    """Give a model whose head is tied a head of its own, with the same weights."""
    if is_tied(hf):
        old = hf.get_output_embeddings().weight
        hf.get_output_embeddings().weight = nn.Parameter(old.detach().clone(), old.requires_grad)


def source_length(config: PreTrainedConfig) -> int | None:
    """Maximum number of encoder tokens of an encoder-decoder, or None if there is no limit."""
    return first_size(config, "max_position_embeddings", "max_encoder_position_embeddings")


def num_decoder_layers(config: PreTrainedConfig) -> int:
    """Number of layers of the model, or of its decoder."""
    text: Any = config.get_text_config(decoder=True)
    if not is_encoder_decoder(config):
        return text.num_hidden_layers
    # not of `text`: transformers resets decoder_layers there to the default of the class
    return first_size(config, "num_decoder_layers", "decoder_layers") or text.num_hidden_layers


def layer_types(config: PreTrainedConfig) -> Sequence[str] | None:
    """The kind of each layer, such as full_attention or linear_attention; None: not listed."""
    text = config.get_text_config(decoder=True)
    found = (getattr(text, name, None) for name in ("layer_types", "layers_block_type"))
    listed = next(filter(None, found), None)
    return listed if listed is not None and len(listed) == num_decoder_layers(config) else None


def num_encoder_layers(config: PreTrainedConfig) -> int:
    """Number of layers of the encoder; 0 for a decoder-only model."""
    if not is_encoder_decoder(config):
        return 0
    return first_size(config, "encoder_layers", "num_layers") or 0


def set_num_layers(config: PreTrainedConfig, decoder: int | None, encoder: int | None) -> None:
    """Set the numbers of layers of an encoder-decoder; None: unchanged."""
    for count, keys in (
        (decoder, ("num_decoder_layers", "decoder_layers")),
        (encoder, ("num_layers", "encoder_layers", "num_hidden_layers")),
    ):
        for key in keys:
            if count is not None and isinstance(getattr(config, key, None), int):
                setattr(config, key, count)


def configured_prompt(
    config: PreTrainedConfig, generation: GenerationConfig | None
) -> tuple[int, ...]:
    """The tokens that a decoder begins with: its start token, then `forced_bos_token_id`."""
    start = configured_token(config, generation, "decoder_start_token_id")
    if start is None:
        raise UsageError(
            f"{config.model_type} has no decoder_start_token_id; set it in its config, or give "
            "decoder_prompt"
        )
    forced = configured_token(config, generation, "forced_bos_token_id")
    return (start,) if forced is None else (start, forced)


def configured_token(
    config: PreTrainedConfig, generation: GenerationConfig | None, name: str
) -> int | None:
    """A token id that the generation config sets, or else the config; None if neither does."""
    for settings in (generation, config):
        value = getattr(settings, name, None)
        if isinstance(value, int):
            return value
        if value:
            raise UnsupportedModelError(
                f"{config.model_type} has {value} as {name}; set it to one token id"
            )
    return None


def ropes_of(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """Settings of rotary positions; several if layers of some types have their own."""
    settings = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in settings.values() if isinstance(value, dict)]
    return nested or [settings]


def first_size(config: PreTrainedConfig, *names: str) -> int | None:
    """The first of these settings that is a positive number, or None."""
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), None)


def nested_configs(config: PreTrainedConfig) -> Iterator[Any]:
    yield config
    for value in vars(config).values():
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            yield from nested_configs(value)


def outer_lists(model: nn.Module, least: int = 2) -> Iterator[nn.ModuleList]:
    """The module lists of `least` or more modules that are not inside another one."""
    outer: list[str] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{other}.") for other in outer)
        if isinstance(module, nn.ModuleList) and len(module) >= least and not inside:
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


def set_number(layer: nn.Module, number: int) -> None:
    """Give a layer this number, also in the modules that it consists of."""
    for module, name in itertools.product(layer.modules(), _LAYER_NUMBERS):
        if isinstance(getattr(module, name, None), int):
            setattr(module, name, number)


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
    for name in COUNTS:
        if isinstance(found.get(name), int):
            setattr(changed, name, min(found[name], len(layers)))
    if (spec := found.get("_heterogeneity_spec")) is not None:  # sizes by layer, of Gemma 4
        old = spec.per_layer_overrides
        changed.per_layer_config = {
            new: dict(old[index]) for new, index in enumerate(layers) if index in old
        }


def _per_layer(key: str) -> bool:
    return "layer" in key or key.endswith(("_types", "_pattern")) or key in _LISTS
