"""One look at a device, a model, a text or a place, before anything expensive begins."""

from __future__ import annotations

import itertools
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import typer

from paceline.cli.console import say, stdout
from paceline.data.prompts import CorpusConfig, read_records, stream_records
from paceline.data.tokens import encode
from paceline.errors import ContextLengthError, ModelLoadError, StorageError
from paceline.models.compatibility import check_same_vocabulary
from paceline.models.inspection import ModelFacts, inspect_model
from paceline.models.loading import find_device
from paceline.records import storage_errors

if TYPE_CHECKING:
    from collections.abc import Iterable

    from paceline.data.prompts import Record

_MOST_READ = 20_000  # records of a text that are read to see that they can be
FLOAT32_BYTES = 4


class Preflight:
    """What was looked at so far, in lines for people; a model or a text is looked at once."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._models: dict[str, ModelFacts] = {}
        self._texts: set[str] = set()

    def device(self, name: str) -> None:
        """Can this device be used?

        Raises:
            UsageError: it cannot.
        """
        self._lines.append(f"device: {find_device(name)}")

    def model(self, role: str, path: str | Path) -> ModelFacts:
        """Can this model be loaded, as far as that can be told without its weights?

        Raises:
            UsageError: it cannot, or it has no tokenizer.
        """
        known = self._models.get(str(path))
        if known is not None:
            return known
        found = self._models[str(path)] = inspect_model(path)
        if found.architecture is None:
            self._lines.append(f"{role}: {path}, a GGUF file")
            return found
        if found.tokenizer is None:
            raise ModelLoadError(
                f"the {role} {path} has no tokenizer files, so nothing says which tokens it means; copy "
                "tokenizer.json and tokenizer_config.json from the model that it was made from"
            )
        size = f", {found.num_parameters:,} parameters" if found.num_parameters else ""
        limit = "no limit" if found.max_length is None else f"{found.max_length:,} tokens"
        self._lines.append(
            f"{role}: {path}, {found.architecture} of {found.num_layers} layers{size}, context {limit}"
        )
        return found

    def pair(self, target: str, draft: str | None) -> list[ModelFacts]:
        """Can both be loaded, and do they share one tokenizer?

        Raises:
            UsageError: one cannot, or they do not.
        """
        models = [self.model("target", target)]
        if draft is not None:
            models.append(self.model("draft", draft))
        if len(models) == 2 and all(model.tokenizer is not None for model in models):
            check_same_vocabulary(*cast("Any", models))
        return models

    def text(self, name: str, corpus: CorpusConfig | str) -> None:
        """Can this text be read? Of a large or a remote one, its beginning.

        Raises:
            PromptError: it cannot; the message names the line.
        """
        corpus = corpus if isinstance(corpus, CorpusConfig) else CorpusConfig(path=corpus)
        if corpus.path in self._texts:
            return
        self._texts.add(corpus.path)
        count = sum(1 for _ in _some(corpus, _MOST_READ))
        self._lines.append(f"{name}: {corpus.path}, {_counted(count, corpus)}")

    def prompts(
        self,
        corpus: CorpusConfig,
        models: Iterable[ModelFacts],
        *,
        count: int,
        max_tokens: int | None,
        behind: Iterable[int],
    ) -> None:
        """Do the first `count` prompts fit the context, with as many tokens behind each as it needs?

        Raises:
            PromptError: they cannot be read; the message names the line.
            ContextLengthError: one does not fit; the message names the line.
        """
        tokenizer = next((m.tokenizer for m in models if m.tokenizer is not None), None)
        limits = [model.max_length for model in models if model.max_length is not None]
        records = list(_some(corpus, count))
        lengths: list[int] = []
        num_begun = 0
        for record, room in zip(records, behind, strict=False):
            if tokenizer is None:
                break
            length = len(encode(record, tokenizer)[0])
            if max_tokens is not None and length > max_tokens:
                num_begun += record.kind == "document"
                length = max_tokens
            if limits and length + room > min(limits):
                raise ContextLengthError(
                    f"{record.where} has {length:,} tokens and {room:,} more are to follow it, but the "
                    f"context holds {min(limits):,}; set max_prompt_tokens, or lower max_new_tokens"
                )
            lengths.append(length)
        of = f" of {min(lengths)} to {max(lengths)} tokens" if lengths else ""
        self._lines.append(f"prompts: {corpus.path}, {len(records)} prompts{of}")
        if num_begun:
            say(
                f"note: {num_begun} of {len(records)} texts are longer than max_prompt_tokens "
                f"{max_tokens}; their first {max_tokens} tokens are the prompts"
            )

    def output(self, path: Path, num_bytes: int = 0) -> None:
        """Can a directory or a file be made here, and is there room for so much?

        Raises:
            StorageError: it cannot, or there is not.
        """
        with storage_errors(path):
            place = path
            while not place.exists():
                place = place.parent
            if not place.is_dir() and place != path:
                raise StorageError(
                    f"output {path} cannot be made: {place} is a file; choose another"
                )
            place = place if place.is_dir() else place.parent
            Path(tempfile.mkdtemp(dir=place, prefix=".paceline-")).rmdir()
            free = shutil.disk_usage(place).free
        if free < num_bytes:
            raise StorageError(
                f"output {path} needs about {_size(num_bytes)} and {_size(free)} are free; "
                "free some space or choose another place"
            )
        need = f", about {_size(num_bytes)} needed" if num_bytes else ""
        self._lines.append(f"output: {path} can be written, {_size(free)} free{need}")

    def file(self, path: Path) -> None:
        """Can a file be written here?

        Raises:
            StorageError: It cannot, or it is a directory.
        """
        if path.is_dir():
            raise StorageError(f"output {path} is a directory; name a file")
        self.output(path)

    def costs(self, config: Any) -> None:
        """Are there costs of an engine for what is asked for?

        Raises:
            UsageError: There are not.
        """
        from paceline.measure.engine_costs import read_costs

        path = getattr(config, "costs", None)
        if path is None:
            return
        costs = read_costs(path)
        gammas = getattr(config, "gammas", None) or config.block_lengths
        costs.usable(gammas, config.concurrency)
        self._lines.append(f"costs: {path}, of {costs}")

    def training_output(self, config: Any, model: ModelFacts | None) -> None:
        """Is there room for the checkpoints of a run of training?"""
        moments = 2 if config.optimizer.kind == "adamw" else 0
        count = 0 if model is None else model.num_parameters
        copies = (config.checkpoints.keep + 1) * (1 + moments) + 1
        self.output(config.output, FLOAT32_BYTES * count * copies)

    def end(self, *, dry_run: bool) -> None:
        """Print what was found and stop, if that is all that was wanted."""
        if not dry_run:
            return
        for line in self._lines:
            stdout.print(line)
        stdout.print("These checks passed. Nothing was run.")
        raise typer.Exit


def _some(corpus: CorpusConfig, count: int) -> Iterable[Record]:
    """The first records of a text that can be read from its beginning; of others, one."""
    if corpus.path.lower().endswith((".txt", ".jsonl")):
        return itertools.islice(stream_records(corpus), count)
    few = min(corpus.limit or count, count)
    return read_records(corpus.model_copy(update={"limit": few}))


def _counted(count: int, corpus: CorpusConfig) -> str:
    return (
        f"{count:,} texts" if count < (corpus.limit or _MOST_READ) else f"at least {count:,} texts"
    )


def _size(num_bytes: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes / 1e3:.1f} kB"
