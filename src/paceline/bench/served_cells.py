"""Runs the cells of a grid in vLLM: a server for each, beside a server of the target alone.

Each example goes to both servers in random order, one request at a time, so that variation in
machine load affects both.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from pydantic import TypeAdapter

from paceline.bench.cell import Cell
from paceline.bench.schema import Baseline, ExampleRow
from paceline.core.rules import Lossless, RuleChoice
from paceline.decode.strategies import Speculative
from paceline.engines.commands import Drafting, Room, check_draft_path
from paceline.engines.contract import Request
from paceline.engines.engine_choice import Setup, check_choice
from paceline.engines.start import started
from paceline.engines.vllm import VllmServer
from paceline.engines.vllm_stream import BLOCKS, examined, stream_answer
from paceline.measure.latency import PassCosts
from paceline.progress import silent
from paceline.records import append_jsonl
from paceline.rng import named_generator

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline.bench.schema import ResultRow
    from paceline.bench.workbench import BenchConfig, PromptSet
    from paceline.core.sampling import SamplingParams
    from paceline.decode.strategies import DecodingConfig
    from paceline.engines.vllm_stream import StreamedAnswer
    from paceline.progress import Progress

_RULE: TypeAdapter[RuleChoice] = TypeAdapter(RuleChoice)


def serve_cells(
    config: BenchConfig,
    prompts: PromptSet,
    cells: Sequence[DecodingConfig],
    progress: Progress = silent,
) -> list[DecodingConfig]:
    """Run cells and append their rows. -> the cells left because of `max_seconds`.

    Raises:
        UsageError: vLLM is not installed, or would misread the draft's path.
        EngineError: A server does not start, or has no plugin of Paceline.
        StorageError: Rows cannot be written.
    """
    assert config.engine is not None, "the caller checks it"
    check_choice(config.engine)
    check_draft_path("vllm", config.engine.draft or config.draft)
    begun = time.monotonic()
    with _server(config, prompts, None, progress) as alone:
        for number, cell in enumerate(cells):
            if config.max_seconds is not None and time.monotonic() - begun > config.max_seconds:
                return list(cells[number:])
            row = _run(config, prompts, cell, alone, progress)
            append_jsonl(config.output / "results.jsonl", row.model_dump(mode="json"))
            progress("cells", number + 1, len(cells))
    return []


def _run(
    config: BenchConfig,
    prompts: PromptSet,
    decoding: DecodingConfig,
    alone: VllmServer,
    progress: Progress,
) -> ResultRow:
    sampling = decoding.sampling
    with _server(config, prompts, decoding, progress, alone) as server:
        for warmed in dict.fromkeys((alone, server)):
            _ask(warmed, prompts, 0, sampling)
        cell = Cell(prompts, decoding, lambda number: _row(server, prompts, number, sampling))
        order = named_generator(prompts.seed, "turns", decoding.model_dump_json())
        for number in range(len(prompts.examples)):
            baseline = None
            for is_cell in torch.randperm(2, generator=order).tolist():
                if is_cell:
                    cell.answer(number)
                elif number in prompts.timed:
                    baseline = _baseline(_ask(alone, prompts, number, sampling))
            cell.set_baseline(baseline)
            if cell.has_failed:
                break
            progress("examples", number + 1, len(prompts.examples))
        return cell.row()


@contextmanager
def _server(
    config: BenchConfig,
    prompts: PromptSet,
    decoding: DecodingConfig | None,
    progress: Progress,
    alone: VllmServer | None = None,
) -> Iterator[VllmServer]:
    """A server that decodes as configured; None: the target alone, which `alone` is."""
    strategy = None if decoding is None else decoding.strategy
    if alone is not None and not isinstance(strategy, Speculative):
        yield alone
        return
    choice = config.engine
    assert choice is not None, "checked by serve_cells"
    drafting, extra = None, 0
    if isinstance(strategy, Speculative):
        gamma = strategy.num_speculative_tokens
        rule = None if strategy.rule == Lossless() else _RULE.dump_json(strategy.rule).decode()
        drafting = Drafting(choice.draft or config.draft, gamma, "probabilistic", rule)
        extra = gamma + 1
        choice = choice.model_copy(update={"options": (*choice.options, *BLOCKS)})
    length = max(map(len, prompts.prompts)) + prompts.max_new_tokens + extra
    setup = Setup(choice.target or config.target, drafting, Room(length), config.dtype)
    with started(choice, setup, progress) as engine:
        assert isinstance(engine, VllmServer), "the configuration allows no other"
        yield engine


def _ask(
    server: VllmServer, prompts: PromptSet, number: int, sampling: SamplingParams
) -> StreamedAnswer:
    prompt, most = prompts.prompts[number], prompts.max_new_tokens
    return stream_answer(
        server.client, server.model, Request(prompt, most, sampling, prompts.seed + number)
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


def costs_from(rows: Sequence[ResultRow], gammas: Sequence[int]) -> PassCosts:
    """Seconds of vLLM's steps in these rows, as inputs of the speedup formulas.

    vLLM does not report the draft's part of a block's seconds, so a block counts as one target pass
    over one token, and the rest as drafting.
    """
    alone = [example.baseline for row in rows for example in row.examples if example.baseline]
    seconds = sum(one.seconds - one.first_seconds for one in alone)
    pass_s = seconds / max(1, sum(one.num_tokens - 1 for one in alone))
    block_s = {gamma: _block_s(rows, gamma) for gamma in gammas}
    drafting_s = {gamma: max(0.0, block_s[gamma] - pass_s) for gamma in gammas}
    least = min(gammas)
    return PassCosts(
        target_pass_s=pass_s,
        draft_pass_s=drafting_s[least] / least,
        drafting_s=drafting_s,
        judging_s={gamma: block_s[gamma] - drafting_s[gamma] for gamma in gammas},
    )


def _block_s(rows: Sequence[ResultRow], gamma: int) -> float:
    """Mean seconds of a block after the first token, over all rules."""
    same = [
        example
        for row in rows
        if isinstance(row.decoding.strategy, Speculative)
        and row.decoding.strategy.num_speculative_tokens == gamma
        for example in row.examples
    ]
    seconds = sum(one.seconds - one.first_seconds for one in same)
    return seconds / max(1, sum(one.num_target_calls for one in same))
