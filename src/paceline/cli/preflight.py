"""What can be wrong with a command's inputs, found before anything expensive begins.

Each command calls its function here first. It reads configurations, tokenizers, headers of weights
and texts, and tries the places of outputs: seconds at most. `--dry-run` ends behind it.
"""

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
from paceline.errors import ContextLengthError, ModelLoadError, StorageError, UsageError
from paceline.models.inspection import ModelFacts, inspect_model
from paceline.models.loading import find_device
from paceline.models.vocabulary import check_same_vocabulary
from paceline.records import storage_errors

if TYPE_CHECKING:
    from collections.abc import Iterable

    from paceline.data.prompts import Record

_MOST_READ = 20_000  # records of a text that are read to see that they can be
_FLOAT32_BYTES = 4


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

    def training_output(self, config: Any, model: ModelFacts | None) -> None:
        """Is there room for the checkpoints of a run of training?"""
        moments = 2 if config.optimizer.kind == "adamw" else 0
        count = 0 if model is None else model.num_parameters
        copies = (config.checkpoints.keep + 1) * (1 + moments) + 1
        self.output(config.output, _FLOAT32_BYTES * count * copies)

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


def check_measured(config: Any, *, dry_run: bool) -> None:
    """Before `measure`, `analyze` and `verify`."""
    found = Preflight()
    found.device(config.device)
    models = found.pair(config.target, config.draft)
    gamma = getattr(config, "gamma", 0)
    timed = min(getattr(config, "timed_prompts", 0), config.num_prompts)
    # a timed request is decoded to its end, and a block keeps its own room behind that
    longest = config.max_new_tokens + min(getattr(config, "gammas", (0,)))
    room = [longest] * timed + [1 + gamma] * (config.num_prompts - timed)
    found.prompts(
        config.prompts,
        models,
        count=config.num_prompts,
        max_tokens=config.max_prompt_tokens,
        behind=room,
    )
    found.end(dry_run=dry_run)


def check_served(config: Any, *, dry_run: bool) -> None:
    """Before `measure --engine`."""
    from paceline.engines.choice import check_choice

    found = Preflight()
    check_choice(config.engine)
    found.device(config.device)
    models = found.pair(config.target, config.draft)
    found.prompts(
        config.prompts,
        models,
        count=config.num_prompts,
        max_tokens=config.max_prompt_tokens,
        behind=[config.max_new_tokens] * config.num_prompts,
    )
    found.end(dry_run=dry_run)


def check_align(config: Any, *, resume: bool, dry_run: bool) -> None:
    """Before `align`."""
    from paceline.records import RunDirectory
    from paceline.train.checkpoint import check_run_directory

    found = Preflight()
    check_run_directory(RunDirectory(config.output), config, resume=resume)
    _look_at_alignment(found, config)
    found.end(dry_run=dry_run)


def _look_at_alignment(found: Preflight, config: Any) -> None:
    _, draft = found.pair(config.target, config.draft)
    for name in ("train", "held_out", "pretraining"):
        text = getattr(config.data, name)
        if text is not None:
            found.text(f"data.{name}", text)
    found.training_output(config, draft)


def check_sweep(config: Any, *, dry_run: bool) -> None:
    """Before `sweep`: what its runs read and write, once."""
    from paceline.train.sweep import cells_of

    found = Preflight()
    for cell in cells_of(config):
        found.pair(cell.config.target, cell.config.draft)
        for text in (cell.config.data.train, cell.config.data.held_out):
            if text is not None:
                found.text("text", text)
    found.output(config.output)
    found.end(dry_run=dry_run)


def check_pretrain(config: Any, *, resume: bool, dry_run: bool) -> None:
    """Before `pretrain`."""
    from paceline.records import RunDirectory
    from paceline.train.checkpoint import check_run_directory

    found = Preflight()
    check_run_directory(RunDirectory(config.output), config, resume=resume)
    start = found.model("model", config.model) if isinstance(config.model, str) else None
    if start is None and isinstance(config.tokenizer, str):
        found.model("tokenizer", config.tokenizer)
    found.text("data.train", config.data.train)
    if config.data.held_out is not None:
        found.text("data.held_out", config.data.held_out)
    found.training_output(config, start)
    found.end(dry_run=dry_run)


def check_generate_data(config: Any, *, dry_run: bool) -> None:
    """Before `generate-data`."""
    found = Preflight()
    models = found.pair(config.target, config.draft)
    found.text("prompts", config.prompts)
    limits = [model.max_length for model in models if model.max_length is not None]
    wanted = config.max_prompt_tokens + config.max_new_tokens
    if limits and wanted > min(limits):
        raise ContextLengthError(
            f"max_prompt_tokens + max_new_tokens is {wanted:,}, but the models' context holds "
            f"{min(limits):,}; lower one of the two"
        )
    found.output(config.output)
    found.end(dry_run=dry_run)


def check_bench(config: Any, *, dry_run: bool) -> None:
    """Before `bench` and `tune`."""
    found = Preflight()
    found.device(config.device)
    found.pair(config.target, config.draft)
    for name in ("corpus", "train_corpus"):
        text = getattr(config.task, name, None)
        if text is not None:
            found.text(f"task.{name}", text)
    config.task.versions()  # is the library that scores installed?
    found.output(config.output)
    found.end(dry_run=dry_run)


def check_trajectory(config: Any, *, dry_run: bool) -> None:
    """Before `trajectory`."""
    from paceline.measure.trajectory import stops_of

    found = Preflight()
    for run in config.runs:
        list(stops_of(run))
    found.model("target", config.target)
    for name, task in config.tasks.items():
        found.text(name, task)
    found.output(config.output)
    found.end(dry_run=dry_run)


def check_draft(config: Any, *, dry_run: bool) -> None:
    """Before `draft`."""
    from paceline.models.draft import check_layers
    from paceline.train.drafts import check_place

    check_place(config)
    found = Preflight()
    target = found.model("target", config.target)
    if config.layers is not None and target.num_layers:
        check_layers(config.layers, target.num_layers)
    if config.text is not None:
        found.text("text", config.text)
    found.output(config.out)
    found.end(dry_run=dry_run)


def check_export(config: Any, *, dry_run: bool) -> None:
    """Before `export`."""
    from paceline.engines.choice import EngineChoice, check_choice
    from paceline.export.export import check_place
    from paceline.models.loading import model_directory

    check_place(config)
    if config.check_engine:
        check_choice(config.engine or EngineChoice(engine=config.to))
    found = Preflight()
    # of a GGUF file the conversion, which has the tokenizer
    model = found.model("model", str(model_directory(config.model)))
    if config.target is not None:
        found.model("target", str(model_directory(config.target)))
    found.output(config.out, _FLOAT32_BYTES * model.num_parameters)
    found.end(dry_run=dry_run)


def check_demo(target: str, out: Path, layers: list[int], *, dry_run: bool) -> None:
    """Before `demo`."""
    from paceline.models.draft import check_layers

    found = Preflight()
    facts = found.model("target", target)
    if facts.num_layers:
        check_layers(layers, facts.num_layers)
    if out.exists() and not out.is_dir():
        raise UsageError(f"output {out} is a file; choose a directory")
    found.output(out)
    found.end(dry_run=dry_run)


def check_decode(target: str, draft: str | None) -> None:
    """Before `decode`."""
    Preflight().pair(target, draft)
