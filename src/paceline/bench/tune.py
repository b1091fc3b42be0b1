"""Chooses rule, threshold and block length for a quality floor or a latency budget.

1. The target alone answers the choosing examples.
2. Teacher-forced passes over its answers predict the speed of each candidate, and the surprisal of
   its tokens. Candidates that are worse in both than another one are dropped.
3. Lossless decoding and some of the other candidates are measured.
4. They are tested on the confirming examples, in the order of `sequential_test`. The last one that
   passes is chosen.

Lossless decoding has the target's quality by proof, so it meets a quality floor relative to the
target even if its random answers above temperature 0 score lower. Steps 1 to 3 are a bench in
`choosing/`, step 4 is a bench in `confirming/`; both resume after an interruption.
"""

from __future__ import annotations

import math
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import Field, field_validator, model_validator

from paceline.bench.answers import key_of, read_rows, read_texts
from paceline.bench.runner import finished, run_cells
from paceline.bench.sequential_test import Bound, Step, Tried, confirm, statement
from paceline.bench.workbench import (
    BenchConfig,
    RuleChoice,
    bench_context,
    cell_key,
    expand_all,
    prepare,
)
from paceline.config import HomePath, Options, Result, StrictModel, to_yaml
from paceline.core.bootstrap import LEAST_UNITS
from paceline.core.rule_base import with_bonus
from paceline.core.rules import DEFAULT_RULES, Lossless
from paceline.core.sampling import SamplingParams
from paceline.data.input_checks import checked
from paceline.decode.strategies import Autoregressive, DecodingConfig, Speculative
from paceline.engines.kinds import KINDS, RuleServer
from paceline.errors import NotReachedError, UsageError
from paceline.measure.acceptance import PairTexts
from paceline.measure.analysis import analyze_rules
from paceline.measure.engine_costs import WithCosts, load_models_of, read_costs
from paceline.measure.latency import PassCosts, PassTimer
from paceline.measure.pair import ModelsConfig
from paceline.measure.prompt_checks import check_costs, check_task
from paceline.measure.results import gamma_of
from paceline.progress import Progress, silent
from paceline.records import RunDirectory, atomic_write_text
from paceline.results.figures import FIGURES
from paceline.results.frontier import Frontier
from paceline.tasks import TaskChoice

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.bench.workbench import Examples
    from paceline.core.rule_base import Rule
    from paceline.data.input_checks import InputChecks
    from paceline.engines.contract import Engine
    from paceline.measure.engine_costs import EngineCosts
    from paceline.measure.pair import Pair
    from paceline.results.row import Row

    Passes = Callable[[Sequence[int]], PassCosts]

__all__ = ["TuneConfig", "Tuned", "tune"]

_PASSES = 15
_FILE = "decoding.yaml"
_STEPS: tuple[Step, Step] = ("choosing", "confirming")


