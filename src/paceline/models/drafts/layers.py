"""Creates a draft from a subset of the target's layers, with its embeddings, head and tokenizer."""

from __future__ import annotations

import copy
import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from paceline.errors import UnsupportedModelError, UsageError
from paceline.models.hf.causal import CausalModel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedConfig, PreTrainedModel


def subset_layers(
    target: CausalModel, layers: Sequence[int], *, share: bool = False
) -> CausalModel:
    """Create a model with only these layers of the target.

    Args:
        target: Not modified.
        layers: Increasing indices, for example [0, 1, 2, 29].
        share: Share the target's weights, for inference only, instead of copying them.

    Raises:
        UsageError: Indices are missing, repeated, decreasing or out of range.
        UnsupportedModelError: The model does not have its layers in one list.
    """
    name, old = layer_list(target.hf)
    check_layers(layers, len(old))
    kept = nn.ModuleList()
    # one memo for both copies, so that configs stay shared and weights stay tied
    memo: dict[int, Any] = {id(old): kept}
    if share:
        memo |= {id(weight): weight for weight in target.hf.parameters()}
    hf = copy.deepcopy(target.hf, memo)
    kept.extend(copy.deepcopy(old[index], memo) for index in layers)
    for index, layer in enumerate(kept):
        for module in layer.modules():
            if isinstance(getattr(module, "layer_idx", None), int):
                module.layer_idx = index  # pyright: ignore[reportArgumentType]
    assert hf.get_submodule(name) is kept, "the copy has other layers"
    shorten_config(hf.config.get_text_config(decoder=True), layers)
    if not share:
        _check_config(hf)
    return CausalModel(hf, target.tokenizer)


def _check_config(hf: PreTrainedModel) -> None:
    """Raise if a model built from the config has other weights, so that loading it would fail."""
    with torch.device("meta"):
        built = type(hf)(copy.deepcopy(hf.config))
    shapes = [
        {name: weight.shape for name, weight in model.named_parameters(remove_duplicate=False)}
        for model in (hf, built)
    ]
    if shapes[0] != shapes[1]:
        raise UnsupportedModelError(
            f"{hf.config.model_type} has layers of several kinds, assigned by index in its config, "
            "and these layers do not match; choose other layers, or a new draft (--params)"
        )


def layer_list(hf: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """The name and module list of the model's layers."""
    count = hf.config.get_text_config(decoder=True).num_hidden_layers
    lists = [
        (name, module)
        for name, module in hf.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    # experts or heads may be lists of the same length, but inside a layer
    outer = [(n, m) for n, m in lists if not any(n.startswith(f"{other}.") for other, _ in lists)]
    if len(outer) != 1:
        raise UnsupportedModelError(
            f"{hf.config.model_type} has its {count} layers in {len(outer)} lists, so a subset is "
            "not supported; use an existing draft instead"
        )
    return outer[0]


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


def shorten_config(config: PreTrainedConfig, layers: Sequence[int]) -> None:
    """Keep only these layers in the config, including lists with one entry per layer."""
    count = config.num_hidden_layers
    for key, value in list(vars(config).items()):
        if "layer" in key and isinstance(value, list) and len(value) == count:
            setattr(config, key, [value[index] for index in layers])
    config.num_hidden_layers = len(layers)
