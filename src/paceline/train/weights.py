"""The weights of models in training: which are trained, and a target's shards over processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from paceline.errors import UsageError
from paceline.models.drafts.layers import layer_lists
from paceline.models.hf.architectures import body_of

if TYPE_CHECKING:
    from accelerate import Accelerator

    from paceline.models.hf.base import HfModel

_CONSTANT = "SinusoidalPositionalEmbedding"


def train_all(model: HfModel) -> None:
    """Train all weights but constants, such as the positions of Marian, and unused embeddings.

    An encoder-decoder without shared embeddings has a shared table that no pass reads. Processes
    that train together wait for the gradient of every weight that is trained.
    """
    model.hf.requires_grad_(True)
    for module in model.hf.modules():
        if type(module).__name__.endswith(_CONSTANT):
            module.requires_grad_(False)
    if model.decoder_prompt is None:
        return
    tables = [m.weight for m in model.hf.modules() if isinstance(m, nn.Embedding)]
    tables = [weight for weight in tables if weight.requires_grad]
    hidden = model.hidden(model.trial_batch([1]))
    gradients = torch.autograd.grad(hidden.sum(), tables, allow_unused=True)
    for weight, gradient in zip(tables, gradients, strict=True):
        if gradient is None and weight is not model.head_weight:
            weight.requires_grad_(False)


def freeze_embeddings(draft: HfModel) -> None:
    """Freeze the input embeddings and the output head."""
    for module in (draft.hf.get_input_embeddings(), draft.hf.get_output_embeddings()):
        if module is not None:
            module.requires_grad_(False)


def freeze_layers(draft: HfModel, count: int) -> None:
    """Freeze the first `count` layers, of the decoder if there is an encoder.

    Raises:
        UsageError: the draft has no further layer.
    """
    if count == 0:
        return
    _, layers = layer_lists(draft.hf)["decoder"]
    if count >= len(layers):
        raise UsageError(
            f"freeze_layers is {count}, but the draft has {len(layers)} layers; "
            "leave at least one to train"
        )
    for layer in layers[:count]:
        layer.requires_grad_(False)


def shard_target(target: HfModel, accelerator: Accelerator) -> None:
    """Shard each layer of the target, then the remaining weights of its body together.

    Weights in main memory are moved to the device layer by layer, only this process's shard. A
    layer is gathered only while it is used. Embeddings and head stay gathered after first use,
    because the loss uses the head chunk by chunk, outside of the target's forward pass.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    target.hf.requires_grad_(False)
    _ = target.head_weight  # the first access runs a forward pass, which needs unsharded weights
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    _, layers = layer_lists(target.hf)["decoder"]
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(body_of(target.hf), mesh=mesh)
    head = target.hf.get_output_embeddings()  # outside of the root if it is not tied
    assert head is not None, "head_weight is its weight"
    head.to(accelerator.device)
