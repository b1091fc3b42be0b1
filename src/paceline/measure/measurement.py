"""Measures whether a draft is worth serving: acceptance, cost, speedup, verdict."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, cast

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from paceline.config import Options, Result
from paceline.core.bootstrap import Interval, difference_interval
from paceline.data.input_checks import InputChecks, checked, note
from paceline.decode import AutoregressiveDecoder, SpeculativeDecoder
from paceline.decode.decoder import shared_context
from paceline.decode.ngram import NGRAM
from paceline.environment import begin, environment
from paceline.errors import UsageError
from paceline.measure.acceptance import PairTexts, most_drafted, rows_of_texts, score_texts
from paceline.measure.engine_costs import (
    EngineCosts,
    WithCosts,
    load_models_of,
    read_costs,
    words_of_starts,
)
from paceline.measure.latency import (
    PassCosts,
    PassTimer,
    candidates,
    choose_gamma,
    num_choosing,
    time_pairs,
)
from paceline.measure.pair import PairConfig, sample_texts, trained_acceptance
from paceline.measure.results import ACCEPTANCE, disturbance, gamma_of, value_of
from paceline.measure.slices import (
    Slice,
    Sliced,
    as_objects,
    judged,
    slices_of,
)
from paceline.measure.verdict import (
    Verdict,
    best_code,
    decide,
    decide_by_expected,
    next_step,
)
from paceline.models.inspection import inspect_model
from paceline.models.loading import fingerprint
from paceline.models.prepare import describe_pass
from paceline.progress import Progress, silent
from paceline.results.figures import FIGURES, as_values
from paceline.results.row import Row, Source, select

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from paceline.models import HfModel
    from paceline.models.contract import Model
    from paceline.models.inspection import ModelFacts
    from paceline.results.figures import Figure


_PASSES = ("target_pass_s", "draft_pass_s", "cost_ratio")
_NGRAM_ADVICE = (
    "serve a draft model, or none: these texts repeat too little",
    "serve the engine's own n-gram lookup, and ask a draft model for more than this",
)
_SPEEDUPS = ("mbsu", "predicted_speedup", "expected_speedup")


class MeasureConfig(WithCosts, PairConfig):
    """Configuration of `measure`.

    Attributes:
        draft: Draft model: hub id, directory or GGUF file. `ngram`: no model, but what followed the
            same tokens earlier in the text.
        other_drafts: Further drafts, measured on the same texts by `measure_drafts`.
        timed_prompts: Number of timed requests, including those that choose gamma; 0: no timing.
        slices: Columns of the prompts by whose values figures and verdicts are given, too;
            `prompt_tokens`: by the length of the prompt.
    """

    draft: Annotated[str, Options(several=True)]
    other_drafts: list[str] = Field(default_factory=list)
    gammas: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        default=(1, 2, 3, 4, 5, 6, 8), min_length=1
    )
    pass_repeats: int = Field(default=31, ge=1)
    timed_prompts: Annotated[int, Options()] = Field(default=16, ge=0)
    slices: Annotated[tuple[str, ...], Options()] = ()

    @property
    def drafts(self) -> list[str]:
        """All drafts."""
        return [self.draft, *self.other_drafts]

    def check(self, checks: InputChecks) -> None:
        checks.device(self.device)
        self.check_costs(checks, self.gammas)
        models = [model for draft in self.drafts for model in self._checked_pair(checks, draft)]
        self.note_defaults(checks)
        count = self.check_prompts(checks, models, new_tokens=1)
        slices_of(self.slices, self.prompts, [()] * count)

    def _checked_pair(self, checks: InputChecks, draft: str) -> list[ModelFacts]:
        """Check target and draft; of several, an error names the draft."""
        if draft == NGRAM:
            return [checks.model("target", self.target)]
        try:
            return checks.pair(self.target, draft)
        except UsageError as error:
            if not self.other_drafts or draft in str(error):
                raise
            raise type(error)(f"draft {draft}: {error}") from None


class Measurement(Result):
    """Result of a measurement. Its JSON has the `figures` of each row beside the rows, by name.

    Attributes:
        rows: Of the scored texts without gamma, then by gamma with blocks and their costs; then,
            with the setting `timed`, of gammas that were timed to choose one, and of the requests
            of the verdict. The units are the numbers of the prompts.
        slices: The prompts by the values of columns.
    """

    schema_version: Literal[2] = 2
    kind: Literal["measure"] = "measure"
    config: MeasureConfig
    rows: list[Row] = Field(min_length=1)
    verdict: Verdict
    slices: list[Slice] = Field(default_factory=list[Slice])
    environment: dict[str, object]
    computed: ClassVar = ("figures", "best_gamma", "disturbance", "sliced")

    @model_serializer(mode="wrap")
    def _with_figures(self, fields: SerializerFunctionWrapHandler) -> dict[str, Any]:
        figures = [
            {name: figure.as_object() for name, figure in as_values(row).items()}
            for row in self.rows
        ]
        return fields(self) | {
            "figures": figures,
            "best_gamma": self.best_gamma,
            "disturbance": self.disturbance,
            "sliced": as_objects(self.sliced),
        }

    @property
    def sliced(self) -> list[Sliced]:
        """The slices with their verdicts by expected speedups, each by itself."""
        return list(judged(self.slices, self.blocks, self.disturbance))

    @property
    def best_gamma(self) -> int:
        """The gamma to serve, that of the verdict; above 0 exactly if the verdict is GO."""
        return self.verdict.gamma if self.verdict.go else 0

    @property
    def judged(self) -> Row:
        """The row of the scored texts with blocks of the gamma of the verdict, else the first."""
        return next(iter(select(self.blocks, gamma=self.verdict.gamma)), self.blocks[0])

    @property
    def texts(self) -> Row:
        """The row of the scored texts."""
        return self.rows[0]

    @property
    def blocks(self) -> list[Row]:
        """The rows of the scored texts with blocks of each gamma."""
        rows = self.rows[1:]
        return [row for row in rows if not row.setting.keys() & {"timed", "position"}]

    @property
    def tried(self) -> list[Row]:
        """Gammas that were timed to choose that of the requests; empty if only one was timed."""
        return select(self.rows, timed="choosing")

    @property
    def requests(self) -> Row | None:
        """The row of the timed requests."""
        return next(iter(select(self.rows, timed="requests")), None)

    def fingerprint(self, role: str) -> str:
        """Fingerprint of the files of the target or the draft; empty for models in memory."""
        return self.texts.source.fingerprints.get(role, "")

    @property
    def engine(self) -> str:
        """The engine with these costs; empty: Paceline's decoder."""
        return str(self.texts.setting.get("engine", ""))

    @property
    def disturbance(self) -> str:
        """Why the block costs cannot be those of an idle machine; empty: they can."""
        return disturbance(self.blocks)

    def figure(self, name: str, row: Row | None = None) -> Interval:
        """A figure of a row, by default of the scored texts, with its interval."""
        return FIGURES[name].measure(row or self.texts)

    @property
    def summary(self) -> str:
        """The verdict with its reason."""
        return str(self.verdict)


