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

import logging
import math
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from paceline.bench.answers import key_of, read_rows, read_texts
from paceline.bench.runner import finished, run_cells
from paceline.bench.sequential_test import Bound, Step, Tried, TuneConfig, confirm, statement
from paceline.bench.workbench import (
    BenchConfig,
    bench_context,
    cell_key,
    prepare,
)
from paceline.config import Result, StrictModel, to_yaml
from paceline.core.rule_base import with_bonus
from paceline.core.rules import Lossless
from paceline.data.input_checks import checked
from paceline.decode import AutoregressiveDecoder
from paceline.decode.strategies import Autoregressive, DecodingConfig, Speculative
from paceline.engines.kinds import KINDS
from paceline.errors import NotReachedError, PacelineError, UsageError
from paceline.measure.acceptance import PairTexts
from paceline.measure.analysis import analyze_rules
from paceline.measure.engine_costs import load_models_of, read_costs
from paceline.measure.latency import PassTimer
from paceline.measure.pair import ModelsConfig, sample_texts
from paceline.measure.results import gamma_of
from paceline.progress import Progress, silent
from paceline.records import RunDirectory, atomic_write_text
from paceline.results.figures import FIGURES
from paceline.results.frontier import Frontier, is_lossless

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.bench.workbench import Examples
    from paceline.core.sampling import SamplingParams
    from paceline.measure.engine_costs import EngineCosts
    from paceline.measure.pair import Pair
    from paceline.results.row import Row

__all__ = ["TuneConfig", "Tuned", "tune"]

_log = logging.getLogger(__name__)
_PASSES = 15
_FILE = "decoding.yaml"
_STEPS: tuple[Step, Step] = ("choosing", "confirming")


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
    # only after models and task were loaded; that of a finished run stays until its result goes
    if not run.manifest.exists():
        run.write_manifest(config)
    _show("first example", choosing.work, _first_answer(choosing.work, config.sampling))
    choosing.measure([])  # raises if the target scores 0
    if config.quality_floor is not None:
        _log.info("note: %s", _draft_alone(choosing, config.quality_floor))
    candidates = propose(choosing)
    run.write_manifest(config)
    for stale in (run.path / _FILE, run.result):  # possibly of another bound
        stale.unlink(missing_ok=True)
    measured = choosing.measure(candidates)
    tried = [
        bound.tried(measured, row, choosing.decoding_of(row), "choosing") for row in measured.rows
    ]
    order = list(map(choosing.decoding_of, bound.test_order(measured)))
    exact = any(is_lossless(one.row) and one.decoding in order for one in tried)
    proven = exact and (config.quality_floor or math.inf) <= 1
    words = f"{len(order)}{', of which lossless decoding meets the floor by proof' * proven}"
    _log.info("note: settings to measure on other examples, until one fails: %s", words)
    tests = confirm(order, lambda decoding: _test(bound, confirming, decoding))
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
    answer = confirming.texts_of(tuned.chosen.decoding)[0]  # figures do not say how texts read
    _show("an example with the chosen setting", confirming.work, answer)
    return tuned


def _draft_alone(choosing: _Measured, floor: float) -> str:
    """How good the draft is: a metric that does not tell it from the target bounds nothing."""
    work, sampling = choosing.work, choosing.config.sampling
    progress = _told_as("the draft alone", choosing.progress)
    drafted = sample_texts(work.pair.draft, work.prompts, work.config, sampling, progress)
    texts = drafted, choosing.texts_of(choosing.alone)
    own, target = (
        sum(work.score(number, text) or 0.0 for number, text in enumerate(each)) for each in texts
    )
    words = f"the draft alone has {own / target:.2f} of the target's quality on these examples"
    return words if own < floor * target else f"{words}: the metric hardly tells them apart"


def _first_answer(work: Examples, sampling: SamplingParams) -> Sequence[int]:
    """The target's, since a task that does not fit the model wastes the whole run."""
    decoder = AutoregressiveDecoder(work.pair.target, sampling)
    (found,) = decoder.generate(work.prompts[:1], work.config.max_new_tokens, work.config.seed)
    return found.tokens


