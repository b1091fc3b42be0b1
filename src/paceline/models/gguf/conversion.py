"""Converts a GGUF file to a model directory in the cache, once.

Reading a quantized GGUF file takes many seconds; reading safetensors takes less than one.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig

from paceline.cache import cached_directory
from paceline.environment import how_to_install
from paceline.errors import ModelLoadError, PacelineError, first_line, is_out_of_memory
from paceline.fingerprints import files_fingerprint, short_hash
from paceline.models.checkpoint_files import save_tokenizer
from paceline.models.gguf.architectures import PAIRS, ROPE_FACTORS, read_config
from paceline.models.gguf.fields import GgufFile
from paceline.models.gguf.vocabulary import read_vocabulary

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_log = logging.getLogger(__name__)

_FORMAT = 8  # increase when the conversion changes, so that old cache entries are not used
# general.file_type of unquantized files, and the type of a tensor; all others become bfloat16
_PLAIN_TYPES = {0: torch.float32, 1: torch.float16}
_GATE_UP = "gate_up_proj"  # of all experts in transformers; two tensors in a GGUF file


def is_gguf(path: str | Path) -> bool:
    """True for an existing file of the type .gguf."""
    local = Path(path).expanduser()
    return local.is_file() and local.suffix == ".gguf"


def converted_gguf(path: Path) -> Path:
    """The model directory of this file; converts the file if it is not in the cache."""

    def fill(folder: Path) -> None:
        _log.warning("converting %s; this happens once, the next load takes a second", path)
        convert_gguf(path, folder)

    return cached_directory("gguf", _entry(path), fill)


def _entry(path: Path) -> str:
    # size, time of change and both ends: hashing all of a large file takes seconds
    facts = f"{_FORMAT} {path.stat().st_mtime_ns} {files_fingerprint([path])}"
    return f"{path.stem}-{short_hash([facts])}"


def open_gguf(path: Path) -> GgufFile:
    """Read the keys and the index of tensors, which detects most damage."""
    if importlib.util.find_spec("gguf") is None:
        raise ModelLoadError(f"reading {path} needs the gguf package: {how_to_install('gguf')}")
    import gguf

    with _errors(path):
        return GgufFile(path, gguf.GGUFReader(path))


def convert_gguf(path: Path, folder: Path, kind: torch.dtype | None = None) -> None:
    """Write the file's model and tokenizer into an empty folder; raises as `converted_gguf`.

    `kind` is the dtype of the weights; None keeps that of the file, or bfloat16 if it is quantized.
    """
    file = open_gguf(path)
    with _errors(path):
        kind = kind or _dtype_of(file)
        hf, tokenizer = _without_weights(file, kind)
        hf.load_state_dict(_read_tensors(file, hf, kind), strict=False, assign=True)
        hf.tie_weights()
        hf.save_pretrained(folder)
        save_tokenizer(tokenizer, folder)


def read_gguf_header(path: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model of a file without its weights, on the meta device, and its tokenizer."""
    file = open_gguf(path)
    with _errors(path):
        hf, tokenizer = _without_weights(file, _dtype_of(file))
        _stored_names(file, hf)
    return hf, tokenizer


@contextlib.contextmanager
def _errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (PacelineError, OSError):
        raise
    except Exception as error:  # the reader raises whatever numpy and struct raise
        if is_out_of_memory(error):
            raise
        raise ModelLoadError(
            f"{path} cannot be read as a GGUF file ({first_line(error)}); download it again, or "
            "use the model's safetensors directory"
        ) from error


def _dtype_of(file: GgufFile) -> torch.dtype:
    kind = file.get("general.file_type")
    if kind is None:  # writers may leave it out
        kinds = (each.tensor_type for each in file.tensors.values() if len(each.shape) > 1)
        kind = max(kinds, default=0)
    return _PLAIN_TYPES.get(int(kind), torch.bfloat16)