def measure(config: MeasureConfig, progress: Progress = silent) -> Measurement:
    """Load both models and measure them.

    Raises:
        UsageError: a model, a prompt file or the pair of tokenizers cannot be used, or there are
            other drafts.
    """
    if config.other_drafts:
        raise UsageError(
            f"measure takes one draft, and other_drafts names {len(config.other_drafts)} more; use "
            "measure_drafts"
        )
    (found,) = measure_each(config, progress)
    return found


@begin()
def measure_each(config: MeasureConfig, progress: Progress = silent) -> list[Measurement]:
    """As `measure`, for each draft: the target is loaded, and writes its texts, once.

    Drafts of one shape share the costs of their passes.
    """
    checked(config)
    costs, target, texts = None, None, None
    if config.costs is not None:
        costs = read_costs(config.costs)
        config = as_served(config, costs)
    marks = {"target": fingerprint(config.target)}
    found, passes = list[Measurement](), dict[object, list[PassCosts]]()
    for draft in config.drafts:
        one = config.model_copy(update={"draft": draft, "other_drafts": []})
        pair = load_models_of(one, costs, progress, target)
        target, (one, prompts) = pair.target, pair.prompts(one)
        texts = texts or sample_texts(target, prompts, one, one.sampling, progress)
        marks |= {"draft": "" if draft == NGRAM else fingerprint(draft)}
        own = passes.setdefault(_shape(pair.draft, draft) if config.other_drafts else "", [])
        found.append(measure_models(*pair, prompts, one, progress, costs, marks, texts, own))
    return found


