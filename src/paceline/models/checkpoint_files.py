"""Checks of a model's files: its configuration, and that weights and configuration match.

A configuration may ask for more memory than there is, and a model with weights that are missing,
damaged or of another model would give other texts without a word.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import zipfile
from collections import Counter
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import huggingface_hub
import torch
import transformers
from safetensors import safe_open
from torch import Tensor
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM
from transformers.models.auto.modeling_auto import AutoModelForImageTextToText

from paceline.errors import ModelLoadError, UnsupportedModelError
from paceline.fingerprints import files_fingerprint
from paceline.models.hf.architectures import is_encoder_decoder, is_quantized, refuse_by_name
from paceline.places import TEMPLATES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import nn
    from transformers import PreTrainedTokenizerBase

WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_READ = (".json", ".safetensors", ".bin", ".jinja", ".model", ".spm", ".txt")  # of a model
_COUNTS = re.compile(r"^(?!.*(size|vocab)).*(layer|label|first_k)")
"""Settings of which transformers makes lists before it makes a model."""
_MOST, _MOST_LISTED = 10_000, 1 << 22  # such a setting, and any number in a list
# buffers that older versions of transformers, fairseq or an engine stored, and no model reads
_CONSTANTS = re.compile(
    r"(^|\.)("
    r"(original_)?inv_freq|cos_cached|sin_cached|embed_positions|_float_tensor|position_ids|"
    r"masked_bias|causal_mask|num_batches_tracked|version|_extra_state|"
    r"[kqv]_scale|kv_scale|[kv]_proj\.output_scale"  # of an FP8 cache
    r")$"
)
_MASKS = ("bias", "causal_mask")
_HEADS = re.compile(r"^(eagle|hydra)$|Eagle3|^Eagle\w*ForCausalLM|medusa|speculator", re.IGNORECASE)
"""Architectures of heads that draft."""
_HEAD_KEYS = re.compile(r"medusa_num_heads|hydra_num_heads|speculators_")
_FUSED = "fc.weight"  # of EAGLE: from an embedding and hidden states to one state
_PACKED = 8  # values in a stored one, of quantized weights
_COPIES = 4  # of a tied embedding, and parts of a fused weight, while a model is built
_MORE_TENSORS, _MORE_VALUES = 1000, 1 << 20
_MOST_TENSORS = 200_000  # of files that are not on this machine
_BUFFER_VALUES = 1 << 28  # masks and positions that a model computes itself


class ModelLocation(NamedTuple):
    """Where a model is read from.

    Attributes:
        name: The model as the user named it.
        source: Its directory or hub id.
    """

    name: str
    source: str

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of transformers' `from_pretrained`."""
        return {"local_files_only": True} if self.directory else {}

    @property
    def directory(self) -> Path | None:
        return Path(self.source) if Path(self.source).is_dir() else None


def read_config(location: ModelLocation) -> Any:
    """The configuration of transformers, if it is one that it can build a model of.

    Raises:
        UnsupportedModelError: transformers does not know the architecture.
        ModelLoadError: A file is not a configuration, or a setting would be lost.
    """
    directory = location.directory
    if directory is None:
        directory = Path(huggingface_hub.hf_hub_download(location.source, "config.json")).parent
    _refuse_unreadable(location.name, directory)
    options = location.options
    config = AutoConfig.from_pretrained(location.source, **options, trust_remote_code=False)
    config.return_dict = config.get_text_config().return_dict = True  # else passes give tuples
    return config


