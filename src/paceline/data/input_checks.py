"""Checks a configuration's inputs before expensive work starts.

They take seconds: they read configurations, tokenizers, weight headers and texts, and test paths.
Each configuration of a long command is `Checkable`. The function that does the work checks it by
`checked`, so a Python program gets the same errors as the command line.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from paceline.data.prompts import CorpusConfig, count_records, read_records
from paceline.data.tokens import asked, encode_prompt
from paceline.engines.client import api_key, root_of
from paceline.engines.process import check_choice
from paceline.environment import busy_processors
from paceline.errors import InputNote, ModelLoadError, StorageError, UsageError
from paceline.models.compatibility import check_same_vocabulary
from paceline.models.inspection import ModelFacts, inspect_model
from paceline.models.loading import find_device, load_tokenizer
from paceline.records import storage_errors

if TYPE_CHECKING:
    from paceline.data.prompts import Record
    from paceline.engines.commands import EngineChoice

_MAX_RECORDS = 20_000  # records read to check a text
_STREAMED = 1_000  # of a text that is streamed, maybe from the hub
_SHOWN = 200  # tokens of a prompt
FLOAT32_BYTES = 4


class Checkable(Protocol):
    """A configuration whose inputs can be checked."""

    def check(self, checks: InputChecks) -> None:
        """Check the inputs by `checks`; raises UsageError."""


def checked(config: Checkable, *, resume: bool = False) -> None:
    """Check a configuration's inputs.

    Warnings other than notes are left to the work itself.

    Args:
        config: The configuration.
        resume: The run directory may hold a run of this configuration.

    Raises:
        UsageError: an input cannot be used.
        StorageError: the output cannot be written.
    """
    caught: list[warnings.WarningMessage] = []
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            config.check(InputChecks(resume=resume))
    finally:
        for each in caught:
            if issubclass(each.category, InputNote):
                warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)


def note(text: str) -> None:
    """Warn of inputs that may not be what the user meant."""
    warnings.warn(text, InputNote, stacklevel=3)


class InputChecks:
    """Runs checks of a configuration's inputs. Each model and text is checked once.

    Attributes:
        resume: The run directory may hold a run of this configuration.
        lines: A line per result.
    """

    def __init__(self, *, resume: bool = False) -> None:
        self.resume = resume
        self.lines: list[str] = []
        self._models: dict[str, ModelFacts] = {}

    def device(self, name: str) -> None:
        """Check that the device exists; raises UsageError. Say if other programs compute on it."""
        device = find_device(name)
        self.lines.append(f"device: {device}")
        if device.type == "cpu" and (busy := busy_processors()):
            note(
                f"other programs use {busy} of {os.cpu_count()} processors: beside them this takes "
                "several times as long, and speedups are not those of an idle machine"
            )

    def model(self, role: str, path: str | Path) -> ModelFacts:
        """Check configuration, tokenizer and weight headers of a model; raises UsageError."""
        if (known := self._models.get(str(path))) is not None:
            return known
        run, below = Path(path).expanduser(), Path(path).expanduser() / "draft"
        if not (run / "config.json").exists() and (below / "config.json").exists():
            raise ModelLoadError(f"{path} is the directory of a run; name its draft, {path}/draft")
        found = self._models[str(path)] = inspect_model(path)
        if found.tokenizer is None:
            raise ModelLoadError(
                f"the {role} {path} has no tokenizer files; copy tokenizer.json and "
                "tokenizer_config.json from the model it was created from"
            )
        size = f", {found.num_parameters:,} parameters" if found.num_parameters else ""
        limit = "no limit" if found.max_length is None else f"{found.max_length:,} tokens"
        layers = f"{found.architecture} of {found.num_layers} layers"
        self.lines.append(f"{role}: {path}, {layers}{size}, context {limit}")
        return found

    def pair(self, target: str, draft: str | None) -> list[ModelFacts]:
        """Check target and draft, and that they share a tokenizer; raises UsageError."""
        models = [self.model("target", target)]
        if draft is not None:
            models.append(self.model("draft", draft))
            check_same_vocabulary(*cast("Any", models))
        return models

    def tokenizer(self, role: str, path: str) -> Any:
        """Check that a tokenizer can be loaded; raises ModelLoadError."""
        tokenizer = load_tokenizer(path, alone=True)
        self.lines.append(f"{role}: {path}, a tokenizer of {len(tokenizer):,} tokens")
        return tokenizer

    def engine(self, choice: EngineChoice) -> None:
        """Check a server, or the program that starts it; raises UsageError."""
        check_choice(choice)
        if choice.url is not None:
            self.key(choice)

    def key(self, server: Any) -> None:
        """Check the API key for a server's settings, and say where it goes; raises UsageError."""
        if (variable := getattr(server, "api_key_env", None)) is None:
            return
        urls = [server.url] if isinstance(server.url, str) else server.url
        api_key(variable, urls)
        note(f"sends the key in ${variable} to {', '.join(map(root_of, urls))}")

    def text(self, name: str, corpus: CorpusConfig | str, **reading: bool) -> None:
        """Check that `count_records` can read the first of a text; raises PromptError."""
        corpus = corpus if isinstance(corpus, CorpusConfig) else CorpusConfig(path=corpus)
        checked = corpus.first(_STREAMED if reading.get("streaming") else _MAX_RECORDS)
        count = count_records(checked, **reading)
        first = "" if count < (checked.limit or 0) else "checked the first "
        self.lines.append(f"{name}: {corpus.path}, {first}{count:,} texts")

    def texts(self, data: Any, *names: str) -> None:
        """Check that the texts of these names that are set can be read; raises PromptError."""
        for name in names:
            if (text := getattr(data, name)) is not None:
                streaming = name == "pretraining" or (
                    name == "train" and getattr(data, "streaming", False)
                )
                self.text(f"data.{name}", text, streaming=streaming, skip_empty=True)

    def first_prompt(self, tokenizer: Any, corpus: CorpusConfig, chat: bool | None) -> Record:
        """Show the first text as the target reads it, and how it is asked; raises PromptError."""
        record = read_records(corpus.first(_STREAMED), skip_empty=True)[0]
        (read,) = asked([record], tokenizer, chat)
        text = tokenizer.decode(encode_prompt(read, tokenizer)[:_SHOWN])
        form = "chat template" if read.kind == "chat" else "raw"
        self.lines += [f"{corpus.path}, {form}; the first one, as the target reads it:", text]
        if read.kind != record.kind and chat is None:
            note(f"{corpus.path} is asked by the chat template; --raw continues it as text")
        return read

    def output(self, path: Path, num_bytes: int = 0) -> None:
        """Check a directory as `check_output_directory`, with its errors."""
        free = check_output_directory(path, num_bytes)
        need = f", about {size_in_words(num_bytes)} needed" if num_bytes else ""
        self.lines.append(f"output: {path} can be written, {size_in_words(free)} free{need}")

    def file(self, path: Path) -> None:
        """Check a file as `check_output_file`, with its errors."""
        check_output_file(path)
        self.lines.append(f"output: {path} can be written")


