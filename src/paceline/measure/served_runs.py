"""Starts the engine with and without the draft in turn, and sends it the requests."""

from __future__ import annotations

import math
import time
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, NamedTuple

from paceline.engines.commands import Drafting, Room, Setup
from paceline.engines.contract import untested
from paceline.engines.process import client_of, connect, started
from paceline.errors import EngineError
from paceline.measure.served_costs import StepTimer
from paceline.measure.starts import Starts, spread_of, turns
from paceline.models.inspection import inspect_model
from paceline.models.loading import model_directory

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from paceline.engines.commands import EngineChoice
    from paceline.engines.contract import Conventions, Engine, Request, Served
    from paceline.measure.pair import Pair
    from paceline.measure.served_figures import ServedConfig
    from paceline.progress import Progress


class Answers(NamedTuple):
    """Answers of one configuration of an engine, with its name, version, conventions and notes.

    Attributes:
        by_start: For each start, the numbers of its requests and the answers.
    """

    name: str
    version: str
    conventions: Conventions
    notes: tuple[str, ...]
    by_start: list[dict[int, Served]]

    @property
    def served(self) -> list[Served]:
        """In the order of the requests."""
        found = {number: one for start in self.by_start for number, one in start.items()}
        return [found[number] for number in sorted(found)]

    def logs(self) -> list[float]:
        """Logarithm of the seconds per target pass of each start.

        Passes vary less with the text than tokens do.
        """
        return [
            math.log(
                sum(one.seconds for one in start.values()) / sum(map(_num_passes, start.values()))
            )
            for start in self.by_start
        ]


def _num_passes(one: Served) -> int:
    """Target passes, that of the prompt included."""
    return len(one.tokens) if one.blocks is None else 1 + one.blocks.num_blocks


class Runs(NamedTuple):
    """Answers without the draft, None if not configured, and with it.

    Attributes:
        plain: Without the draft.
        drafted: With the draft.
        steps: Timed steps; None if not configured.
        starts: Starts of the engine.
    """

    plain: Answers | None
    drafted: Answers
    steps: StepTimer | None
    starts: Starts


def run_engine(
    config: ServedConfig, pair: Pair | None, requests: Sequence[Request], progress: Progress
) -> Runs:
    """Send every request with the draft, and without it, and time the steps, as configured.

    A server is started `starts` times in each configuration, in the order A B B A, and answers its
    part of the requests and rounds in each start. `pair`: for transformers, which runs in this
    process and answers each request with and without the draft in turn.

    Raises:
        EngineError: The engine did not answer, or did not draft.
    """
    number = _num_starts(config, len(requests))
    steps = None
    if config.write_costs is not None:
        steps = StepTimer(config.write_costs, requests, progress, number)
    if pair is not None:
        answers = _in_process(config, pair, requests, steps, progress)
        seconds = 0.0
    else:
        answers, seconds = _in_servers(config, requests, steps, number, progress)
    logs = {} if steps is None else steps.logs()
    for gamma, one in answers.items():
        logs.setdefault(gamma, []).append(one.logs())
    drafted = answers[config.num_speculative_tokens]
    return Runs(answers.get(0), drafted, steps, spread_of(logs, number, seconds))


def _num_starts(config: ServedConfig, num_requests: int) -> int:
    """Starts of each configuration: one if nothing is timed, or the engine cannot be restarted."""
    costs, choice = config.write_costs, config.engine
    if choice.engine == "transformers" or choice.url is not None:
        return 1
    if costs is None:
        return min(config.starts, num_requests) if config.plain else 1
    return min(config.starts, num_requests, costs.num_rounds)


def _in_servers(
    config: ServedConfig,
    requests: Sequence[Request],
    steps: StepTimer | None,
    number: int,
    progress: Progress,
) -> tuple[dict[int, Answers], float]:
    """Answers by gamma, 0 without the draft, and the seconds until servers were ready."""
    asked = {config.num_speculative_tokens}
    if config.plain and config.engine.url is None:  # a running server always drafts
        asked.add(0)
    timed = set[int]() if steps is None else {0, *steps.gammas}
    order = sorted(asked | timed, key=lambda gamma: (gamma not in asked, gamma == 0, gamma))
    answers: dict[int, Answers] = {}
    launches = _Launches(len(order) * number, progress)
    for start, gamma in turns(order, number):
        with _server(config, gamma, requests, launches) as engine:
            if gamma in asked:
                part = range(start, len(requests), number)
                known = [answers[gamma]] if gamma in answers else None
                (answers[gamma],) = _serve(
                    [engine], requests, part, config, progress, known, drafts=gamma > 0
                )
            if steps is not None and gamma in timed:
                steps.time({gamma: engine}, start)
    return answers, launches.seconds


