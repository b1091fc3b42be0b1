"""What a draft gives in the engine that serves it, beside what both models' probabilities predict."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

from paceline.config import StrictModel
from paceline.core.bootstrap import ratio_of_ratios_interval
from paceline.engines.choice import client_of, connect, server_command, server_environment
from paceline.engines.commands import Drafting
from paceline.engines.contract import Request, Served
from paceline.engines.process import ServerProcess, free_port
from paceline.errors import EngineError
from paceline.measure.pair import Pair, load_models, load_prompts
from paceline.measure.results import IntervalRow
from paceline.measure.served_figures import Agreement, BlockFigures, ServedConfig, compare_served
from paceline.models.loading import fingerprint
from paceline.progress import Progress, silent
from paceline.records import cache_root, environment
from paceline.rng import named_generator

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.engines.contract import Engine


class ServedSpeed(StrictModel):
    """Whole requests with and without the draft, one server after the other.

    Attributes:
        speedup: Seconds a token without / with the draft, paired by prompt.
        num_equal: Texts that are the same with and without; all of them, at temperature 0 and in exact
            arithmetic.
    """

    speedup: IntervalRow
    plain_tokens_per_s: float
    speculative_tokens_per_s: float
    num_equal: int


class ServedMeasurement(StrictModel):
    """Figures of an engine, and what was predicted of it.

    Attributes:
        served: From the engine's own counters.
        predicted: From both models' probabilities over the texts that the engine wrote.
        speed: None: the engine was not started here, or not without the draft.
    """

    schema_version: Literal[1] = 1
    config: ServedConfig
    engine: str
    engine_version: str
    num_requests: int
    num_tokens: int
    served: BlockFigures
    predicted: BlockFigures
    agreement: Agreement
    speed: ServedSpeed | None
    environment: dict[str, object]
    target_fingerprint: str = ""
    draft_fingerprint: str = ""


class Answers(NamedTuple):
    """Of one server: who answered, and what."""

    name: str
    version: str
    served: list[Served]


def measure_served(config: ServedConfig, progress: Progress = silent) -> ServedMeasurement:
    """Send the prompts to the engine, read its counters, and predict them from both models.

    Raises:
        UsageError: A model, a prompt file or the engine's program cannot be used.
        EngineError: The engine did not answer, or did not draft.
    """
    pair = load_models(config, progress)
    prompts = load_prompts(config, pair)[: config.num_prompts]
    requests = [
        Request(prompt, config.max_new_tokens, config.sampling, config.seed + number)
        for number, prompt in enumerate(prompts)
    ]
    plain, drafted = _answers(config, pair, requests, progress)
    _check_drafted(config, drafted)
    found = compare_served(pair, requests, drafted.served, config, progress)
    speed = None if plain is None else _speed(plain.served, drafted.served, config.seed)
    return ServedMeasurement(
        config=config,
        engine=drafted.name,
        engine_version=drafted.version,
        num_requests=len(requests),
        num_tokens=sum(len(one.tokens) for one in drafted.served),
        served=found.served,
        predicted=found.predicted,
        agreement=found.agreement,
        speed=speed,
        environment=environment(),
        target_fingerprint=fingerprint(config.target),
        draft_fingerprint=fingerprint(config.draft),
    )


def _answers(
    config: ServedConfig, pair: Pair, requests: Sequence[Request], progress: Progress
) -> tuple[Answers | None, Answers]:
    """What the engine answers without the draft, if that is asked for, and with it."""
    choice = config.engine
    if choice.engine == "transformers":
        from paceline.engines.assisted import Transformers

        gamma = config.num_speculative_tokens
        engines = [Transformers(pair.target, None, gamma)] if config.plain else []
        engines.append(Transformers(pair.target, pair.draft, gamma))
        answers = _in_turns(engines, requests, progress)
        return (answers[0] if config.plain else None), answers[-1]
    if choice.url is not None:
        engine = connect(choice, client_of(choice))
        return None, _in_turns([engine], requests, progress)[0]
    drafting = Drafting(
        choice.draft or config.draft, config.num_speculative_tokens, config.drafting
    )
    plain = _started(config, None, requests, progress) if config.plain else None
    return plain, _started(config, drafting, requests, progress)


def _in_turns(
    engines: Sequence[Engine], requests: Sequence[Request], progress: Progress
) -> list[Answers]:
    """Every request to every engine, in turns; the first request once more before, to warm up."""
    found = [Answers(engine.name, engine.version, []) for engine in engines]
    for engine in engines:
        engine.serve(requests[0])
    for number, request in enumerate(requests):
        for engine, answers in zip(engines, found, strict=True):
            answers.served.append(engine.serve(request))
        progress("requests", number + 1, len(requests))
    return found


def _started(
    config: ServedConfig, drafting: Drafting | None, requests: Sequence[Request], progress: Progress
) -> Answers:
    """Start the server, send the requests, stop it."""
    choice, port = config.engine, free_port()
    longest = max(len(request.prompt) + request.max_new_tokens for request in requests)
    # Drafts behind the last token need room, too.
    room = longest + config.num_speculative_tokens + 1
    target = choice.target or config.target
    command = server_command(choice, target, drafting, port=port, max_length=room)
    role = "plain" if drafting is None else "drafting"
    log = cache_root() / "logs" / f"{choice.engine}-{role}-{port}.log"
    with ExitStack() as stack:
        server = stack.enter_context(ServerProcess(command, port, log, server_environment(choice)))
        client = server.wait_until_ready(choice.start_seconds, progress)
        try:
            return _in_turns([connect(choice, client)], requests, progress)[0]
        except EngineError as error:
            raise EngineError(f"{error}{server.last_words()}") from error


def _check_drafted(config: ServedConfig, answers: Answers) -> None:
    """Did the engine draft at all?"""
    if any(one.blocks is not None and one.blocks.num_drafted for one in answers.served):
        return
    advice = {
        "llamacpp": "llama-server drafts only with --spec-type draft-simple and a draft whose tokenizer "
        "it finds compatible, and only says so in its log",
        "vllm": "start it with --speculative-config",
        "sglang": "start it with --speculative-algorithm STANDALONE",
        "transformers": "prompts or budgets may be too short for a block",
    }[config.engine.engine]
    raise EngineError(f"{answers.name} served without the draft: nothing was drafted; {advice}")


def _speed(plain: Sequence[Served], drafted: Sequence[Served], seed: int) -> ServedSpeed:
    seconds = [torch.tensor([one.seconds for one in side]) for side in (plain, drafted)]
    tokens = [torch.tensor([len(one.tokens) for one in side]) for side in (plain, drafted)]
    found = ratio_of_ratios_interval(
        (seconds[0], tokens[0]), (seconds[1], tokens[1]), rng=named_generator(seed, "served speed")
    )
    return ServedSpeed(
        speedup=IntervalRow.of(found),
        plain_tokens_per_s=float(tokens[0].sum() / seconds[0].sum()),
        speculative_tokens_per_s=float(tokens[1].sum() / seconds[1].sum()),
        num_equal=sum(a.tokens == b.tokens for a, b in zip(plain, drafted, strict=True)),
    )
