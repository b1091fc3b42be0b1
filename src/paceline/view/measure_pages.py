"""Pages of `paceline measure` (with and without an engine) and `verify`."""

from __future__ import annotations

import math
import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

from paceline.measure.engine_costs import words_of_starts
from paceline.measure.results import (
    ACCEPTANCE,
    gamma_of,
    num_tokens,
    value_of,
)
from paceline.results.figures import FIGURES
from paceline.view import charts
from paceline.view.charts import Axis, plotted
from paceline.view.page import (
    Fact,
    Page,
    Section,
    Table,
    about,
    sampling_words,
    sentence,
    shown,
    source_of,
    table_of,
    words_of,
)
from paceline.view.tables import (
    drafts_table,
    gamma_table,
    served_tables,
    slices_table,
    speculators_table,
    steps_table,
)

if TYPE_CHECKING:
    from paceline.measure import Measurement
    from paceline.measure.agreement import Agreement
    from paceline.measure.losslessness import DistributionCheck, LosslessnessReport
    from paceline.measure.measurement import DraftComparison
    from paceline.measure.served import ServedMeasurement
    from paceline.measure.speculators import SpeculatorTable
    from paceline.measure.verdict import Verdict
    from paceline.view.page import Block, Line, Tone

_PREDICTIONS = {
    "predicted_speedup": "predicted: tau / (c gamma + 1)",
    "expected_speedup": "expected on this machine",
    "mbsu": "MBSU (parameter ratio)",
}
_OF_REQUESTS = (
    *("speedup", "decoding_speedup", "cost_ratio", "predicted_speedup", "engine_efficiency"),
    *("target_tokens_per_s", "tokens_per_s", "block_efficiency"),
    "acceptance_rate",
)
_OF_TRIED = ("decoding_tokens_per_s", "expected_speedup")


def measure_page(found: Measurement) -> Page:
    source = source_of("measure", found.config, found.environment)
    verdict = found.verdict
    sizes = {f"{role} parameters": size for role, size in found.texts.source.sizes.items()}
    passes = found.texts.totals | sizes
    text = f"{len(found.texts.units)} prompts, {num_tokens(found.texts)} tokens"
    where = "Median of interleaved passes over one token."
    if found.disturbance:
        where += f" Warning: {found.disturbance}."
    if found.engine:
        where = f"In {found.engine}."
    costs: list[Block] = [Table("Cost of a pass", [passes], text=where)]
    if found.requests is not None:
        count = len(found.requests.units)
        text_of_speed = f"{count} requests with and without the draft, interleaved in one process."
        settings = {"title": "Timed requests", "text": text_of_speed, "units": "requests"}
        costs.append(table_of([found.requests], ("gamma",), _OF_REQUESTS, **settings))
    return Page(
        title="Is this draft worth serving?",
        word=verdict.word,
        tone=_tone(verdict),
        verdict=sentence("; next: ".join(filter(None, (verdict.reason, verdict.next)))),
        facts=_facts(found),
        sections=[_speedups(found), _acceptance(found), Section("Cost", costs)],
        about=about(
            source, f"Text: {text} of the target, {sampling_words(vars(found.config.sampling))}"
        ),
        source=source,
    )


def _tone(verdict: Verdict | Agreement | LosslessnessReport) -> Tone:
    tones: dict[int, Tone] = {0: "good", 1: "bad"}
    return tones.get(verdict.exit_code, "neutral")


def _facts(found: Measurement) -> list[Fact]:
    facts: list[Fact] = []
    if (requests := found.requests) is not None:
        facts.append(Fact.of("measured speedup", found.figure("speedup", requests), unit="x"))
        tau = found.figure("block_efficiency", requests)
        facts.append(Fact.of(words_of("block_efficiency"), tau))
    else:
        expected = found.figure("expected_speedup", found.judged)
        facts.append(Fact.of("expected speedup", expected, unit="x"))
    facts.append(Fact.of("expected acceptance", found.figure("expected_acceptance"), ".3f"))
    facts.append(Fact("cost ratio", f"{found.texts.totals['cost_ratio']:.3f}"))
    if found.verdict.decided:
        facts.append(Fact("gamma to serve", str(found.best_gamma or "none: decode without draft")))
    return facts


