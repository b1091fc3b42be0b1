"""Shards weights over processes with FSDP; a layer is gathered only while it is used.

Draft and target are sharded separately. The target has no gradients or optimizer state. Its
embeddings and head stay gathered after first use, because the loss uses the head chunk by chunk,
outside of the target's forward pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from paceline.models.drafts.layers import layer_list

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from torch import Tensor, nn

    from paceline.models.hf.base import HfModel

_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def shard_model(model: HfModel, root: nn.Module, accelerator: Accelerator) -> None:
    """Shard each layer of a model, then the remaining weights of `root` together.

    Weights in main memory are moved to the device layer by layer, only this process's shard.
    """
    _ = model.head_weight  # the first access runs a forward pass, which needs unsharded weights
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    _, layers = layer_list(model.hf)
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(root, mesh=mesh)
    head = model.hf.get_output_embeddings()  # outside of the root if it is not tied
    assert head is not None, "head_weight is its weight"
    head.to(accelerator.device)


def whole_draft(loss: nn.Module, draft: HfModel) -> HfModel:
    """The unsharded draft on the main process; other processes return `draft`. Collective."""
    if not isinstance(loss, FSDPModule):
        return draft
    weights: dict[str, Any] = get_model_state_dict(loss, options=_WHOLE)
    if not weights:
        return draft
    whole: Any = type(draft.hf)(draft.hf.config)
    whole.load_state_dict({name.removeprefix("hf."): value for name, value in weights.items()})
    whole.generation_config = draft.hf.generation_config
    return draft.rewrap(whole.eval(), draft.draft_vocabulary)


def whole_state(loss: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's unsharded state. Collective."""
    if not isinstance(loss, FSDPModule):
        return optimizer.state_dict()
    return get_optimizer_state_dict(loss, optimizer, options=_WHOLE)


def restore_state(loss: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load the state of `whole_state`. Collective."""
    if isinstance(loss, FSDPModule):
        set_optimizer_state_dict(loss, optimizer, state, options=_WHOLE)
    else:
        optimizer.load_state_dict(state)


def is_finite(weight: Tensor) -> Tensor:
    """Elementwise `isfinite` of the local part of a tensor."""
    return (weight.to_local() if isinstance(weight, DTensor) else weight).isfinite()


def whole_number(value: Tensor) -> float:
    """The value of a scalar tensor that may be sharded."""
    return float(value.full_tensor() if isinstance(value, DTensor) else value)
