"""InputChecks of prompts, tasks and engine costs that several configurations share."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Protocol

from paceline.data.input_checks import InputChecks, first_records, note
from paceline.data.tokens import encode
from paceline.errors import ContextLengthError
from paceline.measure.engine_costs import read_costs
from paceline.measure.pair import after_skipped
from paceline.tasks import Code
from paceline.tasks.row_task import RowTask

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from paceline.data.prompts import CorpusConfig
    from paceline.measure.engine_costs import WithCosts
    from paceline.models.inspection import ModelFacts
    from paceline.tasks import Task


class Prompted(Protocol):
    """Settings that choose prompts."""

    @property
    def prompts(self) -> CorpusConfig: ...
    @property
    def num_prompts(self) -> int: ...
    @property
    def max_prompt_tokens(self) -> int | None: ...


def check_prompts(
    checks: InputChecks,
    config: Prompted,
    models: Iterable[ModelFacts],
    *,
    new_tokens: int,
    timed: tuple[int, int] = (0, 0),
    skip: int = 0,
) -> None:
    """Check that the prompts after `skip` and their `new_tokens` fit the models' context.

    `timed`: number of the first prompts that need another number of tokens, and this number.

    Raises:
        UsageError: there are no prompts after `skip`.
        PromptError: a prompt cannot be read; the message names the line.
        ContextLengthError: a prompt does not fit; the message names the line.
    """
    models = list(models)
    encoder = any(model.decoder_prompt is not None for model in models)
    limit = _least(model.max_length for model in models)
    source_limit = _least(model.max_source_length for model in models)
    tokenizer = next((m.tokenizer for m in models if m.tokenizer is not None), None)
    found = list(first_records(config.prompts, skip + config.num_prompts))
    records = after_skipped(found, skip, config.prompts.path)
    most, lengths, num_cut = config.max_prompt_tokens, list[int](), 0
    needs = itertools.chain(itertools.repeat(timed[1], timed[0]), itertools.repeat(new_tokens))
    for record, num_new in zip(records, needs, strict=False):
        if tokenizer is None:
            break
        length = len(encode(record, tokenizer)[0])
        if most is not None and length > most:
            num_cut += record.kind == "document"
            length = most
        if source_limit is not None and length > source_limit:
            raise ContextLengthError(
                f"{record.where} has {length:,} tokens, but the encoder holds {source_limit:,}; "
                "set max_prompt_tokens"
            )
        if limit is not None and not encoder and length + num_new > limit:
            raise ContextLengthError(
                f"{record.where} has {length:,} tokens and needs {num_new:,} more, but the "
                f"context holds {limit:,}; set max_prompt_tokens or lower max_new_tokens"
            )
        lengths.append(length)
    of = f" of {min(lengths)} to {max(lengths)} tokens" if lengths else ""
    checks.lines.append(f"prompts: {config.prompts.path}, {len(records)} prompts{of}")
    if num_cut:
        note(
            f"{num_cut} of {len(records)} texts are longer than max_prompt_tokens {most}; their "
            f"first {most} tokens are used as prompts"
        )


def _least(limits: Iterable[int | None]) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)


def check_task(checks: InputChecks, name: str, task: Task, count: int, seed: int) -> None:
    """Check the texts of a task, and that its scoring library is installed."""
    task.versions()
    if isinstance(task, RowTask | Code):  # read columns that other commands do not accept
        task.examples("test", count, seed)
        return
    for key in ("corpus", "train_corpus"):
        if (text := getattr(task, key, None)) is not None:
            checks.text(f"{name}.{key}", text)


def check_costs(checks: InputChecks, config: WithCosts, gammas: Sequence[int]) -> None:
    """Check that the costs of an engine, if there are any, cover the block lengths.

    Raises:
        UsageError: they do not, or the file cannot be used.
    """
    if config.costs is not None:
        costs = read_costs(config.costs)
        costs.usable(gammas, config.concurrency)
        checks.lines.append(f"costs: {config.costs}, of {costs}")
