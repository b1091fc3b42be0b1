"""Runs every cell of a grid on every example, interleaved with the target alone.

Up to eight cells and the target alone answer each timed example in random order, so that variation
in machine load affects all. The other examples can be answered in batches. Rows are appended to
`results.jsonl`. A failed cell is recorded, and the others continue. A restarted bench skips
finished cells and repeats failed ones.
"""

from __future__ import annotations

import itertools
import time
from functools import cached_property, partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from paceline.bench.cell import Cell
from paceline.bench.prediction import add_predictions, cells_to_predict, predict
from paceline.bench.schema import Baseline, ExampleRow, ResultRow, read_row
from paceline.bench.served_cells import costs_from, serve_cells
from paceline.bench.workbench import (
    BenchConfig,
    Workbench,
    bench_context,
    bench_prompts,
    cell_key,
    prepare,
)
from paceline.data.input_checks import checked
from paceline.decode import AutoregressiveDecoder
from paceline.decode.strategies import build_decoder
from paceline.decode.text import count_blocks
from paceline.errors import ContextLengthError
from paceline.measure.latency import has_room, time_request, warm_up
from paceline.models.loading import load_tokenizer
from paceline.progress import Progress, silent
from paceline.records import RunDirectory, append_jsonl, read_jsonl
from paceline.rng import named_generator

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from paceline.core.sampling import SamplingParams
    from paceline.core.stats import DecodeStats
    from paceline.decode.decoder import Decoder
    from paceline.decode.strategies import DecodingConfig

# Number of interleaved cells. With more, more are lost if a bench is killed.
_GROUP_SIZE = 8
_BATCHES_AT_ONCE = 8  # per progress report


class Progressed(NamedTuple):
    """State of a bench: rows, and number of cells left because of `max_seconds`."""

    rows: list[ResultRow]
    num_left: int


def bench(config: BenchConfig, progress: Progress = silent) -> Progressed:
    """Run the cells without a row.

    Raises:
        UsageError: a model, the task or the output cannot be used.
        StorageError: rows cannot be written; rows written before are kept.
    """
    checked(config)
    run = RunDirectory(config.output)
    with run.alone():
        return _bench(config, run, progress)


def _bench(config: BenchConfig, run: RunDirectory, progress: Progress) -> Progressed:
    cells = config.grid.cells()
    context = bench_context(config)
    missing = unfinished(cells, context, read_rows(run.path, context))
    served = config.engine is not None
    work = prepare(config, progress) if missing and not served else None
    # after loading the models: a report names those of the manifest
    run.write_manifest(config, context=context)
    if work is not None:
        missing = run_cells(work, missing, run.path, config.max_seconds, progress)
    elif missing:
        prompts = bench_prompts(config, load_tokenizer(config.target))
        missing = serve_cells(config, prompts, missing, read_rows(run.path, context), progress)
    rows = read_rows(run.path, context)
    unpredicted = cells_to_predict(run.path, rows)
    if served:  # vLLM's drafts ignore top-k and top-p, so predictions would be of other drafts
        unpredicted = [cell for cell in unpredicted if _is_unfiltered(cell.sampling)]
    if unpredicted:
        passes = partial(costs_from, rows, config.max_new_tokens - 1) if served else None
        found = predict(work or prepare(config, progress), rows, unpredicted, progress, passes)
        add_predictions(run.path, found)
    return Progressed(without_dropped(rows, cells), len(missing))


def _is_unfiltered(sampling: SamplingParams) -> bool:
    return sampling.top_p == 1 and not sampling.top_k


def without_dropped(rows: Sequence[ResultRow], cells: Sequence[DecodingConfig]) -> list[ResultRow]:
    """The rows without failed ones whose cells are not in the grid any more."""
    return [row for row in rows if row.status == "done" or row.decoding in cells]


def unfinished(
    cells: Sequence[DecodingConfig], context: str, rows: Sequence[ResultRow]
) -> list[DecodingConfig]:
    """The cells without a row, or with the row of a failure."""
    done = {row.key for row in rows if row.status == "done"}
    return [cell for cell in cells if cell_key(context, cell) not in done]


def run_cells(
    work: Workbench,
    cells: Sequence[DecodingConfig],
    folder: Path,
    max_seconds: float | None = None,
    progress: Progress = silent,
) -> list[DecodingConfig]:
    """Run cells in groups, and append their rows. -> the cells left because of `max_seconds`."""
    started = time.monotonic()
    for number, group in groups(cells):
        if max_seconds is not None and time.monotonic() - started > max_seconds:
            return list(cells[number:])

        def report(part: float, done: int = number, size: int = len(group)) -> None:
            progress("cells", done + part * size, len(cells))

        for row in run_together(work, group, report):
            append_jsonl(folder / "results.jsonl", row.model_dump(mode="json"))
    progress("cells", len(cells), len(cells))
    return []


def groups(cells: Sequence[DecodingConfig]) -> Iterator[tuple[int, list[DecodingConfig]]]:
    """Groups of cells with equal sampling, each with the number of cells before it."""
    number = 0
    for _, group in itertools.groupby(cells, key=lambda cell: cell.sampling):
        same = list(group)
        for start in range(0, len(same), _GROUP_SIZE):
            part = same[start : start + _GROUP_SIZE]
            yield number, part
            number += len(part)