def check_output_directory(path: Path, num_bytes: int = 0) -> int:
    """Check write access and free space; returns the free bytes.

    Raises:
        UsageError: the path, or a part of it, is a file.
        StorageError: it cannot be written, or has less than `num_bytes` free.
    """
    if path.is_file():
        raise UsageError(f"output {path} is a file; choose a directory")
    free = _free_above(path, "output", path)
    if free < num_bytes:
        raise StorageError(
            f"output {path} needs about {size_in_words(num_bytes)}, but only "
            f"{size_in_words(free)} are free; free space or choose another path"
        )
    return free


def check_output_file(path: Path, name: str = "output") -> None:
    """Check that a file can be written. `name` is used in messages.

    Raises:
        UsageError: the path is a directory or a device, or a part of it is a file.
        StorageError: it cannot be written.
    """
    if path.is_dir():
        raise UsageError(f"{name} {path} is a directory; name a file")
    if path.exists() and not path.is_file():
        raise UsageError(f"{name} {path} is not a regular file; name another")
    _free_above(path.parent, name, path)


def _free_above(folder: Path, name: str, path: Path) -> int:
    """Free bytes in the nearest existing directory, in which a new entry can be made."""
    with storage_errors(path):
        while not folder.exists():
            folder = folder.parent
        if not folder.is_dir():
            raise UsageError(
                f"{name} {path} cannot be created: {folder} is a file; choose another path"
            )
        Path(tempfile.mkdtemp(dir=folder, prefix=".paceline-")).rmdir()
        return shutil.disk_usage(folder).free


def size_in_words(num_bytes: float) -> str:
    """Such as 1.5 GB."""
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes / 1e3:.1f} kB"