def _shape(draft: HfModel, path: str) -> object:
    """What the time of a pass depends on: equal for drafts that differ in their weights alone."""
    if path == NGRAM:
        return path
    weights = inspect_model(path).hf.named_parameters()
    proposed = draft.draft_vocabulary
    return (
        tuple((name, tuple(weight.shape)) for name, weight in weights),
        None if proposed is None else len(proposed),
        draft.mask_token is None,
        describe_pass(draft),
        str(getattr(draft.hf.config, "quantization_config", None)),
    )


def as_served(config: MeasureConfig, costs: EngineCosts) -> MeasureConfig:
    """The configuration with the engine's gammas and draft sampling, and without timing."""
    drafts = costs.proposals(config.sampling)
    if config.draft_sampling not in (None, drafts):
        raise UsageError(
            f"the costs are of {costs} with {costs.drafting} drafting, but draft_sampling differs; "
            "leave --draft-temperature out, or write the costs with the other drafting "
            "(vLLM: drafting=probabilistic)"
        )
    gammas = costs.usable(config.gammas, config.concurrency)
    changes = {"gammas": gammas, "draft_sampling": drafts, "timed_prompts": 0}
    changes["parallel"] = config.parallel and costs.parallel
    return config.model_copy(update=changes)


def measure_models(
    target: Model,
    draft: Model,
    prompts: Sequence[Sequence[int]],
    config: MeasureConfig,
    progress: Progress = silent,
    engine: EngineCosts | None = None,
    fingerprints: Mapping[str, str] = MappingProxyType({}),
    completions: Sequence[Sequence[int]] | None = None,
    passes: list[PassCosts] | None = None,
) -> Measurement:
    """Measure two models, with these fingerprints, prepared for decoding, on tokenized prompts.

    `engine`: costs of an engine, used instead of timing passes. `completions`: texts of the target
    after the prompts, as `sample_texts` gives them. `passes`: the costs of passes of a draft of
    this shape, if they were timed; else they are added.
    """
    prompts = prompts[: config.num_prompts]
    if completions is None:
        completions = sample_texts(target, prompts, config, config.sampling, progress)
    texts = PairTexts(
        *(target, draft, prompts, completions), *config.scoring, gamma=max(config.gammas)
    )
    _note_of_context(texts)
    scores = score_texts(texts, progress)
    sizes = {"target": target.num_parameters, "draft": draft.num_parameters}
    row, *blocks = rows_of_texts(
        texts,
        scores,
        config.gammas,
        population=f"prompts of {config.prompts.path}",
        units=tuple(range(len(prompts))),
        setting=config.setting | {"parameter_ratio": sizes["draft"] / sizes["target"]},
        source=Source.here("measure", fingerprints=dict(fingerprints), sizes=sizes),
    )
    acceptance = FIGURES["expected_acceptance"].measure(row)
    setting, timed = dict[str, str | int](), list[Row]()
    gammas = [gamma_of(of_gamma) for of_gamma in blocks]
    if engine is not None:
        costs = engine.step_costs(gammas, config.concurrency)
        setting = {"engine": costs.engine, "concurrency": config.concurrency}
    else:
        passes = [] if passes is None else passes
        if not passes:
            passes.append(PassTimer.within(texts, gammas).run(config.pass_repeats, progress))
        costs = passes[0]
    seconds = {name: getattr(costs, name) for name in _PASSES}
    row, *blocks = (one.extended({}, seconds, **setting) for one in (row, *blocks))
    blocks = [costs.priced(of_gamma) for of_gamma in blocks]
    disturbed = disturbance(blocks)
    if config.timed_prompts and engine is None:  # also if no speedup is expected
        chosen, timed = _time_best(texts, blocks, config, progress)
        verdict = decide(acceptance, chosen, timed[-1], disturbed=bool(disturbed))
        speedup = FIGURES["speedup"].measure(timed[-1])
    else:
        remark = "" if engine is None else words_of_starts(engine.starts)
        verdict = decide_by_expected(acceptance, blocks, remark, disturbed)
        (chosen,) = select(blocks, gamma=verdict.gamma)
        speedup = FIGURES["expected_speedup"].measure(chosen)
    if disturbed:
        verdict = verdict.model_copy(update={"next": "stop other programs and run again"})
    else:
        trained = trained_acceptance(config.draft)
        known = verdict, acceptance, blocks, speedup, trained, config.as_options
        most = most_drafted(config.max_new_tokens)
        count = min(config.timed_prompts, len(prompts)) if timed else 0
        drafts = config.draft_sampling
        may_sample = engine is None and drafts is not None and drafts.greedy
        may_sample = may_sample and not config.sampling.greedy
        advice = next_step(*known, most_drafted=most, timed=count, may_sample=may_sample)
        if config.draft == NGRAM and verdict.decided:
            advice = _NGRAM_ADVICE[verdict.go]
        verdict = verdict.model_copy(update={"next": advice})
    return Measurement(
        config=config,
        rows=[row, *blocks, *timed],
        verdict=verdict,
        slices=slices_of(config.slices, config.prompts, prompts),
        environment=environment(),
    )


