"""Spreads a model over several GPUs: its layers in their order, everything else on the first.

transformers loads each part where the map says, and hooks of accelerate move what the parts read.
Callers see one device, that of the embeddings and the head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.errors import UnsupportedModelError
from paceline.models.hf.architectures import outer_lists

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import nn

SHARE = 0.9
"""Of a card's free memory, for weights; the rest is for keys, values, activations and the draft.

On 80 GB, the rest is 8 GB: a draft of 1B in bfloat16, and the keys and values of 30,000 tokens of a
70B Llama 3 whose other half is on another card (160 kB per token).
"""


def is_spread(hf: Any) -> bool:
    """Whether hooks of accelerate move what the modules read, which may be on several devices.

    Such a model is neither moved nor copied.
    """
    return hasattr(hf, "_hf_hook")


def refuse_spread(hf: Any) -> None:
    """Raise an UnsupportedModelError for a spread model, whose layers cannot be copied."""
    if is_spread(hf):
        raise UnsupportedModelError(
            f"this {hf.config.model_type} is spread over several devices, and its layers cannot be "
            "copied; load it on the CPU (device=cpu, or CUDA_VISIBLE_DEVICES= before the command)"
        )


def num_bytes(module: nn.Module, dtype: torch.dtype) -> int:
    """Bytes of the weights and buffers in this dtype; shared ones count once."""
    return sum(
        x.numel() * (dtype.itemsize if x.is_floating_point() else x.itemsize)
        for x in (*module.parameters(), *module.buffers())
    )


def device_map(hf: Any, dtype: torch.dtype, rooms: Sequence[float]) -> dict[str, int] | None:
    """The number of the card for each part of a model; None if the cards do not hold it.

    All cards are filled to the same share, the smallest that suffices.

    Args:
        hf: The model, on the meta device.
        dtype: Of the weights.
        rooms: Bytes for weights on each card.
    """
    layers = {id(layer) for stack in outer_lists(hf) for layer in stack}
    sizes = {name: num_bytes(x, dtype) for name, x in hf.named_modules() if id(x) in layers}
    rest = num_bytes(hf, dtype) - sum(sizes.values())
    shares = ([percent / 100 * room for room in rooms] for percent in range(1, 101))
    fillings = (_filled(rest, list(sizes.values()), limits) for limits in shares)
    cards = next((cards for cards in fillings if cards is not None), None)
    if cards is None:
        return None
    found = dict(zip(sizes, cards, strict=True))
    paths = [name.split(".") for name in sizes]
    above = {".".join(path[:end]) for path in paths for end in range(len(path))}
    parts = hf.named_modules(remove_duplicate=False)
    for name, _ in (*parts, *hf.named_parameters(), *hf.named_buffers()):
        if name not in above and name.rpartition(".")[0] in above:
            found.setdefault(name, 0)
    return found


def _filled(rest: int, sizes: Sequence[int], limits: Sequence[float]) -> list[int] | None:
    """The card of each layer, in order, beside `rest` on the first; None if they do not fit."""
    used, cards = [float(rest), *[0.0] * (len(limits) - 1)], [0]
    for size in sizes:
        card = next((n for n in range(cards[-1], len(used)) if used[n] + size <= limits[n]), None)
        if card is None:
            return None
        used[card] += size
        cards.append(card)
    return cards[1:] if rest <= limits[0] else None


def join_ends(hf: Any) -> None:
    """Move the head of a spread model to its embeddings.

    Raises:
        UnsupportedModelError: The head is in host memory or on disk.
    """
    head = hf.get_output_embeddings()
    if not is_spread(hf):
        return
    if "meta" in (head.weight.device.type, hf.device.type):
        raise UnsupportedModelError(
            f"this {hf.config.model_type} has weights in host memory or on disk (device_map), but "
            "they have to be on GPUs; use more or larger GPUs, or load all of it on the CPU"
        )
    if head.weight.device != hf.device:
        head.to(hf.device)
        head._hf_hook.execution_device = hf.device
