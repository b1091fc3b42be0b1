"""Measures a draft in a serving engine, and compares the engine's counters with the prediction."""

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
from paceline.errors import EngineError, UsageError
from paceline.measure.agreement import Agreement
from paceline.measure.engine_costs import EngineCosts, check_replaceable
from paceline.measure.losslessness import TIE_16_BITS, TIE_FLOAT32, first_split, logit_gap
from paceline.measure.pair import Pair
from paceline.measure.results import IntervalRow
from paceline.measure.served_costs import StepTimer, mean_context
from paceline.measure.served_figures import BlockFigures, ServedConfig, compare_served
from paceline.models import HfModel, load_model
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
        num_equal: Texts that are equal with and without; all at temperature 0 in exact arithmetic.
        num_near_ties: Texts that differ first where the target's two highest logits are closer than
            0.25, in float32 than 0.001; None above temperature 0.
    """

    speedup: IntervalRow
    plain_tokens_per_s: float
    speculative_tokens_per_s: float
    num_equal: int
    num_near_ties: int | None


class ServedMeasurement(StrictModel):
    """Measured and predicted figures of an engine.

    Attributes:
        served: From the engine's counters.
        predicted: From the probabilities of both models over the engine's texts.
        speed: None if the engine was not measured without the draft.
        notes: Remarks on the engine, e.g. an untested version.
        costs: Costs of the engine's steps if `write_costs` is set; `save_costs` writes them.
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
    """Answers of one engine, with its name, version, conventions and notes."""

    name: str
    version: str
    conventions: Conventions
    served: list[Served]
    notes: tuple[str, ...] = ()


def measure_served(config: ServedConfig, progress: Progress = silent) -> ServedMeasurement:
    """Send the prompts to the engine, read its counters, and predict them from both models.

    The models are loaded after the engine has stopped, since a GPU may not have memory for both.
    Also times its steps if `write_costs` is set.

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
        check_replaceable(config.write_costs.file)
        steps = StepTimer(config.write_costs, requests, progress)
    plain, drafted = _answers(config, pair, requests, steps, progress)
    pair = pair or load_scored(config)
    found = compare_served(pair, requests, drafted.served, drafted.conventions, config, progress)
    speed = None
    if plain is not None:
        sides = plain.served, drafted.served
        ties = _near_ties(pair.target, requests, *sides) if config.sampling.greedy else None
        speed = _speed(*sides, ties, config.seed)
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
    """Write the costs of the engine's steps, if timed, to `write_costs.file`.

    Raises:
        StorageError: The file cannot be written.
    """
    output = found.config.write_costs
    if output is not None and found.costs is not None:
        atomic_write_text(output.file, found.costs.model_dump_json(indent=2) + "\n")


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
    """Load both models as the engine uses them.

    A draft with a reduced vocabulary gets the full one, unless its export contains the reduced one.

    Raises:
        UsageError: A model cannot be loaded, or the tokenizers differ.
    """
    choice, paths = config.engine, (config.target, config.draft)
    served = choice.target or config.target, choice.draft or config.draft
    if choice.engine == "transformers":  # runs in this process, with the scored models
        paths = served
    target = load_model(paths[0], dtype=config.dtype, device=config.device)
    draft = load_model(paths[1], dtype=target.dtype, device=config.device)
    check_same_vocabulary(target, draft)
    if target.decoder_prompt is not None:
        raise UsageError(
            f"{config.target} is an encoder-decoder, which {choice.engine} cannot serve with a "
            "draft through Paceline; leave --engine out"
        )
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
    """Answers without the draft, None if not configured, and with it. Also times the steps."""
    gamma = config.num_speculative_tokens
    others = [] if steps is None else [one for one in steps.gammas if one != gamma]
    if pair is not None:
        return _in_process(config, pair, requests, steps, progress)
    plain = drafted = None
    for one in (gamma, 0, *others):
        # a running server always drafts
        wanted = one == gamma or (one == 0 and config.plain and config.engine.url is None)
        if not wanted and steps is None:
            continue
        with _server(config, one, requests, progress) as engine:
            if wanted:
                (answers,) = _serve_all([engine], requests, config, progress, drafts=one > 0)
                plain, drafted = (plain, answers) if one else (answers, drafted)
            if steps is not None and one in (0, *steps.gammas):
                steps.time({one: engine})
    assert drafted is not None, "the first engine drafts"
    return plain, drafted


def _in_process(
    config: ServedConfig,
    pair: Pair,
    requests: Sequence[Request],
    steps: StepTimer | None,
    progress: Progress,
) -> tuple[Answers | None, Answers]:
    from paceline.engines.assisted import Transformers

    def engine_of(gamma: int) -> Engine:
        return Transformers(pair.target, pair.draft if gamma else None, gamma)

    gammas = [config.num_speculative_tokens, *([0] if config.plain else [])]
    answers = _serve_all([engine_of(one) for one in gammas], requests, config, progress)
    if steps is not None:
        steps.time({one: engine_of(one) for one in (0, *steps.gammas)})
    return (answers[1] if config.plain else None), answers[0]


def _serve_all(
    engines: Sequence[Engine],
    requests: Sequence[Request],
    config: ServedConfig,
    progress: Progress,
    *,
    drafts: bool = True,
) -> list[Answers]:
    """Send every request to every engine, interleaved, after a warm-up request.

    `drafts`: the first engine must draft.
    """
    found: list[Answers] = []
    for engine in engines:
        note = untested(engine)
        notes = () if note is None else (note,)
        found.append(Answers(engine.name, engine.version, engine.conventions, [], notes))
    warm = [engine.serve(requests[0]) for engine in engines]
    if drafts:
        _check_drafted(config, warm[0])
    for number, request in enumerate(requests):
        for engine, answers in zip(engines, found, strict=True):
            answers.served.append(engine.serve(request))
        progress("requests", number + 1, len(requests))
    return found


@contextmanager
def _server(
    config: ServedConfig, gamma: int, requests: Sequence[Request], progress: Progress
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
    with started(choice, setup, progress) as engine:
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


def _near_ties(
    target: HfModel,
    requests: Sequence[Request],
    plain: Sequence[Served],
    drafted: Sequence[Served],
) -> int:
    """Number of texts that differ first where rounding may decide between two tokens."""
    limit = TIE_FLOAT32 if target.dtype == torch.float32 else TIE_16_BITS
    count = 0
    for request, one, other in zip(requests, plain, drafted, strict=True):
        split = first_split(one.tokens, other.tokens)
        if split is None or split >= min(len(one.tokens), len(other.tokens)):
            continue
        before = one.tokens[:split]
        gap = logit_gap(target, request.prompt, before, request.sampling, target.vocab_size)
        count += gap < limit
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
