"""What a draft gives in the engine that serves it, beside what both models' probabilities predict."""

from __future__ import annotations

from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

from paceline.config import StrictModel
from paceline.core.bootstrap import ratio_of_ratios_interval
from paceline.data import read_prompts
from paceline.engines.commands import Drafting, Room, check_draft_path
from paceline.engines.contract import Conventions, Request, Served
from paceline.engines.engine_choice import Setup, check_choice, client_of, connect
from paceline.engines.start import started
from paceline.engines.versions import untested
from paceline.environment import environment
from paceline.errors import EngineError
from paceline.measure.acceptance import forced_logits
from paceline.measure.engine_costs import EngineCosts
from paceline.measure.losslessness import TIE_16_BITS, TIE_FLOAT32, first_split
from paceline.measure.pair import Pair
from paceline.measure.results import IntervalRow
from paceline.measure.served_costs import StepTimer, mean_context
from paceline.measure.served_figures import Agreement, BlockFigures, ServedConfig, compare_served
from paceline.models import CausalModel, load_model
from paceline.models.compatibility import check_same_vocabulary
from paceline.models.hf.draft_vocabulary import is_baked
from paceline.models.inspection import inspect_model
from paceline.models.loading import fingerprint, load_tokenizer, model_directory
from paceline.progress import Progress, silent
from paceline.records import atomic_write_text
from paceline.rng import named_generator

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from paceline.engines.contract import Engine


class ServedSpeed(StrictModel):
    """Whole requests with and without the draft.

    Attributes:
        speedup: Seconds per token without / with the draft, paired by prompt.
        num_equal: Texts that are the same with and without; all of them, at temperature 0 and in exact
            arithmetic.
        num_near_ties: Of the others, those that part where the target's two likeliest tokens are nearly as
            likely (logits closer than 0.25, in float32 than 0.001); None above temperature 0.
    """

    speedup: IntervalRow
    plain_tokens_per_s: float
    speculative_tokens_per_s: float
    num_equal: int
    num_near_ties: int | None