def _refuse_unreadable(name: str, directory: Path) -> None:
    path = directory / "config.json"
    settings = json.loads(path.read_text("utf-8"))
    kind = settings.get("model_type") if isinstance(settings, dict) else None
    if isinstance(settings, dict) and (sign := _sign_of_head(settings)):
        raise _head_alone(name, f"{path} has {sign}")
    if kind is None:
        raise ModelLoadError(
            f"{path} has no model_type, so it is not a transformers configuration; use the "
            "config.json that came with the weights"
        )
    if kind not in CONFIG_MAPPING and "auto_map" in settings:
        raise needs_code(name)
    if kind not in CONFIG_MAPPING:
        raise UnsupportedModelError(
            f"{name} has the architecture {kind!r}, which transformers "
            f"{transformers.__version__} does not know; install a version that does, or correct "
            f"model_type in {path}"
        )
    if settings.get("transformers_weights") is not None:
        raise ModelLoadError(
            f"{path} names other files of weights (transformers_weights), which are not read; name "
            "them as transformers does, such as model.safetensors, and remove the key"
        )
    for key in ("attn_implementation", "_attn_implementation", "experts_implementation"):
        if "/" in str(settings.get(key)):
            raise ModelLoadError(
                f"{path} names code of the hub ({key}: {settings[key]}), which is not run; remove "
                "the key"
            )
    _refuse_counts(path, settings)
    _refuse_broken(directory / "generation_config.json")


def _sign_of_head(settings: dict[str, Any]) -> str | None:
    """What in a config.json says that its weights are those of a head, such as EAGLE or Medusa."""
    stated = settings.get("model_type"), *(settings.get("architectures") or ())
    found = next((str(each) for each in stated if _HEADS.search(str(each))), None)
    return found or next((key for key in settings if _HEAD_KEYS.match(key)), None)


def _head_alone(name: str, sign: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{name} is a head that drafts from the hidden states of its target ({sign}), not a model; "
        "name a small language model with the target's tokenizer, or make one by paceline draft"
    )


def needs_code(name: str) -> UnsupportedModelError:
    """The error for a model that only its own code can read."""
    return UnsupportedModelError(
        f"{name} needs Python code that comes with it (auto_map in config.json), which Paceline "
        "does not run; if you trust it, load it with transformers in Python and pass it to "
        "paceline.wrap_model"
    )


def _refuse_counts(path: Path, value: Any, name: str = "", most: int | None = None) -> None:
    """Refuse counts of layers and labels, and numbers in lists, that no model has."""
    if isinstance(value, dict):
        for key, part in value.items():
            _refuse_counts(path, part, key, _MOST if _COUNTS.search(key) else None)
    elif isinstance(value, list):
        for part in value:
            _refuse_counts(path, part, name, _MOST_LISTED)
    elif isinstance(value, int) and most is not None and value > most:
        raise ModelLoadError(
            f"{path} has {name} = {str(value)[:20]}, and at most {most:,} are read; copy or "
            "download the model again"
        )


def _refuse_broken(path: Path) -> None:
    """transformers would use other settings without a word."""
    try:
        is_right = not path.exists() or isinstance(json.loads(path.read_text("utf-8")), dict)
    except (ValueError, RecursionError):
        is_right = False
    if not is_right:
        raise ModelLoadError(
            f"{path} is not a JSON object, so the model's settings cannot be read; correct the "
            "file, or remove it"
        )


def auto_class(config: Any) -> Any:
    """The class of transformers that loads a model of this configuration.

    That of a model of images and text reads text alone, too.

    Raises:
        UnsupportedModelError: There is none.
    """
    refuse_by_name(config)
    kinds: list[Any] = [AutoModelForCausalLM, AutoModelForImageTextToText]
    if is_encoder_decoder(config):
        kinds = [AutoModelForSeq2SeqLM]
    for auto in kinds:
        if type(config) in auto._model_mapping:
            return auto
    if hasattr(config, "auto_map"):
        raise needs_code(f"a model of type {config.model_type}")
    raise UnsupportedModelError(
        f"{config.model_type} is no language model that transformers loads with "
        f"{kinds[0].__name__}; name a model that reads and writes text"
    )


def with_weights(
    location: ModelLocation, config: Any, dtype: torch.dtype, place: Any = None
) -> Any:
    """The model of transformers, if it is `within` its files; and what it says of the loading.

    `place`: the device that weights go straight to, or a `device_map`; None: the CPU.
    """
    auto = auto_class(config)
    if isinstance(place, torch.device):
        place = None if place.type == "cpu" else {"": place}
    with within(location.name, lambda: stored_size(location.source, config)):
        hf, info = auto.from_pretrained(
            location.source,
            config=config,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refuse_incomplete has a clearer message
            trust_remote_code=False,
            device_map=place,
            **location.options,
        )
    if is_quantized(config) and not is_quantized(hf.config):
        hf._weight_conversions = None  # its weights are plain, and are saved as such
    return hf, info


