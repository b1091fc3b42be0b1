"""Starts the engine with and without the draft in turn, and sends it the requests."""

from __future__ import annotations

import time
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Annotated, NamedTuple

from pydantic import Field, model_validator

from paceline.config import Options
from paceline.engines.assisted import Transformers
from paceline.engines.commands import EngineChoice
from paceline.engines.contract import Drafting, DraftSampling, Setup
from paceline.engines.kinds import names_of
from paceline.engines.process import client_of, connect, started
from paceline.errors import EngineError
from paceline.measure.engine_costs import Starts, StepTimer, WriteCosts
from paceline.measure.pair import PairConfig
from paceline.models.inspection import inspect_model
from paceline.models.loading import model_directory

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from paceline.core.sampling import SamplingParams
    from paceline.data.input_checks import InputChecks
    from paceline.engines.contract import Engine, Request, Served
    from paceline.measure.pair import Pair
    from paceline.progress import Progress


class ServedConfig(PairConfig):
    """Configuration of `measure --engine`.

    Attributes:
        engine: The engine, by name or with its settings.
        num_prompts: Number of requests.
        num_speculative_tokens: Draft tokens per block (gamma). Must match a server that is already
            running.
        drafting: How vLLM samples draft tokens. llama-server and SGLang draft greedily;
            transformers drafts at the square of the request's temperature.
        plain: Also measure without the draft, unless the server is already running.
        starts: Number of times that each server is started, with and without the draft in turn. The
            requests and rounds are divided among the starts. With 3 or more, intervals of seconds
            are over starts; with fewer, they leave out the variation between starts. Does not apply
            to transformers and running servers.
        write_costs: Also time the engine's steps, for `measure --costs` and `tune --costs`.
    """

    engine: Annotated[EngineChoice, Options("engine", "url")]
    num_prompts: int = Field(default=64, ge=1)
    max_new_tokens: int = Field(default=64, ge=3)
    num_speculative_tokens: int = Field(default=3, ge=1)
    drafting: DraftSampling = "greedy"
    plain: bool = True
    starts: int = Field(default=2, ge=1)
    write_costs: Annotated[WriteCosts | None, Options(write_costs="file")] = None

    def check(self, checks: InputChecks) -> None:
        """Check the inputs; raises UsageError."""
        checks.engine(self.engine)
        checks.device(self.device)
        models = checks.pair(self.target, self.draft)
        self.note_defaults(checks)
        self.check_prompts(checks, models, new_tokens=self.max_new_tokens)
        if self.write_costs is not None:
            checks.file(self.write_costs.file)

    @model_validator(mode="after")
    def _fits_the_engine(self) -> ServedConfig:
        kind = self.engine.kind
        if self.drafting == "probabilistic" and not kind.samples_drafts:
            others = names_of(lambda other: other.samples_drafts)
            raise ValueError(
                f"drafting=probabilistic is for {others}, not {kind.name}; leave it out"
            )
        if self.draft_sampling is not None:
            raise ValueError(
                "draft_sampling does not apply to engines; set drafting=greedy or probabilistic"
            )
        if self.sampling.repetition_penalty != 1:
            raise ValueError(
                "predictions do not support repetition_penalty, because engines apply it to the "
                "target only or to part of the text; leave repetition_penalty out"
            )
        costs = self.write_costs
        if costs is not None and self.engine.url is not None:
            raise ValueError(
                "write_costs starts the engine with and without the draft, so it cannot use a "
                "running server; leave url out"
            )
        if costs is not None and kind.in_process and set(costs.batch_sizes) != {1}:
            raise ValueError(
                f"{kind.name} assists one text at a time; leave write_costs.batch_sizes at [1]"
            )
        if kind.in_process and self.sampling.top_p < 1:
            raise ValueError(
                f"predictions do not support top_p with {kind.name}, which applies it twice to the "
                "draft; use top_k or neither"
            )
        return self

    @property
    def proposals(self) -> SamplingParams:
        """Sampling parameters of the engine's drafts."""
        return self.engine.kind.proposals(self.drafting, self.sampling)

    @property
    def answered_gammas(self) -> list[int]:
        """Drafted tokens per block of the configurations that answer the requests; 0: no draft."""
        always_drafts = not self.plain or self.engine.url is not None
        return [self.num_speculative_tokens, *([] if always_drafts else [0])]

    def num_starts(self, num_requests: int) -> int:
        """Starts of each server: one if nothing is timed, or the engine cannot be restarted."""
        costs, choice = self.write_costs, self.engine
        if choice.kind.in_process or choice.url is not None:
            return 1
        if costs is None:
            return min(self.starts, num_requests) if self.plain else 1
        return min(self.starts, num_requests, costs.num_rounds)


class Answers(NamedTuple):
    """Answers of one configuration of an engine.

    Attributes:
        by_start: For each start, the numbers of its requests and the answers.
    """

    engine: Engine
    by_start: list[dict[int, Served]]

    @property
    def served(self) -> list[Served]:
        """In the order of the requests."""
        answers = {number: answer for start in self.by_start for number, answer in start.items()}
        return [answers[number] for number in sorted(answers)]

    def seconds_per(self, count: Callable[[Served], int]) -> list[float]:
        """Seconds of all answers of each start / the sum of their counts."""
        starts = [start.values() for start in self.by_start]
        return [sum(one.seconds for one in start) / sum(map(count, start)) for start in starts]


