"""From a hub id, a local directory or a GGUF file to a model that can decode.

Everything that can be wrong with the place is said in one line; weights that are missing or left
over are an error, never a silent random initialisation.
"""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import huggingface_hub
import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoTokenizer

from paceline.errors import ModelLoadError, PacelineError, UnsupportedModelError, UsageError
from paceline.models.gguf import converted_gguf
from paceline.models.hf.architectures import refuse_by_name
from paceline.models.hf.base import named_tokens
from paceline.models.hf.causal import CausalModel, wrap_model
from paceline.models.hf.draft_vocabulary import read_draft_vocabulary
from paceline.models.precision import choose_precision, shapes_of
from paceline.models.silence import quiet
from paceline.records import files_fingerprint

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedTokenizerBase

    from paceline.models.contract import Model

DType = Literal["auto", "float32", "bfloat16", "float16"]

_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_TOKENIZERS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
)
_STORED = frozenset({"float32", "bfloat16", "float16"})
_COMMIT = re.compile(r"[0-9a-f]{40}")
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def load_model(
    path: str | Path, dtype: DType | torch.dtype = "auto", device: str = "auto"
) -> CausalModel:
    """Load a decoder-only model, ready to evaluate.

    Args:
        path: A local directory, a `.gguf` file (converted once, then cached) or a hub id.
        dtype: "auto" is the one that this machine reads such a model's texts fastest in, as
            `precision.choose_precision` measures: float32 or bfloat16. A draft is loaded in the
            dtype of its target.
        device: "auto" is the GPU where there is one, else the CPU.

    Returns:
        The model, with the tokenizer found in the same place (None if there is none).

    Raises:
        ModelLoadError: Nothing there, something that cannot be read, or weights that are not finite.
        UnsupportedModelError: The architecture is unknown, or cannot roll back.
        UsageError: There is no such device here.
    """
    where = find_device(device)
    with quiet():
        place = find_place(path)
        with reading(place):
            refuse_unknown(place)
            config = AutoConfig.from_pretrained(place.source, **place.options)
            refuse_by_name(config)
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                place.source,
                dtype=_dtype(dtype, config, where),
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # refused below, with a clearer line
                **place.options,
            )
            hf, info = loaded
            _refuse_incomplete(place, info)
            _refuse_not_finite(place, hf)
            tokenizer = read_tokenizer(place)
        return wrap_model(hf.to(where).eval(), tokenizer, _draft_vocabulary(place, hf, tokenizer))


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Load only the tokenizer of a model.

    Raises:
        ModelLoadError: There is none, or it cannot be read.
    """
    with quiet():
        place = find_place(path)
        with reading(place):
            tokenizer = read_tokenizer(place)
    if tokenizer is None:
        raise ModelLoadError(
            f"{path} has no tokenizer files; copy tokenizer.json and tokenizer_config.json from the "
            "model it was made from"
        )
    return tokenizer


def tokenizer_of(model: Model, path: str | Path) -> Any:
    """Its tokenizer; `path` says which model it is.

    Raises:
        UsageError: It has none.
    """
    if model.tokenizer is None:
        raise UsageError(f"{path} has no tokenizer; put its tokenizer files beside it")
    return model.tokenizer


def model_directory(path: str | Path) -> Path:
    """The local directory behind a path, a GGUF file or a hub id (its downloaded files).

    Raises:
        ModelLoadError: Nothing there.
    """
    with quiet():
        return _directory_of(find_place(path))


def fingerprint(path: str | Path) -> str:
    """Tells one model from another: by its commit on the hub, else by its files."""
    directory = model_directory(path)
    if directory.parent.name == "snapshots" and _COMMIT.fullmatch(directory.name):
        return directory.name[:16]  # the files of the hub come one by one
    return files_fingerprint(
        file
        for file in sorted(directory.iterdir())
        if file.suffix in (".json", ".safetensors", ".bin") and not file.name.startswith(".")
    )


def fingerprint_if_there(path: str | Path) -> str:
    """The same; empty where no model is."""
    try:
        return fingerprint(path)
    except ModelLoadError:
        return ""


def shapes_at(path: str | Path) -> list[tuple[int, int]]:
    """`shapes_of` the model at this place.

    Raises:
        ModelLoadError: Nothing there, or a config.json that cannot be read.
    """
    with quiet():
        place = find_place(path)
        with reading(place):
            return shapes_of(AutoConfig.from_pretrained(place.source, **place.options))


def stored_dtype(path: str | Path) -> torch.dtype | None:
    """What the weights of a model are stored in; None where its config does not say."""
    settings = json.loads((model_directory(path) / "config.json").read_text("utf-8"))
    name = settings.get("dtype") or settings.get("torch_dtype")
    return getattr(torch, name) if name in _STORED else None


@dataclass(frozen=True)
class Place:
    """Where a model lies: as the user named it, and as transformers finds it."""

    named: str
    source: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def directory(self) -> Path | None:
        return Path(self.source) if Path(self.source).is_dir() else None


def _directory_of(place: Place) -> Path:
    """Where its files are; those of the hub but for the weights, downloaded."""
    if place.directory:
        return place.directory
    patterns = ["*.json", "*.txt", "*.model", "*.jinja", "README.md", "LICENSE*", "NOTICE*"]
    return Path(huggingface_hub.snapshot_download(place.source, allow_patterns=patterns))


def find_place(path: str | Path) -> Place:
    """A directory that holds a model, converted from GGUF if need be, or a reachable hub id."""
    local = Path(path).expanduser()
    if local.is_file() and local.suffix == ".gguf":
        directory = converted_gguf(local)
        return Place(str(path), str(directory), {"local_files_only": True})
    if local.is_file():
        raise ModelLoadError(
            f"{path} is a file; name the directory that holds config.json and the weights, or a "
            ".gguf file"
        )
    if not local.exists():
        return _find_on_hub(path)
    if not (local / "config.json").exists():
        hint = "name the directory that holds config.json and the weights"
        if (local / "adapter_config.json").exists():
            hint = "it holds an adapter: merge it into its base model first"
        elif found := sorted(local.glob("*.gguf")):
            hint = f"it holds a GGUF file: name {found[0]}"
        raise ModelLoadError(f"{path} has no config.json; {hint}")
    if not any(
        (local / name).exists() or (local / f"{name}.index.json").exists() for name in _WEIGHTS
    ):
        raise ModelLoadError(
            f"{path} has a config.json but no weights; expected model.safetensors (or its index) "
            "beside it"
        )
    return Place(str(path), str(local), {"local_files_only": True})


def _find_on_hub(path: str | Path) -> Place:
    """Ask once and briefly whether the id exists: transformers would retry for half a minute."""
    name = str(path)
    if not _HUB_ID.fullmatch(name):
        raise ModelLoadError(
            f"{path} does not exist; name a model directory, a .gguf file or a hub id like "
            "organisation/model"
        )
    try:
        huggingface_hub.model_info(name, timeout=5)
    except Exception as error:  # offline, refused or unknown: a stored copy will do
        if isinstance(huggingface_hub.try_to_load_from_cache(name, "config.json"), str):
            return Place(name, name, {"local_files_only": True})
        raise ModelLoadError(
            f"{name} is no local path, and no hub id that can be reached ({_first_line(error)}); "
            "check the spelling or the network"
        ) from error
    return Place(name, name)


@contextlib.contextmanager
def reading(place: Place) -> Iterator[None]:
    """Whatever the libraries below raise about a damaged model, as one line."""
    try:
        yield
    except (PacelineError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise ModelLoadError(
            f"{place.named} cannot be read ({_first_line(error)}); it may be damaged or incomplete: "
            "copy or download it again"
        ) from error


def refuse_unknown(place: Place) -> None:
    """Is this a configuration of a model that transformers knows?"""
    if place.directory is None:
        return
    path = place.directory / "config.json"
    settings = json.loads(path.read_text("utf-8"))
    name = settings.get("model_type") if isinstance(settings, dict) else None
    if name is None:
        raise ModelLoadError(
            f"{path} names no model_type, so it is not the configuration of a transformers model; use "
            "the config.json that came with the weights"
        )
    if name not in CONFIG_MAPPING and "auto_map" not in settings:
        raise UnsupportedModelError(
            f"{place.named} has the architecture {name!r}, which transformers "
            f"{transformers.__version__} does not know; install a version that does, or correct "
            f"model_type in {path}"
        )


def _refuse_incomplete(place: Place, info: dict[str, Any]) -> None:
    faults = {
        "missing_keys": "are missing from the file",
        "unexpected_keys": "are in the file without a place in the model",
        "mismatched_keys": "have another size in the file",
    }
    for kind, what in faults.items():
        names = sorted(key if isinstance(key, str) else str(key[0]) for key in info[kind])
        if names:
            raise ModelLoadError(
                f"{place.named}: config.json and weights do not belong together: {len(names)} weights "
                f"{what}, for example {names[0]}; use the config.json that came with them"
            )


def _refuse_not_finite(place: Place, hf: Any) -> None:
    """Any weight that is not a number, or infinite, makes every logit so.

    Cost: a sum over all weights, a few percent of what reading them takes.
    """
    named = [(name, weight) for name, weight in hf.named_parameters() if weight.is_floating_point()]
    # A sum is finite only if all its terms are; where it overflows, every weight is looked at.
    doubtful = [(name, weight) for name, weight in named if not weight.detach().sum().isfinite()]
    faults = [(name, weight) for name, weight in doubtful if not weight.isfinite().all()]
    if faults:
        name, weight = faults[0]
        what = "NaN" if weight.isnan().any() else "infinite values"
        count = int((~weight.isfinite()).sum())
        more = f", and in {len(faults) - 1} other weights" if len(faults) > 1 else ""
        raise ModelLoadError(
            f"{place.named} holds {what} in {name} ({count:,} of {weight.numel():,} values{more}); "
            "copy it again, or go back to an earlier checkpoint"
        )


def read_tokenizer(place: Place) -> PreTrainedTokenizerBase | None:
    """The tokenizer beside the weights; None if there are no files of one."""
    if place.directory and not any((place.directory / name).exists() for name in _TOKENIZERS):
        return None
    return AutoTokenizer.from_pretrained(place.source, **place.options)


def _draft_vocabulary(place: Place, hf: Any, tokenizer: Any) -> torch.Tensor | None:
    head = hf.get_output_embeddings()
    if head is None:
        return None
    return read_draft_vocabulary(
        _directory_of(place), named_tokens(tokenizer, head.weight.shape[0])
    )


def find_device(device: str) -> torch.device:
    """The device of that name; "auto" is the GPU where there is one, else the CPU.

    Raises:
        UsageError: There is no such device, or it does not work.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    gpus = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    here = ", ".join(["auto", "cpu", *gpus])
    try:
        found = torch.device(device)
    except RuntimeError:
        raise UsageError(f"there is no device called {device!r}; wanted one of {here}") from None
    try:
        torch.zeros(1, device=found).item()
    except (AssertionError, RuntimeError) as error:
        raise UsageError(
            f"device {device!r} cannot be used ({_first_line(error)}); wanted one of {here}"
        ) from None
    return found


def _dtype(dtype: DType | torch.dtype, config: Any, device: torch.device) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        dtype = choose_precision("reading", shapes_of(config), device).precision
    return getattr(torch, dtype)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).split("\n")[0]
