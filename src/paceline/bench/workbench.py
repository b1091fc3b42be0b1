"""What all cells of a bench share: models, task, examples; and the names that cells go by."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from pydantic import Field

from paceline.bench.grid import Grid
from paceline.bench.schema import SCHEMA_VERSION, digest
from paceline.data.tokens import encode
from paceline.errors import ContextLengthError
from paceline.measure.pair import ModelsConfig, Pair, load_models
from paceline.progress import Progress, silent
from paceline.records import stamps
from paceline.tasks import TaskChoice

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.decode.strategies import DecodingConfig
    from paceline.tasks import Task, TaskExample


class BenchConfig(ModelsConfig):
    """What to compare, on which task.

    Attributes:
        output: The run directory.
        num_examples: How many examples of the task's test split every cell answers, after
            `skip_examples` that stay unseen.
        num_timed: How many of these, evenly spread, the target alone answers beside each cell;
            None: all. Speed is that of these.
        max_seconds: Begin no cells later than this; the rest is for the next start.
        full_vocabulary: The draft proposes all tokens, whatever list it has, as in an engine.
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
    """The models and the examples that all cells share.

    `timed`: the examples that the target alone answers beside each cell. `context`: digest of all this.
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
        """What the cell's row is found by."""
        return cell_key(self.context, cell)


def prepare(
    config: BenchConfig, progress: Progress = silent, pair: Pair | None = None
) -> Workbench:
    """Load both models, unless they are given, and the examples.

    Raises:
        UsageError: a model or the task cannot be used, or an example does not fit the context.
    """
    progress("loading", 0, 1)
    pair = pair or load_models(config, full_vocabulary=config.full_vocabulary)
    wanted = config.skip_examples + config.num_examples
    examples = config.task.examples("test", wanted, config.seed)[config.skip_examples :]
    prompts = [_prompt(example, pair, config) for example in examples]
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


def _prompt(example: TaskExample, pair: Pair, config: BenchConfig) -> list[int]:
    tokens, _ = encode(example.record, pair.tokenizer)
    limit = config.max_prompt_tokens
    if limit is not None and len(tokens) > limit:
        raise ContextLengthError(
            f"{example.record.where} has {len(tokens)} tokens, more than max_prompt_tokens {limit}; "
            "raise it, or ask the task for shorter examples"
        )
    return tokens


def bench_context(config: BenchConfig) -> str:
    """What all cells share; the grid, the place and the time given do not change a row.

    Models are known by their files' sizes and times: one that is trained on is another model.
    """
    left = {"grid", "output", "max_seconds"}
    if not config.full_vocabulary:  # rows of before there was this key are found again
        left.add("full_vocabulary")
    shared = config.model_dump(mode="json", exclude=left)
    models = [stamps(config.target), stamps(config.draft)]
    versions = config.task.versions()
    return digest(SCHEMA_VERSION, shared, models, versions, torch.get_num_threads())


def cell_key(context: str, cell: DecodingConfig) -> str:
    """What a row is found by."""
    return digest(context, cell.model_dump(mode="json"))
