"""Runs every cell of a grid on every example, interleaved with the target alone.

Up to eight cells and the target alone answer each timed example in random order, so that variation
in machine load affects all. The other examples can be answered in batches. Rows are added to
`rows.jsonl`. A failed cell is recorded, and the others continue. A restarted bench skips finished
cells and repeats failed ones.
"""

from __future__ import annotations

import itertools
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch

from paceline.bench.answers import complete, keep, key_of, read_rows
from paceline.bench.served_cells import serve_cells
from paceline.bench.workbench import (
    BenchConfig,
    Cell,
    Examples,
    bench_context,
    cell_key,
    examples_of,
    prepare,
)
from paceline.data.input_checks import checked
from paceline.decode import AutoregressiveDecoder
from paceline.decode.strategies import build_decoder
from paceline.errors import ContextLengthError
from paceline.measure.latency import time_request, warm_up
from paceline.models.loading import load_tokenizer
from paceline.progress import Progress, silent
from paceline.records import RunDirectory
from paceline.rng import named_generator

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from paceline.bench.answers import Answer
    from paceline.core.stats import TimedAnswer, Times
    from paceline.decode.decoder import Decoder
    from paceline.decode.strategies import DecodingConfig
    from paceline.results.row import Row

# Number of interleaved cells. With more, more are lost if a bench is killed.
_GROUP_SIZE = 8
_BATCHES_AT_ONCE = 8  # per progress report


class Progressed(NamedTuple):
    """State of a bench: rows, and number of cells without one."""

    rows: list[Row]
    num_left: int


def bench(config: BenchConfig, progress: Progress = silent) -> Progressed:
    """Run the cells without a row."""
    checked(config)
    run = RunDirectory(config.output)
    before = run.read_manifest() or {}
    run.resumed = before if before.get("context") == bench_context(config) else None
    with run.alone():
        return _bench(config, run, progress)


def _bench(config: BenchConfig, run: RunDirectory, progress: Progress) -> Progressed:
    cells = config.cells()
    context = bench_context(config)
    done = finished(cells, context, read_rows(run.path, context))
    missing = [cell for cell in cells if cell not in done]
    served = config.engine is not None
    work = prepare(config, progress) if missing and not served else None
    # after loading the models: a report names those of the manifest
    run.write_manifest(config, context=context)
    if work is not None:
        run_cells(work, missing, run.path, progress)
        missing = []
    elif missing:
        prompts = examples_of(config, load_tokenizer(config.target))
        missing = serve_cells(config, prompts, missing, read_rows(run.path, context), progress)
    complete(run.path)
    rows = read_rows(run.path, context)
    keys = {cell_key(context, cell) for cell in cells}  # a failed cell may be asked for no more
    rows = [row for row in rows if not row.error or key_of(row) in keys]
    return Progressed(rows, len(missing))


def finished(
    cells: Sequence[DecodingConfig], context: str, rows: Sequence[Row]
) -> list[DecodingConfig]:
    """The cells that were measured."""
    done = {key_of(row) for row in rows if not row.error}
    return [cell for cell in cells if cell_key(context, cell) in done]


def run_cells(
    work: Examples,
    cells: Sequence[DecodingConfig],
    folder: Path,
    progress: Progress = silent,
) -> None:
    """Run cells in groups, and append their rows."""
    for number, group in groups(cells):

        def report(part: float, done: int = number, size: int = len(group)) -> None:
            progress("cells", done + part * size, len(cells))

        ended = run_together(work, group, report)
        rows = [cell.row() for cell in ended]
        keep(folder, rows, {key: texts for cell in ended for key, texts in cell.texts.items()})
    progress("cells", len(cells), len(cells))


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
    work: Examples, cells: Sequence[DecodingConfig], report: Callable[[float], None]
) -> list[Cell]:
    """Answer every example with each cell.

    A cell stops at its first error; the others continue. `report` gets the finished fraction.
    """
    running = [Cell(work, cell, _answerer(work, cell)) for cell in cells]
    count = len(work.examples)
    batched = [number for number in range(count) if number not in work.timed]
    if work.config.batch_size == 1:
        batched = []
    single = sorted(set(range(count)) - set(batched))
    for done in _answer_interleaved(work, cells, running, single):
        report(done / count)
    size = _BATCHES_AT_ONCE * work.config.batch_size
    for start in range(0, len(batched), size):
        numbers = batched[start : start + size]
        for index, cell in enumerate(running, start=1):
            cell.answer(*numbers)
            report((len(single) + start + len(numbers) * index / len(running)) / count)
    return running


def _answer_interleaved(
    work: Examples,
    cells: Sequence[DecodingConfig],
    running: Sequence[Cell],
    numbers: Sequence[int],
) -> Iterator[int]:
    """Answer these examples one by one, each with all cells and, if timed, the target alone.

    Yields the number of answered examples.
    """
    alone = AutoregressiveDecoder(work.pair.target, cells[0].sampling)
    warm_up(alone, work.prompts, work.max_new_tokens, work.config.seed)
    order = named_generator(work.config.seed, "turns", cells[0].model_dump_json())
    for done, number in enumerate(numbers, start=1):
        times: Times | None = None
        for index in torch.randperm(len(running) + 1, generator=order).tolist():
            if index < len(running):
                running[index].answer(number)
            elif number in work.timed:
                times = _time(work, alone, number).times
        for cell in running:
            cell.set_alone(number, times)
        yield done


def _answerer(
    work: Examples, decoding: DecodingConfig
) -> Callable[[Sequence[int]], Sequence[Answer]]:
    """Answers examples with a decoder, which is built and warmed up at the first one."""

    @cache
    def decoder() -> Decoder:
        built = build_decoder(decoding, *work.pair)
        warm_up(built, work.prompts, work.max_new_tokens, work.config.seed)
        return built

    def answer(numbers: Sequence[int]) -> Sequence[Answer]:
        """One example is timed; several are answered together, in float32 with the same tokens."""
        for number in numbers:
            _check_room(work, number, decoder())
        if len(numbers) == 1:
            return [_time(work, decoder(), numbers[0])]
        prompts = [work.prompts[number] for number in numbers]
        seeds, size = [work.seed_of(number) for number in numbers], work.config.batch_size
        return decoder().generate(prompts, work.max_new_tokens, seeds, batch_size=size)

    return answer


def _check_room(work: Examples, number: int, decoder: Decoder) -> None:
    prompt = work.prompts[number]
    free = decoder.remaining_context(prompt)
    if free is not None and free < work.max_new_tokens:
        raise ContextLengthError(
            f"example {number} has {len(prompt):,} tokens and max_new_tokens is "
            f"{work.max_new_tokens}, but {decoder.context_in_words}; lower max_new_tokens, or "
            "use shorter examples"
        )


def _time(work: Examples, decoder: Decoder, number: int) -> TimedAnswer:
    prompt, seed = work.prompts[number], work.seed_of(number)
    return time_request(decoder, prompt, work.max_new_tokens, seed)
