"""Run a grid: every cell on every example, the target alone timed beside it.

Eight cells and the target take turns, example by example and every time in another order, so that
what the machine does meanwhile falls on all. Rows are appended to `results.jsonl` when they end. A
bench that is started again skips the cells that have a row and tries failed ones anew; a cell that
fails is recorded, and the others go on.
"""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, NamedTuple

import torch

from paceline.bench.prediction import add_predictions, cells_to_predict, predict
from paceline.bench.schema import Baseline, ExampleRow, ResultRow, read_row
from paceline.bench.workbench import BenchConfig, Workbench, bench_context, cell_key, prepare
from paceline.decode.result import count_blocks
from paceline.decode.strategies import Autoregressive, DecodingConfig, build_decoder
from paceline.errors import ContextLengthError, PacelineError, StorageError
from paceline.measure.latency import time_request, warm_up
from paceline.progress import Progress, silent
from paceline.records import RunDirectory, append_jsonl, read_jsonl
from paceline.rng import named_generator

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from paceline.decode.decoder import Decoder

# Cells that take turns: more of them share a slow minute, and more are lost when a bench is killed.
_TOGETHER = 8


class Progressed(NamedTuple):
    """How far a bench is: rows so far, and cells that were left for want of time."""

    rows: list[ResultRow]
    num_left: int


def bench(config: BenchConfig, progress: Progress = silent) -> Progressed:
    """Run the cells that have no row yet.

    Raises:
        UsageError: a model or the task cannot be used.
        StorageError: rows cannot be written; those that were stay.
    """
    run = RunDirectory(config.output)
    if run.path.exists() and not run.path.is_dir():
        raise StorageError(f"output {run.path} is a file; choose a directory")
    run.check_kind(config)
    with run.alone():
        return _bench(config, run, progress)


def _bench(config: BenchConfig, run: RunDirectory, progress: Progress) -> Progressed:
    cells = config.grid.cells()
    context = bench_context(config)
    missing = unfinished(cells, context, read_rows(run.path, context))
    work = prepare(config, progress) if missing else None
    # not before the models are there: a report names those of the manifest
    run.write_manifest(config, context=context)
    if work is not None:
        missing = run_cells(work, missing, run.path, config.max_seconds, progress)
    rows = read_rows(run.path, context)
    unpredicted = cells_to_predict(run.path, rows)
    if unpredicted:
        found = predict(work or prepare(config, progress), rows, unpredicted, progress)
        add_predictions(run.path, found)
    return Progressed(without_dropped(rows, cells), len(missing))


def without_dropped(rows: Sequence[ResultRow], cells: Sequence[DecodingConfig]) -> list[ResultRow]:
    """The rows but for those that failed and are asked for no more."""
    return [row for row in rows if row.status == "done" or row.decoding in cells]


def unfinished(
    cells: Sequence[DecodingConfig], context: str, rows: Sequence[ResultRow]
) -> list[DecodingConfig]:
    """The cells that have no row, or only one that says why they failed."""
    done = {row.key for row in rows if row.status == "done"}
    return [cell for cell in cells if cell_key(context, cell) not in done]


def run_cells(
    work: Workbench,
    cells: Sequence[DecodingConfig],
    folder: Path,
    max_seconds: float | None = None,
    progress: Progress = silent,
) -> list[DecodingConfig]:
    """Run cells in order, a few together, a row for each. -> the cells that there was no time for."""
    started = time.monotonic()
    for number, together in groups(cells):
        if max_seconds is not None and time.monotonic() - started > max_seconds:
            return list(cells[number:])

        def told(part: float, done: int = number, size: int = len(together)) -> None:
            progress("cells", done + part * size, len(cells))

        for row in run_together(work, together, told):
            append_jsonl(folder / "results.jsonl", row.model_dump(mode="json"))
    progress("cells", len(cells), len(cells))
    return []


def groups(cells: Sequence[DecodingConfig]) -> Iterator[tuple[int, list[DecodingConfig]]]:
    """Cells that run together, one sampler each, with the number of those before them."""
    number = 0
    for _, alike in itertools.groupby(cells, key=lambda cell: cell.sampling):
        same = list(alike)
        for start in range(0, len(same), _TOGETHER):
            together = same[start : start + _TOGETHER]
            yield number, together
            number += len(together)


