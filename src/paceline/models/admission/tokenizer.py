"""Compares a tokenizer with libraries other than transformers, once; the result is kept.

transformers 5 builds the classes of many models anew from vocabulary and merges, and ignores the
normalizer, the pre-tokenizer and the decoder of tokenizer.json. Engines and earlier versions of
transformers read that file, and so does Paceline: where a class gives other tokens, the file is
read without the class, and a warning names the difference.
"""

from __future__ import annotations

import copy
import hashlib
import importlib.metadata
import warnings
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, ValidationError
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from paceline.config import StrictModel
from paceline.errors import ModelLoadError, first_line
from paceline.fingerprints import files_fingerprint
from paceline.models.admission.results import recall, remember
from paceline.models.admission.tokenizer_doubts import (
    NO_VOCABULARY,
    doubts,
    has_vocabulary,
    read_settings,
    reads_nothing,
    refuse_outside,
)
from paceline.models.admission.tokenizer_probes import TOKENIZER_FILE, TokenizerFile, find_reference
from paceline.version import __version__

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.models.admission.tokenizer_probes import Reading, Reference

_FORMAT = 1  # increase when the comparison changes, so that kept results are not used
_PACKAGES = ("transformers", "tokenizers", "sentencepiece")
_FILES = ("*.json", "*.model", "*.spm", "*.txt", "*.tiktoken")
_WEIGHTS = ".index.json"  # ends the name of a list of weight files
_CLASS_SETTINGS = ("padding_side", "truncation_side", "model_input_names")
_CHECK = "_paceline_check"  # attribute of a tokenizer that was compared
_MOST_SHOWN = 8  # tokens of an example in a message
_MOST_KEPT = 5  # differences in a result


class Difference(StrictModel):
    """A text that transformers reads otherwise.

    Attributes:
        text: The text.
        transformers: Its tokens by transformers: ids, or pieces for SentencePiece. The text of
            the tokens where only that differs.
        reference: The same by the reference.
    """

    text: str
    transformers: tuple[int | str | None, ...] | str
    reference: tuple[int | str | None, ...] | str


class TokenizerCheck(StrictModel):
    """The comparison of a tokenizer with a reference.

    Attributes:
        reference: File that another library reads: tokenizer.json, or a SentencePiece model; None
            if there is no such file.
        transformers_class: Class that transformers chooses; None if it cannot be built.
        used: What reads texts: that class; tokenizer.json without it ("file"); or that class with
            the parts of tokenizer.json, if it has languages ("parts").
        settings: What `used` = "file" takes from the class, such as default special tokens.
        num_probes: Compared texts, those of the added tokens included.
        num_differing: Texts that the class reads otherwise than the reference.
        differences: The plainest of them.
        num_restored: Compared texts that their tokens give back exactly.
        warnings: What a user has to know, one line each.
    """

    reference: str | None
    transformers_class: str | None
    used: Literal["class", "file", "parts"] = "class"
    settings: dict[str, str | list[str]] = Field(default_factory=dict)
    num_probes: int
    num_differing: int
    differences: tuple[Difference, ...]
    num_restored: int
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Loader:
    """Loads the tokenizer at a path or hub id."""

    source: str
    options: dict[str, Any]

    def by_class(self) -> Any:
        """With the class that transformers chooses."""
        return AutoTokenizer.from_pretrained(self.source, trust_remote_code=False, **self.options)

    def by_file(self, **settings: Any) -> Any:
        """tokenizer.json without a class of its own; `settings` replace those of the directory."""
        return PreTrainedTokenizerFast.from_pretrained(self.source, **settings, **self.options)


def check_tokenizer(directory: Path, tokenizer: Any) -> TokenizerCheck:
    """The check of a loaded tokenizer; compares one that was not loaded by `admit_tokenizer`."""
    kept = vars(tokenizer).get(_CHECK)
    return kept or _compare(tokenizer, find_reference(directory))


def admit_tokenizer(name: str, directory: Path, source: str, options: dict[str, Any]) -> Any:
    """Load a tokenizer that reads texts as tokenizer.json says, where there is one.

    Args:
        name: The model as the user gave it, for warnings.
        directory: Its local files.
        source: Path or hub id for transformers.
        options: Arguments of `from_pretrained`.

    Raises:
        ModelLoadError: There is no vocabulary, or it is named outside of the directory.
        Exception: What transformers raises.
    """
    refuse_outside(directory)
    loader = _Loader(source, options)
    key = _key(directory)
    check = _kept(key)
    if check is None:
        tokenizer, check = _first(directory, loader)
        remember(key, check.model_dump(mode="json"))
    elif check.used == "file":
        tokenizer = loader.by_file(**check.settings)
    else:
        tokenizer = loader.by_class()
        if check.used == "parts":
            _take_parts(tokenizer, TokenizerFile(directory / TOKENIZER_FILE))
    vars(tokenizer)[_CHECK] = check
    for message in check.warnings:
        warnings.warn(f"{name}: {message}", stacklevel=4)
    return tokenizer


