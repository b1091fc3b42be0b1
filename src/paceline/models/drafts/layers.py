"""A draft cut out of its target: some of the layers, the same embeddings, head and tokenizer."""

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
    """A model of only these layers of the target.

    Args:
        target: Left as it is.
        layers: Increasing indices, for example [0, 1, 2, 29].
        share: Its weights are the target's own, to look at and not to train; else they are copies.

    Raises:
        UsageError: No index, or indices that repeat, decrease or name no layer.
        UnsupportedModelError: The model does not keep its layers in one list.
    """
    name, old = layer_list(target.hf)
    check_layers(layers, len(old))
    kept = nn.ModuleList()
    # one memo for both copies: layers and model go on to share one config, and ties stay ties
    memo: dict[int, Any] = {id(old): kept}
    if share:
        memo |= {id(weight): weight for weight in target.hf.parameters()}
    hf = copy.deepcopy(target.hf, memo)
    kept.extend(copy.deepcopy(old[index], memo) for index in layers)
    for index, layer in enumerate(kept):
        for module in layer.modules():
            if isinstance(getattr(module, "layer_idx", None), int):
                module.layer_idx = index  # pyright: ignore[reportArgumentType]
    assert hf.get_submodule(name) is kept, "the copy holds the layers it was cut to"
    shorten_config(hf.config.get_text_config(decoder=True), layers)
    if not share:
        _check_config(hf)
    return CausalModel(hf, target.tokenizer)


def _check_config(hf: PreTrainedModel) -> None:
    """Would the config alone give these weights? Some tell the kinds of layers by number.

    Raises:
        UnsupportedModelError: it would not, so that what is saved could not be loaded.
    """
    with torch.device("meta"):
        made = type(hf)(copy.deepcopy(hf.config))
    shapes = [
        {name: weight.shape for name, weight in model.named_parameters(remove_duplicate=False)}
        for model in (hf, made)
    ]
    if shapes[0] != shapes[1]:
        raise UnsupportedModelError(
            f"{hf.config.model_type} has layers of several kinds, which its config tells by their "
            "numbers, and these layers do not fit those; choose others, or a new draft (--params)"
        )


def layer_list(hf: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """The one list of as many modules as the model has layers."""
    count = hf.config.get_text_config(decoder=True).num_hidden_layers
    lists = [
        (name, module)
        for name, module in hf.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    # experts or heads may come in lists of the same length, but only inside a layer
    outer = [(n, m) for n, m in lists if not any(n.startswith(f"{other}.") for other, _ in lists)]
    if len(outer) != 1:
        raise UnsupportedModelError(
            f"{hf.config.model_type} keeps its {count} layers in {len(outer)} lists, so no subset can "
            "be cut out; name a draft directory of your own instead"
        )
    return outer[0]


def check_layers(layers: Sequence[int], count: int) -> None:
    """Are these layers of a model of `count` layers, in order and once each?

    Raises:
        UsageError: they are not.
    """
    increasing = all(a < b for a, b in itertools.pairwise(layers))
    if not layers or not increasing or layers[0] < 0 or layers[-1] >= count:
        example = sorted({0, 1, count // 2, count - 1} & set(range(count)))
        raise UsageError(
            f"got layers {','.join(map(str, layers)) or '(none)'}; wanted increasing numbers from 0 to "
            f"{count - 1}, for example {','.join(map(str, example))}"
        )


def shorten_config(config: PreTrainedConfig, layers: Sequence[int]) -> None:
    """Fewer layers, and every list with one entry a layer (layer_types and its like) cut alike."""
    count = config.num_hidden_layers
    for key, value in list(vars(config).items()):
        if "layer" in key and isinstance(value, list) and len(value) == count:
            setattr(config, key, [value[index] for index in layers])
    config.num_hidden_layers = len(layers)
