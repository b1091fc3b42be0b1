"""Runs the cells of a grid in vLLM: a server for each, which answers the examples one by one.

At each temperature, a server of the target alone answers first; its seconds are the baseline of the
cells. Only one server runs at a time: on a CPU, an idle vLLM slows another one down. Each cell has
one start of its server, so intervals of its rows leave out the variation between starts.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pydantic import TypeAdapter

from paceline.bench.cell import Cell, failed_row
from paceline.bench.schema import Baseline, ExampleRow
from paceline.decode.strategies import Autoregressive, Speculative
from paceline.engines.commands import Drafting, Room, Setup, check_draft_path
from paceline.engines.contract import Request
from paceline.engines.process import check_choice, started
from paceline.engines.servers import BLOCKS, VllmServer, examined, stream_answer
from paceline.errors import EngineError
from paceline.extensions import RuleChoice
from paceline.measure.engine_costs import costs_of_blocks
from paceline.progress import silent
from paceline.records import append_jsonl

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from paceline.bench.schema import ResultRow
    from paceline.bench.workbench import BenchConfig, PromptSet
    from paceline.core.sampling import SamplingParams
    from paceline.decode.strategies import DecodingConfig
    from paceline.engines.servers import StreamedAnswer
    from paceline.measure.latency import PassCosts
    from paceline.progress import Progress

    Baselines = Mapping[int, Baseline]

_RULE: TypeAdapter[RuleChoice] = TypeAdapter(RuleChoice)
_OPTIONS = ("--no-enable-prefix-caching",)  # the warm-up and earlier cells ask the same prompts


def serve_cells(
    config: BenchConfig,
    prompts: PromptSet,
    cells: Sequence[DecodingConfig],
    done: Sequence[ResultRow],
    progress: Progress = silent,
) -> list[DecodingConfig]:
    """Run cells and append their rows. -> the cells left because of `max_seconds`.

    A cell whose server does not start is recorded as failed, and the others continue; without the
    target alone, the cells of its temperature are left.

    Args:
        config: Of the bench, with an engine.
        prompts: The prompts.
        cells: In the order of the grid: the target alone before the others of its temperature.
        done: Finished rows of the bench.
        progress: Progress callback.

    Raises:
        UsageError: vLLM is not installed, or would misread the draft's path.
        StorageError: Rows cannot be written.
    """
    assert config.engine is not None, "the caller checks it"
    check_choice(config.engine)
    check_draft_path("vllm", config.engine.draft or config.draft)
    begun = time.monotonic()
    baselines = {
        row.decoding.sampling: _baselines(row, prompts) for row in done if _is_alone(row.decoding)
    }
    left: list[DecodingConfig] = []
    for number, cell in enumerate(cells):
        if config.max_seconds is not None and time.monotonic() - begun > config.max_seconds:
            return [*left, *cells[number:]]
        known = baselines.get(cell.sampling)
        if known is None and not _is_alone(cell):
            left.append(cell)
            continue
        row = _run(config, prompts, cell, known or {}, progress)
        if _is_alone(cell) and row.status == "done":
            baselines[cell.sampling] = _baselines(row, prompts)
        append_jsonl(config.output / "results.jsonl", row.model_dump(mode="json"))
        progress("cells", number + 1, len(cells))
    return left


def _is_alone(decoding: DecodingConfig) -> bool:
    return isinstance(decoding.strategy, Autoregressive)


def _baselines(row: ResultRow, prompts: PromptSet) -> Baselines:
    return {
        number: Baseline(
            seconds=one.seconds, first_seconds=one.first_seconds, num_tokens=len(one.tokens)
        )
        for number, one in enumerate(row.examples)
        if number in prompts.timed
    }


def _run(
    config: BenchConfig,
    prompts: PromptSet,
    decoding: DecodingConfig,
    baselines: Baselines,
    progress: Progress,
) -> ResultRow:
    """The cell's row. The target alone is asked twice: its first answer is its own baseline."""
    sampling = decoding.sampling
    try:
        with _server(config, prompts, decoding, progress) as server:
            _ask(server, prompts, 0, sampling)
            cell = Cell(
                prompts,
                decoding,
                lambda numbers: [_row(server, prompts, number, sampling) for number in numbers],
            )
            for number in range(len(prompts.examples)):
                baseline = baselines.get(number)
                if _is_alone(decoding) and number in prompts.timed:
                    baseline = _baseline(_ask(server, prompts, number, sampling))
                cell.answer(number)
                cell.set_baseline(number, baseline)
                if cell.has_failed:
                    break
                progress("examples", number + 1, len(prompts.examples))
            return cell.row()
    except EngineError as error:
        return failed_row(prompts, decoding, error)