def _first(directory: Path, loader: _Loader) -> tuple[Any, TokenizerCheck]:
    """Load and compare; choose what reads texts."""
    faults: list[str] = []
    reference = None
    try:
        reference = find_reference(directory)
    except Exception as error:  # tokenizers raises whatever its parser finds
        faults.append(
            f"tokenizer.json cannot be read by the library tokenizers ({first_line(error)}), so "
            "nothing confirms the tokens of texts; copy the file again"
        )
    try:
        converted = read_settings(directory).get("read_from") == "gguf"
        tokenizer = loader.by_file() if converted else loader.by_class()
    except Exception as error:
        if not has_vocabulary(directory):
            raise ModelLoadError(NO_VOCABULARY.format(directory)) from error
        if not isinstance(reference, TokenizerFile):
            raise
        tokenizer = loader.by_file()
        faults.append(
            f"transformers cannot build the tokenizer's class ({first_line(error)}); "
            "tokenizer.json is read without it"
        )
        check = _compare(tokenizer, reference)
        check = check.model_copy(update={"used": "file", "transformers_class": None})
    else:
        check = _compare(tokenizer, reference)
        if converted:  # whatever class the architecture has in transformers
            check = check.model_copy(update={"used": "file"})
        elif check.num_differing and isinstance(reference, TokenizerFile):
            tokenizer, check = _replaced(tokenizer, check, reference, loader)
        if check.num_differing:
            faults.append(_difference(check))
    if reads_nothing(tokenizer):
        raise ModelLoadError(NO_VOCABULARY.format(directory))
    faults += doubts(directory, tokenizer, reference)
    return tokenizer, check.model_copy(update={"warnings": tuple(faults)})


def _replaced(
    tokenizer: Any, check: TokenizerCheck, reference: TokenizerFile, loader: _Loader
) -> tuple[Any, TokenizerCheck]:
    """The tokenizer that reads as the file does, if one does; with the differences of the class."""
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return tokenizer, check
    settings: dict[str, Any] = {}
    if hasattr(tokenizer, "src_lang"):
        used, found = "parts", copy.deepcopy(tokenizer)
        _take_parts(found, reference)
    else:
        used, settings = "file", _settings(tokenizer, reference)
        found = loader.by_file(**settings)
    again = _compare(found, reference)
    if again.num_differing >= check.num_differing:
        return tokenizer, check
    update = {"used": used, "settings": settings, "num_restored": again.num_restored}
    return found, check.model_copy(update=update)


def _settings(tokenizer: Any, reference: TokenizerFile) -> dict[str, Any]:
    """What a class sets by itself, and tokenizer_config.json may leave out."""
    known = reference.plain.get_vocab()
    tokens = tokenizer.special_tokens_map.items()
    found: dict[str, Any] = {
        name: str(token) for name, token in tokens if isinstance(token, str) and token in known
    }
    return found | {name: getattr(tokenizer, name) for name in _CLASS_SETTINGS}


def _take_parts(tokenizer: Any, reference: TokenizerFile) -> None:
    """Give a class the parts of tokenizer.json that read texts; its languages stay."""
    backend, plain = tokenizer.backend_tokenizer, reference.plain
    backend.model = plain.model
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        setattr(backend, part, getattr(plain, part))


def _compare(tokenizer: Any, reference: Reference | None) -> TokenizerCheck:
    probes = [] if reference is None else reference.probes(tokenizer)
    found: list[Difference] = []
    num_restored = 0
    for text in probes:
        assert reference is not None, "without a reference there are no probes"
        ours, theirs = reference.read_by(tokenizer, text), reference.reads(text)
        num_restored += ours.text == text
        if ours != theirs:
            found.append(_as_difference(text, ours, theirs))
    return TokenizerCheck(
        reference=None if reference is None else reference.source,
        transformers_class=type(tokenizer).__name__,
        num_probes=len(probes),
        num_differing=len(found),
        differences=tuple(sorted(found, key=_plainness)[:_MOST_KEPT]),
        num_restored=num_restored,
    )


def _plainness(difference: Difference) -> tuple[bool, int]:
    """Sorts differences of tokens before those of texts, and short ones first."""
    return isinstance(difference.reference, str), len(difference.text)


def _as_difference(text: str, ours: Reading, theirs: Reading) -> Difference:
    if ours.tokens != theirs.tokens:
        tokens = tuple(ours.tokens), tuple(theirs.tokens)
        return Difference(text=text, transformers=tokens[0], reference=tokens[1])
    return Difference(text=text, transformers=str(ours.text), reference=str(theirs.text))


def _difference(check: TokenizerCheck) -> str:
    """The warning about texts that a class reads otherwise than the reference."""
    first = check.differences[0]
    if isinstance(first.reference, str) or isinstance(first.transformers, str):
        what, shown = "text of the tokens", (repr(first.reference), repr(first.transformers))
    else:
        what, shown = "tokens", _from_difference(first.reference, first.transformers)
    message = (
        f"{check.reference} gives {first.text!r} the {what} {shown[0]}, transformers' "
        f"{check.transformers_class} {shown[1]}"
    )
    if check.used == "class":
        return f"{message}, which is used; programs that read {check.reference} may differ"
    return f"{message}; {check.reference} is used, programs with transformers 5 may differ"


def _from_difference(*found: tuple[int | str | None, ...]) -> list[str]:
    """Tokens from the first that differs, in words."""
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*found, strict=False)))
    shown: list[str] = []
    for tokens in found:
        part = ", ".join(map(str, tokens[same : same + _MOST_SHOWN]))
        more = ", ..." if len(tokens) > same + _MOST_SHOWN else ""
        shown.append(f"[{'..., ' if same else ''}{part}{more}]")
    return shown


def _key(directory: Path) -> str:
    """Hash of what a check depends on: the tokenizer's files, config.json and versions."""
    files = {file for pattern in _FILES for file in directory.glob(pattern)}
    kept = sorted(file for file in files if not file.name.endswith(_WEIGHTS) and file.is_file())
    digest = hashlib.sha256(f"{_FORMAT} {__version__} {files_fingerprint(kept)}".encode())
    for package in _PACKAGES:
        digest.update(f"{package} {importlib.metadata.version(package)}\n".encode())
    return digest.hexdigest()[:16]


def _kept(key: str) -> TokenizerCheck | None:
    found = recall(key)
    try:
        return None if found is None else TokenizerCheck.model_validate(found)
    except ValidationError:  # damaged
        return None
