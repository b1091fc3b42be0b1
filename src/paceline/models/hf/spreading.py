"""Models that are spread over several GPUs: device_map="auto" of transformers.

Hooks of accelerate move what the parts read. Callers see one device, that of the embeddings and the
head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.errors import UnsupportedModelError
from paceline.models.hf.architectures import is_quantized

if TYPE_CHECKING:
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
    """Move the head of a spread model to its embeddings."""
    head, device = hf.get_output_embeddings(), hf.device
    if not is_spread(hf):
        return
    if any(weight.is_meta for weight in hf.parameters()):
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