def _note_of_context(texts: PairTexts) -> None:
    """Say how many texts are longer than the shorter context of the models."""
    pairs = zip(texts.written, texts.completions, strict=True)
    longer = sum(len(whole) > len(kept) for whole, kept in pairs)
    if longer:
        shorter = shared_context(*texts.pair)
        note(
            f"{longer} of {len(texts.prompts)} texts are longer than the models' shorter context "
            f"of {shorter} tokens: what is behind it has no drafts and is not scored"
        )


def _time_best(
    texts: PairTexts, blocks: Sequence[Row], config: MeasureConfig, progress: Progress
) -> tuple[Row, list[Row]]:
    """Choose and time gamma, on separate requests.

    Returns:
        The one of `blocks` with this gamma; and the rows of all tried gammas, then that of the
        timed requests.
    """
    prompts, length = texts.prompts[: config.timed_prompts], config.max_new_tokens
    chosen = candidates(blocks)
    choosing = num_choosing(len(prompts)) if len(chosen) > 1 else 0
    decoders = [
        SpeculativeDecoder(
            *(*texts.pair, None, gamma_of(row), texts.sampling), draft_sampling=texts.draft_sampling
        )
        for row in chosen
    ]
    best, tried = 0, list[Row]()
    if choosing:
        best, tried = choose_gamma(
            list(zip(chosen, decoders, strict=True)),
            prompts[:choosing],
            max_new_tokens=length,
            seed=config.seed + len(prompts),  # not used by time_pairs
            progress=progress,
        )
    times = time_pairs(
        AutoregressiveDecoder(texts.target, texts.sampling),
        decoders[best],
        prompts[choosing:],
        max_new_tokens=length,
        seed=config.seed,
        progress=progress,
    )
    scored = chosen[best]
    requests = scored.model_copy(
        update={
            "units": scored.units[choosing : len(prompts)],
            "setting": scored.setting | {"timed": "requests"},
            "sums": times.sums,
            "totals": {name: scored.totals[name] for name in _PASSES},
            "bounds": {},
        }
    )
    return scored, [*tried, requests]


class Compared(NamedTuple):
    """A figure of a draft beside that of the first draft.

    Attributes:
        gamma: Drafted tokens per block; None: of the texts without blocks.
        difference: Less the figure of the first draft, paired by prompt; None of the first draft.
    """

    figure: str
    draft: str
    gamma: int | None
    value: Interval
    difference: Interval | None


