"""An export's configuration and inputs: model, target, training run and measurement."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import torch
from huggingface_hub import metadata_load
from pydantic import Field, model_validator
from yaml import YAMLError

from paceline.config import HomePath, Options, StrictModel, read_result
from paceline.data.input_checks import FLOAT32_BYTES, InputChecks
from paceline.engines.kinds import KINDS, EngineName, names_of
from paceline.errors import ConfigError, UsageError, VocabularyMismatchError
from paceline.measure import Measurement
from paceline.models import load_model
from paceline.models.admission.tokenizer import PROBES
from paceline.models.checkpoint_files import weight_files
from paceline.models.compatibility import check_block, check_same_vocabulary
from paceline.models.drafts.save import other_file
from paceline.models.gguf.conversion import open_gguf
from paceline.models.hf.draft_vocabulary import EXPORTED
from paceline.models.inspection import ModelFacts, inspect_model
from paceline.models.loading import (
    LICENCES,
    fingerprint,
    model_directory,
    stored_dtype,
)
from paceline.models.token_text import tokens_of
from paceline.records import RunDirectory, is_run

if TYPE_CHECKING:
    from paceline.engines.contract import Engine
    from paceline.models import HfModel


Stored = Literal["auto", "float32", "bfloat16", "float16", "q8_0"]


class ExportConfig(StrictModel):
    """Export of a draft, or of a target alone, for an engine.

    Attributes:
        model: The draft or target to export: directory, `.gguf` file or hub name.
        to: The engine that loads the export.
        out: The directory to create.
        target: The draft's target. None: the target of the draft's training run; a model without a
            run is exported alone.
        served_target: Path of the target in the launch command. None: `target`.
        base_model: Name on the hub of a target that was read from a file, for the card's header.
        dtype: Stored dtype of the weights. auto: unchanged; q8_0: llamacpp only.
        draft_vocabulary: How to export a draft vocabulary, which engines ignore. keep: unchanged,
            the engine drafts from all tokens. bake: set the head's rows of other tokens to the mean
            of the listed rows, so greedy drafting never proposes them.
        measurement: JSON of `paceline measure`, for the launch command and the model card.
        num_speculative_tokens: Tokens drafted per block. None: the best in `measurement`, else 3.
        draft_sample_method: How vLLM drafts. auto: as in `measurement`, else greedily.
        overwrite: Replace an older export at `out`.
    """

    model: Annotated[str, Options(positional=True)]
    to: EngineName
    out: HomePath
    target: Annotated[str | None, Options()] = None
    served_target: str | None = None
    base_model: Annotated[str | None, Field(pattern=r"^[\w.-]+/[\w.-]+$")] = None
    dtype: Stored = "auto"
    draft_vocabulary: Literal["keep", "bake"] = "keep"
    measurement: Annotated[HomePath | None, Options()] = None
    num_speculative_tokens: Annotated[int | None, Options(gamma="")] = Field(default=None, ge=1)
    draft_sample_method: Literal["auto", "greedy", "probabilistic"] = "auto"
    overwrite: bool = False

    @model_validator(mode="after")
    def _fits_the_engine(self) -> ExportConfig:
        if self.dtype == "q8_0" and not self.kind.loads_gguf:
            loaders = names_of(lambda kind: kind.loads_gguf)
            raise ValueError(
                f"dtype q8_0 is for {loaders} only, not for {self.to}; choose another dtype"
            )
        if self.draft_sample_method == "probabilistic" and not self.kind.samples_drafts:
            samplers = names_of(lambda kind: kind.samples_drafts)
            raise ValueError(
                f"draft_sample_method probabilistic is for {samplers}, not for {self.to}; leave it "
                "out"
            )
        return self

    @property
    def kind(self) -> type[Engine]:
        """The engine's class."""
        return KINDS[self.to]

    def check(self, checks: InputChecks) -> None:
        """Check the inputs, and that `out` may be written; raises UsageError."""
        _check_place(self)
        model = checks.model("model", self.model)
        models = [model] if self.target is None else [model, checks.model("target", self.target)]
        for each in models:
            check_block(self.num_speculative_tokens or 1, each.max_length)
        checks.output(self.out, FLOAT32_BYTES * model.num_parameters)