def _without_weights(
    file: GgufFile, kind: torch.dtype
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    config = read_config(file)
    tokenizer, roles = read_vocabulary(file)
    file.refuse_unread()
    config.dtype = kind
    config.bos_token_id, config.eos_token_id = roles.bos, roles.eos
    config.pad_token_id = roles.pad
    with torch.device("meta"):
        hf: Any = AutoModelForCausalLM.from_config(config, dtype=kind, trust_remote_code=False)
    hf.generation_config = GenerationConfig(
        bos_token_id=roles.bos,
        eos_token_id=list(roles.ends) or None,
        pad_token_id=roles.pad,
    )
    return hf, tokenizer


def tensor_names(hf: PreTrainedModel, arch: str) -> dict[str, tuple[str, ...]]:
    """llama.cpp's names of each weight; none for a weight without a name."""
    import gguf  # an optional dependency

    archs = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(archs[arch], hf.config.num_hidden_layers)
    ends = (".weight", ".bias")
    found: dict[str, tuple[str, ...]] = {}
    for name in hf.state_dict():
        label = names.get_name(name, ends)
        if label is None and name.endswith(f"experts.{_GATE_UP}"):
            block = name.split(".")[2]
            found[name] = tuple(f"blk.{block}.ffn_{part}_exps.weight" for part in ("gate", "up"))
        elif label is None and name == "lm_head.weight":
            found[name] = ("output.weight",)
        else:
            bare = label is not None and not label.endswith(ends)
            found[name] = () if label is None else (f"{label}.weight" if bare else label,)
    return found


def _stored_names(file: GgufFile, hf: PreTrainedModel) -> dict[str, tuple[str, ...]]:
    """The file's tensors of each weight of this model; none for a bias that the file lacks."""
    names = tensor_names(hf, file.arch)
    if hf.config.tie_word_embeddings:
        names.pop("lm_head.weight", None)
    for name, labels in names.items():
        missing = [label for label in labels if label not in file.tensors]
        if missing or not labels:
            if not name.endswith(".bias"):
                raise file.error(f"lacks the tensor {(missing or [name])[0]}")
            names[name] = ()
    used = {ROPE_FACTORS}.union(*names.values())
    if left := sorted(file.tensors.keys() - used):
        raise file.error(
            f"has {len(left)} tensors that {hf.config.model_type} of transformers has no place "
            f"for, for example {left[0]}"
        )
    return names


def _read_tensors(file: GgufFile, hf: PreTrainedModel, kind: torch.dtype) -> dict[str, Tensor]:
    """All weights of the file as the state of this model; raises as `stored_names`."""
    shapes = hf.state_dict()
    found: dict[str, Tensor] = {}
    for name, labels in _stored_names(file, hf).items():
        if labels:
            weight = _read(file, labels, name, hf.config, shapes[name])
            found[name] = weight.to(kind).contiguous()
        else:
            found[name] = torch.zeros(shapes[name].shape, dtype=kind)
    return found


def _read(file: GgufFile, labels: tuple[str, ...], name: str, config: Any, meta: Tensor) -> Tensor:
    import gguf

    stored = [file.tensors[label] for label in labels]
    arrays = [gguf.quants.dequantize(each.data, each.tensor_type).copy() for each in stored]
    parts = [torch.from_numpy(array) for array in arrays]
    weight = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    # undo what llama.cpp's converter does
    if file.arch in PAIRS:
        weight = rotated_by_pairs(name, weight, config, parts=(-1, 2))
    elif file.arch.startswith("gemma") and name.endswith("norm.weight"):
        weight = weight - 1
    if weight.shape != meta.shape:
        raise file.error(
            f"has {labels[0]} of size {list(weight.shape)}, which should be {list(meta.shape)}"
        )
    return weight


def rotated_by_pairs(
    name: str, weight: Tensor, config: Any, parts: tuple[int, int] = (2, -1)
) -> Tensor:
    """Reorder rows of q and k: llama.cpp rotates neighbours, transformers the two halves.

    `parts`: (-1, 2) for the inverse.
    """
    part = name.split(".")[-2]
    sizes = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    if part not in sizes:
        return weight
    rows = weight.reshape(sizes[part], *parts, *weight.shape[1:])
    return rows.transpose(1, 2).reshape(weight.shape)
