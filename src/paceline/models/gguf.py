"""A GGUF file becomes an ordinary model directory in the cache, once.

Reading a quantised GGUF takes many seconds every time; safetensors take less than one.
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
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from paceline.errors import ModelLoadError, PacelineError
from paceline.models.hf.architectures import refuse_by_name
from paceline.models.silence import quiet
from paceline.records import cache_root, storage_errors

if TYPE_CHECKING:
    from collections.abc import Iterator

_log = logging.getLogger(__name__)

_FORMAT = 1  # raise it when the conversion changes: old entries are then left alone
_ENDS = 1 << 20
# general.file_type of files that hold plain numbers; every quantised kind becomes bfloat16
_PLAIN_TYPES = {0: torch.float32, 1: torch.float16}


def converted_gguf(path: Path) -> Path:
    """The model directory made from this file; made now if it is not in the cache.

    The cache is $PACELINE_CACHE, else ~/.cache/paceline. An entry appears whole or not at all.

    Raises:
        ModelLoadError: Not a GGUF file, a damaged one, or the `gguf` package is missing.
        StorageError: No room for the converted weights (as large as the model in 16 bits).
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
    """Size, time of change and both ends: reading all of a large file would cost seconds."""
    status = path.stat()
    digest = hashlib.sha256(f"{_FORMAT} {status.st_size} {status.st_mtime_ns}".encode())
    with path.open("rb") as stream:
        digest.update(stream.read(_ENDS))
        stream.seek(max(0, status.st_size - _ENDS))
        digest.update(stream.read(_ENDS))
    return digest.hexdigest()[:16]


@contextlib.contextmanager
def _parsed_once() -> Iterator[None]:
    """Share what transformers computes anew for config, weights, tokenizer and every module."""
    import gguf  # an extra: only those who load GGUF files install it

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
    """Read the file's directory of tensors, which finds most damage; the dtype to convert to."""
    import gguf

    try:
        reader = gguf.GGUFReader(path)
        file_type = reader.get_field("general.file_type")
        kind = None if file_type is None else int(file_type.contents())
    except Exception as error:  # the reader raises whatever numpy and struct raise
        raise ModelLoadError(
            f"{path} is not a whole GGUF file ({_first_line(error)}); download it again"
        ) from error
    return torch.bfloat16 if kind is None else _PLAIN_TYPES.get(kind, torch.bfloat16)


def _convert_into(entry: Path, path: Path) -> None:
    """Called with the entry's lock held, so scratch directories found here are of killed runs."""
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
    """Write the file's model and tokenizer into an empty folder.

    `kind`: what its weights become; None: what the file holds, of quantised ones bfloat16.

    Raises:
        ModelLoadError: Not a GGUF file, a damaged one, or a model that transformers does not know.
    """
    with _parsed_once():
        found = _check(path)
        _convert(path, folder, kind or found)


def _convert(path: Path, scratch: Path, kind: torch.dtype) -> None:
    source: dict[str, Any] = {"gguf_file": path.name}
    try:
        # its bar covers a tenth of the time and cannot be switched off
        with contextlib.redirect_stderr(io.StringIO()):
            config = AutoConfig.from_pretrained(path.parent, **source)
            refuse_by_name(config)
            _set_head_width(config, path)
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                path.parent, config=config, dtype=kind, output_loading_info=True, **source
            )
            tokenizer = AutoTokenizer.from_pretrained(path.parent, **source)
    except (PacelineError, OSError):
        raise
    except Exception as error:
        raise ModelLoadError(
            f"transformers cannot read {path} ({_first_line(error)}); use the model's safetensors "
            "directory instead"
        ) from error
    hf, info = loaded
    if info["missing_keys"]:
        raise ModelLoadError(
            f"{path} lacks {len(info['missing_keys'])} weights, for example "
            f"{min(info['missing_keys'])}; use the model's safetensors directory instead"
        )
    # the weights are plain numbers now, but the model still remembers that they were quantised
    hf.hf_quantizer = None
    hf.is_quantized = False
    if hasattr(hf.config, "quantization_config"):
        del hf.config.quantization_config
    with quiet():
        hf.save_pretrained(scratch)
    tokenizer.save_pretrained(scratch)


def _set_head_width(config: Any, path: Path) -> None:
    """The width of a head as the file says it; for some families transformers takes its default."""
    import gguf

    width = gguf.GGUFReader(path).get_field(f"{config.model_type}.attention.key_length")
    if width is not None and getattr(config, "head_dim", None) is not None:
        config.head_dim = int(width.contents())


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).split("\n")[0]