def _check_place(config: ExportConfig) -> None:
    """Raise UsageError unless `out` is free or an older export that may be replaced."""
    out = config.out
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not (out / EXPORTED).exists():
        raise UsageError(f"{out} exists already and is not an export; choose another --out")
    if not config.overwrite:
        raise UsageError(
            f"{out} exists already; choose another --out, or give --overwrite to replace it"
        )
    if (other := other_file(out, EXPORTED, "README.md", "*.gguf", *LICENCES)) is not None:
        raise UsageError(f"{out} holds {other}, which is no part of an export; move it")
    for path in (config.model, config.target):
        if path is not None and Path(path).expanduser().resolve().is_relative_to(out.resolve()):
            raise UsageError(f"{out} would replace {path}, which is exported; choose another --out")


SAMPLES = (
    'def mean(values):\n    """The arithmetic mean."""\n    return sum(values) / len(values)\n',
    "The quick brown fox didn't jump over 13 lazy dogs; it's 2026, and they've 1,234.5 reasons.",
    "  Whitespace\n\n\tand\r\nlines,   naïve café, Größe, нещо, 東京 🚀 … “quotes” -- ----\n",
)
"""Texts for comparing tokenizers and models."""


@dataclass(frozen=True)
class Inputs:
    """Inputs of an export.

    Attributes:
        config: Configuration of the export.
        model: The model, float32 on the CPU.
        stored: The dtype of the exported weights.
        target: Facts about the draft's target; None: the model is exported alone.
        directory: Files of the target, or of a model exported alone; of a GGUF file, those of its
            conversion.
        run: Manifest of the run that trained the draft; None if there is none.
        measurement: Measurement of this draft with this target; None if not given.
        licence: Licence stated by the target, or by a model exported alone; None if not stated.
    """

    config: ExportConfig
    model: HfModel
    stored: torch.dtype
    target: ModelFacts | None
    directory: Path
    run: dict[str, Any] | None
    measurement: Measurement | None
    licence: str | None

    @property
    def source(self) -> str:
        """Path of the model whose tokenizer is exported: the target, else the model itself."""
        return self.config.model if self.target is None else self.target.path

    @property
    def tokenizer(self) -> Any:
        return self.model.tokenizer if self.target is None else self.target.tokenizer

    @property
    def served_target(self) -> str:
        """Path of the target that the engine loads; without a target, of the model itself."""
        return self.config.served_target or self.source

    @property
    def stored_name(self) -> str:
        """Such as bfloat16."""
        return str(self.stored).removeprefix("torch.")


def read_inputs(config: ExportConfig) -> Inputs:
    """Load the inputs; raises UsageError if one cannot be read or they do not match."""
    run = _run_of(config.model)
    named = config.target or (run["config"].get("target") if run else None)
    if named is not None and not isinstance(named, str):
        raise UsageError(f"{manifest_of(config.model)} names no model as target; give --target")
    directories = [model_directory(path) for path in (config.model, named) if path is not None]
    target = None
    if named is not None:
        drafted, target = (
            _facts_of(path, directory)
            for path, directory in zip((config.model, named), directories, strict=True)
        )
        check_same_reading(target, drafted)
    measurement = None if config.measurement is None else read_measurement(config, named)
    model = load_model(config.model, dtype="float32", device="cpu")
    _check_model(config, model)
    stored = _stored(config, model)
    licence = licence_of(named or config.model, directories[-1])
    return Inputs(config, model, stored, target, directories[-1], run, measurement, licence)


