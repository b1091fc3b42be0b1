"""Measures a draft in a serving engine, and compares the engine's counters with the prediction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

from paceline.config import StrictModel
from paceline.core.bootstrap import ratio_of_ratios_interval
from paceline.data import read_prompts
from paceline.data.input_checks import checked
from paceline.engines.commands import check_draft_path
from paceline.engines.contract import Request, check_counts
from paceline.environment import environment
from paceline.errors import UsageError
from paceline.measure.acceptance import score_texts
from paceline.measure.agreement import (
    Agreement,
    BlockFigures,
    GreedyCounts,
    decide_agreement,
    figures_of,
    predicted_counts,
    served_counts,
)
from paceline.measure.engine_costs import EngineCosts, mean_context
from paceline.measure.losslessness import TIE_16_BITS, TIE_FLOAT32, OfSessions, first_split
from paceline.measure.pair import Pair, load_beside
from paceline.measure.results import IntervalRow
from paceline.measure.served_runs import ServedConfig, run_engine
from paceline.measure.starts import Starts
from paceline.models import HfModel, load_model
from paceline.models.hf.draft_vocabulary import is_baked
from paceline.models.loading import fingerprint, load_tokenizer
from paceline.progress import Progress, silent
from paceline.records import atomic_write_text
from paceline.rng import named_generator

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.core.bootstrap import Interval
    from paceline.engines.contract import Conventions, Served
    from paceline.measure.served_runs import Runs


class ServedSpeed(StrictModel):
    """Whole requests with and without the draft.

    Attributes:
        speedup: Seconds per token without / with the draft, paired by prompt; the interval contains
            the variation between starts.
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
        starts: Starts of the engine; variation between them is in the intervals of seconds.
        costs: Costs of the engine's steps if `write_costs` is set; `save_costs` writes them.
    """

    schema_version: Literal[1] = 1
    kind: Literal["measure --engine"] = "measure --engine"
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
    starts: Starts = Starts()
    costs: EngineCosts | None = None


def measure_served(config: ServedConfig, progress: Progress = silent) -> ServedMeasurement:
    """Send the prompts to the engine, read its counters, and predict them from both models.

    The models are loaded after the engine has stopped, since a GPU may not have memory for both.
    Also times its steps if `write_costs` is set.

    Raises:
        UsageError: A model, a prompt file or the engine's program cannot be used.
        EngineError: The engine did not answer, or did not draft.
    """
    checked(config)
    check_draft_path(config.engine.engine, config.engine.draft or config.draft)
    tokenizer = load_tokenizer(config.target)
    prompts = read_prompts(config.prompts, tokenizer, max_tokens=config.max_prompt_tokens)
    requests = [
        Request(prompt, config.max_new_tokens, config.sampling, config.seed + number)
        for number, prompt in enumerate(prompts[: config.num_prompts])
    ]
    in_process = config.engine.engine == "transformers"
    pair = load_scored(config) if in_process else None
    runs = run_engine(config, pair, requests, progress)
    pair = pair or load_scored(config)
    drafted, notes = runs.drafted, list(runs.drafted.notes)
    if config.engine.url is not None:
        notes.append("a running server is not restarted, so all figures are of one start")
    elif in_process:
        notes.append("transformers runs in this process: all figures are of one start")
    comparison = compare_served(
        pair, requests, drafted.served, drafted.conventions, config, progress
    )
    return ServedMeasurement(
        config=config,
        engine=drafted.name,
        engine_version=drafted.version,
        num_requests=len(requests),
        num_tokens=sum(len(answer.tokens) for answer in drafted.served),
        **comparison._asdict(),
        speed=_speed(config, pair, requests, runs),
        environment=environment(),
        target_fingerprint=fingerprint(config.target),
        draft_fingerprint=fingerprint(config.draft),
        notes=tuple(notes),
        starts=runs.starts,
        costs=_costs(config, pair, requests, runs),
    )


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
    draft = load_beside(target, paths[1], config.device)
    if target.decoder_prompt is not None:
        raise UsageError(
            f"{config.target} is an encoder-decoder, which {choice.engine} cannot serve with a "
            "draft through Paceline; leave --engine out"
        )
    if draft.draft_vocabulary is not None and not is_baked(served[1]):
        draft = draft.without_draft_vocabulary()
    return Pair(target, draft)


class Comparison(NamedTuple):
    """Figures from an engine's counters, predicted figures, and whether they agree."""

    served: BlockFigures
    predicted: BlockFigures
    agreement: Agreement


