"""Measures a draft in a serving engine, and compares the engine's counters with the prediction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

from paceline.config import Result, StrictModel
from paceline.core.bootstrap import Interval
from paceline.data import read_prompts
from paceline.data.input_checks import checked
from paceline.engines.contract import Request, check_counts
from paceline.environment import environment
from paceline.errors import UsageError
from paceline.measure.acceptance import PairTexts, check_longest, score_texts
from paceline.measure.agreement import (
    Agreement,
    Counts,
    decide_agreement,
    predicted_counts,
    served_counts,
)
from paceline.measure.engine_costs import EngineCosts, Starts, mean_context, over_starts
from paceline.measure.losslessness import TIE_16_BITS, TIE_FLOAT32, first_split
from paceline.measure.pair import Pair, load_beside
from paceline.measure.reference import logit_gap
from paceline.measure.served_runs import ServedConfig, run_engine
from paceline.measure.verdict import Verdict, decide_served
from paceline.models import HfModel, load_model
from paceline.models.hf.draft_vocabulary import is_baked
from paceline.models.loading import fingerprint, load_tokenizer
from paceline.progress import Progress, silent
from paceline.records import atomic_write_text
from paceline.results.figures import FIGURES
from paceline.results.row import Row, Source

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.engines.contract import EngineClass, Served
    from paceline.measure.served_runs import Answers, Runs


class ServedSpeed(StrictModel):
    """Whole requests with and without the draft.

    Attributes:
        speedup: Seconds per token without / with the draft, paired by prompt.
        speedup_by_start: Of each start; with 3 or more, the interval of `speedup` is over them.
        num_equal: Texts that are equal with and without; all at temperature 0 in exact arithmetic.
        num_near_ties: Texts that differ first where the target's two highest logits are closer than
            0.25, in float32 than 0.001; None above temperature 0.
    """

    speedup: Interval
    speedup_by_start: list[float]
    plain_tokens_per_s: float
    speculative_tokens_per_s: float
    num_equal: int
    num_near_ties: int | None


class ServedMeasurement(Result):
    """Measured and predicted figures of an engine.

    Attributes:
        rows: With the setting `counts`: served, the engine's counters, or predicted, from the
            probabilities of both models over the engine's texts. Of either a row of all blocks, and
            a row per position in the block, if the engine reports it. A row with the setting
            `timed` has the requests with and without the draft. The units are the requests.
        speed: None if the engine was not measured without the draft.
        verdict: On the speedup; None without it.
        notes: Remarks on the engine.
        starts: Starts of the engine.
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
    notes: tuple[str, ...] = ()
    starts: Starts = Starts()
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
    config.engine.kind.check_draft_path(config.engine.draft or config.draft)
    tokenizer = load_tokenizer(config.target)
    asked = config.prompts.first(config.num_prompts)
    prompts = read_prompts(asked, tokenizer, max_tokens=config.max_prompt_tokens)
    requests = [
        Request(prompt, config.max_new_tokens, config.sampling, config.seed + number)
        for number, prompt in enumerate(prompts)
    ]
    in_process = config.engine.kind.in_process
    pair = load_scored(config) if in_process else None
    runs = run_engine(config, pair, requests, progress)
    pair = pair or load_scored(config)
    engine, served = runs.drafted.engine, runs.drafted.served
    notes: list[str] = []
    if config.engine.url is not None:
        notes.append("a running server is not restarted, so all figures are of one start")
    elif in_process:
        notes.append(f"{engine.name} runs in this process: all figures are of one start")
    found = compare_served(pair, requests, served, engine, config, progress)
    rows = _rows(config, pair, found, served)
    speed = verdict = None
    if runs.plain is not None:
        rows.append(timed_requests(rows[0], runs.plain.served, served))
        speed = _speed(rows[-1], config, pair, requests, runs.plain, runs.drafted)
        verdict = decide_served(speed.speedup, rows[0], engine.name)
    return ServedMeasurement(
        config=config,
        engine=engine.name,
        engine_version=engine.version,
        num_requests=len(requests),
        num_tokens=sum(len(answer.tokens) for answer in served),
        rows=rows,
        agreement=found.agreement,
        speed=speed,
        verdict=verdict,
        environment=environment(),
        notes=tuple(notes),
        starts=runs.starts,
        costs=_costs(config, pair, requests, runs),
    )