class TuneConfig(WithCosts, ModelsConfig):
    """Configuration of `tune`, with one of the two bounds.

    Attributes:
        quality_floor: Minimum mean score, relative to the target's.
        max_latency: Maximum seconds per token, relative to the target's.
        output: Run directory; resumes if it exists. Its `decoding.yaml` is for `decode --config`.
        sampling: Sampling parameters.
        rules: Candidate rules; lists of parameters are expanded. With `costs`, the default is
            lossless decoding alone, since engines have no other rule.
        num_speculative_tokens: Candidate block lengths (gamma).
        served_by: Decode the candidates as this serves them. vLLM takes first and bonus tokens from
            the target and drafts without top-k and top-p; cascades have no effect there at
            temperature 0, so they are no candidates. With the `costs` of vLLM, it is vllm.
        num_candidates: Number of candidates to measure, besides lossless decoding.
        num_examples: Number of examples for choosing.
        num_confirmed: Number of other examples, for confirming.
        num_timed: Number of examples, of either kind, on which speed is measured; None: all.
        confidence: A run chooses a setting that misses the bound with a probability of at most
            1 - confidence, whatever the number of tested settings.
    """

    task: TaskChoice
    output: HomePath
    quality_floor: float | None = Field(default=None, gt=0)
    max_latency: float | None = Field(default=None, gt=0)
    sampling: Annotated[SamplingParams, Options("temperature")] = SamplingParams()
    rules: tuple[RuleChoice, ...] = Field(default=DEFAULT_RULES, min_length=1)
    num_speculative_tokens: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        default=(1, 2, 3, 4, 6), min_length=1
    )
    served_by: Annotated[RuleServer, Options(for_="")] = "paceline"
    num_candidates: int = Field(default=8, ge=1)
    num_examples: int = Field(default=64, ge=2)
    num_confirmed: int = Field(default=128, ge=LEAST_UNITS)
    num_timed: int | None = Field(default=None, ge=1)
    confidence: float = Field(default=0.8, gt=0.5, lt=1)

    @field_validator("rules", mode="before")
    @classmethod
    def _one_of_each(cls, value: Any) -> Any:
        return expand_all(value)

    @model_validator(mode="after")
    def _one_bound(self) -> TuneConfig:
        if (self.quality_floor is None) == (self.max_latency is None):
            raise ValueError(
                "set exactly one of quality_floor and max_latency, such as quality_floor 0.98"
            )
        timed = self.num_timed
        if self.max_latency is not None and timed is not None and timed < LEAST_UNITS:
            raise ValueError(
                f"num_timed is {timed}, but max_latency needs at least {LEAST_UNITS} timed "
                "examples; raise num_timed"
            )
        return self

    @model_validator(mode="after")
    def _engines_have_no_such_penalty(self) -> TuneConfig:
        if self.server is not None and self.sampling.repetition_penalty != 1:
            raise ValueError(
                f"{self.server.title} applies a repetition penalty to the target alone, and "
                "Paceline's decoder to the draft, too; leave sampling.repetition_penalty out, or "
                "served_by"
            )
        return self

    @property
    def server(self) -> type[Engine] | None:
        """The engine that serves the setting; None: Paceline's decoder."""
        return KINDS.get(self.served_by)

    def check(self, checks: InputChecks) -> None:
        """Check the inputs; raises UsageError."""
        RunDirectory(self.output).check_kind(self)
        checks.device(self.device)
        check_costs(checks, self, self.block_lengths)
        count = self.num_examples + self.num_confirmed
        check_task(checks, "task", self.task, count, self.seed)
        checks.pair(self.target, self.draft)
        checks.drafting(self.target, self.draft)
        checks.output(self.output)

    @property
    def block_lengths(self) -> tuple[int, ...]:
        """The values of `num_speculative_tokens` that fit into an answer."""
        most = max(1, self.max_new_tokens - 1)
        return tuple(gamma for gamma in self.num_speculative_tokens if gamma <= most)

    @property
    def bound(self) -> str:
        """The bound in words."""
        if self.quality_floor is not None:
            return f"a quality of at least {self.quality_floor:g} of the target's"
        return f"a time per token of at most {self.max_latency:g} of the target's"


class FailedCell(StrictModel):
    """A candidate that failed, with the error."""

    decoding: DecodingConfig
    error: str


class Tuned(Result):
    """The chosen setting, and all measurements.

    Attributes:
        tried: Those on the choosing examples, then those on the confirming ones, in order.
        num_tests: Number of settings tested on the confirming examples.
        statement: The guarantee of the tests, in words.
    """

    schema_version: Literal[1] = 1
    kind: Literal["tune"] = "tune"
    chosen: Tried
    tried: tuple[Tried, ...]
    failed: tuple[FailedCell, ...]
    num_tests: int
    statement: str
    config: TuneConfig

    @property
    def summary(self) -> str:
        """The chosen setting, and the guarantee."""
        return f"{self.chosen.row.setting}; {self.statement}"

    def rows(self, examples: Step) -> list[Row]:
        """The result rows of the settings that were measured on these examples."""
        return [one.row for one in self.tried if one.row.has(examples=examples)]


def tune(config: TuneConfig, progress: Progress = silent) -> Tuned:
    """Choose a setting and write it to `decoding.yaml`.

    Raises:
        UsageError: a model or the task cannot be used, or it has no metric for a quality floor.
        NotReachedError: no setting meets the bound on the confirming examples.
    """
    if config.max_latency is None and config.task.metric is None:
        raise UsageError(
            f"task {config.task.task} has no metric, so no quality floor can be tested; set "
            "max_latency, or use a task with a metric such as arithmetic"
        )
    checked(config)
    costs = None if config.costs is None else read_costs(config.costs)
    if costs is not None:
        config = _for_engine(config, costs)
    run = RunDirectory(config.output)
    with run.alone():
        return _tune(config, costs, run, progress)


