"""Measures a draft in a serving engine, and compares the engine's counters with the prediction."""

from __future__ import annotations

from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from pydantic import Field, model_validator

from paceline.config import Options, Result, StrictModel
from paceline.core.bootstrap import Interval
from paceline.data.input_checks import checked
from paceline.engines.assisted import Transformers
from paceline.engines.commands import EngineChoice
from paceline.engines.contract import (
    Drafting,
    DraftSampling,
    Request,
    Setup,
    check_counts,
)
from paceline.engines.kinds import names_of
from paceline.engines.process import client_of, started
from paceline.environment import environment
from paceline.errors import EngineError, UsageError
from paceline.measure.acceptance import PairTexts, check_longest, score_texts
from paceline.measure.agreement import (
    Agreement,
    decide_agreement,
    predicted_counts,
    served_counts,
)
from paceline.measure.engine_costs import EngineCosts, StepTimer, WriteCosts, over_starts
from paceline.measure.pair import Pair, PairConfig, load_beside
from paceline.measure.verdict import Verdict, decide_served
from paceline.models import load_model
from paceline.models.hf.draft_vocabulary import is_baked
from paceline.models.inspection import inspect_model
from paceline.models.loading import fingerprint, load_tokenizer
from paceline.progress import Progress, silent
from paceline.records import atomic_write_text
from paceline.results.figures import FIGURES
from paceline.results.row import Row, Source

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from paceline.core.sampling import SamplingParams
    from paceline.data.input_checks import InputChecks
    from paceline.engines.contract import Engine, EngineClass, Served


