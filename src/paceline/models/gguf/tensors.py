"""Weights of a GGUF file in the layout of transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.models.gguf.architectures import ROPE_TENSORS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from paceline.models.gguf.fields import GgufFile

_GATE_UP = "gate_up_proj"  # of all experts in transformers; two tensors in a GGUF file


def tensor_names(hf: PreTrainedModel, arch: str) -> dict[str, tuple[str, ...]]:
    """llama.cpp's names of each weight; none for a weight without a name."""
    import gguf  # an optional dependency

    archs = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(archs[arch], hf.config.num_hidden_layers)
    ends = (".weight", ".bias")
    found: dict[str, tuple[str, ...]] = {}
    for name in hf.state_dict():
        label = names.get_name(name, ends) or names.get_name(
            name.removeprefix("transformer."), ends
        )
        if label is None and name.endswith(f"experts.{_GATE_UP}"):
            block = name.split(".")[2]
            found[name] = tuple(f"blk.{block}.ffn_{part}_exps.weight" for part in ("gate", "up"))
        elif label is None and name == "lm_head.weight":
            found[name] = ("output.weight",)
        else:
            bare = label is not None and not label.endswith(ends)
            found[name] = () if label is None else (f"{label}.weight" if bare else label,)
    return found


def stored_names(file: GgufFile, hf: PreTrainedModel) -> dict[str, tuple[str, ...]]:
    """The file's tensors of each weight of this model; none for a bias that the file lacks.

    Raises:
        ModelLoadError: The model has no place for a tensor, or the file lacks one.
    """
    names = tensor_names(hf, file.arch)
    if hf.config.tie_word_embeddings:
        names.pop("lm_head.weight", None)
    for name, labels in names.items():
        missing = [label for label in labels if label not in file.tensors]
        if missing or not labels:
            if not name.endswith(".bias"):
                raise file.error(f"lacks the tensor {(missing or [name])[0]}")
            names[name] = ()
    used = set(ROPE_TENSORS).union(*names.values())
    if left := sorted(file.tensors.keys() - used):
        raise file.error(
            f"has {len(left)} tensors that {hf.config.model_type} of transformers has no place "
            f"for, for example {left[0]}"
        )
    return names


def read_tensors(file: GgufFile, hf: PreTrainedModel, kind: torch.dtype) -> dict[str, Tensor]:
    """All weights of the file as the state of this model; raises as `stored_names`."""
    shapes = hf.state_dict()
    found: dict[str, Tensor] = {}
    for name, labels in stored_names(file, hf).items():
        if labels:
            weight = _read(file, labels, name, hf.config, shapes[name])
            found[name] = weight.to(kind).contiguous()
        else:
            found[name] = torch.zeros(shapes[name].shape, dtype=kind)
    return found


def _read(file: GgufFile, labels: tuple[str, ...], name: str, config: Any, meta: Tensor) -> Tensor:
    import gguf

    parts: list[Tensor] = []
    for label in labels:
        stored = file.tensors[label]
        array = gguf.quants.dequantize(stored.data, stored.tensor_type)
        parts.append(torch.from_numpy(array.copy()))
    weight = _layout(parts[0] if len(parts) == 1 else torch.cat(parts, 1), name, file.arch, config)
    if weight.squeeze().shape != meta.shape and weight.squeeze().shape != meta.squeeze().shape:
        raise file.error(
            f"has {labels[0]} of size {list(weight.shape)}, which should be {list(meta.shape)}"
        )
    return weight.reshape(meta.shape)


def _layout(weight: Tensor, name: str, arch: str, config: Any) -> Tensor:
    """Undo what llama.cpp's converter does to a weight."""
    match arch:
        case "llama" | "granite":
            return rotated_by_halves(name, weight, config)
        case "gemma" | "gemma2" | "gemma3" | "nemotron":
            return weight - 1 if name.endswith("norm.weight") else weight
        case "gpt2":
            turned = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
            return weight.T if name.endswith(turned) else weight
        case "bloom" if ".query_key_value." in name:
            parts = weight.reshape(3, config.n_head, -1, *weight.shape[1:])
            return parts.transpose(0, 1).reshape(weight.shape)
        case "falcon" if ".query_key_value." in name:
            return _in_groups(weight, config.num_attention_heads, config.num_kv_heads)
        case _:
            return weight


def _in_groups(weight: Tensor, heads: int, kv_heads: int) -> Tensor:
    """Queries, keys and values of each key-value head side by side."""
    rows = weight.reshape(heads + 2 * kv_heads, -1, *weight.shape[1:])
    queries, keys, values = rows.split([heads, kv_heads, kv_heads])
    groups = queries.reshape(kv_heads, heads // kv_heads, *rows.shape[1:])
    return torch.cat((groups, keys[:, None], values[:, None]), 1).reshape(weight.shape)


def rotated_by_halves(name: str, weight: Tensor, config: Any) -> Tensor:
    """Reorder rows of q and k: llama.cpp rotates neighbours, transformers the two halves."""
    heads = _rotated_heads(name, config)
    if heads is None:
        return weight
    pairs = weight.reshape(heads, -1, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)


def rotated_by_pairs(name: str, weight: Tensor, config: Any) -> Tensor:
    """The inverse of `rotated_by_halves`."""
    heads = _rotated_heads(name, config)
    if heads is None:
        return weight
    halves = weight.reshape(heads, 2, -1, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)


def _rotated_heads(name: str, config: Any) -> int | None:
    part = name.split(".")[-2]
    return {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(part)
