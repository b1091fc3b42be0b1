"""Loads models, task and examples, which all cells of a bench share, and computes cell keys."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from pydantic import Field

from paceline.bench.grid import Grid
from paceline.bench.schema import SCHEMA_VERSION, digest
from paceline.data.tokens import encode, encode_prompts
from paceline.errors import ContextLengthError
from paceline.measure.pair import ModelsConfig, Pair, load_models
from paceline.progress import Progress, silent
from paceline.records import stamps
from paceline.tasks import TaskChoice
from paceline.tasks.base import examples_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.decode.strategies import DecodingConfig
    from paceline.tasks import Task, TaskExample


class BenchConfig(ModelsConfig):
    """Configuration of `bench`.

    Attributes:
        output: Run directory; resumes if it exists.
        num_examples: Number of examples of the task's test split, after `skip_examples`.
        num_timed: Number of examples, evenly spaced, on which speed is measured; None: all.
        max_seconds: Start no more cells after this time; a restarted bench runs the others.
        full_vocabulary: The draft proposes from the full vocabulary, even if it has a reduced one.
    """

    task: TaskChoice
    grid: Grid = Grid()
    output: Path
    num_examples: int = Field(default=64, ge=1)
    skip_examples: int = Field(default=0, ge=0)
    num_timed: int | None = Field(default=None, ge=1)
    max_seconds: float | None = Field(default=None, gt=0)
    full_vocabulary: bool = False


@dataclass(frozen=True)
class Workbench:
    """The models and examples that all cells share.

    Attributes:
        timed: Indices of the examples that the target alone answers, too.
        context: Digest of all this.
    """

    pair: Pair
    task: Task
    examples: Sequence[TaskExample]
    prompts: list[list[int]]
    max_new_tokens: int
    seed: int
    timed: frozenset[int]
    context: str

    def key_of(self, cell: DecodingConfig) -> str:
        """Key of the cell's row."""
        return cell_key(self.context, cell)


def prepare(
    config: BenchConfig, progress: Progress = silent, pair: Pair | None = None
) -> Workbench:
    """Load the examples, and both models unless `pair` is given.

    Raises:
        UsageError: a model or the task cannot be used, or an example does not fit the context.
    """
    progress("loading", 0, 1)
    pair = pair or load_models(config, full_vocabulary=config.full_vocabulary)
    wanted = config.skip_examples + config.num_examples
    examples = examples_of(config.task, "test", wanted, config.seed)[config.skip_examples :]
    prompts = _prompts(examples, pair, config)
    progress("loading", 1, 1)
    count = len(examples)
    timed = min(config.num_timed or count, count)
    return Workbench(
        pair=pair,
        task=config.task,
        examples=examples,
        prompts=prompts,
        max_new_tokens=config.max_new_tokens,
        seed=config.seed,
        timed=frozenset(number * count // timed for number in range(timed)),
        context=bench_context(config),
    )


def _prompts(examples: Sequence[TaskExample], pair: Pair, config: BenchConfig) -> list[list[int]]:
    if pair.target.decoder_prompt is None:
        return [_whole(example, pair, config) for example in examples]
    records = [example.record for example in examples]
    limit = config.max_prompt_tokens
    return encode_prompts(records, pair.tokenizer, max_tokens=limit, encoder=True)


def _whole(example: TaskExample, pair: Pair, config: BenchConfig) -> list[int]:
    """The prompt of a decoder-only model; truncation would remove its examples or its question."""
    tokens, _ = encode(example.record, pair.tokenizer)
    limit = config.max_prompt_tokens
    if limit is not None and len(tokens) > limit:
        raise ContextLengthError(
            f"{example.record.where} has {len(tokens)} tokens, more than max_prompt_tokens "
            f"{limit}; raise it, or use shorter examples"
        )
    return tokens


def bench_context(config: BenchConfig) -> str:
    """Digest of everything that all cells share, including sizes and times of the models' files."""
    excluded = {"grid", "output", "max_seconds"}
    if not config.full_vocabulary:  # for rows older than this key
        excluded.add("full_vocabulary")
    shared = config.model_dump(mode="json", exclude=excluded)
    models = [stamps(config.target), stamps(config.draft)]
    versions = config.task.versions()
    return digest(SCHEMA_VERSION, shared, models, versions, torch.get_num_threads())


def cell_key(context: str, cell: DecodingConfig) -> str:
    """Key of a cell's row."""
    return digest(context, cell.model_dump(mode="json"))