def without_weights(location: ModelLocation, config: Any) -> Any:
    """The model of transformers on the meta device, if it is `within` its files."""
    auto = auto_class(config)
    size = within(location.name, lambda: stored_size(location.source, config))
    with size, torch.device("meta"):
        return auto.from_config(config, trust_remote_code=False)


class Size(NamedTuple):
    """Number of tensors, and of the values in them."""

    tensors: int
    values: int


def stored_size(source: str | Path, config: Any) -> Size | None:
    """What the weights of a directory or a hub id hold; None if they are not on this machine."""
    directory = Path(source)
    if not directory.is_dir():
        cached = huggingface_hub.try_to_load_from_cache(str(source), "config.json")
        if not isinstance(cached, str) or not has_weights(Path(cached).parent):
            return None
        directory = Path(cached).parent
    tensors = values = 0
    for file in weight_files(directory):
        counts = [count for _, count in shapes_in(file).values()]
        tensors += len(counts)
        values += min(sum(counts), 2 * file.stat().st_size)  # names may share values
    return Size(tensors, values * (_PACKED if is_quantized(config) else 1))


def shapes_in(file: Path) -> dict[str, tuple[Sequence[int], int]]:
    """Shape of each tensor in a file of weights, and how many values are stored for it.

    Raises:
        SafetensorError: The file is truncated.
    """
    if file.suffix == ".safetensors":
        with safe_open(file, "pt") as weights:
            shapes = {key: weights.get_slice(key).get_shape() for key in list(weights.keys())}
        return {key: (shape, math.prod(shape)) for key, shape in shapes.items()}
    # a tensor with a stride of 0 has more values than are stored
    return {
        key: (tensor.shape, min(tensor.numel(), tensor.untyped_storage().nbytes()))
        for key, tensor in _unpickled(file).items()
    }


@contextlib.contextmanager
def within(name: str, size: Callable[[], Size | None]) -> Iterator[None]:
    """Stop the construction of a model on the meta device that is larger than its files.

    Args:
        name: The model as the user named it.
        size: What its files hold; called once the first weight is made, after any download.

    Raises:
        ModelLoadError: it has more than 4 times their tensors and 1000, or more than 4 times their
            values and 2^20; or its buffers have more than 4 times their values and 2^28.
    """
    stored = cache(size)
    made: Counter[str] = Counter()
    seen: dict[int, Any] = {}  # tied weights are registered again

    def count(kind: str, spare: int, _module: nn.Module, _name: str, tensor: Any) -> None:
        if tensor is None or not tensor.is_meta or id(tensor) in seen:
            return
        seen[id(tensor)] = tensor
        made[f"{kind}s"] += 1
        made[kind] += tensor.numel()
        held = stored() or Size(_MOST_TENSORS, 1 << 62)
        most = Size(_COPIES * held.tensors + _MORE_TENSORS, _COPIES * held.values + spare)
        if made[f"{kind}s"] > most.tensors or made[kind] > most.values:
            raise ModelLoadError(
                f"{name}: config.json and weights do not match: the configuration has at least "
                f"{made[f'{kind}s']:,} {kind}s with {made[kind]:,} values, and the files have "
                f"{held.tensors:,} with {held.values:,}; use the config.json that came with them"
            )

    weights = register_module_parameter_registration_hook(partial(count, "weight", _MORE_VALUES))
    buffers = register_module_buffer_registration_hook(partial(count, "buffer", _BUFFER_VALUES))
    with weights, buffers:
        yield