def _tune(
    config: TuneConfig, costs: EngineCosts | None, run: RunDirectory, progress: Progress
) -> Tuned:
    bound = Bound(config, costs)
    pair = cache(lambda: load_models_of(config, costs))
    choosing, confirming = (_Measured(config, costs, name, pair, progress) for name in _STEPS)
    _ = choosing.work, confirming.work  # raises if a prompt is too long
    candidates = propose(choosing)
    run.write_manifest(config)  # only after models and task were loaded
    for stale in (run.path / _FILE, run.result):  # possibly of another bound
        stale.unlink(missing_ok=True)
    measured = choosing.measure(candidates)
    tried = [
        bound.tried(measured, row, choosing.decoding_of(row), "choosing") for row in measured.rows
    ]
    tests = confirm(
        bound.test_order(measured),
        lambda row: _test(bound, confirming, choosing.decoding_of(row)),
    )
    tried += tests
    confirmed = [tested for tested in tests if tested.met]
    failed = (*choosing.failed, *confirming.failed)
    if not confirmed:
        best = max(one.measure(bound.figure).value for one in tried)
        known = f" ({len(failed)} more failed, see rows.jsonl)" if failed else ""
        raise NotReachedError(
            f"none of {len(tried)} measurements{known} meets {config.bound}: the best "
            f"{bound.figure} is {best:.3f}; loosen the bound, raise num_confirmed, or align the "
            "draft further"
        )
    tuned = Tuned(
        chosen=confirmed[-1],
        tried=tuple(tried),
        failed=failed,
        num_tests=sum(tested.lower_limit is not None for tested in tests),
        statement=statement(config, tests),
        config=config,
    )
    atomic_write_text(run.path / _FILE, to_yaml(tuned.chosen.decoding))
    run.write_result(tuned.model_dump(mode="json"))
    return tuned


def _for_engine(config: TuneConfig, costs: EngineCosts) -> TuneConfig:
    """The block lengths with known costs, and no rules unless configured: engines have none."""
    changes: dict[str, Any] = {
        "num_speculative_tokens": costs.usable(config.block_lengths, config.concurrency),
        "rules": config.rules if "rules" in config.model_fields_set else (),
    }
    if KINDS[costs.engine].runs_rules:
        changes["served_by"] = costs.engine
    return config.model_copy(update=changes)


def _test(bound: Bound, confirming: _Measured, decoding: DecodingConfig) -> Tried | None:
    """Measure a setting on the confirming examples; None if it failed to decode them."""
    frontier = confirming.measure([decoding])
    rows = (row for row in frontier.rows if confirming.decoding_of(row) == decoding)
    row = next(rows, None)
    return None if row is None else bound.tried(frontier, row, decoding, "confirming")


