"""Converts a GGUF file to a model directory in the cache, once.

Reading a quantized GGUF file takes many seconds; reading safetensors takes less than one.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import io
import logging
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from filelock import FileLock
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from paceline.errors import ModelLoadError, PacelineError
from paceline.models.hf.architectures import refuse_by_name
from paceline.models.silence import quiet
from paceline.records import cache_root, storage_errors

if TYPE_CHECKING:
    from collections.abc import Iterator

_log = logging.getLogger(__name__)

_FORMAT = 2  # increase when the conversion changes, so that old cache entries are not used
_ENDS = 1 << 20
# llama.cpp's names of pre-tokenizers that isolate digits; transformers has no rule for them
_DIGITS = {
    *("codeshell", "command-r", "exaone", "mellum2", "minerva-7b", "refact", "smollm", "starcoder")
}
# general.file_type of unquantized files; all quantized types are converted to bfloat16
_PLAIN_TYPES = {0: torch.float32, 1: torch.float16}


def converted_gguf(path: Path) -> Path:
    """The model directory of this file; converts the file if it is not in the cache.

    The cache is $PACELINE_CACHE, else ~/.cache/paceline. Entries are created atomically.

    Raises:
        ModelLoadError: Not a valid GGUF file, or the `gguf` package is missing.
        StorageError: The disk is too full for the weights (16 bits each if quantized).
    """
    entry = cache_root() / "gguf" / f"{path.stem}-{_key(path)}"
    if entry.exists():
        return entry
    if importlib.util.find_spec("gguf") is None:
        raise ModelLoadError(f"reading {path} needs the gguf package: pip install -e '.[gguf]'")
    with storage_errors(entry):
        entry.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{entry}.lock"):
            if not entry.exists():
                _log.warning("converting %s; this happens once, the next load takes a second", path)
                _convert_into(entry, path)
    return entry


def _key(path: Path) -> str:
    # size, time of change and both ends: hashing all of a large file takes seconds
    status = path.stat()
    digest = hashlib.sha256(f"{_FORMAT} {status.st_size} {status.st_mtime_ns}".encode())
    with path.open("rb") as stream:
        digest.update(stream.read(_ENDS))
        stream.seek(max(0, status.st_size - _ENDS))
        digest.update(stream.read(_ENDS))
    return digest.hexdigest()[:16]


@contextlib.contextmanager
def _parsed_once() -> Iterator[None]:
    """Cache results that transformers computes several times per file."""
    import gguf  # an optional dependency

    parse, name_map = gguf.GGUFReader, gguf.get_tensor_name_map
    parse_once = functools.cache(parse)
    replaced: Any = gguf
    replaced.GGUFReader = lambda path: parse_once(str(path))
    replaced.get_tensor_name_map = functools.cache(name_map)
    try:
        yield
    finally:
        replaced.GGUFReader, replaced.get_tensor_name_map = parse, name_map


def _check(path: Path) -> torch.dtype:
    """Read the tensor index, which detects most damage; returns the dtype to convert to."""
    import gguf

    try:
        reader = gguf.GGUFReader(path)
        file_type = reader.get_field("general.file_type")
        kind = None if file_type is None else int(file_type.contents())
    except Exception as error:  # the reader raises whatever numpy and struct raise
        raise ModelLoadError(
            f"{path} is not a complete GGUF file ({first_line(error)}); download it again"
        ) from error
    return torch.bfloat16 if kind is None else _PLAIN_TYPES.get(kind, torch.bfloat16)


def _convert_into(entry: Path, path: Path) -> None:
    # the caller holds the entry's lock, so existing scratch directories belong to killed runs
    for stale in entry.parent.glob(f".{entry.name}.*"):
        shutil.rmtree(stale, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(dir=entry.parent, prefix=f".{entry.name}."))
    try:
        convert_gguf(path, scratch)
        scratch.chmod(0o755)
        scratch.replace(entry)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def convert_gguf(path: Path, folder: Path, kind: torch.dtype | None = None) -> None:
    """Write the file's model and tokenizer into an empty folder; raises as `converted_gguf`.

    `kind` is the dtype of the weights; None keeps that of the file, or bfloat16 if it is quantized.
    """
    with _parsed_once():
        found = _check(path)
        _convert(path, folder, kind or found)


def _convert(path: Path, scratch: Path, kind: torch.dtype) -> None:
    import gguf

    source: dict[str, Any] = {"gguf_file": path.name}
    try:
        # hides a progress bar that cannot be disabled
        with contextlib.redirect_stderr(io.StringIO()):
            config = AutoConfig.from_pretrained(path.parent, **source)
            refuse_by_name(config)
            width = gguf.GGUFReader(path).get_field(f"{config.model_type}.attention.key_length")
            if width is not None and getattr(config, "head_dim", None) is not None:
                config.head_dim = int(width.contents())  # transformers may use its default instead
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                path.parent, config=config, dtype=kind, output_loading_info=True, **source
            )
            tokenizer = AutoTokenizer.from_pretrained(path.parent, **source)
    except (PacelineError, OSError):
        raise
    except Exception as error:
        raise ModelLoadError(
            f"transformers cannot read {path} ({first_line(error)}); use the model's safetensors "
            "directory instead"
        ) from error
    hf, info = loaded
    if info["missing_keys"]:
        raise ModelLoadError(
            f"{path} lacks {len(info['missing_keys'])} weights, for example "
            f"{min(info['missing_keys'])}; use the model's safetensors directory instead"
        )
    # the weights are dequantized, but the model still has its quantization settings
    hf.hf_quantizer = None
    hf.is_quantized = False
    if hasattr(hf.config, "quantization_config"):
        del hf.config.quantization_config
    with quiet():
        hf.save_pretrained(scratch)
    _isolate_digits(tokenizer, path)
    tokenizer.save_pretrained(scratch)


def _isolate_digits(tokenizer: Any, path: Path) -> None:
    """Split digits as llama.cpp does: `   5` is three spaces and a digit, for example."""
    import gguf

    name = gguf.GGUFReader(path).get_field("tokenizer.ggml.pre")
    if name is not None and name.contents() in _DIGITS:
        parts = [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
        tokenizer.backend_tokenizer.pre_tokenizer = Sequence(parts)


def first_line(error: Exception) -> str:
    """The first line of an error message, or the type of an error without one."""
    return (str(error).strip() or type(error).__name__).split("\n")[0]