def _speedups(found: Measurement) -> Section:
    rows: list[Line] = [
        {"gamma": gamma_of(row), "kind": words, "speedup": value_of(row, name)}
        for row in found.blocks
        for name, words in _PREDICTIONS.items()
        if charts.is_finite(value_of(row, name))
    ]
    text = (
        "Predicted from acceptance and costs, for each number of drafted tokens. Above the dashed "
        "line, decoding with the draft is faster than without."
    )
    if (timed := found.requests) is not None:
        first = {"gamma": gamma_of(timed), "kind": "measured after the first token"}
        whole = {"gamma": gamma_of(timed), "kind": "measured, whole requests"}
        rows.append(first | {"speedup": found.figure("decoding_speedup", timed)})
        rows.append(whole | {"speedup": found.figure("speedup", timed)})
        text += f" The measured points are of {len(timed.units)} requests, with 95% intervals."
    axes = "gamma", Axis("speedup", format=".2f")
    blocks: list[Block] = [
        plotted("Speedup by gamma", text, rows, charts.curves, *axes, group="kind"),
        gamma_table(found, with_intervals=True),
    ]
    if found.tried:
        text = "On other requests than the measured speedup, to choose the gamma."
        title = "Gammas that were timed"
        blocks.append(
            table_of(found.tried, ("gamma",), _OF_TRIED, bare=_OF_TRIED, title=title, text=text)
        )
    return Section("Speed", blocks)


def _acceptance(found: Measurement) -> Section:
    text = "Three figures that others call acceptance rate, on text of the target."
    line = {name: found.figure(name) for name in ACCEPTANCE}
    tables = [Table("Acceptance", [line], text=text, units="prompts")]
    return Section("Acceptance", [*tables, *filter(None, [slices_table(found)])])


def drafts_page(found: DraftComparison) -> Page:
    first = found.measurements[0]
    source = source_of(
        "measure",
        first.config.model_copy(update={"other_drafts": found.drafts[1:]}),
        first.environment,
    )
    verdicts = [
        {"draft": one.config.draft, "verdict": one.verdict.word, "reason": one.verdict.reason}
        for one in found.measurements
    ]
    go = [one.config.draft for one in found.measurements if one.verdict.go]
    return Page(
        title="Which of these drafts is worth serving?",
        verdict=sentence(f"GO: {', '.join(go) or 'none'}"),
        sections=[
            Section("Drafts", [drafts_table(found), Table("Verdicts", verdicts)]),
        ],
        source=source,
    )


def speculators_page(found: SpeculatorTable) -> Page:
    config = found.config
    methods = " ".join(f"--speculative-config {shlex.quote(x)}" for x in config.speculative_config)
    source = source_of(f"measure {methods}", config, found.environment)
    return Page(
        title="Which speculator, at which load?",
        verdict=sentence(found.summary),
        sections=[Section("Methods", [speculators_table(found)])],
        source=source,
    )


def served_page(found: ServedMeasurement) -> Page:
    """The page of a measurement in an engine: its counters beside the prediction."""
    source = source_of(
        f"measure --engine {found.config.engine.engine}", found.config, found.environment
    )
    agreement, config = found.agreement, found.config
    requests = (
        f"{found.num_requests} requests, {found.num_tokens} tokens, "
        f"{sampling_words(vars(config.sampling))}, gamma {config.num_speculative_tokens}"
    )
    facts = [] if found.speed is None else [Fact.of("speedup", found.speed.speedup, unit="x")]
    tau = FIGURES["block_efficiency"].measure(found.rows[0])
    facts.append(Fact.of(words_of("block_efficiency"), tau))
    facts.append(Fact.of("served / predicted", agreement.ratio, ".3f"))
    verdict, notes = found.verdict or agreement, []
    if found.verdict is not None:
        notes = [f"The engine's counters and the prediction: {agreement}."]
    return Page(
        title=f"The draft in {found.engine} {found.engine_version}".strip(),
        word=verdict.word.upper(),
        tone=_tone(verdict),
        verdict=sentence(verdict.reason),
        facts=facts,
        sections=[_served_blocks(found), *_served_speed(found)],
        about=[*about(source, requests), *notes],
        source=source,
    )