class _Measured:
    """The examples of one step, measured in a bench of their own."""

    def __init__(
        self,
        config: TuneConfig,
        costs: EngineCosts | None,
        name: Step,
        pair: Callable[[], Pair],
        progress: Progress,
    ) -> None:
        self.alone = DecodingConfig(strategy=Autoregressive(), sampling=config.sampling)
        self.failed: list[FailedCell] = []
        self.config, self.costs = config, costs
        self._setting = _bench_of(config, costs, name)
        self._context = bench_context(self._setting)
        self._pair = pair
        self._decodings: dict[str, DecodingConfig] = {}
        self.progress = progress

    @cached_property
    def work(self) -> Examples:
        """Models and examples, loaded on first use."""
        return prepare(self._setting, self.progress, self._pair(), "paceline tune")

    @property
    def texts(self) -> list[list[int]]:
        """Answers of the target alone."""
        self.rows([])
        texts = read_texts(self._setting.output)
        if (key := cell_key(self._context, self.alone)) not in texts:
            raise UsageError(
                f"{self._setting.output} lacks answers of the target alone, which predictions "
                "need; run again in a new directory"
            )
        return texts[key]

    def decoding_of(self, row: Row) -> DecodingConfig:
        """The decoding of a cell that was asked for."""
        return self._decodings[key_of(row)]

    def rows(self, cells: Sequence[DecodingConfig]) -> list[Row]:
        """Rows of these cells and the target alone; finished cells are not run again."""
        folder, context, cells = self._setting.output, self._context, [self.alone, *cells]
        done = finished(cells, context, read_rows(folder, context))
        if missing := [cell for cell in cells if cell not in done]:
            run_cells(self.work, missing, folder, progress=self.progress)
        asked = {cell_key(context, cell): cell for cell in cells}
        self._decodings |= asked
        rows = [row for row in read_rows(folder, context) if key_of(row) in asked]
        for row in rows:
            if row.error and self.decoding_of(row) == self.alone:
                raise UsageError(f"the target alone could not answer the examples: {row.error}")
        return rows

    def measure(self, cells: Sequence[DecodingConfig]) -> Frontier:
        """Figures of the cells and the target alone; failed cells are added to `failed`."""
        rows = self.rows(cells)
        self.failed += [
            FailedCell(decoding=self.decoding_of(row), error=row.error) for row in rows if row.error
        ]
        done = [row for row in rows if not row.error]
        if self.costs is not None:
            done = in_engine_seconds(done, self.costs, self.config.concurrency)
        frontier = Frontier(done)
        floor = self.config.quality_floor
        if floor and not frontier.value("quality", frontier.target):
            raise NotReachedError(
                "the target itself scores 0 on these examples, so every setting meets a relative "
                "floor; use more examples, another task, or max_latency"
            )
        return frontier


def propose(choosing: _Measured) -> list[DecodingConfig]:
    """Candidates to measure: lossless decoding, and those on the frontier of speed and surprisal.

    Each rule has its fastest block length. If there are more than `num_candidates`, they are evenly
    spaced in the order of surprisal, including both ends.
    """
    texts, config = choosing.texts, choosing.config
    drafts, passes, server = config.sampling, None, config.server
    if (costs := choosing.costs) is not None:
        drafts = costs.proposals(config.sampling)
        passes = partial(costs.step_costs, batch_size=config.concurrency)
    elif server is not None:
        drafts = server.proposals("probabilistic", config.sampling)
    rules = config.rules
    if server and config.sampling.greedy:  # vLLM decodes losslessly with cascades
        rules = [rule for rule in rules if not rule.uses_confidence]
    cells = [
        DecodingConfig(
            strategy=Speculative(
                rule=rule,
                num_speculative_tokens=gamma,
                draft_sampling=None if drafts == config.sampling else drafts,
                bonus="target" if server else "rule",
            ),
            sampling=config.sampling,
        )
        for rule in (Lossless(), *rules)
        for gamma in config.num_speculative_tokens
    ]
    predictions = predict(choosing.work, texts, cells, choosing.progress, passes)
    best: dict[Rule, tuple[Predicted, DecodingConfig]] = {}
    for cell, predicted in zip(cells, predictions, strict=True):
        assert isinstance(cell.strategy, Speculative)
        rule = cell.strategy.rule
        if rule not in best or predicted.speedup > best[rule][0].speedup:
            best[rule] = (predicted, cell)
    _, lossless = best[Lossless()]
    others = [cell for cell in undominated(list(best.values())) if cell != lossless]
    return [lossless, *spread(others, config.num_candidates)]


class Predicted(NamedTuple):
    """Mean surprisal of a cell's tokens under the target, nats; tau / cost of a block."""

    surprisal: float
    speedup: float


