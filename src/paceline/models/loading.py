"""Loads models and tokenizers from a hub id, a directory or a GGUF file; wraps loaded ones.

Every problem is a one-line error. Missing or unexpected weights are an error, never a silent random
initialization.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import re
import warnings
from importlib import import_module
from importlib.util import find_spec
from multiprocessing import parent_process
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import huggingface_hub
import torch
from torch import nn

from paceline.cache import cached_directory
from paceline.config import read_json_mapping
from paceline.environment import how_to_install
from paceline.errors import (
    ModelLoadError,
    PacelineError,
    UnsupportedModelError,
    UsageError,
    first_line,
    is_out_of_memory,
    shorten,
)
from paceline.models.admission.model import admit
from paceline.models.admission.tokenizer import admit_tokenizer, has_vocabulary, tokenizer_paths
from paceline.models.checkpoint_files import (
    ModelLocation,
    model_fingerprint,
    needs_code,
    read_config,
    refuse_incomplete,
    refuse_not_finite,
    weight_files,
    with_weights,
    without_weights,
)
from paceline.models.gguf.conversion import converted_gguf, is_gguf
from paceline.models.hf.architectures import (
    configured_prompt,
    is_encoder_decoder,
    is_quantized,
    is_tied,
    untie_head,
)
from paceline.models.hf.causal import CausalModel
from paceline.models.hf.draft_vocabulary import (
    DRAFT_VOCABULARY,
    is_draft_vocabulary,
    read_draft_vocabulary,
)
from paceline.models.hf.seq2seq import Seq2SeqModel
from paceline.models.hf.settings import warn_of_unused
from paceline.models.hf.spreading import SHARE, join_ends, num_bytes
from paceline.models.precision import choose_precision
from paceline.places import copy_files, neighbour

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from paceline.models.contract import Model
    from paceline.models.hf.base import HfModel

DType = Literal["auto", "float32", "bfloat16", "float16"]

_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model")
_TOKENIZERS += ("vocab.json", "vocab.txt")
LICENCES = ("LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*")
"""Files that go with a model."""
_STORED = frozenset({"float32", "bfloat16", "float16"})
_LONGEST_REASON = 300
_FORMAT = 5  # increase when merged models change, so that old cache entries are not used
_ADAPTER = "adapter_config.json"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def load_model(
    path: str | Path, dtype: DType | torch.dtype = "auto", device: str = "auto"
) -> HfModel:
    """Load a decoder-only model or an encoder-decoder in evaluation mode.

    Args:
        path: A local directory, a `.gguf` file (converted once, then cached) or a hub id.
        dtype: "auto" is float32 or bfloat16, whichever is faster on this machine for a model of
            `precision.choose_precision`.
        device: "auto" is the GPU if there is one, else the CPU. A model that the first GPU cannot
            hold is spread over all of them.

    Returns:
        The model, with the tokenizer of the same path (None if there is none).

    Raises:
        ModelLoadError: The model does not exist or is damaged, or its weights are not finite.
        UnsupportedModelError: The architecture is unknown, or its sessions do not give the logits
            of transformers.
        UsageError: The device does not exist.
    """
    found_device = find_device(device)
    with open_model(path) as location:
        config = read_config(location)
        kind = choose_dtype(dtype, found_device)
        spread = _spread(config, kind) if device == "auto" else None
        hf, info = with_weights(location, config, kind, spread or found_device)
        join_ends(hf)
        refuse_incomplete(location, info)
        refuse_not_finite(location.name, hf)
        tokenizer = read_tokenizer(location)
    # hooks move what a spread model reads: it stays where it is
    model = unchecked((hf if spread else hf.to(found_device)).eval(), tokenizer)
    draft_vocabulary = read_draft_vocabulary(_directory_of(location), model.vocab_size)
    warn_of_unused(hf, stacklevel=2)
    try:
        return admitted(model, draft_vocabulary, files_of(model, location.source))
    except ImportError as error:  # of products in 8 bits, at their first use
        raise _unreadable(path, error) from error


def wrap_model(
    hf_model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    draft_vocabulary: Tensor | None = None,
    decoder_prompt: Sequence[int] | None = None,
) -> HfModel:
    """Wrap a transformers model, decoder-only or encoder-decoder, as a Paceline model.

    Args:
        hf_model: The model. If it is spread over several GPUs (device_map="auto"), its head is
            moved to its embeddings.
        tokenizer: Its tokenizer, if texts are tokenised.
        draft_vocabulary: The only tokens it may propose, most likely first, [K]; None for all.
        decoder_prompt: Encoder-decoders only: the tokens that every decoder text begins with. None:
            `decoder_start_token_id` and, if it is set, `forced_bos_token_id`.

    Raises:
        UnsupportedModelError: Its sessions do not give the logits of transformers.
        UsageError: `decoder_prompt` is given for a decoder-only model, or it is missing; or
            `draft_vocabulary` is no list of distinct tokens.
    """
    model = unchecked(hf_model, tokenizer, decoder_prompt)
    if draft_vocabulary is not None and not is_draft_vocabulary(draft_vocabulary, model.vocab_size):
        got = shorten(" ".join(repr(draft_vocabulary).split()))
        raise UsageError(
            f"got draft_vocabulary {got}; wanted a tensor of distinct token ids (int64) below "
            f"{model.vocab_size}"
        )
    warn_of_unused(hf_model, stacklevel=2)
    return admitted(model, draft_vocabulary)


def admitted(
    model: HfModel, draft_vocabulary: Tensor | None = None, files: str | None = None
) -> HfModel:
    """A model whose sessions have been compared with transformers; see `admission.model.admit`."""
    admit(model, files)  # before the restriction: it compares the logits of all tokens
    if draft_vocabulary is not None:
        model = model.rewrap(model.hf, draft_vocabulary.to(model.device))
    model.files = files
    return model


def unchecked(
    hf: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    decoder_prompt: Sequence[int] | None = None,
) -> HfModel:
    """`wrap_model` without comparing anything."""
    if not isinstance(hf.get_output_embeddings(), nn.Module):
        raise UnsupportedModelError(
            f"{type(hf).__name__} has no output head; load it with AutoModelForCausalLM, or "
            "AutoModelForSeq2SeqLM if it is an encoder-decoder"
        )
    join_ends(hf)
    if not is_encoder_decoder(hf.config):
        if decoder_prompt is not None:
            raise UsageError(
                f"got decoder_prompt {list(decoder_prompt)}, but {hf.config.model_type} is "
                "decoder-only; begin the prompts themselves with these tokens"
            )
        return CausalModel(hf, tokenizer)
    if decoder_prompt is None:
        decoder_prompt = configured_prompt(hf.config, hf.generation_config)
    head: Any = hf.get_output_embeddings()  # Marian may read other tokens than it writes
    count = head.weight.shape[0]
    if not decoder_prompt or not 0 <= min(decoder_prompt) <= max(decoder_prompt) < count:
        raise UsageError(
            f"got decoder_prompt {list(decoder_prompt)}; wanted at least one token id below {count}"
        )
    return Seq2SeqModel(hf, tokenizer, decoder_prompt=tuple(decoder_prompt))


def load_head(
    path: str | Path, dtype: DType | torch.dtype = "auto", device: str = "auto"
) -> HfModel:
    """Load a decoder-only model without its layers: embeddings, head and tokenizer alone.

    For hidden states that the whole model has computed before. The layers are not read. Arguments
    and errors are those of `load_model`.
    """
    found_device = find_device(device)
    with open_model(path) as location:
        config = read_config(location)
        if is_encoder_decoder(config):
            raise UnsupportedModelError(
                f"{location.name} is an encoder-decoder, whose head cannot be loaded alone"
            )
        vars(config).pop("quantization_config", None)  # the head is not, and else is refused
        shape = config.get_text_config()
        shape.num_hidden_layers = 0
        if getattr(shape, "layer_types", None):
            shape.layer_types = []
        kind = choose_dtype(dtype, found_device)
        hf, info = with_weights(location, config, kind)
        info["unexpected_keys"] = ()
        refuse_incomplete(location, info)
        refuse_not_finite(location.name, hf)
        return unchecked(hf.to(found_device).eval(), read_tokenizer(location))


def load_tokenizer(path: str | Path, *, alone: bool = False) -> PreTrainedTokenizerBase:
    """Load only the tokenizer of a model; `alone`: a local directory needs no model beside it.

    Raises:
        ModelLoadError: The model has no tokenizer, or it cannot be read.
    """
    with open_model(path, tokenizer_alone=alone) as location:
        tokenizer = read_tokenizer(location)
    if tokenizer is None:
        raise ModelLoadError(
            f"{path} has no tokenizer files; copy tokenizer.json and tokenizer_config.json from "
            "the model it is derived from"
        )
    return tokenizer


def _has_tokenizer(directory: Path) -> bool:
    return any((directory / name).exists() for name in _TOKENIZERS)


def tokenizer_of(model: Model, path: str | Path) -> Any:
    """The model's tokenizer; raises a UsageError about `path` if there is none."""
    if model.tokenizer is None:
        raise UsageError(
            f"{path} has no tokenizer; put its tokenizer files into the same directory"
        )
    return model.tokenizer