class ServedConfig(PairConfig):
    """Configuration of `measure --engine`.

    Attributes:
        engine: The engine, by name or with its settings.
        num_prompts: Number of requests.
        num_speculative_tokens: Draft tokens per block (gamma). Must match a server that is already
            running.
        drafting: How vLLM samples draft tokens. llama-server and SGLang draft greedily;
            transformers drafts at the square of the request's temperature.
        starts: Number of times that each server is started, with and without the draft in turn. The
            requests and rounds are divided among the starts. With 3 or more, intervals of seconds
            are over starts; with fewer, they leave out the variation between starts. Does not apply
            to transformers and running servers.
        write_costs: Also time the engine's steps, for `measure --costs` and `tune --costs`.
    """

    engine: Annotated[EngineChoice, Options("engine", "url")]
    num_prompts: Annotated[int, Options()] = Field(default=64, ge=1)
    max_new_tokens: Annotated[int, Options()] = Field(default=64, ge=3)
    num_speculative_tokens: Annotated[int, Options()] = Field(default=3, ge=1)
    drafting: DraftSampling = "greedy"
    starts: int = Field(default=2, ge=1)
    write_costs: Annotated[WriteCosts | None, Options(write_costs="file")] = None

    def check(self, checks: InputChecks) -> None:
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
        if self.draft_sampling is not None or self.draft_weights != "auto":
            raise ValueError(
                "draft_sampling and draft_weights do not apply to engines; set "
                "drafting=greedy or probabilistic, and export the draft as it is to be served"
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
        return [self.num_speculative_tokens, *([] if self.engine.url is not None else [0])]

    def num_starts(self, num_requests: int) -> int:
        """Starts of each server: one if the engine cannot be restarted."""
        if self.engine.kind.in_process or self.engine.url is not None:
            return 1
        rounds = self.starts if self.write_costs is None else self.write_costs.num_rounds
        return min(self.starts, num_requests, rounds)


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

    @property
    def seconds_per_token(self) -> list[float]:
        """Of all answers of each start."""
        starts = [start.values() for start in self.by_start]
        return [sum(a.seconds for a in one) / sum(len(a.tokens) for a in one) for one in starts]


class Runs:
    """Sends the requests to engines, and times their steps.

    Attributes:
        answers: By gamma; 0 without the draft.
        steps: Timed steps; None if not configured.
        num_starts: Number of starts of each server.
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

    def run_servers(self) -> None:
        """Start each server `num_starts` times, in the order A B A B.

        In each start it answers a part of the requests, and its steps are timed in a part of the
        rounds, as configured.
        """
        answering = set(self._config.answered_gammas)
        timed = set[int]() if self.steps is None else {0, *self.steps.gammas}
        gammas = sorted(
            answering | timed, key=lambda gamma: (gamma not in answering, gamma == 0, gamma)
        )
        for start in range(self.num_starts):
            part = range(start, len(self._requests), self.num_starts)
            for gamma in gammas:
                with self._server(gamma) as engine:
                    if gamma in answering:
                        self._serve({gamma: engine}, part)
                    if self.steps is not None and gamma in timed:
                        self.steps.time({gamma: engine}, start)

    def run_in_process(self, pair: Pair) -> None:
        """Answer each request with and without the draft in turn: of transformers."""

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
                yield choice.server(client, choice.model)
            return
        drafting = None
        if gamma:
            path = choice.draft or config.draft
            at_once = config.parallel and choice.kind.drafts_at_once
            at_once = at_once and inspect_model(path).mask_token is not None
            drafting = Drafting(path, gamma, config.drafting, parallel=at_once)
        sizes = config.write_costs.batch_sizes if config.write_costs else (1,)
        target, length = choice.target or config.target, self._context_length()
        setup = Setup(target, drafting, length, config.dtype, batch_size=max(sizes))
        with started(choice, setup, self._progress) as engine:
            yield engine

    def _context_length(self) -> int:
        """Tokens of the longest request and one more block, at most the target's context length."""
        config = self._config
        longest = max(len(request.prompt) for request in self._requests) + config.max_new_tokens
        limit = inspect_model(config.target).max_length
        others = config.write_costs.gammas if config.write_costs else ()
        length = longest + max([config.num_speculative_tokens, *others]) + 1
        return length if limit is None else min(length, limit)


class ServedSpeed(StrictModel):
    """Whole requests with and without the draft.

    Attributes:
        speedup: Seconds per token without / with the draft, paired by prompt.
        speedup_by_start: Of each start; with 3 or more, the interval of `speedup` is over them.
        num_equal: Texts that are equal with and without; all at temperature 0 in exact arithmetic.
    """

    speedup: Interval
    speedup_by_start: list[float]
    plain_tokens_per_s: float
    speculative_tokens_per_s: float
    num_equal: int


class ServedMeasurement(Result):
    """Measured and predicted figures of an engine.

    Attributes:
        rows: With the setting `counts`: served, the engine's counters, or predicted, from the
            probabilities of both models over the engine's texts. Of either a row of all blocks, and
            a row per position in the block, if the engine reports it. A row with the setting
            `timed` has the requests with and without the draft. The units are the requests.
        speed: None if the engine was not measured without the draft.
        verdict: On the speedup; None without it.
        starts: Number of starts of each server.
        costs: Costs of the engine's steps if `write_costs` is set; `save_costs` writes them.
    """

    schema_version: Literal[2] = 2
    kind: Literal["measure --engine"] = "measure --engine"
    config: ServedConfig
    engine: str
    engine_version: str
    num_requests: int
    num_tokens: int
    rows: list[Row]
    agreement: Agreement
    speed: ServedSpeed | None
    verdict: Verdict | None = None
    environment: dict[str, object]
    starts: int = 1
    costs: EngineCosts | None = None

    @property
    def summary(self) -> str:
        """The verdict on the speedup; without it, whether the counters agree."""
        return str(self.verdict or self.agreement)

    @property
    def exit_code(self) -> int:
        """Of the command line: that of the verdict; without it, of the agreement."""
        return (self.verdict or self.agreement).exit_code


def measure_served(config: ServedConfig, progress: Progress = silent) -> ServedMeasurement:
    """Send the prompts to the engine, read its counters, and predict them from both models.

    The models are loaded after the engine has stopped, since a GPU may not have memory for both.
    Also times its steps if `write_costs` is set.

    Raises:
        UsageError: A model, a prompt file or the engine's program cannot be used.
        EngineError: The engine did not answer, or did not draft.
    """
    checked(config)
    tokenizer = load_tokenizer(config.target)
    config, prompts = config.read_prompts(tokenizer)
    requests = [
        Request(prompt, config.max_new_tokens, config.sampling, config.seed + number)
        for number, prompt in enumerate(prompts)
    ]
    in_process = config.engine.kind.in_process
    runs = Runs(config, requests, progress)
    if in_process:
        pair = load_scored(config)
        runs.run_in_process(pair)
    else:
        runs.run_servers()
        pair = load_scored(config)
    plain, drafted = runs.answers.get(0), runs.answers[config.num_speculative_tokens]
    engine, served = drafted.engine, drafted.served
    rows, agreement = compare_served(pair, requests, served, engine, config, progress)
    speed = verdict = None
    if plain is not None:
        rows.append(timed_requests(rows[0], plain.served, served))
        speed = _speed(rows[-1], plain, drafted)
        verdict = decide_served(speed.speedup, rows[0], engine.name)
    return ServedMeasurement(
        config=config,
        engine=engine.name,
        engine_version=engine.version,
        num_requests=len(requests),
        num_tokens=sum(len(answer.tokens) for answer in served),
        rows=rows,
        agreement=agreement,
        speed=speed,
        verdict=verdict,
        environment=environment(),
        starts=runs.num_starts,
        costs=_costs(config, pair, runs),
    )


def load_scored(config: ServedConfig) -> Pair:
    """Load both models as the engine uses them.

    A draft with a reduced vocabulary gets the full one, unless its export contains the reduced one.
    """
    choice, paths = config.engine, (config.target, config.draft)
    served = choice.target or config.target, choice.draft or config.draft
    if choice.kind.in_process:  # with the scored models
        paths = served
    target = load_model(paths[0], dtype=config.dtype, device=config.device)
    at_once = config.parallel and choice.kind.drafts_at_once
    draft = load_beside(target, paths[1], config.device, parallel=at_once)
    if target.decoder_prompt is not None:
        raise UsageError(
            f"{config.target} is an encoder-decoder, which {choice.engine} cannot serve with a "
            "draft through Paceline; leave --engine out"
        )
    if draft.draft_vocabulary is not None and not is_baked(served[1]):
        draft = draft.without_draft_vocabulary()
    return Pair(target, draft)


def compare_served(
    pair: Pair,
    requests: Sequence[Request],
    served: Sequence[Served],
    engine: EngineClass,
    config: ServedConfig,
    progress: Progress = silent,
) -> tuple[list[Row], Agreement]:
    """Score the engine's texts with both models, and compare the prediction with its counters.

    Both describe the same texts, so the random draws of the texts affect both equally.

    Returns:
        The rows of the counts, whose units are the requests that the engine counted, and whether
        they agree.
    """
    gamma = config.num_speculative_tokens
    for answer in served:
        check_counts(answer, gamma, engine)
    units = tuple(place for place, answer in enumerate(served) if answer.blocks is not None)
    prompts = [requests[place].prompt for place in units]
    texts = [served[place].tokens for place in units]
    check_longest(max(map(len, texts), default=0))
    samplings = config.sampling, config.proposals
    written = PairTexts(*pair, prompts, texts, *samplings, gamma=gamma)
    scores = score_texts(written, progress)
    predicted = predicted_counts(scores, gamma, config.max_new_tokens, engine)
    actual = served_counts(served, gamma)
    greedy = config.sampling.greedy and config.proposals.greedy
    agreement = decide_agreement(actual, predicted, greedy=greedy)
    sizes = {name: model.num_parameters for name, model in pair._asdict().items()}
    base = Row(
        population=f"prompts of {config.prompts.path}",
        units=units,
        setting={
            "draft": config.draft,
            **config.sampling.setting,
            "engine": config.engine.engine,
            "draft_temperature": config.proposals.temperature,
            "parameter_ratio": sizes["draft"] / sizes["target"],
            "gamma": gamma,
        },
        sums={"tokens": tuple(float(len(text)) for text in texts)},
        source=Source.here(
            "measure --engine",
            fingerprints={name: fingerprint(getattr(config, name)) for name in Pair._fields},
            sizes=sizes,
        ),
    )
    return [*actual.rows(base, "served"), *predicted.rows(base, "predicted")], agreement


def _speed(row: Row, plain: Answers, drafted: Answers) -> ServedSpeed:
    """The speed of the timed requests in `row`."""
    sides = plain.served, drafted.served
    by_start = speedup_by_start(plain, drafted)
    return ServedSpeed(
        speedup=over_starts(FIGURES["speedup"].measure(row), by_start),
        speedup_by_start=by_start,
        plain_tokens_per_s=FIGURES["target_tokens_per_s"].value(row),
        speculative_tokens_per_s=FIGURES["tokens_per_s"].value(row),
        num_equal=sum(a.tokens == b.tokens for a, b in zip(*sides, strict=True)),
    )


def timed_requests(base: Row, plain: Sequence[Served], drafted: Sequence[Served]) -> Row:
    """`base` with the seconds and tokens of each request without and with the draft."""
    sums: dict[str, tuple[float, ...]] = {}
    for prefix, side in (("target_", plain), ("", drafted)):
        sums[f"{prefix}seconds"] = tuple(answer.seconds for answer in side)
        sums[f"{prefix}tokens"] = tuple(float(len(answer.tokens)) for answer in side)
    setting = {name: value for name, value in base.setting.items() if name != "counts"}
    changes = {"units": tuple(range(len(drafted))), "setting": setting | {"timed": "requests"}}
    return base.model_copy(update=changes | {"sums": sums})


def speedup_by_start(plain: Answers, drafted: Answers) -> list[float]:
    """Seconds per token without / with the draft of each start, which answers the same requests."""
    sides = (one.seconds_per_token for one in (plain, drafted))
    return [without / with_draft for without, with_draft in zip(*sides, strict=True)]


def _costs(config: ServedConfig, pair: Pair, runs: Runs) -> EngineCosts | None:
    if runs.steps is None:
        return None
    engine = runs.answers[config.num_speculative_tokens].engine
    return EngineCosts(
        engine=config.engine.engine,
        engine_version=engine.version,
        drafting=config.drafting,
        drafts_in_full=engine.counts_behind_end,
        full_vocabulary=pair.draft.draft_vocabulary is None,
        parallel=pair.draft.mask_token is not None,
        target_parameters=pair.target.num_parameters,
        draft_parameters=pair.draft.num_parameters,
        steps=runs.steps.costs(),
        starts=runs.num_starts,
        served=config.model_dump(mode="json"),
        environment=environment(),
    )


def save_costs(measurement: ServedMeasurement) -> None:
    """Write the costs of the engine's steps, if timed, to `write_costs.file`."""
    output = measurement.config.write_costs
    if output is not None and measurement.costs is not None:
        atomic_write_text(output.file, measurement.costs.model_dump_json(indent=2) + "\n")