def _show(what: str, work: Examples, tokens: Sequence[int]) -> None:
    """Show the first example with an answer."""
    shown = {
        "prompt": work.tokenizer.decode(work.prompts[0]),
        "reference": work.examples[0].reference,
        "answer": work.answer(0, tokens)[1],
        "score": work.score(0, tokens),
    }
    for name, value in shown.items():
        _log.info("note: %s, %s: %r", what, name, value)


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
        self._pair, self._name = pair, name
        self._decodings: dict[str, DecodingConfig] = {}
        self.progress = progress

    @cached_property
    def work(self) -> Examples:
        """Models and examples, loaded on first use."""
        return prepare(self._setting, self.progress, self._pair(), "paceline tune")

    def texts_of(self, cell: DecodingConfig) -> list[list[int]]:
        """Answers of a cell that was measured."""
        return read_texts(self._setting.output)[cell_key(self._context, cell)]

    def decoding_of(self, row: Row) -> DecodingConfig:
        """The decoding of a cell that was asked for."""
        return self._decodings[key_of(row)]

    def rows(self, cells: Sequence[DecodingConfig]) -> list[Row]:
        """Rows of these cells and the target alone; finished cells are not run again."""
        folder, context, cells = self._setting.output, self._context, [self.alone, *cells]
        done = finished(cells, context, read_rows(folder, context))
        if missing := [cell for cell in cells if cell not in done]:
            stage = "the target alone" if missing == [self.alone] else f"{self._name} examples"
            run_cells(self.work, missing, folder, progress=_told_as(stage, self.progress))
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
            raise PacelineError(
                f"the target itself scores 0 on all {frontier.num_examples} examples, so every "
                "setting meets a relative floor; compare answer and reference of the first example "
                "above: an answer that goes on needs task.stop, a chat model task.chat"
            )
        return frontier


def _told_as(name: str, progress: Progress) -> Progress:
    """Reports the progress of another function as that of a stage of `tune`."""

    def told(stage: str, done: float, total: float, note: str = "") -> None:
        del stage
        progress(name, done, total, note)

    return told


def propose(choosing: _Measured) -> list[DecodingConfig]:
    """Candidates to measure: lossless decoding, and those on the frontier of speed and surprisal.

    Each rule has its fastest block length. If there are more than `num_candidates`, they are evenly
    spaced in the order of surprisal, including both ends.
    """
    config, work, texts = choosing.config, choosing.work, choosing.texts_of(choosing.alone)
    rules, sampling, server = [*config.rules], config.sampling, config.server
    if server and sampling.greedy:  # vLLM decodes losslessly with cascades
        rules = [rule for rule in rules if not rule.uses_confidence]
    rules = [Lossless(), *rules]
    bonus = "target" if server else "rule"
    drafts = sampling
    if (engine := choosing.costs) is not None:
        drafts = engine.proposals(sampling)
    elif server is not None:
        drafts = server.proposals("probabilistic", sampling)
    drafts = None if drafts == sampling else drafts
    most = max(1, config.max_new_tokens - 1)  # a block leaves one token of the budget to the target
    gammas = sorted({min(gamma, most) for gamma in config.num_speculative_tokens})
    answers = PairTexts(*work.pair, work.prompts, texts, sampling, drafts, config.max_new_tokens)
    if engine is not None:
        costs = engine.step_costs(gammas, config.concurrency)
    else:
        costs = PassTimer.within(answers, gammas).run(_PASSES)
    analyzed = analyze_rules(
        answers, [with_bonus(rule, bonus) for rule in rules], gammas, choosing.progress
    )
    speedup, best = FIGURES["expected_speedup"], list[Candidate]()
    for rule, (_, *rows) in zip(rules, analyzed, strict=True):
        priced = [costs.priced(row) for row in rows]
        row = max(priced, key=speedup.value)
        strategy = Speculative(
            rule=rule, num_speculative_tokens=gamma_of(row), draft_sampling=drafts, bonus=bonus
        )
        decoding = DecodingConfig(strategy=strategy, sampling=sampling)
        best.append(Candidate(FIGURES["surprisal"].value(row), speedup.value(row), decoding))
    lossless = best[0].decoding
    others = [cell for cell in undominated(best) if cell != lossless]
    return [lossless, *spread(others, config.num_candidates)]


class Candidate(NamedTuple):
    """Predicted surprisal of a rule's tokens under the target, nats, and speedup of its blocks."""

    surprisal: float
    speedup: float
    decoding: DecodingConfig


def undominated(candidates: Sequence[Candidate]) -> list[DecodingConfig]:
    """Candidates faster than all with a lower surprisal, in the order of surprisal."""
    kept: list[DecodingConfig] = []
    fastest = 0.0
    for one in sorted(candidates, key=lambda one: (one.surprisal, -one.speedup)):
        if one.speedup > fastest:
            fastest = one.speedup
            kept.append(one.decoding)
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
    steps = costs.step_costs(costs.gammas, concurrency)
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