@contextmanager
def _server(
    config: BenchConfig, prompts: PromptSet, decoding: DecodingConfig, progress: Progress
) -> Iterator[VllmServer]:
    """A server that decodes as configured."""
    choice, strategy = config.engine, decoding.strategy
    assert choice is not None, "checked by serve_cells"
    options = (*choice.options, *_OPTIONS)
    drafting, extra = None, 0
    if isinstance(strategy, Speculative):
        gamma = strategy.num_speculative_tokens
        # the lossless rule, too: on a CPU vLLM's own sampler reads unset values (issue 55005)
        rule = _RULE.dump_json(strategy.rule).decode()
        drafting = Drafting(choice.draft or config.draft, gamma, "probabilistic", rule)
        options, extra = (*options, *BLOCKS), gamma + 1
    length = max(map(len, prompts.prompts)) + prompts.max_new_tokens + extra
    setup = Setup(choice.target or config.target, drafting, Room(length), config.dtype)
    with started(choice.model_copy(update={"options": options}), setup, progress) as engine:
        assert isinstance(engine, VllmServer), "the configuration allows no other"
        yield engine


def _ask(
    server: VllmServer, prompts: PromptSet, number: int, sampling: SamplingParams
) -> StreamedAnswer:
    prompt, most = prompts.prompts[number], prompts.max_new_tokens
    return stream_answer(
        server.client, server.model, Request(prompt, most, sampling, prompts.seed_of(number))
    )


def _baseline(answer: StreamedAnswer) -> Baseline:
    return Baseline(
        seconds=answer.seconds,
        first_seconds=answer.first_seconds,
        num_tokens=len(answer.tokens),
    )


def _row(
    server: VllmServer, prompts: PromptSet, number: int, sampling: SamplingParams
) -> ExampleRow:
    answer = _ask(server, prompts, number, sampling)
    counts = examined(answer.blocks, len(answer.tokens))
    return ExampleRow(
        tokens=tuple(answer.tokens),
        score=prompts.score(number, answer.tokens),
        seconds=answer.seconds,
        first_seconds=answer.first_seconds,
        baseline=None,
        num_target_calls=counts.num_passes,
        num_drafted=counts.num_drafted,
        num_examined=counts.num_examined,
        num_rejected=counts.num_rejected,
        num_first_tokens=answer.num_first_tokens,
        num_prefill_tokens=1,
    )


def costs_from(rows: Sequence[ResultRow], most: int, gammas: Sequence[int]) -> PassCosts:
    """Seconds of vLLM's steps in these rows; `most`: a block has no more drafts than this."""
    alone = [example for row in rows if _is_alone(row.decoding) for example in row.examples]
    block_s = {gamma: _seconds_per_pass(_of_gamma(rows, gamma, most)) for gamma in gammas}
    return costs_of_blocks(_seconds_per_pass(alone), block_s)


def _of_gamma(rows: Sequence[ResultRow], gamma: int, most: int) -> list[ExampleRow]:
    """Answers of all rules with blocks of this length."""
    return [
        example
        for row in rows
        if isinstance(row.decoding.strategy, Speculative)
        and min(row.decoding.strategy.num_speculative_tokens, most) == gamma
        for example in row.examples
    ]


def _seconds_per_pass(examples: Sequence[ExampleRow]) -> float:
    """Mean seconds of a target pass, with the prompt's; vLLM may send first tokens late."""
    num_passes = sum(1 + one.num_target_calls for one in examples)
    return sum(one.seconds for one in examples) / max(1, num_passes)