def run_together(
    work: Workbench, cells: Sequence[DecodingConfig], report: Callable[[float], None]
) -> list[ResultRow]:
    """Answer every example with each cell.

    A cell stops at its first error; the others continue. `report` gets the finished fraction.
    """
    running = [Cell(work, cell, _Answerer(work, cell)) for cell in cells]
    count = len(work.examples)
    batched = [number for number in range(count) if number not in work.timed]
    if work.batch_size == 1:
        batched = []
    single = sorted(set(range(count)) - set(batched))
    for done in _answer_interleaved(work, cells, running, single):
        report(done / count)
    size = _BATCHES_AT_ONCE * work.batch_size
    for start in range(0, len(batched), size):
        numbers = batched[start : start + size]
        for index, cell in enumerate(running, start=1):
            cell.answer(*numbers)
            report((len(single) + start + len(numbers) * index / len(running)) / count)
    return [cell.row() for cell in running]


def _answer_interleaved(
    work: Workbench,
    cells: Sequence[DecodingConfig],
    running: Sequence[Cell],
    numbers: Sequence[int],
) -> Iterator[int]:
    """Answer these examples one by one, each with all cells and, if timed, the models alone.

    Yields the number of answered examples.
    """
    sampling = cells[0].sampling
    alone = [AutoregressiveDecoder(work.pair.target, sampling)]
    if work.reference is not None:
        alone.append(AutoregressiveDecoder(work.reference, sampling))
    for decoder in alone:
        warm_up(decoder, work.prompts, work.max_new_tokens, work.seed)
    order = named_generator(work.seed, "turns", cells[0].model_dump_json())
    for done, number in enumerate(numbers, start=1):
        times: list[Baseline | None] = [None, None]  # of the target, of the reference
        for index in torch.randperm(len(running) + len(alone), generator=order).tolist():
            if index < len(running):
                running[index].answer(number)
            elif number in work.timed:
                place = index - len(running)
                times[place] = _time_alone(work, alone[place], number)
        for cell in running:
            cell.set_baseline(number, *times)
        yield done


class _Answerer:
    """Answers examples with a decoder, which is built and warmed up at the first one."""

    def __init__(self, work: Workbench, decoding: DecodingConfig) -> None:
        self._work = work
        self._decoding = decoding

    def __call__(self, numbers: Sequence[int]) -> list[ExampleRow]:
        for number in numbers:
            _check_room(self._work, number, self._decoder)
        if len(numbers) == 1:
            return [_answer(self._work, numbers[0], self._decoder)]
        return _answer_in_batches(self._work, numbers, self._decoder)

    @cached_property
    def _decoder(self) -> Decoder:
        decoder = build_decoder(self._decoding, *self._work.pair)
        warm_up(decoder, self._work.prompts, self._work.max_new_tokens, self._work.seed)
        return decoder


def _time_alone(work: Workbench, decoder: Decoder, number: int) -> Baseline:
    first_s, all_s, blocks = time_request(
        decoder, work.prompts[number], work.max_new_tokens, work.seed_of(number)
    )
    count = sum(len(block.tokens) for block in blocks)
    return Baseline(seconds=all_s, first_seconds=first_s, num_tokens=count)


def _check_room(work: Workbench, number: int, method: Decoder) -> None:
    prompt = work.prompts[number]
    if not has_room(method, prompt, work.max_new_tokens):
        raise ContextLengthError(
            f"example {number} has {len(prompt):,} tokens and max_new_tokens is "
            f"{work.max_new_tokens}, but {method.context_in_words()}; lower max_new_tokens, or use "
            "shorter examples"
        )


def _answer(work: Workbench, number: int, method: Decoder) -> ExampleRow:
    first_s, all_s, blocks = time_request(
        method, work.prompts[number], work.max_new_tokens, work.seed_of(number)
    )
    tokens = [token for block in blocks for token in block.tokens]
    row = _untimed_row(work, number, tokens, count_blocks(blocks))
    times = {"seconds": all_s, "first_seconds": first_s}
    return row.model_copy(update=times | {"num_first_tokens": len(blocks[0].tokens)})


def _answer_in_batches(
    work: Workbench, numbers: Sequence[int], method: Decoder
) -> list[ExampleRow]:
    """The tokens and counts of `_answer`, in float32, without times."""
    answers = method.generate(
        [work.prompts[number] for number in numbers],
        work.max_new_tokens,
        [work.seed_of(number) for number in numbers],
        batch_size=work.batch_size,
    )
    return [
        _untimed_row(work, number, answer.tokens, answer.stats)
        for number, answer in zip(numbers, answers, strict=True)
    ]


def _untimed_row(
    work: Workbench, number: int, tokens: Sequence[int], stats: DecodeStats
) -> ExampleRow:
    return ExampleRow(
        tokens=tuple(tokens),
        score=work.score(number, tokens),
        seconds=0.0,
        first_seconds=0.0,
        baseline=None,
        num_target_calls=stats.num_target_calls,
        num_drafted=stats.num_drafted,
        num_examined=stats.num_examined,
        num_rejected=stats.num_recovered,
        num_first_tokens=0,
        num_prefill_tokens=stats.num_prefill_tokens,
    )


def read_rows(folder: Path, context: str | None = None) -> list[ResultRow]:
    """The newest row of each cell with this context; None: the context of the newest row.

    Raises:
        UsageError: a row has another version or is malformed.
    """
    path = folder / "results.jsonl"
    rows = [
        read_row(values, f"{path} row {number}")
        for number, values in enumerate(read_jsonl(path), start=1)
    ]
    if context is None and rows:
        context = rows[-1].context
    return list({row.key: row for row in rows if row.context == context}.values())
