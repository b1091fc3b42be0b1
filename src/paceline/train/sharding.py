"""Weights dealt out over the processes: each holds its part, and a whole layer only while it is read.

Draft and target are dealt out apart: the target is read and never trained, so that it costs its weights
and nothing else, and the draft brings its gradients and moments along. The target's embeddings and head
stay whole once they were read: the loss projects chunk by chunk, outside of the target's passes.
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
from paceline.models.hf.causal import CausalModel

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from torch import Tensor, nn

_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def deal_out(model: CausalModel, root: nn.Module, accelerator: Accelerator) -> None:
    """Deal out a model's layers one by one, and what else the module `root` holds of it together.

    A model in main memory comes to the device layer by layer, this process's part of each.
    """
    _ = model.head_weight  # makes a pass the first time, which only whole weights can
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    _, layers = layer_list(model.hf)
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(root, mesh=mesh)
    head = model.hf.get_output_embeddings()  # beside the root, where it is not tied
    assert head is not None, "head_weight is its weight"
    head.to(accelerator.device)


def is_dealt_out(module: nn.Module) -> bool:
    return isinstance(module, FSDPModule)


def whole_draft(loss: nn.Module, draft: CausalModel) -> CausalModel:
    """The draft in one piece, on the first process; all of them must call. Others get it as it is."""
    if not is_dealt_out(loss):
        return draft
    weights: dict[str, Any] = get_model_state_dict(loss, options=_WHOLE)
    if not weights:
        return draft
    whole: Any = type(draft.hf)(draft.hf.config)
    prefix = "hf."
    whole.load_state_dict({name.removeprefix(prefix): value for name, value in weights.items()})
    whole.generation_config = draft.hf.generation_config
    return CausalModel(whole.eval(), draft.tokenizer, draft.draft_vocabulary)


def whole_state(loss: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimiser's state in one piece; all processes must call."""
    if not is_dealt_out(loss):
        return optimizer.state_dict()
    return get_optimizer_state_dict(loss, optimizer, options=_WHOLE)


def restore_state(loss: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Give back what `whole_state` took; all processes must call."""
    if is_dealt_out(loss):
        set_optimizer_state_dict(loss, optimizer, state, options=_WHOLE)
    else:
        optimizer.load_state_dict(state)


def is_finite(weight: Tensor) -> Tensor:
    """Entry by entry, of the part of a tensor that is here."""
    return (weight.to_local() if isinstance(weight, DTensor) else weight).isfinite()


def whole_number(value: Tensor) -> float:
    """Of a tensor that may be dealt out."""
    return float(value.full_tensor() if isinstance(value, DTensor) else value)