class ServedMeasurement(StrictModel):
    """Figures of an engine, and what was predicted of it.

    Attributes:
        served: From the engine's own counters.
        predicted: From both models' probabilities over the texts that the engine wrote.
        speed: None: the engine was not started here, or not without the draft.
        notes: What to know about the engine.
        costs: Of its steps, if they were to be timed; `save_costs` writes them.
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
    notes: tuple[str, ...] = ()
    costs: EngineCosts | None = None


class Answers(NamedTuple):
    """Of one server: who answered, how it counts, what it answered, and what to know about it."""

    name: str
    version: str
    conventions: Conventions
    served: list[Served]
    notes: tuple[str, ...] = ()


def measure_served(config: ServedConfig, progress: Progress = silent) -> ServedMeasurement:
    """Send the prompts to the engine, read its counters, and predict them from both models.

    The models are loaded after the engine has stopped: both would not fit one GPU. With `write_costs`,
    the engine's steps are timed, too.

    Raises:
        UsageError: A model, a prompt file or the engine's program cannot be used.
        EngineError: The engine did not answer, or did not draft.
    """
    check_choice(config.engine)
    check_draft_path(config.engine.engine, config.engine.draft or config.draft)
    requests = _requests(config)
    pair = load_scored(config) if config.engine.engine == "transformers" else None
    steps = None
    if config.write_costs is not None:
        steps = StepTimer(config.write_costs, requests, progress)
    plain, drafted = _answers(config, pair, requests, steps, progress)
    pair = pair or load_scored(config)
    found = compare_served(pair, requests, drafted.served, drafted.conventions, config, progress)
    speed = None
    if plain is not None:
        ties = None
        if config.sampling.greedy:
            ties = _near_ties(pair.target, requests, plain.served, drafted.served)
        speed = _speed(plain.served, drafted.served, ties, config.seed)
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
        notes=drafted.notes,
        costs=None if steps is None else _costs(config, pair, requests, steps, drafted),
    )


def save_costs(found: ServedMeasurement) -> None:
    """Write the costs of the engine's steps where the configuration says, if they were timed.

    Raises:
        StorageError: They cannot be written.
    """
    wanted = found.config.write_costs
    if wanted is not None and found.costs is not None:
        atomic_write_text(wanted.file, found.costs.model_dump_json(indent=2) + "\n")


def _costs(
    config: ServedConfig,
    pair: Pair,
    requests: Sequence[Request],
    steps: StepTimer,
    answers: Answers,
) -> EngineCosts:
    return EngineCosts(
        engine=config.engine.engine,
        engine_version=answers.version,
        drafting=config.drafting,
        drafts_in_full=answers.conventions.counts_behind_end,
        full_vocabulary=pair.draft.draft_vocabulary is None,
        target_parameters=pair.target.num_parameters,
        draft_parameters=pair.draft.num_parameters,
        mean_context=mean_context(requests),
        steps=sorted(steps.steps, key=lambda step: (step.gamma, step.batch_size)),
        served=config.model_dump(mode="json"),
        environment=environment(),
    )


def _requests(config: ServedConfig) -> list[Request]:
    tokenizer = load_tokenizer(config.target)
    prompts = read_prompts(config.prompts, tokenizer, max_tokens=config.max_prompt_tokens)
    return [
        Request(prompt, config.max_new_tokens, config.sampling, config.seed + number)
        for number, prompt in enumerate(prompts[: config.num_prompts])
    ]


def load_scored(config: ServedConfig) -> Pair:
    """Both models as the engine computes them.

    An engine drafts from all tokens, whatever list the draft has, unless its export has the list baked in.

    Raises:
        UsageError: A model cannot be loaded, or the tokenizers differ.
    """
    choice, paths = config.engine, (config.target, config.draft)
    served = choice.target or config.target, choice.draft or config.draft
    if choice.engine == "transformers":  # what is scored is what is served, in this process
        paths = served
    target = load_model(paths[0], dtype=config.dtype, device=config.device)
    draft = load_model(paths[1], dtype=target.dtype, device=config.device)
    check_same_vocabulary(target, draft)
    if draft.draft_vocabulary is not None and not is_baked(served[1]):
        draft = draft.without_draft_vocabulary()
    return Pair(target, draft)


def _answers(
    config: ServedConfig,
    pair: Pair | None,
    requests: Sequence[Request],
    steps: StepTimer | None,
    progress: Progress,
) -> tuple[Answers | None, Answers]:
    """What the engine answers without the draft, if that is asked for, and with it.

    `steps` are timed on the way, by servers of other gammas after that.
    """
    gamma = config.num_speculative_tokens
    others = [] if steps is None else [one for one in steps.gammas if one != gamma]
    if pair is not None:
        return _in_process(config, pair, requests, steps, others, progress)
    plain = drafted = None
    for one in (gamma, 0, *others):
        # a server that runs drafts always
        wanted = one == gamma or (one == 0 and config.plain and config.engine.url is None)
        if not wanted and steps is None:
            continue
        with _server(config, one, requests, progress) as engine:
            if wanted:
                (answers,) = _in_turns([engine], requests, config, progress, drafts=one > 0)
                plain, drafted = (plain, answers) if one else (answers, drafted)
            if steps is not None and one in (0, *steps.gammas):
                steps.time({one: engine})
    assert drafted is not None, "the first of them drafts"
    return plain, drafted


def _in_process(
    config: ServedConfig,
    pair: Pair,
    requests: Sequence[Request],
    steps: StepTimer | None,
    others: Sequence[int],
    progress: Progress,
) -> tuple[Answers | None, Answers]:
    """The same of transformers, with and without the draft in turns."""
    from paceline.engines.assisted import Transformers

    def engine_of(gamma: int) -> Engine:
        return Transformers(pair.target, pair.draft if gamma else None, gamma)

    gammas = [config.num_speculative_tokens, *([0] if config.plain else [])]
    answers = _in_turns([engine_of(one) for one in gammas], requests, config, progress)
    if steps is not None:
        steps.time({one: engine_of(one) for one in (0, *steps.gammas)})
    return (answers[1] if config.plain else None), answers[0]


def _in_turns(
    engines: Sequence[Engine],
    requests: Sequence[Request],
    config: ServedConfig,
    progress: Progress,
    *,
    drafts: bool = True,
) -> list[Answers]:
    """Every request to every engine, in turns; the first request once more before, to warm up.

    `drafts`: whether the first engine is to draft.
    """
    found = [_nothing_yet(one) for one in engines]
    warm = [engine.serve(requests[0]) for engine in engines]
    if drafts:
        _check_drafted(config, warm[0])
    for number, request in enumerate(requests):
        for engine, answers in zip(engines, found, strict=True):
            answers.served.append(engine.serve(request))
        progress("requests", number + 1, len(requests))
    return found


def _nothing_yet(engine: Engine) -> Answers:
    note = untested(engine)
    notes = () if note is None else (note,)
    return Answers(engine.name, engine.version, engine.conventions, [], notes)


@contextmanager
def _server(
    config: ServedConfig, gamma: int, requests: Sequence[Request], progress: Progress
) -> Generator[Engine]:
    """The running server, or one that is started to draft so many tokens; 0: none."""
    choice = config.engine
    if choice.url is not None:
        with closing(client_of(choice)) as client:
            yield connect(choice, client)
        return
    drafting = Drafting(choice.draft or config.draft, gamma, config.drafting) if gamma else None
    sizes = config.write_costs.batch_sizes if config.write_costs else (1,)
    room = Room(_length(config, requests), max(sizes))
    setup = Setup(choice.target or config.target, drafting, room, config.dtype)
    with started(choice, setup, progress) as engine:
        yield engine


def _length(config: ServedConfig, requests: Sequence[Request]) -> int:
    """Tokens of the longest request with a block behind it, but no more than the target's context."""
    longest = max(len(request.prompt) for request in requests) + config.max_new_tokens
    limit = inspect_model(model_directory(config.target)).max_length
    others = config.write_costs.gammas if config.write_costs else ()
    gammas = (config.num_speculative_tokens, *others)
    room = longest + max(gammas) + 1
    return room if limit is None else min(room, limit)


