"""Runs the cells of a grid in vLLM: a server for each, which answers the examples one by one.

At each temperature, a server of the target alone answers first; its seconds are the baseline of the
cells. Only one server runs at a time: on a CPU, an idle vLLM slows another one down. Each cell has
one start of its server, so intervals of its rows leave out the variation between starts.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from pydantic import TypeAdapter

from paceline.bench.answers import keep, key_of
from paceline.bench.workbench import Cell
from paceline.core.stats import TimedAnswer, Times
from paceline.decode.strategies import Autoregressive, DecodingConfig, Speculative
from paceline.engines.contract import Drafting, Request, Setup
from paceline.engines.process import check_choice, started
from paceline.engines.vllm import BLOCKS, VllmServer
from paceline.errors import EngineError
from paceline.extensions import RuleChoice
from paceline.models.inspection import inspect_model
from paceline.progress import silent

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from paceline.bench.workbench import BenchConfig, Examples
    from paceline.core.sampling import SamplingParams
    from paceline.progress import Progress
    from paceline.results.row import Row

    Baselines = Mapping[int, Times]

_RULE: TypeAdapter[RuleChoice] = TypeAdapter(RuleChoice)
_OPTIONS = ("--no-enable-prefix-caching",)  # the warm-up and earlier cells ask the same prompts


def serve_cells(
    config: BenchConfig,
    prompts: Examples,
    cells: Sequence[DecodingConfig],
    done: Sequence[Row],
    progress: Progress = silent,
) -> list[DecodingConfig]:
    """Run cells and append their rows. -> the cells that are left.

    A cell whose server does not start is recorded as failed, and the others continue; without the
    target alone, the cells of its temperature are left.

    Args:
        config: Of the bench, with an engine.
        prompts: The prompts.
        cells: In the order of the grid: the target alone before the others of its temperature.
        done: Finished rows of the bench.
        progress: Progress callback.
    """
    assert config.engine is not None, "the caller checks it"
    check_choice(config.engine)
    known = {key_of(row): row for row in done if not row.error}
    left: list[DecodingConfig] = []
    for number, cell in enumerate(cells):
        alone = prompts.key_of(DecodingConfig(strategy=Autoregressive(), sampling=cell.sampling))
        if alone not in known and not _is_alone(cell):
            left.append(cell)
            continue
        baselines = _baselines(known[alone], prompts) if alone in known else {}
        ended = _run(config, prompts, cell, baselines, progress)
        row = ended.row()
        if not row.error:
            known[key_of(row)] = row
        keep(config.output, [row], ended.texts)
        progress("cells", number + 1, len(cells))
    return left


def _is_alone(decoding: DecodingConfig) -> bool:
    return isinstance(decoding.strategy, Autoregressive)


def _baselines(row: Row, prompts: Examples) -> Baselines:
    """Times of the timed answers of the target alone."""
    parts = (row.sums[name] for name in ("seconds", "first_seconds", "tokens", "first_tokens"))
    times = enumerate(zip(*parts, strict=True))
    return {
        number: Times(seconds or 0.0, first or 0.0, int(tokens or 0), int(num_first or 0))
        for number, (seconds, first, tokens, num_first) in times
        if number in prompts.timed
    }


def _run(
    config: BenchConfig,
    prompts: Examples,
    decoding: DecodingConfig,
    baselines: Baselines,
    progress: Progress,
) -> Cell:
    """The cell, answered. The target alone is asked twice: its first answer is its own baseline."""
    try:
        with _server(config, prompts, decoding, progress) as server:
            ask = partial(_ask, server, prompts, decoding.sampling)
            ask(0)
            cell = Cell(prompts, decoding, lambda numbers: list(map(ask, numbers)))
            for number in range(len(prompts.examples)):
                baseline = baselines.get(number)
                if _is_alone(decoding) and number in prompts.timed:
                    baseline = ask(number).times
                cell.answer(number)
                cell.set_alone(number, baseline)
                if cell.has_failed:
                    break
                progress("examples", number + 1, len(prompts.examples))
            return cell
    except EngineError as error:
        failed = Cell(prompts, decoding, lambda _: [])
        failed.fail(error)
        return failed


def _ask(
    server: VllmServer, prompts: Examples, sampling: SamplingParams, number: int
) -> TimedAnswer:
    """The answer to an example."""
    prompt, most = prompts.prompts[number], prompts.max_new_tokens
    request = Request(prompt, most, sampling, prompts.seed_of(number))
    return server.timed(request)


@contextmanager
def _server(
    config: BenchConfig, prompts: Examples, decoding: DecodingConfig, progress: Progress
) -> Iterator[VllmServer]:
    """A server that decodes as configured."""
    choice, strategy = config.engine, decoding.strategy
    assert choice is not None, "checked by serve_cells"
    options = (*choice.options, *_OPTIONS)
    drafting, extra = None, 0
    if isinstance(strategy, Speculative):
        gamma = strategy.num_speculative_tokens
        rule = _RULE.dump_json(strategy.rule).decode()
        drafting = Drafting(choice.draft or config.draft, gamma, "probabilistic", rule)
        options, extra = (*options, *BLOCKS), gamma + 1
    length = max(map(len, prompts.prompts)) + prompts.max_new_tokens + extra
    limit = inspect_model(config.target).max_length
    length = length if limit is None else min(length, limit)
    setup = Setup(choice.target or config.target, drafting, length, config.dtype)
    with started(choice.model_copy(update={"options": options}), setup, progress) as engine:
        assert isinstance(engine, VllmServer), "the configuration allows no other"
        yield engine
