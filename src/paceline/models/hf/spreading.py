"""Spreads a model over several GPUs: its layers in their order, everything else on the first.

transformers loads each part where the map says, and hooks of accelerate move what the parts read.
Callers see one device, that of the embeddings and the head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.errors import UnsupportedModelError
from paceline.models.hf.architectures import is_quantized, outer_lists

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch
    from torch import nn

SHARE = 0.9
"""Of a card's free memory, for weights; the rest is for keys, values, activations and the draft.

On 80 GB, the rest is 8 GB: a draft of 1B in bfloat16, and the keys and values of 30,000 tokens of a
70B Llama 3 whose other half is on another card (160 kB per token).
"""


def is_spread(hf: Any) -> bool:
    """Whether hooks move what the modules read. Such a model is neither moved nor copied."""
    return hasattr(hf, "_hf_hook")


def refuse_copies(hf: Any) -> None:
    """Raise an UnsupportedModelError for a quantized or spread model; layers are not copied."""
    if is_quantized(hf.config):
        raise UnsupportedModelError(
            f"this {hf.config.model_type} is quantized, and its layers cannot be copied; name the "
            "original model, or choose a new draft (--params)"
        )
    if is_spread(hf):
        raise UnsupportedModelError(
            f"this {hf.config.model_type} is spread over several devices, and its layers cannot be "
            "copied; load it on the CPU (device=cpu, or CUDA_VISIBLE_DEVICES= before the command)"
        )


def join_ends(hf: Any) -> None:
    """Move the head of a spread model to its embeddings.

    Raises:
        UnsupportedModelError: One of them is in host memory or on disk.
    """
    head, device = hf.get_output_embeddings(), hf.device
    if not is_spread(hf):
        return
    if head.weight.is_meta or device.type == "meta":
        raise UnsupportedModelError(
            f"this {hf.config.model_type} has weights in host memory or on disk (device_map), but "
            "they have to be on GPUs; use more or larger GPUs, or load all of it on the CPU"
        )
    if head.weight.device != device:
        head.to(device)
        head._hf_hook.execution_device = device


def num_bytes(module: nn.Module, dtype: torch.dtype) -> int:
    """Bytes of the weights and buffers in this dtype; shared ones count once."""
    tensors = (*module.parameters(), *module.buffers())
    return sum(x.numel() * (dtype if x.is_floating_point() else x.dtype).itemsize for x in tensors)


def device_map(hf: Any, dtype: torch.dtype, rooms: Sequence[float]) -> dict[str, int] | None:
    """The number of the card for each part of a model; None if the cards do not hold it.

    All cards are filled to the same share, the smallest that suffices. `hf` may be on the meta
    device; `rooms` are the bytes for weights on each card.
    """
    layers = {id(layer) for stack in outer_lists(hf) for layer in stack}
    sizes = {name: num_bytes(x, dtype) for name, x in hf.named_modules() if id(x) in layers}
    rest = num_bytes(hf, dtype) - sum(sizes.values())
    shares = ([percent / 100 * room for room in rooms] for percent in range(1, 101))
    cards = next(filter(None, (_filled(rest, sizes.values(), limits) for limits in shares)), None)
    if cards is None:
        return None
    above = {name[:end] for name in sizes for end, letter in enumerate(name) if letter == "."}
    parts = (*hf.named_modules(), *hf.named_parameters(), *hf.named_buffers())
    names = [name for name, _ in parts if name.rpartition(".")[0] in {"", *above}]
    on_first = dict.fromkeys((name for name in names if name not in {"", *above}), 0)
    return on_first | dict(zip(sizes, cards, strict=True))


def _filled(rest: int, sizes: Iterable[int], limits: Sequence[float]) -> list[int] | None:
    """The card of each layer, in order, beside `rest` on the first; None if they do not fit."""
    used, cards = [rest, *[0] * (len(limits) - 1)], [0]
    for size in sizes:
        card = next((n for n in range(cards[-1], len(used)) if used[n] + size <= limits[n]), None)
        if card is None:
            return None
        used[card] += size
        cards.append(card)
    return cards[1:] if rest <= limits[0] else None
