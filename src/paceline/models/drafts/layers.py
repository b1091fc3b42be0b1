"""Creates a draft from a subset of the target's layers, with its embeddings, head and tokenizer."""

from __future__ import annotations

import copy
import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from paceline.errors import UnsupportedModelError, UsageError
from paceline.models.hf.architectures import (
    is_encoder_decoder,
    num_decoder_layers,
    num_encoder_layers,
    outer_lists,
    set_num_layers,
    set_number,
    shorten_config,
)
from paceline.models.hf.spreading import refuse_copies

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

    from paceline.models.hf.base import HfModel


def subset_layers(
    target: HfModel, layers: Sequence[int], encoder_layers: Sequence[int] | None = None
) -> HfModel:
    """Create a model with only these layers of the target.

    Args:
        target: Not modified.
        layers: Increasing indices, for example [0, 1, 2, 29]; of an encoder-decoder's decoder.
        encoder_layers: Of an encoder-decoder's encoder; None: all.

    Raises:
        UsageError: Indices are missing, repeated, decreasing or out of range.
        UnsupportedModelError: The model does not have its layers in one list, is quantized, or is
            spread over several devices.
    """
    refuse_copies(target.hf)
    kept = {"decoder": list(layers)}
    if encoder_layers is not None:
        kept["encoder"] = list(encoder_layers)
    lists = layer_lists(target.hf)
    for part, chosen in kept.items():
        if part not in lists:
            raise UsageError(
                f"got encoder layers, but {target.hf.config.model_type} is decoder-only; leave "
                "them out"
            )
        check_layers(chosen, len(lists[part][1]))
    new = {part: nn.ModuleList() for part in kept}
    # one memo for all copies, so that configs stay shared and weights stay tied
    memo: dict[int, Any] = {id(lists[part][1]): new[part] for part in kept}
    hf = copy.deepcopy(target.hf, memo)
    for part, chosen in kept.items():
        name, old = lists[part]
        new[part].extend(copy.deepcopy(old[index], memo) for index in chosen)
        _keep_relative_positions(old[0], new[part][0], memo)
        for index, layer in enumerate(new[part]):
            set_number(layer, index)
        assert hf.get_submodule(name) is new[part], "the copy has other layers"
    _shorten(hf, kept)
    _check_config(hf)
    return target.rewrap(hf)


def _keep_relative_positions(old: Any, new: Any, memo: dict[int, Any]) -> None:
    """Copy T5's table of relative positions, which only the first layer has."""
    pairs = zip(old.modules(), new.modules(), strict=False)
    for source, copied in pairs:
        has_table = getattr(source, "has_relative_attention_bias", False)
        if has_table and not copied.has_relative_attention_bias:
            copied.has_relative_attention_bias = True
            copied.relative_attention_bias = copy.deepcopy(source.relative_attention_bias, memo)
            return


def _shorten(hf: PreTrainedModel, kept: dict[str, list[int]]) -> None:
    """Set the numbers of layers in the config, and in those of encoder and decoder."""
    if not is_encoder_decoder(hf.config):
        shorten_config(hf.config.get_text_config(decoder=True), kept["decoder"])
        return
    counts = {part: len(layers) for part, layers in kept.items()}
    set_num_layers(hf.config, counts.get("decoder"), counts.get("encoder"))
    for part, count in counts.items():
        module: Any = hf.get_decoder() if part == "decoder" else hf.get_encoder()
        if module.config is not hf.config and hasattr(module.config, "num_layers"):
            module.config.num_layers = count


def _check_config(hf: PreTrainedModel) -> None:
    """Raise if a model built from the config, as it is read from a file, has other weights."""
    config = type(hf.config).from_dict(hf.config.to_dict())
    types = [
        getattr(each.get_text_config(decoder=True), "layer_types", None)
        for each in (hf.config, config)
    ]
    try:
        with torch.device("meta"):
            built = type(hf)(config)
    except ValueError:  # Gemma 4: layers use the keys of others, or the last has a window
        built = None
    if built is None or types[0] != types[1] or _shapes(hf) != _shapes(built):
        raise UnsupportedModelError(
            f"{hf.config.model_type} has layers of several kinds, assigned by index in its config, "
            "and these layers do not match; choose others, such as the target's last one at the "
            "end, a new draft (--params), or a smaller model with its tokenizer"
        )


def _shapes(hf: PreTrainedModel) -> dict[str, torch.Size]:
    return {name: weight.shape for name, weight in hf.named_parameters(remove_duplicate=False)}


def layer_lists(hf: PreTrainedModel) -> dict[str, tuple[str, nn.ModuleList]]:
    """Names and module lists of the layers: `decoder`, and `encoder` if there is one."""
    config = hf.config
    counts = {"decoder": num_decoder_layers(config), "encoder": num_encoder_layers(config)}
    parts: dict[str, Any] = {"decoder": hf}
    if is_encoder_decoder(config):
        parts = {"decoder": hf.get_decoder(), "encoder": hf.get_encoder()}
    names = {id(module): name for name, module in hf.named_modules()}
    found: dict[str, tuple[str, nn.ModuleList]] = {}
    for part, module in parts.items():
        # experts or heads may be lists of the same length, but inside a layer
        lists = [each for each in outer_lists(module, least=1) if len(each) == counts[part]]
        if len(lists) != 1:
            raise UnsupportedModelError(
                f"the {part} of {config.model_type} has its {counts[part]} layers in {len(lists)} "
                "lists, so a subset is not supported; use an existing draft instead"
            )
        found[part] = names[id(lists[0])], lists[0]
    return found


def check_layers(layers: Sequence[int], count: int) -> None:
    """Raise a UsageError unless these are increasing layer indices of a model of `count` layers."""
    increasing = all(a < b for a, b in itertools.pairwise(layers))
    if not layers or not increasing or layers[0] < 0 or layers[-1] >= count:
        example = sorted({0, 1, count // 2, count - 1} & set(range(count)))
        got, wanted = (",".join(map(str, some)) for some in (layers, example))
        raise UsageError(
            f"got layers {got or '(none)'}; wanted increasing numbers from 0 to {count - 1}, for "
            f"example {wanted}"
        )