def model_directory(path: str | Path) -> Path:
    """The local directory of a path, a converted GGUF file or a downloaded hub id."""
    with open_model(path) as location:
        return _directory_of(location)


def fingerprint(path: str | Path) -> str:
    """Identifies a model by its commit on the hub, else by its files."""
    directory = model_directory(path)
    if directory.parent.name == "snapshots" and _COMMIT.fullmatch(directory.name):
        return directory.name[:16]  # a snapshot may be downloaded only in part
    return model_fingerprint(directory)


def files_of(model: HfModel, path: str | Path) -> str:
    """Identifies the files that a model was loaded from; see `fingerprint`."""
    commit: str | None = getattr(model.hf.config, "_commit_hash", None)
    return commit[:16] if commit else fingerprint(path)


def fingerprint_if_there(path: str | Path) -> str:
    """The fingerprint, or an empty string if there is no model."""
    try:
        return fingerprint(path)
    except ModelLoadError:
        return ""


def config_at(path: str | Path) -> Any:
    """The configuration of the model at this path; its weights are not read."""
    with open_model(path) as location:
        return read_config(location)


def stored_dtype(path: str | Path) -> torch.dtype | None:
    """The dtype that config.json declares for the weights, or None."""
    settings = read_json_mapping(model_directory(path) / "config.json")
    name = str(settings.get("dtype") or settings.get("torch_dtype"))
    return getattr(torch, name) if name in _STORED else None


