"""Measures a draft in a serving engine, and compares the engine's counters with the prediction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from paceline.config import StrictModel
from paceline.core.bootstrap import ratio_of_ratios_interval
from paceline.data import read_prompts
from paceline.data.input_checks import checked
from paceline.engines.commands import check_draft_path
from paceline.engines.contract import Request, Served
from paceline.environment import environment
from paceline.errors import UsageError
from paceline.measure.agreement import Agreement
from paceline.measure.engine_costs import EngineCosts
from paceline.measure.losslessness import TIE_16_BITS, TIE_FLOAT32, first_split, logit_gap
from paceline.measure.pair import Pair
from paceline.measure.results import IntervalRow
from paceline.measure.served_costs import mean_context
from paceline.measure.served_figures import BlockFigures, ServedConfig, compare_served
from paceline.measure.served_runs import run_engine
from paceline.measure.starts import Starts
from paceline.models import HfModel, load_model
from paceline.models.compatibility import check_same_vocabulary
from paceline.models.hf.draft_vocabulary import is_baked
from paceline.models.loading import fingerprint, load_tokenizer
from paceline.progress import Progress, silent
from paceline.records import atomic_write_text
from paceline.rng import named_generator

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.core.bootstrap import Interval
    from paceline.engines.contract import Served
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
    requests = _requests(config)
    pair = load_scored(config) if config.engine.engine == "transformers" else None
    runs = run_engine(config, pair, requests, progress)
    pair = pair or load_scored(config)
    drafted = runs.drafted
    found = compare_served(pair, requests, drafted.served, drafted.conventions, config, progress)
    return ServedMeasurement(
        config=config,
        engine=drafted.name,
        engine_version=drafted.version,
        num_requests=len(requests),
        num_tokens=sum(len(one.tokens) for one in drafted.served),
        served=found.served,
        predicted=found.predicted,
        agreement=found.agreement,
        speed=_speed(config, pair, requests, runs),
        environment=environment(),
        target_fingerprint=fingerprint(config.target),
        draft_fingerprint=fingerprint(config.draft),
        notes=(*drafted.notes, *_notes(config)),
        starts=runs.starts,
        costs=_costs(config, pair, requests, runs),
    )


def _notes(config: ServedConfig) -> list[str]:
    if config.engine.url is not None:
        return ["a running server is not restarted, so all figures are of one start"]
    if config.engine.engine == "transformers":
        return ["transformers runs in this process: all figures are of one start"]
    return []


def save_costs(found: ServedMeasurement) -> None:
    """Write the costs of the engine's steps, if timed, to `write_costs.file`.

    Raises:
        StorageError: The file cannot be written.
    """
    output = found.config.write_costs
    if output is not None and found.costs is not None:
        atomic_write_text(output.file, found.costs.model_dump_json(indent=2) + "\n")


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
    config: ServedConfig, pair: Pair, requests: Sequence[Request], runs: Runs
) -> ServedSpeed | None:
    if runs.plain is None:
        return None
    sides = runs.plain.served, runs.drafted.served
    tokens = [sum(len(one.tokens) for one in side) for side in sides]
    seconds = [sum(one.seconds for one in side) for side in sides]
    ties = _near_ties(pair.target, requests, *sides) if config.sampling.greedy else None
    return ServedSpeed(
        speedup=IntervalRow.of(speedup(*sides, runs.starts, config.seed)),
        plain_tokens_per_s=tokens[0] / seconds[0],
        speculative_tokens_per_s=tokens[1] / seconds[1],
        num_equal=sum(a.tokens == b.tokens for a, b in zip(*sides, strict=True)),
        num_near_ties=ties,
    )


def speedup(
    plain: Sequence[Served], drafted: Sequence[Served], starts: Starts, seed: int
) -> Interval:
    """Seconds per token without / with the draft, with an interval over requests and starts."""
    sides = [
        (
            torch.tensor([one.seconds for one in side]),
            torch.tensor([len(one.tokens) for one in side]),
        )
        for side in (plain, drafted)
    ]
    found = ratio_of_ratios_interval(*sides, rng=named_generator(seed, "served speed"))
    return starts.widen(found, 2)
