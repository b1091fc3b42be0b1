"""What is exported: the model, its target, the run that trained it and what was measured."""

from __future__ import annotations

import itertools
import json
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import yaml

from paceline.config import read_result
from paceline.errors import ConfigError, UsageError, VocabularyMismatchError
from paceline.measure import Measurement
from paceline.models import load_model
from paceline.models.compatibility import check_same_vocabulary
from paceline.models.inspection import ModelFacts, inspect_model
from paceline.models.loading import fingerprint, model_directory, stored_dtype
from paceline.records import RunDirectory

if TYPE_CHECKING:
    from paceline.export.export_config import ExportConfig
    from paceline.models import CausalModel

_FRONT = re.compile(r"\A---\n(.*?)\n---\n", re.DOTALL)  # the header of a model card
_NUM_STRINGS = 100
SAMPLES = (
    'def mean(values):\n    """The arithmetic mean."""\n    return sum(values) / len(values)\n',
    "The quick brown fox didn't jump over 13 lazy dogs; it's 2026, and they've 1,234.5 reasons.",
    "  Whitespace\n\n\tand\r\nlines,   naïve café, Größe, нещо, 東京 🚀 … “quotes” -- ----\n",
)
"""Texts that tokenizers and models are compared on."""


@dataclass(frozen=True)
class Target:
    """What an export needs of a target, whose weights are not loaded.

    Attributes:
        path: As the user named it.
        directory: Its files; of a GGUF file those of its conversion.
        facts: Of its files.
        num_rows: Rows of its embedding, as its config says.
    """

    path: str
    directory: Path
    facts: ModelFacts
    num_rows: int


@dataclass(frozen=True)
class Sources:
    """Everything that goes into an export.

    Attributes:
        config: What is wanted.
        model: The model, float32 on the CPU.
        stored: The dtype that the export stores.
        target: Of a draft; None: the model is exported alone.
        run: The manifest of the run that trained the draft; None: there is none beside it.
        measurement: Of this draft with this target.
        licence: What the target, or the model alone, states; None: nothing.
    """

    config: ExportConfig
    model: CausalModel
    stored: torch.dtype
    target: Target | None
    run: dict[str, Any] | None
    measurement: Measurement | None
    licence: str | None

    @property
    def tokenizer_source(self) -> str:
        """Where the tokenizer's files are taken from: the target, else the model itself."""
        return self.config.model if self.target is None else self.target.path

    @property
    def tokenizer(self) -> Any:
        """The one of these files."""
        return self.model.tokenizer if self.target is None else self.target.facts.tokenizer


def read_sources(config: ExportConfig) -> Sources:
    """Load the model and read what belongs to it.

    Raises:
        UsageError: Something cannot be read, or does not belong together.
    """
    run = _run_of(config.model)
    named = config.target or (run["config"].get("target") if run else None)
    target = None if named is None else read_target(named)
    if target is not None:
        check_same_reading(target, inspect_model(model_directory(config.model)))
    measurement = None if config.measurement is None else read_measurement(config, named)
    model = load_model(config.model, dtype="float32", device="cpu")
    if config.draft_vocabulary == "bake" and model.draft_vocabulary is None:
        raise UsageError(
            f"draft_vocabulary=bake: {config.model} proposes all tokens, so there is nothing to bake; "
            "leave it out"
        )
    licence = licence_of(config.model if target is None else target.path)
    return Sources(config, model, _stored(config, model), target, run, measurement, licence)


def licence_of(path: str) -> str | None:
    """What a model states as its licence, in its card's header or its GGUF file; None: nothing."""
    file = Path(path).expanduser()
    if file.suffix == ".gguf":
        import gguf

        field = gguf.GGUFReader(file).get_field("general.license")
        return None if field is None else str(field.contents())
    card = model_directory(path) / "README.md"
    found = _FRONT.match(card.read_text("utf-8")) if card.exists() else None
    stated = yaml.safe_load(found[1]) if found else None
    licence = stated.get("license") if isinstance(stated, dict) else None
    return licence if isinstance(licence, str) else None


def read_target(path: str) -> Target:
    """What is known of a target without its weights.

    Raises:
        UsageError: It cannot be read.
    """
    directory = model_directory(path)
    settings = json.loads((directory / "config.json").read_text("utf-8"))
    text = settings.get("text_config") or settings
    return Target(path, directory, inspect_model(directory), int(text["vocab_size"]))


def check_same_reading(target: Target, draft: ModelFacts) -> None:
    """Do both tokenizers read every text alike? The export carries the target's.

    Names and merges are compared one by one, the rest by what it does to texts: the same splitting can
    be written down in two ways.

    Raises:
        VocabularyMismatchError: They do not.
    """
    check_same_vocabulary(*cast("Any", (target.facts, draft)))
    ours, theirs = target.facts.tokenizer, draft.tokenizer
    if ours is None or theirs is None:
        missing = target.path if ours is None else draft.path
        raise VocabularyMismatchError(
            f"{missing} has no tokenizer files, so its tokenizer cannot be compared; add them"
        )
    what = _other_merge(_merges(ours), _merges(theirs)) or _other_tokens(ours, theirs)
    if what is not None:
        raise VocabularyMismatchError(
            f"the tokenizers of {target.path} and {draft.path} name the same tokens but differ {what}, so "
            "they tokenize texts differently; make the draft with the target's tokenizer"
        )


def _merges(tokenizer: Any) -> list[str]:
    """Of a BPE tokenizer, in order; empty for others."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    found = [] if backend is None else json.loads(backend.to_str())["model"].get("merges") or []
    return [merge if isinstance(merge, str) else " ".join(merge) for merge in found]


def _other_merge(ours: list[str], theirs: list[str]) -> str | None:
    for place, both in enumerate(itertools.zip_longest(ours, theirs, fillvalue="none")):
        if both[0] != both[1]:
            return f"in merge {place} ({both[0]!r} and {both[1]!r})"
    return None


def _other_tokens(ours: Any, theirs: Any) -> str | None:
    """A text that both tokenize differently: samples, and strings of random tokens."""
    draws = random.Random(0)
    numbers = range(len(ours))
    strings = [ours.decode(draws.choices(numbers, k=12)) for _ in range(_NUM_STRINGS)]
    for text in (*SAMPLES, *strings):
        found = [reader(text, add_special_tokens=False)["input_ids"] for reader in (ours, theirs)]
        if found[0] != found[1]:
            return f"on {text[:30]!r}"
    return None


def _run_of(model: str) -> dict[str, Any] | None:
    """The manifest of the run whose `draft` directory this is."""
    folder = Path(model).expanduser()
    manifest = RunDirectory(folder.parent).read_manifest() if folder.is_dir() else None
    return manifest if manifest and manifest.get("kind") == "Align" else None


def read_measurement(config: ExportConfig, target: str | None) -> Measurement:
    """A measurement of this draft with this target.

    Raises:
        ConfigError: It cannot be read, or is of another pair.
    """
    path = cast("Path", config.measurement)
    found = read_result(Measurement, path, "paceline measure --json")
    pairs = (
        ("draft", found.config.draft, found.draft_fingerprint, config.model),
        ("target", found.config.target, found.target_fingerprint, target),
    )
    for role, measured, known, place in pairs:
        if place is None or known != fingerprint(place):
            raise ConfigError(
                f"{path} was measured with the {role} {measured} as it was then, not with {place} as it "
                "is now; measure again"
            )
    return found


def _stored(config: ExportConfig, model: CausalModel) -> torch.dtype:
    if config.dtype in ("auto", "q8_0"):
        return stored_dtype(config.model) or model.dtype
    return getattr(torch, config.dtype)