def _in_process(
    config: ServedConfig,
    pair: Pair,
    requests: Sequence[Request],
    steps: StepTimer | None,
    progress: Progress,
) -> dict[int, Answers]:
    from paceline.engines.assisted import Transformers

    def engine_of(gamma: int) -> Engine:
        return Transformers(pair.target, pair.draft if gamma else None, gamma)

    gammas = [config.num_speculative_tokens, *([0] if config.plain else [])]
    engines = [engine_of(one) for one in gammas]
    answers = _serve(engines, requests, range(len(requests)), config, progress)
    if steps is not None:
        steps.time({one: engine_of(one) for one in (0, *steps.gammas)})
    return dict(zip(gammas, answers, strict=True))


def _serve(
    engines: Sequence[Engine],
    requests: Sequence[Request],
    part: Sequence[int],
    config: ServedConfig,
    progress: Progress,
    known: list[Answers] | None = None,
    *,
    drafts: bool = True,
) -> list[Answers]:
    """Send these requests to every engine, interleaved, after a warm-up request.

    `known`: answers of earlier starts, which are extended. `drafts`: the first engine must draft.
    """
    warm = [engine.serve(requests[part[0]]) for engine in engines]
    if drafts:
        _check_drafted(config, warm[0])
    found = known or [_without_answers(engine) for engine in engines]
    for answers in found:
        answers.by_start.append({})
    for done, number in enumerate(part, 1):
        for engine, answers in zip(engines, found, strict=True):
            answers.by_start[-1][number] = engine.serve(requests[number])
        progress("requests", done, len(part))
    return found


def _without_answers(engine: Engine) -> Answers:
    note = untested(engine)
    notes = () if note is None else (note,)
    return Answers(engine.name, engine.version, engine.conventions, notes, [])


class _Launches:
    """Progress of servers that start, with the seconds until they are ready."""

    def __init__(self, total: int, progress: Progress) -> None:
        self._total, self._progress = total, progress
        self._number, self._begun = 0, 0.0
        self.seconds = 0.0

    @contextmanager
    def started(self, choice: EngineChoice, setup: Setup) -> Generator[Engine]:
        self._begun = time.monotonic()
        with started(choice, setup, self._waiting) as engine:
            self.seconds += time.monotonic() - self._begun
            self._number += 1
            self._report(self.seconds)
            yield engine

    def _waiting(self, stage: str, done: float, total: float, note: str = "") -> None:
        del stage, done, total, note
        self._report(self.seconds + time.monotonic() - self._begun)

    def _report(self, seconds: float) -> None:
        self._progress("starting servers", self._number, self._total, f"{seconds:.0f} s")


@contextmanager
def _server(
    config: ServedConfig, gamma: int, requests: Sequence[Request], launches: _Launches
) -> Generator[Engine]:
    """The running server, or one started with this gamma; 0: without a draft."""
    choice = config.engine
    if choice.url is not None:
        with closing(client_of(choice)) as client:
            yield connect(choice, client)
        return
    drafting = Drafting(choice.draft or config.draft, gamma, config.drafting) if gamma else None
    sizes = config.write_costs.batch_sizes if config.write_costs else (1,)
    room = Room(_context_length(config, requests), max(sizes))
    setup = Setup(choice.target or config.target, drafting, room, config.dtype)
    with launches.started(choice, setup) as engine:
        yield engine


def _context_length(config: ServedConfig, requests: Sequence[Request]) -> int:
    """Tokens of the longest request and one more block, at most the target's context length."""
    longest = max(len(request.prompt) for request in requests) + config.max_new_tokens
    limit = inspect_model(model_directory(config.target)).max_length
    others = config.write_costs.gammas if config.write_costs else ()
    wanted = longest + max([config.num_speculative_tokens, *others]) + 1
    return wanted if limit is None else min(wanted, limit)


def _check_drafted(config: ServedConfig, answer: Served) -> None:
    if answer.blocks is not None and answer.blocks.num_drafted:
        return
    advice = {
        "llamacpp": "start llama-server with --spec-type draft-simple, and read its log: it "
        "ignores drafts whose tokenizer it finds incompatible",
        "vllm": "start it with --speculative-config",
        "sglang": "start it with --speculative-algorithm STANDALONE",
        "transformers": "use longer prompts or raise max_new_tokens",
    }[config.engine.engine]
    raise EngineError(
        f"{config.engine.engine} served without the draft: nothing was drafted; {advice}"
    )