class DraftComparison(Result):
    """Drafts that were measured on the same texts.

    Attributes:
        measurements: Of each draft, in the order given.
    """

    schema_version: Literal[2] = 2
    kind: Literal["measure drafts"] = "measure drafts"
    computed: ClassVar = ("compared", "conclusion")
    measurements: list[Measurement] = Field(min_length=1)

    @model_serializer(mode="wrap")
    def _with_comparison(self, fields: SerializerFunctionWrapHandler) -> dict[str, Any]:
        lines = [line._asdict() for line in self.compared()]
        for line in lines:
            for name in ("value", "difference"):
                line[name] = line[name] and line[name].as_object()
        return fields(self) | {"compared": lines, "conclusion": self.conclusion}

    @property
    def summary(self) -> str:
        """The verdict on each draft."""
        return ", ".join(f"{one.config.draft} {one.verdict.word}" for one in self.measurements)

    @property
    def drafts(self) -> list[str]:
        """The drafts, in the order given."""
        return [found.config.draft for found in self.measurements]

    @property
    def rows(self) -> list[Row]:
        """The rows of all drafts; the setting `draft` names the draft."""
        return [row for found in self.measurements for row in found.rows]

    @property
    def exit_code(self) -> int:
        """0 if any verdict is GO, 1 if all are NO-GO, else 3."""
        return best_code([found.verdict.exit_code for found in self.measurements])

    @property
    def conclusion(self) -> str:
        """Which draft is better, or that it is not shown: by the last speedup of `compared`.

        The best draft is compared with each of the others, paired by prompt, with intervals that
        share an error of 5%.
        """
        requests = [found.requests for found in self.measurements]
        rows = [fastest(found) for found in self.measurements]
        names = ("expected_speedup", "mbsu")  # tokens per call grow with gamma
        name = next(name for name in names if all(FIGURES[name].is_in(row) for row in rows))
        if None not in requests:
            name, rows = "speedup", cast("list[Row]", requests)
        figure, words = FIGURES[name], FIGURES[name].words
        best = max(range(len(rows)), key=lambda place: figure.value(rows[place]))
        others = [place for place in range(len(rows)) if place != best]
        if not others:
            return ""
        confidence = 1 - 0.05 / len(others)
        less = [paired_difference(figure, rows[best], rows[i], confidence) for i in others]
        if any(one.low <= 0 for one in less):
            return f"no draft is shown to be better: the difference in {words} may be 0"
        listed = ", ".join(
            f"by {one} than that of {self.drafts[place]}"
            for one, place in zip(less, others, strict=True)
        )
        return f"fastest: {self.drafts[best]}; its {words} is larger {listed}"

    def compared(self) -> list[Compared]:
        """Acceptance; tokens per target call; speedups.

        Tokens per target call are those at the gamma of the first draft. Speedups are at each
        draft's own gamma: that of its timed requests, else the one with the largest expectation.
        A figure that a draft lacks is left out.
        """
        own = [fastest(found) for found in self.measurements]
        shared = gamma_of(own[0])
        texts = [found.texts for found in self.measurements]
        alike = [
            next(row for row in found.blocks if gamma_of(row) == shared)
            for found in self.measurements
        ]
        requests = [found.requests for found in self.measurements]
        lines = [line for name in ACCEPTANCE for line in self._compared(name, texts)]
        lines += self._compared("block_efficiency", alike)
        lines += [line for name in _SPEEDUPS for line in self._compared(name, own)]
        if None not in requests:
            lines += self._compared("speedup", cast("list[Row]", requests))
        return lines

    def _compared(self, name: str, rows: list[Row]) -> Iterator[Compared]:
        """A line per draft, with the rows of the drafts in their order."""
        figure, first = FIGURES[name], self.measurements[0]
        if not all(figure.is_in(row) for row in rows):
            return
        for found, row in zip(self.measurements, rows, strict=True):
            less = None if found is first else paired_difference(figure, row, rows[0])
            gamma = gamma_of(row) if "gamma" in row.setting else None
            yield Compared(name, found.config.draft, gamma, figure.measure(row), less)


def paired_difference(
    figure: Figure, first: Row, second: Row, confidence: float = 0.95
) -> Interval:
    """A figure of `first` - that of `second`, on the units that both measured.

    What makes a unit hard for both cancels. The interval is over units; that of one unit is
    unbounded. A formula is a multiple of its ratio: totals, such as costs of passes, are exact.
    """
    shared = {*figure.units(first)} & {*figure.units(second)}
    sides = [row.only([unit for unit in row.units if unit in shared]) for row in (first, second)]
    base = FIGURES[figure.of or figure.name]
    one, two = (figure.value(row) / base.value(row) if figure.of else 1.0 for row in sides)
    columns = map(base.columns, sides)
    return difference_interval(*columns, scales=(one, two), confidence=confidence)


def fastest(found: Measurement) -> Row:
    """The blocks of the gamma that was timed, else of that with the largest expected speedup.

    Without costs: of that with the largest MBSU.
    """
    if found.requests is not None:
        gamma = gamma_of(found.requests)
        return next(row for row in found.blocks if gamma_of(row) == gamma)

    def expected(row: Row) -> float:
        speeds = (value_of(row, name) for name in ("expected_speedup", "mbsu"))
        return next(speed for speed in speeds if speed is not None)

    return max(found.blocks, key=expected)


def measure_drafts(config: MeasureConfig, progress: Progress = silent) -> DraftComparison:
    """Measure `draft` and `other_drafts`. The target is loaded, and writes its texts, once.

    Raises:
        UsageError: A model, a prompt file or a tokenizer cannot be used.
    """
    return DraftComparison(measurements=measure_each(config, progress))
