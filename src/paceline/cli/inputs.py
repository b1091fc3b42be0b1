"""Quick checks of devices, models, texts and output paths before expensive work starts."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any, cast

import typer

from paceline.cli.console import echo, say, stdout
from paceline.cli.output_paths import check_output_directory, check_output_file, size_in_words
from paceline.data.prompts import CorpusConfig, read_records, stream_records
from paceline.data.tokens import encode
from paceline.engines.client import api_key, root_of
from paceline.engines.process import check_choice
from paceline.errors import ContextLengthError, ModelLoadError
from paceline.models.compatibility import check_same_vocabulary, no_rollback
from paceline.models.inspection import ModelFacts, inspect_model, read_header, state_keeper
from paceline.models.loading import find_device, load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from paceline.data.examples import Example
    from paceline.data.prompts import Record
    from paceline.engines.commands import EngineChoice
    from paceline.models.inspection import Header

_MAX_RECORDS = 20_000  # records read to check a text
FLOAT32_BYTES = 4


class Preflight:
    """Runs checks and collects a line per result. Each model and text is checked once."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._models: dict[str, ModelFacts] = {}
        self._headers: dict[str, Header] = {}
        self._texts: set[str] = set()
        self._example: tuple[Example, Any] | None = None

    def device(self, name: str) -> None:
        """Check that the device exists; raises UsageError."""
        self._lines.append(f"device: {find_device(name)}")

    def model(self, role: str, path: str | Path) -> ModelFacts:
        """Check configuration, tokenizer and weight headers of a model; raises UsageError."""
        if (known := self._models.get(str(path))) is not None:
            return known
        header = self._headers[str(path)] = read_header(path)
        found = self._models[str(path)] = inspect_model(path, header)
        if found.tokenizer is None:
            raise ModelLoadError(
                f"the {role} {path} has no tokenizer files; copy tokenizer.json and "
                "tokenizer_config.json from the model it was created from"
            )
        size = f", {found.num_parameters:,} parameters" if found.num_parameters else ""
        limit = "no limit" if found.max_length is None else f"{found.max_length:,} tokens"
        layers = f"{found.architecture} of {found.num_layers} layers"
        if found.num_encoder_layers:
            layers = (
                f"{found.architecture} of {found.num_encoder_layers} encoder and "
                f"{found.num_layers} decoder layers"
            )
        self._lines.append(f"{role}: {path}, {layers}{size}, context {limit}")
        return found

    def pair(self, target: str, draft: str | None) -> list[ModelFacts]:
        """Check target and draft, and that they share a tokenizer; raises UsageError."""
        models = [self.model("target", target)]
        if draft is not None:
            models.append(self.model("draft", draft))
        if len(models) == 2 and all(model.tokenizer is not None for model in models):
            check_same_vocabulary(*cast("Any", models))
        sizes = [model.num_parameters for model in models]
        if len(sizes) == 2 and 0 < sizes[0] < sizes[1]:
            say(
                f"note: the draft {draft} has more parameters than the target {target}; are target "
                "and draft swapped?"
            )
        return models

    def drafting(self, *paths: str | None) -> None:
        """Check that these models can draft and verify drafts; raises UnsupportedModelError."""
        for path in paths:
            if path is not None and (name := state_keeper(path)) is not None:
                raise no_rollback(name)

    def tokenizer(self, role: str, path: str) -> Any:
        """Check that a tokenizer can be loaded; raises ModelLoadError."""
        tokenizer = load_tokenizer(path, alone=True)
        self._lines.append(f"{role}: {path}, a tokenizer of {len(tokenizer):,} tokens")
        return tokenizer

    def engine(self, choice: EngineChoice) -> None:
        """Check a server, or the program that starts it; raises UsageError."""
        check_choice(choice)
        if choice.url is not None:
            self.key(choice)

    def key(self, server: Any) -> None:
        """Check the API key for a server's settings, and say where it goes; raises UsageError."""
        variable = getattr(server, "api_key_env", None)
        if variable is None:
            return
        urls = [server.url] if isinstance(server.url, str) else server.url
        api_key(variable, urls)
        say(f"note: sends the key in ${variable} to {', '.join(map(root_of, urls))}")

    def text(self, name: str, corpus: CorpusConfig | str) -> None:
        """Check that a text can be read, up to a number of records; raises PromptError."""
        corpus = corpus if isinstance(corpus, CorpusConfig) else CorpusConfig(path=corpus)
        if corpus.path in self._texts:
            return
        self._texts.add(corpus.path)
        count = sum(1 for _ in first_records(corpus, _MAX_RECORDS))
        bound = "" if count < (corpus.limit or _MAX_RECORDS) else "at least "
        self._lines.append(f"{name}: {corpus.path}, {bound}{count:,} texts")

    def training_text(self, examples: Sequence[Example], tokenizer: Any) -> None:
        """Let a dry run show the first example of training."""
        if examples and self._example is None:
            self._example = examples[0], tokenizer

    def prompts(
        self,
        corpus: CorpusConfig,
        models: Iterable[ModelFacts],
        *,
        count: int,
        max_tokens: int | None,
        new_tokens: Iterable[int],
        skip: int = 0,
    ) -> None:
        """Check that `count` prompts after `skip` and their `new_tokens` fit the models' context.

        Raises:
            UsageError: there are no prompts after `skip`.
            PromptError: a prompt cannot be read; the message names the line.
            ContextLengthError: a prompt does not fit; the message names the line.
        """
        from paceline.measure.pair import after_skipped

        models = list(models)
        encoder = any(model.decoder_prompt is not None for model in models)
        limits = [model.max_length for model in models if model.max_length is not None]
        sources = [m.max_source_length for m in models if m.max_source_length is not None]
        records = after_skipped(list(first_records(corpus, skip + count)), skip, corpus.path)
        tokenizer = next((m.tokenizer for m in models if m.tokenizer is not None), None)
        lengths: list[int] = []
        num_cut = 0
        for record, num_new in zip(records, new_tokens, strict=False):
            if tokenizer is None:
                break
            length = len(encode(record, tokenizer)[0])
            if max_tokens is not None and length > max_tokens:
                num_cut += record.kind == "document"
                length = max_tokens
            if sources and length > min(sources):
                raise ContextLengthError(
                    f"{record.where} has {length:,} tokens, but the encoder holds "
                    f"{min(sources):,}; set max_prompt_tokens"
                )
            if limits and not encoder and length + num_new > min(limits):
                raise ContextLengthError(
                    f"{record.where} has {length:,} tokens and needs {num_new:,} more, but the "
                    f"context holds {min(limits):,}; set max_prompt_tokens or lower max_new_tokens"
                )
            lengths.append(length)
        of = f" of {min(lengths)} to {max(lengths)} tokens" if lengths else ""
        self._lines.append(f"prompts: {corpus.path}, {len(records)} prompts{of}")
        if num_cut:
            say(
                f"note: {num_cut} of {len(records)} texts are longer than max_prompt_tokens "
                f"{max_tokens}; their first {max_tokens} tokens are used as prompts"
            )

    def output(self, path: Path, num_bytes: int = 0) -> None:
        """Check a directory as `check_output_directory`, with its errors."""
        self._can_be_written(path, check_output_directory(path, num_bytes), num_bytes)

    def file(self, path: Path) -> None:
        """Check a file as `check_output_file`, with its errors."""
        self._can_be_written(path, check_output_file(path), 0)

    def _can_be_written(self, path: Path, free: int, num_bytes: int) -> None:
        need = f", about {size_in_words(num_bytes)} needed" if num_bytes else ""
        self._lines.append(f"output: {path} can be written, {size_in_words(free)} free{need}")

    def costs(self, config: Any) -> None:
        """Check that `costs` of an engine cover the block lengths; raises UsageError."""
        from paceline.measure.engine_costs import read_costs

        path = getattr(config, "costs", None)
        if path is None:
            return
        costs = read_costs(path)
        gammas = getattr(config, "gammas", None) or config.block_lengths
        costs.usable(gammas, config.concurrency)
        self._lines.append(f"costs: {path}, of {costs}")

    def training_output(self, config: Any, model: ModelFacts | None) -> None:
        """Check the disk space for the checkpoints of a training run; raises StorageError."""
        moments = 2 if config.optimizer.kind == "adamw" else 0
        count = 0 if model is None else model.num_parameters
        copies = (config.checkpoints.keep + 1) * (1 + moments) + 1
        self.output(config.output, FLOAT32_BYTES * count * copies)

    def end(self, *, dry_run: bool, as_json: bool = False) -> None:
        """With `dry_run`, describe the models, print the collected lines and exit."""
        if not dry_run:
            return
        from paceline.cli.inspect import show
        from paceline.export.model_report import describe, trained_text

        found = [describe(path, header) for path, header in self._headers.items()]
        if self._example is not None:
            shown = [[trained_text(*self._example)], *([] for _ in found[1:])]
            found = [
                each.model_copy(update={"examples": examples})
                for each, examples in zip(found, shown, strict=True)
            ]
        if as_json:
            models = [each.model_dump(mode="json") for each in found]
            checked = {"dry_run": True, "models": models, "checks": self._lines}
            echo(json.dumps(checked, indent=2))
            raise typer.Exit
        for each in found:
            stdout.print(f"{'model':<20} {each.path}")
            show(each)
        for line in self._lines:
            stdout.print(line)
        stdout.print("These checks passed. Nothing was run.")
        raise typer.Exit


def first_records(corpus: CorpusConfig, count: int) -> Iterable[Record]:
    """The first records of a corpus, at most `count`."""
    if corpus.path.lower().endswith((".txt", ".jsonl")):
        return itertools.islice(stream_records(corpus), count)
    limit = min(corpus.limit or count, count)
    return read_records(corpus.model_copy(update={"limit": limit}))