def _check_drafted(config: ServedConfig, answer: Served) -> None:
    """Did the engine draft at all?

    Raises:
        EngineError: It did not.
    """
    if answer.blocks is not None and answer.blocks.num_drafted:
        return
    advice = {
        "llamacpp": "llama-server drafts only with --spec-type draft-simple and a draft whose tokenizer "
        "it finds compatible; otherwise only its log says so",
        "vllm": "start it with --speculative-config",
        "sglang": "start it with --speculative-algorithm STANDALONE",
        "transformers": "prompts or budgets may be too short for a block",
    }[config.engine.engine]
    raise EngineError(
        f"{config.engine.engine} served without the draft: nothing was drafted; {advice}"
    )


def _near_ties(
    target: CausalModel,
    requests: Sequence[Request],
    plain: Sequence[Served],
    drafted: Sequence[Served],
) -> int:
    """How many texts part where rounding may decide between two tokens."""
    limit = TIE_FLOAT32 if target.dtype == torch.float32 else TIE_16_BITS
    count = 0
    for request, one, other in zip(requests, plain, drafted, strict=True):
        place = first_split(one.tokens, other.tokens)
        if place is None or place >= min(len(one.tokens), len(other.tokens)):
            continue
        # logits before each token, the last of which is any: only those before it count
        logits_TV = forced_logits(
            target, request.prompt, [*one.tokens[:place], 0], request.sampling, target.vocab_size
        )
        best, second = logits_TV[-1].topk(2).values
        count += float(best - second) < limit
    return count


def _speed(
    plain: Sequence[Served], drafted: Sequence[Served], ties: int | None, seed: int
) -> ServedSpeed:
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
        num_near_ties=ties,
    )
