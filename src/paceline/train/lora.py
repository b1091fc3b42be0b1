"""Trains an adapter of low rank in place of the draft's weights (LoRA), in peft's format.

W' = W + (alpha / rank) B A, A of rank x inputs, B of outputs x rank, which begins at 0. Saved
models have W'; the adapter beside them has A and B.
Paper: Hu et al. 2021, arXiv 2106.09685, section 4.1.
"""

from __future__ import annotations

import copy
import json
import math
from typing import TYPE_CHECKING, Any

import torch
from pydantic import Field
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from paceline.config import StrictModel
from paceline.errors import UsageError
from paceline.models.drafts.layers import layer_lists
from paceline.records import atomic_directory
from paceline.rng import named_generator

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from paceline.models.hf.base import HfModel

ADAPTER = "adapter"
"""Directory of the adapter in a run and in a checkpoint."""
_WEIGHTS, _SETTINGS = "adapter_model.safetensors", "adapter_config.json"


class Lora(StrictModel):
    """An adapter of all linear layers but the head.

    Attributes:
        rank: Rank of the change of each weight.
        alpha: The change is multiplied by alpha / rank; None: twice the rank.
    """

    rank: int = Field(default=16, ge=1)
    alpha: float | None = Field(default=None, gt=0)

    @property
    def scale(self) -> float:
        """alpha / rank."""
        return 2.0 if self.alpha is None else self.alpha / self.rank


class _LowRank(nn.Module):
    """scale B A; the weight is inputs x outputs if `transposed`."""

    def __init__(
        self, weight: Tensor, lora: Lora, rng: torch.Generator, *, transposed: bool
    ) -> None:
        super().__init__()
        outputs, inputs = weight.shape[::-1] if transposed else weight.shape
        bound = 1 / math.sqrt(inputs)  # as peft and torch begin
        first = (torch.rand(lora.rank, inputs, generator=rng) * 2 - 1) * bound
        self.lora_A = nn.Parameter(first.to(weight.device, weight.dtype))
        self.lora_B = nn.Parameter(weight.new_zeros(outputs, lora.rank))
        self.scale, self.transposed = lora.scale, transposed

    @property
    def change(self) -> Tensor:
        """Of the weight."""
        found = self.scale * (self.lora_B @ self.lora_A)
        return found.T if self.transposed else found


def _add_change(part: Any, inputs: tuple[Tensor], output: Tensor) -> Tensor:
    """Forward hook of a linear layer."""
    change: _LowRank = part.lora
    return output + change.scale * (inputs[0] @ change.lora_A.T @ change.lora_B.T)


def add_adapter(draft: HfModel, lora: Lora, seed: int) -> None:
    """Let only an adapter of the draft be trained; raises a UsageError for an encoder-decoder."""
    if draft.decoder_prompt is not None:
        raise UsageError("adapters of encoder-decoders are not trained; unset lora")
    draft.hf.requires_grad_(False)
    rng = named_generator(seed, "adapter")
    for _, part in _linear_parts(draft):
        part.lora = _LowRank(part.weight, lora, rng, transposed=_is_conv1d(part))
        part.register_forward_hook(_add_change)


def _linear_parts(draft: HfModel) -> Iterator[tuple[str, Any]]:
    """The linear layers inside the draft's layers, by name."""
    name, layers = layer_lists(draft.hf)["decoder"]
    for inner, part in layers.named_modules():
        if isinstance(part, nn.Linear) or _is_conv1d(part):
            yield f"{name}.{inner}", part


def _is_conv1d(part: nn.Module) -> bool:
    """GPT-2's linear layer, whose weight is inputs x outputs."""
    return type(part).__name__ == "Conv1D"


def _changes(draft: HfModel) -> Iterator[tuple[str, _LowRank]]:
    for name, part in _linear_parts(draft):
        if hasattr(part, "lora"):
            yield name, part.lora


def has_adapter(draft: HfModel) -> bool:
    """True behind `add_adapter`."""
    return any(hasattr(part, "lora") for part in draft.hf.modules())


@torch.no_grad()
def merged(draft: HfModel) -> HfModel:
    """The draft with its adapter in its weights; the draft itself if it has none."""
    if not has_adapter(draft):
        return draft
    copied = copy.copy(draft)
    copied.hf = copy.deepcopy(draft.hf)
    for _, part in _linear_parts(copied):
        part.weight += part.lora.change
        del part.lora
        part._forward_hooks.clear()
    return copied.rewrap(copied.hf, copied.draft_vocabulary)


def save_adapter(draft: HfModel, lora: Lora, base: str, folder: Path) -> None:
    """Write the adapter as peft reads it; `base` is the draft that it changes."""
    weights: dict[str, Tensor] = {}
    transposed = False
    for name, change in _changes(draft):
        for side in ("lora_A", "lora_B"):
            weight = getattr(change, side).detach().cpu().contiguous()
            weights[f"base_model.model.{name}.{side}.weight"] = weight
        transposed = change.transposed
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.scale * lora.rank,
        "target_modules": sorted({name.rpartition(".")[2] for name, _ in _changes(draft)}),
        "fan_in_fan_out": transposed,
        "bias": "none",
        "inference_mode": True,
    }
    with atomic_directory(folder) as scratch:
        save_file(weights, scratch / _WEIGHTS)
        (scratch / _SETTINGS).write_text(json.dumps(settings, indent=2) + "\n", "utf-8")


@torch.no_grad()
def restore_adapter(draft: HfModel, folder: Path) -> None:
    """Read the adapter of a checkpoint."""
    weights = load_file(folder / _WEIGHTS)
    for name, change in _changes(draft):
        for side in ("lora_A", "lora_B"):
            getattr(change, side).copy_(weights[f"base_model.model.{name}.{side}.weight"])
