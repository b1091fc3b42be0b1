"""The weights of models in training: which are trained, tied embeddings, shards over processes.

With FSDP, a layer is gathered only while it is used. Draft and target are sharded separately. The
target has no gradients or optimizer state. Its embeddings and head stay gathered after first use,
because the loss uses the head chunk by chunk, outside of the target's forward pass.

The functions import FSDP: it takes as long to load as half of torch, and what reads a configuration
alone does not need it.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.models.drafts.layers import layer_lists

if TYPE_CHECKING:
    from collections.abc import Iterator

    from accelerate import Accelerator
    from torch.distributed.checkpoint.state_dict import StateDictOptions
    from torch.distributed.fsdp import FSDPModule

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


@contextlib.contextmanager
def rows_added_in_place(model: HfModel) -> Iterator[None]:
    """Within this context, forward passes add tied embeddings' gradients directly to `weight.grad`.

    Autograd would allocate a full matrix for the embeddings' gradient and another for its sum with
    the head's gradient, although a batch uses only a few rows.

    For a single process only, because data parallelism synchronises gradients from autograd.
    Embeddings with further functions, such as padding, are not changed.
    """
    embedding: Any = model.hf.get_input_embeddings()
    head: Any = model.hf.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight and embedding.weight.requires_grad
    plain = type(embedding) is nn.Embedding and embedding.padding_idx is None
    if not tied or not plain or embedding.scale_grad_by_freq:
        yield
        return
    handle = embedding.register_forward_hook(_detach_output)
    try:
        yield
    finally:
        handle.remove()


def _detach_output(embedding: nn.Embedding, inputs: tuple[Tensor], output: Tensor) -> Tensor | None:
    if not output.requires_grad:
        return None
    tokens_BT = inputs[0]
    rows_BTD = output.detach().requires_grad_()

    def add(grad_BTD: Tensor) -> None:
        weight = embedding.weight
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        weight.grad.index_add_(0, tokens_BT.flatten(), grad_BTD.flatten(0, 1).to(weight.dtype))

    rows_BTD.register_hook(add)
    return rows_BTD


def shard_model(model: HfModel, root: nn.Module, accelerator: Accelerator) -> None:
    """Shard each layer of a model, then the remaining weights of `root` together.

    Weights in main memory are moved to the device layer by layer, only this process's shard.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    _ = model.head_weight  # the first access runs a forward pass, which needs unsharded weights
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    _, layers = layer_lists(model.hf)["decoder"]
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(root, mesh=mesh)
    head = model.hf.get_output_embeddings()  # outside of the root if it is not tied
    assert head is not None, "head_weight is its weight"
    head.to(accelerator.device)


def as_sharded(module: nn.Module) -> FSDPModule | None:
    """The module if `shard_model` has sharded it."""
    from torch.distributed.fsdp import FSDPModule

    return module if isinstance(module, FSDPModule) else None


def _whole() -> StateDictOptions:
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    return StateDictOptions(full_state_dict=True, cpu_offload=True)


def whole_model(loss: nn.Module, model: HfModel) -> HfModel:
    """The unsharded model on the main process; other processes return `model`. Collective."""
    if as_sharded(loss) is None:
        return model
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    weights: dict[str, Any] = get_model_state_dict(loss, options=_whole())
    if not weights:
        return model
    whole: Any = type(model.hf)(model.hf.config)
    whole.load_state_dict({name.removeprefix("hf."): value for name, value in weights.items()})
    whole.generation_config = model.hf.generation_config
    return model.rewrap(whole.eval(), model.draft_vocabulary)


def whole_state(loss: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's unsharded state. Collective."""
    if as_sharded(loss) is None:
        return optimizer.state_dict()
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    return get_optimizer_state_dict(loss, optimizer, options=_whole())


def restore_state(loss: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load the state of `whole_state`. Collective."""
    if as_sharded(loss) is None:
        optimizer.load_state_dict(state)
        return
    from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

    set_optimizer_state_dict(loss, optimizer, state, options=_whole())


def local_part(weight: Tensor) -> Tensor:
    """This process's part of a tensor that may be sharded."""
    from torch.distributed.tensor import DTensor

    return weight.to_local() if isinstance(weight, DTensor) else weight


def whole_number(value: Tensor) -> float:
    """The value of a scalar tensor that may be sharded."""
    from torch.distributed.tensor import DTensor

    return float(value.full_tensor() if isinstance(value, DTensor) else value)