def num_passes(answer: Served) -> int:
    """Target passes, that of the prompt included; they vary less with the text than tokens do."""
    blocks = answer.blocks and answer.blocks.num_blocks
    return 1 + blocks if blocks else len(answer.tokens)


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

    A server is started `starts` times in each configuration, in the order A B A B, and answers its
    part of the requests and rounds in each start. `pair`: for transformers, which runs in this
    process and answers each request with and without the draft in turn.

    Raises:
        EngineError: The engine did not answer, or did not draft.
    """
    runner = _Runner(config, requests, progress)
    if pair is None:
        runner.run_servers()
    else:
        runner.run_in_process(pair)
    steps, answers = runner.steps, runner.answers
    by_start = [of_gamma.seconds_per(num_passes) for of_gamma in answers.values()]
    if steps is not None:
        by_start += [cost.seconds_by_start for cost in steps.costs()]
    spread = max(max(seconds) / min(seconds) for seconds in by_start) - 1
    starts = Starts(number=runner.num_starts, spread=spread, seconds=runner.ready_s)
    return Runs(answers.get(0), answers[config.num_speculative_tokens], steps, starts)


class _Runner:
    """Sends the requests to engines, and times their steps.

    Attributes:
        answers: By gamma; 0 without the draft.
        steps: Timed steps; None if not configured.
        ready_s: Seconds until the servers were ready, in all.
    """

    def __init__(
        self, config: ServedConfig, requests: Sequence[Request], progress: Progress
    ) -> None:
        self._config, self._requests, self._progress = config, requests, progress
        self.num_starts = config.num_starts(len(requests))
        self.answers: dict[int, Answers] = {}
        self.steps: StepTimer | None = None
        if config.write_costs is not None:
            self.steps = StepTimer(config.write_costs, requests, progress, self.num_starts)
        self.ready_s = 0.0
        self._num_ready = self._num_servers = 0

    def run_servers(self) -> None:
        """Start each server `num_starts` times; it answers its part of the requests."""
        answering = set(self._config.answered_gammas)
        timed = set[int]() if self.steps is None else {0, *self.steps.gammas}
        gammas = sorted(
            answering | timed, key=lambda gamma: (gamma not in answering, gamma == 0, gamma)
        )
        self._num_servers = len(gammas) * self.num_starts
        for start in range(self.num_starts):
            part = range(start, len(self._requests), self.num_starts)
            for gamma in gammas:
                with self._server(gamma) as engine:
                    if gamma in answering:
                        self._serve({gamma: engine}, part)
                    if self.steps is not None and gamma in timed:
                        self.steps.time({gamma: engine}, start)

    def run_in_process(self, pair: Pair) -> None:
        """Answer each request with and without the draft in turn."""

        def engine_of(gamma: int) -> Engine:
            return Transformers(pair.target, pair.draft if gamma else None, gamma)

        engines = {gamma: engine_of(gamma) for gamma in self._config.answered_gammas}
        self._serve(engines, range(len(self._requests)))
        if self.steps is not None:
            self.steps.time({gamma: engine_of(gamma) for gamma in (0, *self.steps.gammas)})

    def _serve(self, engines: dict[int, Engine], part: Sequence[int]) -> None:
        """Send these requests to every engine, interleaved, after a warm-up request."""
        for gamma, engine in engines.items():
            warm = engine.serve(self._requests[part[0]])
            if gamma:
                self._check_drafted(warm)
            self.answers.setdefault(gamma, Answers(engine, [])).by_start.append({})
        for done, number in enumerate(part, 1):
            for gamma, engine in engines.items():
                answer = engine.serve(self._requests[number])
                self.answers[gamma].by_start[-1][number] = answer
            self._progress("requests", done, len(part))

    def _check_drafted(self, answer: Served) -> None:
        if len(answer.tokens) < 2:  # the prefill gave all of it
            return
        if answer.blocks is not None and answer.blocks.num_drafted:
            return
        name = self._config.engine.engine
        raise EngineError(
            f"{name} served without the draft: nothing was drafted; start it with the draft, and "
            "read its log"
        )

    @contextmanager
    def _server(self, gamma: int) -> Generator[Engine]:
        """The running server, or one started with this gamma; 0: without a draft."""
        config, choice = self._config, self._config.engine
        if choice.url is not None:
            with closing(client_of(choice)) as client:
                yield connect(choice, client)
            return
        drafting = None
        if gamma:
            drafting = Drafting(choice.draft or config.draft, gamma, config.drafting)
        sizes = config.write_costs.batch_sizes if config.write_costs else (1,)
        target, length = choice.target or config.target, self._context_length()
        setup = Setup(target, drafting, length, config.dtype, batch_size=max(sizes))
        begun = time.monotonic()

        def report(stage: str, done: float, total: float, note: str = "") -> None:
            del stage, done, total, note
            self._report_servers(self.ready_s + time.monotonic() - begun)

        with started(choice, setup, report) as engine:
            self.ready_s += time.monotonic() - begun
            self._num_ready += 1
            self._report_servers(self.ready_s)
            yield engine

    def _report_servers(self, seconds: float) -> None:
        note = f"{seconds:.0f} s"
        self._progress("starting servers", self._num_ready, self._num_servers, note)

    def _context_length(self) -> int:
        """Tokens of the longest request and one more block, at most the target's context length."""
        config = self._config
        longest = max(len(request.prompt) for request in self._requests) + config.max_new_tokens
        limit = inspect_model(model_directory(config.target)).max_length
        others = config.write_costs.gammas if config.write_costs else ()
        length = longest + max([config.num_speculative_tokens, *others]) + 1
        return length if limit is None else min(length, limit)
