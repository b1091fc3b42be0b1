"""Converts a GGUF file to a model directory in the cache, once.

Reading a quantized GGUF file takes many seconds; reading safetensors takes less than one.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from paceline.cache import cached_directory, is_cached
from paceline.errors import ModelLoadError, PacelineError, first_line
from paceline.models.checkpoint_files import within
from paceline.models.gguf.architectures import check_frequencies, read_config
from paceline.models.gguf.fields import GgufFile, checked_reader
from paceline.models.gguf.tensors import read_tensors, stored_names
from paceline.models.gguf.vocabulary import read_vocabulary
from paceline.models.hf.architectures import refuse_by_name
from paceline.models.silence import quiet

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_log = logging.getLogger(__name__)

_FORMAT = 4  # increase when the conversion changes, so that old cache entries are not used
_ENDS = 1 << 20
# general.file_type of unquantized files; all quantized types are converted to bfloat16
_PLAIN_TYPES = {0: torch.float32, 1: torch.float16}
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
    "xtc_probability": "xtc_probability",
    "mirostat": "mirostat",
}


def is_gguf(path: str | Path) -> bool:
    """True for an existing file of the type .gguf."""
    local = Path(path).expanduser()
    return local.is_file() and local.suffix == ".gguf"


def converted_gguf(path: Path) -> Path:
    """The model directory of this file; converts the file if it is not in the cache.

    Raises:
        ModelLoadError: Not a valid GGUF file, or the `gguf` package is missing.
        StorageError: The disk is too full for the weights (16 bits each if quantized).
    """

    def fill(folder: Path) -> None:
        _log.warning("converting %s; this happens once, the next load takes a second", path)
        convert_gguf(path, folder)

    return cached_directory("gguf", _entry(path), fill)


def is_converted(path: Path) -> bool:
    """Whether the conversion of this file is in the cache."""
    return is_cached("gguf", _entry(path))


def _entry(path: Path) -> str:
    return f"{path.stem}-{_key(path)}"


def _key(path: Path) -> str:
    # size, time of change and both ends: hashing all of a large file takes seconds
    status = path.stat()
    digest = hashlib.sha256(f"{_FORMAT} {status.st_size} {status.st_mtime_ns}".encode())
    with path.open("rb") as stream:
        digest.update(stream.read(_ENDS))
        stream.seek(max(0, status.st_size - _ENDS))
        digest.update(stream.read(_ENDS))
    return digest.hexdigest()[:16]


def open_gguf(path: Path) -> GgufFile:
    """Read the keys and the index of tensors, which detects most damage.

    Raises:
        ModelLoadError: Not a valid GGUF file, or the `gguf` package is missing.
    """
    if importlib.util.find_spec("gguf") is None:
        raise ModelLoadError(f"reading {path} needs the gguf package: pip install -e '.[gguf]'")
    try:
        return GgufFile(path, checked_reader(path))
    except PacelineError:
        raise
    except Exception as error:  # the reader raises whatever numpy and struct raise
        raise ModelLoadError(
            f"{path} is not a complete GGUF file ({first_line(error)}); download it again"
        ) from error


def convert_gguf(path: Path, folder: Path, kind: torch.dtype | None = None) -> None:
    """Write the file's model and tokenizer into an empty folder; raises as `converted_gguf`.

    `kind` is the dtype of the weights; None keeps that of the file, or bfloat16 if it is quantized.
    """
    file = open_gguf(path)
    with _conversion_errors(path):
        kind = kind or _dtype_of(file)
        hf, tokenizer = _without_weights(file, kind)
        hf.load_state_dict(read_tensors(file, hf, kind), strict=False, assign=True)
        hf.tie_weights()
        with quiet():
            hf.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def read_gguf_header(path: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model of a file without its weights, on the meta device, and its tokenizer.

    Raises:
        ModelLoadError: Not a valid GGUF file, or one that would not be converted.
    """
    file = open_gguf(path)
    with _conversion_errors(path):
        hf, tokenizer = _without_weights(file, _dtype_of(file))
        stored_names(file, hf)
    return hf, tokenizer


@contextlib.contextmanager
def _conversion_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (PacelineError, OSError):
        raise
    except Exception as error:
        raise ModelLoadError(
            f"{path} cannot be converted ({first_line(error)}); use the model's safetensors "
            "directory instead"
        ) from error


def _dtype_of(file: GgufFile) -> torch.dtype:
    kind = file.get("general.file_type")
    return torch.bfloat16 if kind is None else _PLAIN_TYPES.get(int(kind), torch.bfloat16)


def _without_weights(
    file: GgufFile, kind: torch.dtype
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    config = read_config(file)
    refuse_by_name(config)
    tokenizer, roles = read_vocabulary(file)
    suppressed = file.get("tokenizer.ggml.suppress_tokens")
    file.refuse_unread()
    config.dtype = kind
    config.bos_token_id, config.eos_token_id = roles.bos, roles.eos
    config.pad_token_id = roles.pad
    with within(str(file.path), file.size), torch.device("meta"):
        hf: Any = AutoModelForCausalLM.from_config(config, dtype=kind, trust_remote_code=False)
    check_frequencies(file, hf)
    hf.generation_config = GenerationConfig(
        bos_token_id=roles.bos,
        eos_token_id=list(roles.ends) or None,
        pad_token_id=roles.pad,
        suppress_tokens=suppressed or None,
        **_sampling(file),
    )
    return hf, tokenizer


def _sampling(file: GgufFile) -> dict[str, Any]:
    """What llama.cpp samples with if a request names nothing, as settings of transformers."""
    found = {ours: file.get(f"general.sampling.{name}") for name, ours in _SAMPLING.items()}
    given = {name: value for name, value in found.items() if value is not None}
    if given.get("temperature") == 0:
        return {name: given[name] for name in given if name == "repetition_penalty"}
    return given | ({"do_sample": True} if given else {})