def refuse_incomplete(location: ModelLocation, hf: Any, info: dict[str, Any]) -> None:
    """Raise a ModelLoadError unless weights and model match.

    Constants that the model computes itself may be in the files. `info`: what transformers says of
    the loading.
    """
    directory = location.directory
    left = [*info["unexpected_keys"], *_ignored_masks(directory, hf)]
    unexpected = [key for key in left if not _is_constant(key, hf, directory)]
    faults = {
        "are missing from the file": info["missing_keys"],
        "are in the file but not in the model": unexpected,
        "have a different size in the file": info["mismatched_keys"],
    }
    if _FUSED in unexpected and info["missing_keys"]:
        raise _head_alone(location.name, f"its weights have {_FUSED}, as those of EAGLE")
    for fault, keys in faults.items():
        names = sorted(key if isinstance(key, str) else str(key[0]) for key in keys)
        if names:
            both = info["missing_keys"] and unexpected
            others = f" (the file has {min(unexpected)})" if both else ""
            advice = "use the config.json that came with them"
            if both and min(unexpected).endswith(names[0]):
                start = min(unexpected).removesuffix(names[0])
                advice = f"a training program put {start!r} in front of the names: remove it"
            raise ModelLoadError(
                f"{location.name}: config.json and weights do not match: {len(names)} weights "
                f"{fault}, for example {names[0]}{others}; {advice}"
            )


def refuse_integers(location: ModelLocation, hf: Any) -> None:
    """Raise a ModelLoadError if a weight is stored in 8 bits or as integers, without scales."""
    directory = location.directory
    if directory is None:
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
                        f"{location.name} stores {key} as {kind}, but its config.json has no "
                        "quantization_config; use the config.json that came with the weights"
                    )


def refuse_not_finite(name: str, hf: Any) -> None:
    """Raise a ModelLoadError that names a weight with NaN or infinite values."""
    # 8-bit floats, which torch does not add up, have scales of more bits
    floats = (each for each in hf.named_parameters() if each[1].is_floating_point())
    named = [(key, weight) for key, weight in floats if weight.dtype.itemsize > 1]
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


def model_fingerprint(*directories: Path) -> str:
    """Hash of all files that weights, settings and tokenizer are read from."""
    return files_fingerprint(
        file
        for directory in directories
        for file in sorted([*directory.iterdir(), *(directory / TEMPLATES).glob("*.jinja")])
        if file.suffix in _READ and not file.name.startswith(".")
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


def has_weights(directory: Path) -> bool:
    """True if all weights of a snapshot of the hub are there, and not only their index."""
    files = weight_files(directory)
    return bool(files) and all(file.exists() for file in files)


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
            if file.suffix == ".safetensors":
                with safe_open(file, "pt") as weights:
                    known = set(weights.keys())
                    tensors = (weights.get_tensor(name) for name in names if name in known)
                    tensor = next(tensors, None)
            else:
                unpickled = _unpickled(file)
                tensor = next((unpickled[name] for name in names if name in unpickled), None)
            if tensor is not None:
                return tensor
    return None


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a tokenizer without a class of its own; transformers 4 does not know 5's name of it."""
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text("utf-8")) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text(json.dumps(settings, indent=2) + "\n", "utf-8")


def _ignored_masks(directory: Path | None, hf: Any) -> list[str]:
    """Masks in the files that transformers reports nowhere, as it does for GPT-J from 5.24 on."""
    patterns = hf._keys_to_ignore_on_load_unexpected or ()
    files = [] if directory is None or not patterns else weight_files(directory)
    known = hf.state_dict().keys()
    keys = {key for file in files for key in shapes_in(file)} - known
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
    found = known.get(owner, known.get(f"{hf.base_model_prefix}.{owner}"))
    if found is None or not list(found.children()):
        return False
    return not list(found.parameters(recurse=False))


def _is_causal_mask(stored: Tensor) -> bool:
    """True if the values are 0 or 1, and no token sees a later one."""
    values = stored.float()
    known = bool(((values == 0) | (values == 1)).all())
    if stored.dim() < 2:
        return known
    diagonal = values.diagonal(dim1=-2, dim2=-1)
    return known and not bool(values.triu(1).any()) and bool((diagonal == 1).all())


def _unpickled(file: Path) -> dict[str, Tensor]:
    """The tensors of a pickled file, of which no code runs; an old file is read into memory."""
    stored = torch.load(file, "cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    return {name: value for name, value in stored.items() if isinstance(value, torch.Tensor)}