def _check_model(config: ExportConfig, model: HfModel) -> None:
    """Raise UsageError if the engine cannot draft with the model, or reads no baked head."""
    if model.decoder_prompt is not None and not config.kind.in_process:
        raise UsageError(
            f"{config.model} is an encoder-decoder, which {config.to} cannot serve with a draft; "
            f"use --to {names_of(lambda kind: kind.in_process)}"
        )
    if config.draft_vocabulary == "keep":
        return
    if model.draft_vocabulary is None:
        raise UsageError(
            f"draft_vocabulary=bake: {config.model} has no draft vocabulary, so there is nothing "
            "to bake; leave it out"
        )
    if model.hf.config.model_type in config.kind.always_ties:
        raise UsageError(
            f"draft_vocabulary=bake: {config.to} takes the head of every "
            f"{model.hf.config.model_type} from its embedding, so a head of its own is not used; "
            "leave it out"
        )


def licence_of(path: str, directory: Path) -> str | None:
    """Return the licence in a GGUF file, or in a model card's header; None if not stated."""
    file = Path(path).expanduser()
    if file.suffix == ".gguf":
        stated = open_gguf(file).get("general.license")
        return None if stated is None else str(stated)
    card = directory / "README.md"
    try:
        licence = (metadata_load(card) or {}).get("license") if card.exists() else None
    except (YAMLError, ValueError):  # the header is none
        return None
    return licence if isinstance(licence, str) else None


def _facts_of(path: str, directory: Path) -> ModelFacts:
    """Facts about a model; of one from the hub, the weights may not be here."""
    files = weight_files(directory)  # an index may name files that are not here
    there = bool(files) and all(file.exists() for file in files)
    return inspect_model(directory if there else path)._replace(path=path)


def check_same_reading(target: ModelFacts, draft: ModelFacts) -> None:
    """Raise VocabularyMismatchError if the tokenizers differ: the export has the target's.

    Compares vocabularies and merges, and the tokens of sample texts: two tokenizer files may
    describe the same pre-tokenization differently.
    """
    check_same_vocabulary(*cast("Any", (target, draft)))
    ours, theirs = target.tokenizer, draft.tokenizer
    if ours is None or theirs is None:
        missing = target.path if ours is None else draft.path
        raise VocabularyMismatchError(
            f"{missing} has no tokenizer files, so its tokenizer cannot be compared; add them"
        )
    same = _merges(ours) == _merges(theirs)
    for text in (*SAMPLES, *PROBES):
        if not same or tokens_of(text, ours) != tokens_of(text, theirs):
            raise VocabularyMismatchError(
                f"the tokenizers of {target.path} and {draft.path} have the same tokens but differ "
                f"in their merges or on {text[:30]!r}; build the draft with the target's tokenizer"
            )


def _merges(tokenizer: Any) -> Any:
    """Merges of a BPE tokenizer, in order; None for other tokenizers."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return None if backend is None else json.loads(backend.to_str())["model"].get("merges")


def manifest_of(model: str) -> Path:
    """Where the run that trained a draft has its manifest, if the model is its `draft`."""
    return RunDirectory(Path(model).expanduser().parent).manifest


def _run_of(model: str) -> dict[str, Any] | None:
    """Manifest of the training run whose `draft` directory this is, if any."""
    folder = Path(model).expanduser()
    manifest = RunDirectory(folder.parent).read_manifest() if folder.is_dir() else None
    ours = manifest is not None and is_run(manifest) and manifest.get("kind") == "Align"
    return manifest if ours else None


def read_measurement(config: ExportConfig, target: str | None) -> Measurement:
    """Read the measurement; raises ConfigError if it cannot be read or belongs to another pair."""
    path = cast("Path", config.measurement)
    found = read_result(Measurement, path, "paceline measure --json")
    pairs = (
        ("draft", found.config.draft, config.model),
        ("target", found.config.target, target),
    )
    for role, measured, wanted in pairs:
        if wanted is None or found.fingerprint(role) != fingerprint(wanted):
            raise ConfigError(
                f"{path} was measured with the {role} {measured}, which is not {wanted} or has "
                "changed since; measure again"
            )
    return found


def _stored(config: ExportConfig, model: HfModel) -> torch.dtype:
    if config.dtype in ("auto", "q8_0"):
        return stored_dtype(config.model) or model.dtype
    return getattr(torch, config.dtype)