def _rows(
    config: ServedConfig, pair: Pair, found: Comparison, served: Sequence[Served]
) -> list[Row]:
    base = Row(
        population=f"prompts of {config.prompts.path}",
        units=found.units,
        setting={
            "draft": config.draft,
            **config.sampling.setting,
            "engine": config.engine.engine,
            "draft_temperature": config.proposals.temperature,
            "parameter_ratio": pair.draft.num_parameters / pair.target.num_parameters,
            "gamma": config.num_speculative_tokens,
        },
        sums={"tokens": tuple(float(len(served[unit].tokens)) for unit in found.units)},
        source=Source.here(
            "measure --engine",
            fingerprints={name: fingerprint(getattr(config, name)) for name in Pair._fields},
            sizes={name: model.num_parameters for name, model in pair._asdict().items()},
        ),
    )
    sides = {"served": found.served, "predicted": found.predicted}
    return [row for name, counts in sides.items() for row in counts.rows(base, name)]


def load_scored(config: ServedConfig) -> Pair:
    """Load both models as the engine uses them.

    A draft with a reduced vocabulary gets the full one, unless its export contains the reduced one.

    Raises:
        UsageError: A model cannot be loaded, or the tokenizers differ.
    """
    choice, paths = config.engine, (config.target, config.draft)
    served = choice.target or config.target, choice.draft or config.draft
    if choice.kind.in_process:  # with the scored models
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
    """Counts of an engine, expected counts, and whether they agree.

    Attributes:
        units: Numbers of the requests whose blocks the engine counted.
    """

    units: tuple[int, ...]
    served: Counts
    predicted: Counts
    agreement: Agreement


def compare_served(
    pair: Pair,
    requests: Sequence[Request],
    served: Sequence[Served],
    engine: EngineClass,
    config: ServedConfig,
    progress: Progress = silent,
) -> Comparison:
    """Score the engine's texts with both models, and compare the prediction with its counters.

    Both describe the same texts, so the random draws of the texts affect both equally.

    Raises:
        EngineError: The counters do not match the texts.
        UsageError: Every text has one token, so that nothing could be drafted.
    """
    gamma = config.num_speculative_tokens
    for answer in served:
        check_counts(answer, gamma, engine)
    units = tuple(place for place, answer in enumerate(served) if answer.blocks is not None)
    prompts = [requests[place].prompt for place in units]
    texts = [served[place].tokens for place in units]
    check_longest(max(map(len, texts), default=0))
    written = PairTexts(*pair, prompts, texts, config.sampling, config.proposals)
    scores = score_texts(written, progress)
    predicted = predicted_counts(scores, gamma, config.max_new_tokens, engine)
    actual = served_counts(served, gamma)
    greedy = config.sampling.greedy and config.proposals.greedy
    agreement = decide_agreement(actual, predicted, greedy=greedy)
    return Comparison(units, actual, predicted, agreement)


def _speed(
    row: Row,
    config: ServedConfig,
    pair: Pair,
    requests: Sequence[Request],
    plain: Answers,
    drafted: Answers,
) -> ServedSpeed:
    """The speed of the timed requests in `row`."""
    sides = plain.served, drafted.served
    by_start = speedup_by_start(plain, drafted)
    ties = _near_ties(pair.target, requests, *sides) if config.sampling.greedy else None
    return ServedSpeed(
        speedup=over_starts(FIGURES["speedup"].measure(row), by_start),
        speedup_by_start=by_start,
        plain_tokens_per_s=FIGURES["target_tokens_per_s"].value(row),
        speculative_tokens_per_s=FIGURES["tokens_per_s"].value(row),
        num_equal=sum(a.tokens == b.tokens for a, b in zip(*sides, strict=True)),
        num_near_ties=ties,
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
    sides = (one.seconds_per(lambda answer: len(answer.tokens)) for one in (plain, drafted))
    return [without / with_draft for without, with_draft in zip(*sides, strict=True)]


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
            begun = request.prompt, without.tokens[:split]
            count += logit_gap(target, *begun, request.sampling, target.vocab_size) < limit
    return count


def _costs(
    config: ServedConfig, pair: Pair, requests: Sequence[Request], runs: Runs
) -> EngineCosts | None:
    if runs.steps is None:
        return None
    return EngineCosts(
        engine=config.engine.engine,
        engine_version=runs.drafted.engine.version,
        drafting=config.drafting,
        drafts_in_full=runs.drafted.engine.counts_behind_end,
        full_vocabulary=pair.draft.draft_vocabulary is None,
        target_parameters=pair.target.num_parameters,
        draft_parameters=pair.draft.num_parameters,
        mean_context=mean_context(requests),
        steps=runs.steps.costs(),
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