def _served_blocks(found: ServedMeasurement) -> Section:
    whole, positions = served_tables(found)
    blocks: list[Block] = [replace(whole, title="Tokens per target call")]
    if positions.rows:
        position = Axis("position", "position in the block, from 0", "d", whole=True)
        accepted = Axis("position_acceptance", "share of blocks that accept it", ".2f")
        text = "Share of the blocks that accept the first (0), second (1), ... drafted token."
        title, axes = "Acceptance by position", (position, accepted, "counts")
        blocks.append(plotted(title, text, positions.rows, charts.curves, *axes))
    return Section("Blocks", blocks)


def _served_speed(found: ServedMeasurement) -> list[Section]:
    blocks: list[Block] = []
    if found.speed is not None:
        text = f"With and without the draft; {words_of_starts(found.starts)}."
        blocks.append(Table("Whole requests", [dict(found.speed)], text=text))
    if (costs := found.costs) is not None:
        rows = steps_table(costs).rows
        gamma = Axis("gamma", "drafted tokens per block; 0: without the draft", "d", whole=True)
        ms = Axis("ms per step", format=".2f")
        text = f"Time of an engine step, with 95% intervals; {words_of_starts(costs.starts)}."
        axes = gamma, ms, "requests at a time"
        blocks.append(plotted("Cost of a step", text, rows, charts.curves, *axes))
    return [Section("Speed", blocks)] if blocks else []


def verify_page(found: LosslessnessReport) -> Page:
    source = source_of("verify", found.config)
    greedy, sampled, broken = found.greedy, found.distribution, found.broken_distribution
    texts = greedy.counts
    compared = (
        "Each prompt is decoded at temperature 0 with the draft, and compared with the greedy text "
        f"of {found.reference}. Texts may differ after two logits closer than "
        f"{found.config.tie:g}, which rounding can exchange."
    )
    checks = {"lossless rule": sampled} | ({} if broken is None else {"broken rule": broken})
    tests = [
        {"test": name, "passed": _tested(one), **one.counts, **_test_figures(one)}
        for name, one in checks.items()
    ]
    columns = {
        "impossible": "tokens of probability 0 under the target.",
        "border": "tokens that rounding can move across the limit of top-k or top-p, excluded.",
        "false alarm": "how often a lossless rule fails.",
    }
    greedy_line = {**texts, "first difference": greedy.first_difference}
    return Page(
        title="Is decoding with this draft lossless?",
        word=found.word,
        tone=_tone(found),
        verdict=_verdict_of_verify(found),
        facts=[
            Fact("greedy texts equal", f"{texts['identical']} of {texts['prompts']}"),
            Fact("G-test p", shown(sampled.p_value, ".2g"), f"fails below {sampled.false_alarm:g}"),
            Fact("sampled tokens", f"{sampled.counts['tokens']:,}"),
        ],
        sections=[
            Section("Greedy texts", [Table("Token by token", [greedy_line], text=compared)]),
            Section("Sampled tokens", [Table("G-tests", tests, columns=columns)]),
        ],
        about=about(
            source,
            f"Compared with {found.reference}",
            f"{sampling_words(vars(found.config.sampling))}, gamma {found.config.gamma}",
        ),
        source=source,
    )


def _tested(check: DistributionCheck) -> bool | None:
    """Whether it passed; None if there were too few tokens."""
    return None if check.passed and math.isnan(check.p_value) else check.passed


def _test_figures(check: DistributionCheck) -> Line:
    known = {name: check.row.totals.get(name) for name in ("g_statistic", "p_value")}
    return known | {"false alarm": check.false_alarm}


def _verdict_of_verify(found: LosslessnessReport) -> str:
    texts, sampled = found.greedy.counts, found.distribution
    if found.word == "UNDECIDED":
        return sentence(f"No test failed, but {found.open_question}")
    ties = f", {texts['ties']} differ at a tie of its logits" if texts["ties"] else ""
    if _tested(sampled) is None:
        return (
            f"{texts['identical']} of {texts['prompts']} greedy texts equal the target's{ties}; "
            f"{sampled.counts['tokens']:,} sampled tokens are too few to test."
        )
    follow = "follow" if sampled.passed else "do not follow"
    broken = found.broken_distribution
    more = "; the same test rejects a broken rule" if broken and not broken.passed else ""
    return (
        f"{texts['identical']} of {texts['prompts']} greedy texts equal the target's{ties}, and "
        f"{sampled.counts['tokens']:,} sampled tokens {follow} its distribution (p "
        f"{sampled.p_value:.2g}){more}."
    )
