"""Checks that a checkpoint and its model match, and that its values are finite."""

from __future__ import annotations

import contextlib
import json
import re
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open

from paceline.errors import ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

# buffers that older versions of transformers, fairseq or an engine stored, and no model reads
_CONSTANTS = re.compile(
    r"(^|\.)("
    r"(original_)?inv_freq|cos_cached|sin_cached|embed_positions|_float_tensor|position_ids|"
    r"masked_bias|causal_mask|num_batches_tracked|version|_extra_state|"
    r"[kqv]_scale|kv_scale|[kv]_proj\.output_scale"  # of an FP8 cache
    r")$"
)
_MASKS = ("bias", "causal_mask")
WEIGHTS = ("model.safetensors", "pytorch_model.bin")


def refuse_incomplete(name: str, directory: Path | None, hf: Any, info: dict[str, Any]) -> None:
    """Raise a ModelLoadError unless weights and model match.

    Constants that the model computes itself may be in the files.

    Args:
        name: The model as the user named it.
        directory: Its local directory, if it has one.
        hf: The loaded model.
        info: What transformers says about the loading.
    """
    left = [*info["unexpected_keys"], *_ignored_masks(directory, hf)]
    unexpected = [key for key in left if not _is_constant(key, hf, directory)]
    faults = {
        "are missing from the file": info["missing_keys"],
        "are in the file but not in the model": unexpected,
        "have a different size in the file": info["mismatched_keys"],
    }
    for fault, keys in faults.items():
        names = sorted(key if isinstance(key, str) else str(key[0]) for key in keys)
        if names:
            both = info["missing_keys"] and unexpected
            others = f" (the file has {min(unexpected)})" if both else ""
            raise ModelLoadError(
                f"{name}: config.json and weights do not match: {len(names)} weights {fault}, for "
                f"example {names[0]}{others}; use the config.json that came with them"
            )


def refuse_integers(name: str, directory: Path | None, hf: Any) -> None:
    """Raise a ModelLoadError if a weight is stored in 8 bits or as integers, without scales."""
    if directory is None or getattr(hf.config, "quantization_config", None) is not None:
        return
    known = {key for key, weight in hf.named_parameters() if weight.is_floating_point()}
    for file in weight_files(directory):
        if file.suffix != ".safetensors":
            continue
        with safe_open(file, "pt") as weights:
            for key in known & set(weights.keys()):
                kind = weights.get_slice(key).get_dtype()
                if kind[0] in "IU" or kind.startswith("F8"):
                    raise ModelLoadError(
                        f"{name} stores {key} as {kind}, but its config.json has no "
                        "quantization_config; use the config.json that came with the weights"
                    )


def refuse_not_finite(name: str, hf: Any) -> None:
    """Raise a ModelLoadError that names a weight with NaN or infinite values."""
    named = [(key, weight) for key, weight in hf.named_parameters() if weight.is_floating_point()]
    # A finite sum has finite terms only. Where the sum is not finite, each weight is checked.
    doubtful = [(key, weight) for key, weight in named if not weight.detach().sum().isfinite()]
    faults = [(key, weight) for key, weight in doubtful if not weight.isfinite().all()]
    if faults:
        key, weight = faults[0]
        values = "NaN" if weight.isnan().any() else "infinite values"
        count = int((~weight.isfinite()).sum())
        more = f", and in {len(faults) - 1} other weights" if len(faults) > 1 else ""
        raise ModelLoadError(
            f"{name} holds {values} in {key} ({count:,} of {weight.numel():,} values{more}); copy "
            "it again, or go back to an earlier checkpoint"
        )


def weight_files(directory: Path) -> list[Path]:
    """The files of weights that transformers reads from a directory; empty if there are none.

    Raises:
        ModelLoadError: The index of the files is damaged, or names a file outside of the directory.
    """
    for name in WEIGHTS:
        if (directory / name).exists():
            return [directory / name]
        index = directory / f"{name}.index.json"
        if index.exists():
            return [directory / shard for shard in _shards(index)]
    return []


def _shards(index: Path) -> list[str]:
    try:
        shards = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ModelLoadError(f"{index} is not an index of weights; copy it again") from None
    for shard in shards:
        if not isinstance(shard, str) or ".." in Path(shard).parts or Path(shard).is_absolute():
            raise ModelLoadError(
                f"{index} names {shard!r}, which is not a file in its directory; use the index "
                "that came with the weights"
            )
    return shards


def stored_tensor(directory: Path, names: Sequence[str]) -> Tensor | None:
    """The tensor of the files with one of these names; None if it cannot be read alone."""
    with contextlib.suppress(OSError, RuntimeError, KeyError, ValueError):
        for file in weight_files(directory):
            for tensor in _tensors(file, names):
                return tensor
    return None


def _ignored_masks(directory: Path | None, hf: Any) -> list[str]:
    """Masks in the files that transformers reports nowhere, as it does for GPT-J from 5.24 on."""
    patterns = hf._keys_to_ignore_on_load_unexpected or ()
    files = [] if directory is None or not patterns else weight_files(directory)
    known = hf.state_dict().keys()
    keys = {key for file in files for key in _keys(file)} - known
    ignored = [key for key in keys if any(re.search(pattern, key) for pattern in patterns)]
    # not the weights of further layers, such as those that predict several tokens
    return [key for key in ignored if _is_buffer_of_attention(key, hf)]


def _is_constant(key: str, hf: nn.Module, directory: Path | None) -> bool:
    if not _CONSTANTS.search(key) and not _is_buffer_of_attention(key, hf):
        return False
    if key.rpartition(".")[2] not in _MASKS or directory is None:
        return True
    stored = stored_tensor(directory, (key, key.removeprefix(f"{hf.base_model_prefix}.")))
    return stored is None or _is_causal_mask(stored)


def _is_buffer_of_attention(key: str, hf: Any) -> bool:
    """True for a `bias` of a module that has layers, but no weights of its own."""
    owner, _, last = key.rpartition(".")
    if last != "bias":
        return False
    known: dict[str, nn.Module] = dict(hf.named_modules())
    names = (owner, f"{hf.base_model_prefix}.{owner}")
    found = next((known[name] for name in names if name in known), None)
    if found is None or not any(True for _ in found.children()):
        return False
    return not any(True for _ in found.parameters(recurse=False))


def _is_causal_mask(stored: Tensor) -> bool:
    """True if the values are 0 or 1, and no token sees a later one."""
    values = stored.float()
    known = bool(((values == 0) | (values == 1)).all())
    if stored.dim() < 2:
        return known
    diagonal = values.diagonal(dim1=-2, dim2=-1)
    return known and not bool(values.triu(1).any()) and bool((diagonal == 1).all())


def _keys(file: Path) -> list[str]:
    if file.suffix == ".safetensors":
        with safe_open(file, "pt") as weights:
            return list(weights.keys())
    return list(unpickled(file))


def _tensors(file: Path, names: Sequence[str]) -> list[Tensor]:
    if file.suffix == ".safetensors":
        with safe_open(file, "pt") as weights:
            known = set(weights.keys())
            return [weights.get_tensor(name) for name in names if name in known]
    found = unpickled(file)
    return [found[name] for name in names if name in found]


def unpickled(file: Path) -> dict[str, Tensor]:
    """The tensors of a pickled file, of which no code runs; an old file is read into memory."""
    stored = torch.load(file, "cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    return {name: value for name, value in stored.items() if isinstance(value, torch.Tensor)}