def predict(
    work: Examples,
    texts: list[list[int]],
    cells: Sequence[DecodingConfig],
    progress: Progress = silent,
    passes: Passes | None = None,
) -> list[Predicted]:
    """Predict cells with a rule, blocks of a fixed length, and equal sampling of both models.

    Args:
        work: Models and prompts.
        texts: Answers of the target alone, with the sampling of the cells.
        cells: The cells.
        progress: Progress callback.
        passes: Gives the costs of passes for gammas; None: passes are timed.
    """
    most = work.max_new_tokens - 1  # a block leaves one token of the budget to the target
    strategies = [cell.strategy for cell in cells if isinstance(cell.strategy, Speculative)]
    ruled = [with_bonus(strategy.rule, strategy.bonus) for strategy in strategies]
    rules = list(dict.fromkeys(ruled))
    lengths = [min(strategy.num_speculative_tokens, most) for strategy in strategies]
    gammas = sorted(set(lengths))
    sampling, drafts = cells[0].sampling, strategies[0].draft_sampling
    positive = [gamma for gamma in gammas if gamma]
    if passes and positive:
        costs = passes(positive)
    else:
        timed = PassTimer(*work.pair, work.prompts[0], positive, sampling, drafts, texts[0])
        costs = timed.run(_PASSES)
    answers = PairTexts(*work.pair, work.prompts, texts, sampling, drafts, work.max_new_tokens)
    analyzed = analyze_rules(answers, rules, gammas, progress)
    by_rule = {
        (rule, gamma_of(row)): row
        for rule, (_, *rows) in zip(rules, analyzed, strict=True)
        for row in rows
    }
    predictions: list[Predicted] = []
    for rule, gamma in zip(ruled, lengths, strict=True):
        row = by_rule[rule, gamma]
        tau, surprisal = (FIGURES[name].value(row) for name in ("block_efficiency", "surprisal"))
        tau = 1.0 if math.isnan(tau) else tau  # texts of a single token
        cost = costs.block_cost(gamma, row.totals["drafted_per_block"]) if gamma else tau
        predictions.append(Predicted(surprisal, tau / cost))
    return predictions


def undominated(
    candidates: Sequence[tuple[Predicted, DecodingConfig]],
) -> list[DecodingConfig]:
    """Candidates faster than all with a lower surprisal, in the order of surprisal."""
    order = sorted(candidates, key=lambda one: (one[0].surprisal, -one[0].speedup))
    kept: list[DecodingConfig] = []
    fastest = 0.0
    for predicted, decoding in order:
        if predicted.speedup > fastest:
            fastest = predicted.speedup
            kept.append(decoding)
    return kept


def spread(candidates: Sequence[DecodingConfig], count: int) -> list[DecodingConfig]:
    """`count` evenly spaced candidates, including the first and, if there are two, the last."""
    if count >= len(candidates):
        return list(candidates)
    if count == 1:
        return [candidates[0]]
    last = len(candidates) - 1
    return [candidates[round(number * last / (count - 1))] for number in range(count)]


def _bench_of(config: TuneConfig, costs: EngineCosts | None, name: Step) -> BenchConfig:
    choosing = name == "choosing"
    shared = {key: getattr(config, key) for key in ModelsConfig.model_fields}
    return BenchConfig(
        **shared,
        task=config.task,
        output=config.output / name,
        num_examples=config.num_examples if choosing else config.num_confirmed,
        skip_examples=0 if choosing else config.num_examples,
        num_timed=config.num_timed,
        full_vocabulary=costs is not None and costs.full_vocabulary,
    )


def in_engine_seconds(rows: Sequence[Row], costs: EngineCosts, concurrency: int) -> list[Row]:
    """Set the seconds of each row to number of steps x seconds per step, without the prefill.

    Rows must be of the target alone, or of a rule with blocks of a fixed length.
    """
    gammas = {int(row.setting["gamma"]) for row in rows if "gamma" in row.setting}
    steps = costs.step_costs(sorted({*gammas, *costs.gammas}), concurrency)
    step_s = steps.target_pass_s

    def timed(row: Row) -> Row:
        gamma = int(row.setting.get("gamma", 0))

        def passes(calls: float, drafted: float) -> float:
            return calls * steps.block_cost(gamma, drafted / calls) if gamma and calls else calls

        counts = zip(row.sums["calls"], row.sums["drafted"], strict=True)
        seconds = [step_s * passes(calls or 0.0, drafted or 0.0) for calls, drafted in counts]
        # the prefill gives the first token
        alone = [
            None if tokens is None else step_s * max(tokens - 1, 0)
            for tokens in row.sums["target_tokens"]
        ]
        changes = {
            "seconds": tuple(seconds),
            "first_seconds": (0.0,) * len(seconds),
            "target_seconds": tuple(alone),
            "target_first_seconds": tuple(None if one is None else 0.0 for one in alone),
        }
        return row.model_copy(update={"sums": row.sums | changes})

    return [timed(row) for row in rows]