def _directory_of(location: ModelLocation) -> Path:
    """The model's local directory; files of the hub are downloaded, without the weights."""
    if location.directory:
        return location.directory
    patterns = ["*.json", "*.txt", "*.model", "*.spm", "*.jinja", "README.md", *LICENCES]
    return Path(huggingface_hub.snapshot_download(location.source, allow_patterns=patterns))


@contextlib.contextmanager
def open_model(path: str | Path, *, tokenizer_alone: bool = False) -> Iterator[ModelLocation]:
    """Locate a model, and turn any error of the libraries that read it into a `ModelLoadError`."""
    if not isinstance(path, str | Path) or not str(path):
        raise ModelLoadError(
            f"got {path!r} as a model; name a model directory, a .gguf file or a hub id like "
            "organisation/model"
        )
    directory = Path(path).expanduser()
    try:
        if tokenizer_alone and _has_tokenizer(directory):
            yield ModelLocation(str(path), str(directory))
        else:
            yield _locate(path)
    except (PacelineError, RecursionError):
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        if "trust_remote_code" in str(error):  # a model of the hub
            raise needs_code(str(path)) from None
        raise _unreadable(path, error) from error


def _unreadable(path: str | Path, error: Exception) -> ModelLoadError:
    # torch advises to run code that is pickled beside weights
    said = "pickled code is not run" if "weights_only" in str(error) else str(error)
    reason = shorten(" ".join(said.split()) or type(error).__name__, _LONGEST_REASON)
    return ModelLoadError(f"{path} cannot be read ({reason}); mend that, or download it again")


def _locate(path: str | Path) -> ModelLocation:
    """Find the model directory, convert a GGUF file, or check that a hub id exists."""
    local = Path(path).expanduser()
    if is_gguf(local):
        return ModelLocation(str(path), str(converted_gguf(local)))
    if not local.exists():
        return _locate_on_hub(str(path))
    if (local / _ADAPTER).exists():
        return ModelLocation(str(path), str(_merged_adapter(local)))
    if not (local / "config.json").exists() or not weight_files(local):
        raise ModelLoadError(
            f"{path} does not hold config.json and model.safetensors (or its index); name the "
            "directory that holds both, or a .gguf file"
        )
    return ModelLocation(str(path), str(local))


@functools.cache
def _locate_on_hub(name: str) -> ModelLocation:
    if not _HUB_ID.fullmatch(name) or name.endswith(".gguf"):
        raise ModelLoadError(
            f"{name} does not exist; name a model directory, a .gguf file or a hub id like "
            f"organisation/model{neighbour(Path(name))}"
        )
    try:
        # a single short request: transformers would retry for half a minute
        huggingface_hub.model_info(name, timeout=5)
    except Exception as error:  # offline, refused or unknown: use a cached copy if there is one
        if isinstance(huggingface_hub.try_to_load_from_cache(name, "config.json"), str):
            return ModelLocation(name, name)
        raise ModelLoadError(
            f"{name} is not a local path or a hub id that can be reached ({first_line(error)}); "
            "check the spelling or the network"
        ) from error
    return ModelLocation(name, name)


def read_tokenizer(location: ModelLocation) -> PreTrainedTokenizerBase | None:
    """The tokenizer in the model's directory; None if there are no tokenizer files."""
    if location.directory and not _has_tokenizer(location.directory):
        return None
    return admit_tokenizer(location, _directory_of(location))


