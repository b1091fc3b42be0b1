"""Run a grid: every cell on every example, the target alone timed beside it.

Rows are appended to `results.jsonl` as cells end. A bench that is started again skips the cells that
have a row and tries failed ones anew; a cell that fails is recorded, and the others go on.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from paceline.bench.prediction import predict, rows_of_the_target, write_predictions
from paceline.bench.schema import Baseline, ExampleRow, ResultRow, read_row
from paceline.bench.workbench import BenchConfig, Workbench, bench_context, cell_key, prepare
from paceline.decode.result import count_blocks
from paceline.decode.strategies import Autoregressive, DecodingConfig, build_decoder
from paceline.errors import ContextLengthError, PacelineError, StorageError
from paceline.measure.latency import time_request
from paceline.progress import Progress, silent
from paceline.records import RunDirectory, append_jsonl, read_jsonl

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from paceline.decode.decoder import Decoder

_WARM_UP_TOKENS = 8


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
    cells = config.grid.cells()
    context = bench_context(config)
    done = {row.key for row in read_rows(run.path, context) if row.status == "done"}
    missing = [cell for cell in cells if cell_key(context, cell) not in done]
    run.write_manifest(config)
    if missing:
        work = prepare(config, progress)
        missing = run_cells(work, missing, run.path, config.max_seconds, progress)
        answered = rows_of_the_target(read_rows(run.path, context))
        write_predictions(run.path, predict(work, answered, cells, progress))
    return Progressed(read_rows(run.path, context), len(missing))


def run_cells(
    work: Workbench,
    cells: Sequence[DecodingConfig],
    folder: Path,
    max_seconds: float | None = None,
    progress: Progress = silent,
) -> list[DecodingConfig]:
    """Run cells in order, a row for each. -> the cells that there was no time for."""
    started = time.monotonic()
    for number, cell in enumerate(cells):
        if max_seconds is not None and time.monotonic() - started > max_seconds:
            return list(cells[number:])
        progress("cells", number, len(cells), cell.strategy.strategy)
        append_jsonl(folder / "results.jsonl", run_cell(work, cell).model_dump(mode="json"))
    progress("cells", len(cells), len(cells))
    return []


def run_cell(work: Workbench, cell: DecodingConfig) -> ResultRow:
    """Answer every example; what goes wrong becomes the row's error."""
    row = ResultRow(
        key=work.key_of(cell),
        context=work.context,
        decoding=cell,
        metric=work.task.metric,
        status="done",
    )
    try:
        examples = _answer_all(work, cell)
    except (PacelineError, RuntimeError, AssertionError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        return row.model_copy(update={"status": "failed", "error": reason})
    return row.model_copy(update={"examples": tuple(examples)})


def _answer_all(work: Workbench, cell: DecodingConfig) -> list[ExampleRow]:
    method = build_decoder(cell, *work.pair)
    alone = cell.model_copy(update={"strategy": Autoregressive()})
    baseline = build_decoder(alone, *work.pair)
    for decoder in (method, baseline):
        decoder.generate([work.prompts[0]], min(_WARM_UP_TOKENS, work.max_new_tokens), work.seed)
    return [_answer(work, number, method, baseline) for number in range(len(work.examples))]


def _answer(work: Workbench, number: int, method: Decoder, baseline: Decoder) -> ExampleRow:
    """One example; whoever goes first changes from one to the next."""
    prompt = work.prompts[number]
    room = method.room(prompt)
    if room is not None and room < work.max_new_tokens:
        raise ContextLengthError(
            f"example {number} leaves room for {room} tokens of max_new_tokens "
            f"{work.max_new_tokens}; lower it, or max_prompt_tokens"
        )
    decoders = {"method": method}
    if number in work.timed:
        decoders = {"baseline": baseline, **decoders}
    order = list(decoders) if number % 2 else list(reversed(decoders))
    found = {
        name: time_request(decoders[name], prompt, work.max_new_tokens, work.seed + number)
        for name in order
    }
    first_s, all_s, blocks = found["method"]
    tokens = [token for block in blocks for token in block.tokens]
    stats = count_blocks(blocks)
    beside = None
    if "baseline" in found:
        base_first_s, base_s, base_blocks = found["baseline"]
        count = sum(len(block.tokens) for block in base_blocks)
        beside = Baseline(seconds=base_s, first_seconds=base_first_s, num_tokens=count)
    return ExampleRow(
        tokens=tuple(tokens),
        score=_score(work, number, tokens),
        seconds=all_s,
        first_seconds=first_s,
        baseline=beside,
        num_target_calls=stats.num_target_calls,
        num_drafted=stats.num_drafted,
        num_examined=stats.num_examined,
        num_rejected=stats.num_recovered,
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