def compare_served(
    pair: Pair,
    requests: Sequence[Request],
    served: Sequence[Served],
    conventions: Conventions,
    config: ServedConfig,
    progress: Progress = silent,
) -> Comparison:
    """Score the engine's texts with both models, and compare the prediction with its counters.

    Both describe the same texts, so the random draws of the texts affect both equally.

    Raises:
        EngineError: The counters do not match the texts.
    """
    gamma = config.num_speculative_tokens
    for answer in served:
        check_counts(answer, gamma, conventions)
    counted = [both for both in zip(requests, served, strict=True) if both[1].blocks is not None]
    prompts = [request.prompt for request, _ in counted]
    texts = [answer.tokens for _, answer in counted]
    scores = score_texts(*pair, prompts, texts, config.sampling, progress, config.proposals)
    settings = scores, gamma, config.max_new_tokens, conventions
    predicted, actual = predicted_counts(*settings), served_counts(served, gamma)
    greedy = None
    if config.sampling.greedy and config.proposals.greedy:
        greedy = GreedyCounts.of(*settings, float32=pair.target.dtype == torch.float32)
    return Comparison(
        served=figures_of(actual, config.seed),
        predicted=figures_of(predicted, config.seed),
        agreement=decide_agreement(
            actual, predicted, engine=config.engine.engine, seed=config.seed, greedy=greedy
        ),
    )


def _speed(
    config: ServedConfig, pair: Pair, requests: Sequence[Request], runs: Runs
) -> ServedSpeed | None:
    if runs.plain is None:
        return None
    plain, drafted = sides = runs.plain.served, runs.drafted.served
    rates = [
        sum(len(answer.tokens) for answer in side) / sum(answer.seconds for answer in side)
        for side in sides
    ]
    ties = _near_ties(pair.target, requests, *sides) if config.sampling.greedy else None
    return ServedSpeed(
        speedup=IntervalRow.of(speedup(*sides, runs.starts, config.seed)),
        plain_tokens_per_s=rates[0],
        speculative_tokens_per_s=rates[1],
        num_equal=sum(a.tokens == b.tokens for a, b in zip(plain, drafted, strict=True)),
        num_near_ties=ties,
    )


def speedup(
    plain: Sequence[Served], drafted: Sequence[Served], starts: Starts, seed: int
) -> Interval:
    """Seconds per token without / with the draft, with an interval over requests and starts."""
    sides = [
        (
            torch.tensor([answer.seconds for answer in side]),
            torch.tensor([len(answer.tokens) for answer in side]),
        )
        for side in (plain, drafted)
    ]
    rng = named_generator(seed, "served speed")
    return starts.widen(ratio_of_ratios_interval(*sides, rng=rng), 2)


def _near_ties(
    target: HfModel,
    requests: Sequence[Request],
    plain: Sequence[Served],
    drafted: Sequence[Served],
) -> int:
    """Number of texts that differ first where rounding may decide between two tokens."""
    limit = TIE_FLOAT32 if target.dtype == torch.float32 else TIE_16_BITS
    count = 0
    for request, without, with_draft in zip(requests, plain, drafted, strict=True):
        split = first_split(without.tokens, with_draft.tokens)
        if split is not None and split < min(len(without.tokens), len(with_draft.tokens)):
            scored = OfSessions(target, request.sampling, target.vocab_size)
            count += scored.gap(request.prompt, without.tokens[:split]) < limit
    return count


def _costs(
    config: ServedConfig, pair: Pair, requests: Sequence[Request], runs: Runs
) -> EngineCosts | None:
    if runs.steps is None:
        return None
    return EngineCosts(
        engine=config.engine.engine,
        engine_version=runs.drafted.version,
        drafting=config.drafting,
        drafts_in_full=runs.drafted.conventions.counts_behind_end,
        full_vocabulary=pair.draft.draft_vocabulary is None,
        target_parameters=pair.target.num_parameters,
        draft_parameters=pair.draft.num_parameters,
        mean_context=mean_context(requests),
        steps=runs.steps.costs(runs.starts),
        starts=runs.starts,
        served=config.model_dump(mode="json"),
        environment=environment(),
    )


def save_costs(measurement: ServedMeasurement) -> None:
    """Write the costs of the engine's steps, if timed, to `write_costs.file`.

    Raises:
        StorageError: The file cannot be written.
    """
    output = measurement.config.write_costs
    if output is not None and measurement.costs is not None:
        atomic_write_text(output.file, measurement.costs.model_dump_json(indent=2) + "\n")