def find_device(device: str) -> torch.device:
    """The device of that name; "auto" is the GPU if there is one, else the CPU.

    Raises:
        UsageError: The device does not exist, or does not work.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
        torch.zeros(1, device=found).item()
    except (AssertionError, RuntimeError) as error:
        gpus = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
        raise UsageError(
            f"device {device!r} cannot be used ({first_line(error)}); wanted one of "
            f"{', '.join(['auto', 'cpu', *gpus])}"
        ) from None
    return found


def _spread(config: Any, dtype: torch.dtype) -> str | None:
    """The `device_map` of a model that the first of several GPUs cannot hold; else None."""
    several, is_worker = torch.cuda.device_count() > 1, parent_process() is not None
    # workers have a card each; shapes do not tell the size of quantized weights
    if not several or is_worker or is_quantized(config):
        return None
    size = num_bytes(without_weights(copy.deepcopy(config)), dtype)
    return None if size <= SHARE * _free_bytes(0) else "auto"


def _free_bytes(card: int) -> int:
    cached = torch.cuda.memory_reserved(card) - torch.cuda.memory_allocated(card)
    return torch.cuda.mem_get_info(card)[0] + cached


def choose_dtype(dtype: DType | torch.dtype, device: torch.device) -> torch.dtype:
    """The type that weights are loaded in; raises UsageError for one that does not exist."""
    name = str(dtype).removeprefix("torch.")
    if name not in ("auto", "float64", *_STORED):
        raise UsageError(f"got dtype {name}, wanted auto, float32, bfloat16 or float16")
    if name == "auto":
        name = choose_precision(device).precision
    return getattr(torch, name)


def _merged_adapter(directory: Path) -> Path:
    """The directory of the base model with the adapter (LoRA, DoRA, IA3 …) merged by peft, once.

    The base model is `base_model_name_or_path`: a directory, or in the cache of the hub.
    """
    settings = json.loads((directory / _ADAPTER).read_text("utf-8"))
    if find_spec("peft") is None:
        raise ModelLoadError(
            f"{directory} holds an adapter, which peft merges: {how_to_install('peft')}"
        )
    # peft would import the module that megatron_core names, and load what adapters names
    if fault := next((key for key in ("megatron_config", "adapters") if settings.get(key)), None):
        raise ModelLoadError(
            f"{directory / _ADAPTER} sets {fault}, which names code or files outside of the "
            "adapter; merge it into its base model, and name the merged model"
        )
    base = _base_of(settings)
    if (base / _ADAPTER).exists():
        raise ModelLoadError(f"{directory} is an adapter of another, {base}; merge that one first")
    name = f"{directory.name}-{_FORMAT}-{model_fingerprint(directory, base)}"
    return cached_directory("merged", name, lambda folder: _merge_into(folder, directory, base))


def _base_of(settings: dict[str, Any]) -> Path:
    name = str(settings.get("base_model_name_or_path"))
    if (base := Path(name).expanduser()).is_dir():
        return base
    options = {"revision": settings.get("revision"), "local_files_only": True}
    return Path(huggingface_hub.snapshot_download(name, **options))


def _merge_into(scratch: Path, directory: Path, base: Path) -> None:
    """Write the merged model, with the tokenizer of the adapter, else that of the base."""
    location = ModelLocation(str(base), str(base))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = read_config(location)
        hf, info = with_weights(location, config, torch.float32)
        refuse_incomplete(location, info)
        _merge(hf, directory, base)
        stored = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
        hf.to(stored).save_pretrained(scratch)
    names = tokenizer_paths(directory if has_vocabulary(directory) else base)
    copy_files([*names, base / DRAFT_VOCABULARY], scratch)


def _merge(hf: Any, directory: Path, base: Path) -> None:
    """Merge in place, and untie the head if its weights are then others than the embedding's."""
    peft: Any = import_module("peft")  # an optional dependency
    tied = is_tied(hf)
    untie_head(hf)  # a change of the head is no change of the embedding
    place = str(directory.absolute())  # peft takes other names for those of the hub, too
    try:
        model: Any = peft.PeftModel(hf, peft.PeftConfig.from_pretrained(place))
        result = model.load_adapter(place, "default")
        odd = [*result.missing_keys, *result.unexpected_keys]
        if not odd:
            model.merge_and_unload(safe_merge=True)
    except Exception as error:
        raise ModelLoadError(
            f"peft cannot merge the adapter in {directory} into {base} ({first_line(error)}); "
            "check that it belongs to this base model"
        ) from error
    if odd:
        raise ModelLoadError(
            f"the adapter in {directory} does not fit {base}: {len(odd)} of its weights are "
            f"missing or unknown, for example {odd[0]}; name the base model that it was trained for"
        )
    if tied and torch.equal(hf.get_output_embeddings().weight, hf.get_input_embeddings().weight):
        hf.tie_weights()
    elif tied:
        hf.config.tie_word_embeddings = False
        hf.config.get_text_config(decoder=True).tie_word_embeddings = False