def run_together(
    work: Workbench, cells: Sequence[DecodingConfig], told: Callable[[float], None]
) -> list[ResultRow]:
    """Answer every example with each cell in turn, beside the target alone.

    So the machine's slow minutes fall on all of them. A cell in which something goes wrong ends there;
    the others go on.
    """
    running = [_Cell(work, cell) for cell in cells]
    alone = DecodingConfig(strategy=Autoregressive(), sampling=cells[0].sampling)
    baseline = build_decoder(alone, *work.pair)
    warm_up(baseline, work.prompts, work.max_new_tokens, work.seed)
    order = named_generator(work.seed, "turns", cells[0].model_dump_json())
    for number in range(len(work.examples)):
        beside = None
        for place in torch.randperm(len(running) + 1, generator=order).tolist():
            if place < len(running):
                running[place].answer(number)
            elif number in work.timed:
                beside = _time_alone(work, baseline, number)
        for cell in running:
            cell.stand_beside(beside)
        told((number + 1) / len(work.examples))
    return [cell.row() for cell in running]


class _Cell:
    """One cell on its way through the examples."""

    def __init__(self, work: Workbench, decoding: DecodingConfig) -> None:
        self._work = work
        self._decoding = decoding
        self._decoder: Decoder | None = None
        self._examples: list[ExampleRow] = []
        self._error: str | None = None

    def answer(self, number: int) -> None:
        """Answer one example, unless an earlier one failed."""
        if self._error is not None:
            return
        try:
            decoder = self._decoder or self._start()
            self._examples.append(_answer(self._work, number, decoder))
        except (PacelineError, RuntimeError, AssertionError) as error:
            self._error = " ".join(str(error).split()) or type(error).__name__

    def stand_beside(self, baseline: Baseline | None) -> None:
        """The target alone on the example that was just answered."""
        if self._error is None:
            self._examples[-1] = self._examples[-1].model_copy(update={"baseline": baseline})

    def row(self) -> ResultRow:
        """What came of it."""
        failed = self._error is not None
        return ResultRow(
            key=self._work.key_of(self._decoding),
            context=self._work.context,
            decoding=self._decoding,
            metric=self._work.task.metric,
            status="failed" if failed else "done",
            error=self._error,
            examples=() if failed else tuple(self._examples),
        )

    def _start(self) -> Decoder:
        work = self._work
        decoder = self._decoder = build_decoder(self._decoding, *work.pair)
        warm_up(decoder, work.prompts, work.max_new_tokens, work.seed)
        return decoder


def _time_alone(work: Workbench, baseline: Decoder, number: int) -> Baseline:
    first_s, all_s, blocks = time_request(
        baseline, work.prompts[number], work.max_new_tokens, work.seed + number
    )
    count = sum(len(block.tokens) for block in blocks)
    return Baseline(seconds=all_s, first_seconds=first_s, num_tokens=count)


def _answer(work: Workbench, number: int, method: Decoder) -> ExampleRow:
    prompt = work.prompts[number]
    room = method.room(prompt)
    if room is not None and room < work.max_new_tokens:
        raise ContextLengthError(
            f"example {number} has {len(prompt):,} tokens and max_new_tokens is {work.max_new_tokens}, but "
            f"{method.context_in_words()}; lower max_new_tokens, or take shorter examples"
        )
    first_s, all_s, blocks = time_request(method, prompt, work.max_new_tokens, work.seed + number)
    tokens = [token for block in blocks for token in block.tokens]
    stats = count_blocks(blocks)
    return ExampleRow(
        tokens=tuple(tokens),
        score=_score(work, number, tokens),
        seconds=all_s,
        first_seconds=first_s,
        baseline=None,
        num_target_calls=stats.num_target_calls,
        num_drafted=stats.num_drafted,
        num_examined=stats.num_examined,
        num_rejected=stats.num_recovered,
        num_first_tokens=len(blocks[0].tokens),
        num_prefill_tokens=stats.num_prefill_tokens,
    )


def _score(work: Workbench, number: int, tokens: Sequence[int]) -> float | None:
    if work.task.metric is None:
        return None
    answer = work.pair.tokenizer.decode(list(tokens), skip_special_tokens=True)
    assert isinstance(answer, str)
    return work.task.score(work.examples[number], answer)


def read_rows(folder: Path, context: str | None = None) -> list[ResultRow]:
    """The newest row of each cell, of this context or (None) of the newest one.

    Raises:
        UsageError: a row is of another version or malformed.
    """
    path = folder / "results.jsonl"
    rows = [
        read_row(values, f"{path} row {number}")
        for number, values in enumerate(read_jsonl(path), start=1)
    ]
    if context is None and rows:
        context = rows[-1].context
    return list({row.key: row for row in rows if row.context == context}.values())
