"""Page of `paceline measure`: verdict, acceptance, speedups by gamma."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from paceline.report.html import charts
from paceline.report.html.encodings import Axis
from paceline.report.html.made_by import machine, models, sampling_words, source_of
from paceline.report.html.page import Fact, Figure, Page, Panel, Section, Table, bounded

if TYPE_CHECKING:
    from paceline.measure import Measurement
    from paceline.measure.results import GammaRow, IntervalRow
    from paceline.measure.verdict import Verdict
    from paceline.report.html.page import Row, Source, Tone

_PREDICTIONS = {
    "predicted_speedup": "predicted: tau / (c gamma + 1)",
    "expected_speedup": "expected on this machine",
    "mbsu": "MBSU (parameter ratio)",
}
_MOST_POSITIONS = 64


def measure_page(found: Measurement) -> Page:
    """The page of a measurement."""
    config = found.config.model_dump(mode="json")
    source = source_of("measure", found.config, found.environment)
    sections = [_speed(found, source), _acceptance(found, source), _cost(found, source)]
    about = [
        *models(config),
        f"Text: {found.acceptance.num_prompts} prompts, {found.acceptance.num_tokens} tokens of "
        f"the target, {sampling_words(config['sampling'])}",
        machine(found.environment),
    ]
    return Page(
        title="Is this draft worth serving?",
        word=found.verdict.word,
        tone=tone_of(found.verdict),
        verdict=sentence(found.verdict.reason),
        facts=_facts(found),
        sections=sections,
        about=[line for line in about if line],
    )


def tone_of(verdict: Verdict) -> Tone:
    """How a verdict is marked."""
    if not verdict.decided:
        return "neutral"
    return "good" if verdict.go else "bad"


def sentence(text: str) -> str:
    """The text with a capital letter and a full stop."""
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")


def interval_words(found: IntervalRow, format: str = ".2f") -> str:
    """An interval as `1.38 to 1.47`."""
    return f"{found.low:{format}} to {found.high:{format}}"


def _facts(found: Measurement) -> list[Fact]:
    facts: list[Fact] = []
    if (speed := found.speed) is not None:
        value = f"{speed.speedup.value:.2f}x"
        facts.append(Fact("measured speedup", value, interval_words(speed.speedup)))
        facts.append(Fact("tokens per target call", f"{speed.block_efficiency:.2f}"))
    elif found.expected is not None:
        value = f"{found.expected.value:.2f}x"
        facts.append(Fact("expected speedup", value, interval_words(found.expected)))
    alpha = found.acceptance.expected_acceptance
    facts.append(Fact("expected acceptance", f"{alpha.value:.3f}", interval_words(alpha, ".3f")))
    if not found.verdict.timed:
        return facts
    facts.append(Fact("cost ratio", f"{found.cost.cost_ratio:.3f}"))
    if found.verdict.decided:
        gamma = str(found.best_gamma) if found.best_gamma else "none"
        note = "" if found.best_gamma else "decode without draft"
        facts.append(Fact("gamma to serve", gamma, note))
    return facts


def _speed(found: Measurement, source: Source) -> Section:
    rows = [row for gamma in found.gammas for row in _speedups(gamma)]
    text = (
        "Predicted from acceptance and costs, for each number of drafted tokens. Above the dashed "
        "line, decoding with the draft is faster than without."
    )
    if (speed := found.speed) is not None:
        measured = {
            "measured after the first token": speed.decoding_speedup,
            "measured, whole requests": speed.speedup,
        }
        rows += [
            {"gamma": speed.gamma, "kind": kind, **bounded("speedup", value)}
            for kind, value in measured.items()
        ]
        text += f" The measured points are of {speed.num_requests} requests, with 95% intervals."
    y = Axis("speedup", "speedup", ".2f", bounds=True)
    chart = charts.curves(rows, _GAMMA, y, "kind", reference=(None, 1.0))
    figure = Figure("Speedup by gamma", text, [Panel(chart)], rows, source)
    blocks = [figure, Table("Predictions for each gamma", _gamma_rows(found), source)]
    if found.tried:
        tried = [row.model_dump() for row in found.tried]
        text = "On other requests than the measured speedup, to choose the gamma."
        blocks.append(Table("Gammas that were timed", tried, source, text))
    terms = ("speedup", "predicted speedup", "expected speedup", "MBSU", "gamma", "95% interval")
    return Section("Speed", blocks, (*terms, "block efficiency", "break-even acceptance"))


_GAMMA = Axis("gamma", "gamma: drafted tokens per block", "d", whole=True)


def _speedups(row: GammaRow) -> list[Row]:
    return [
        {"gamma": row.gamma, "kind": words, "speedup": getattr(row, name)}
        for name, words in _PREDICTIONS.items()
        if not math.isnan(getattr(row, name))
    ]


def _gamma_rows(found: Measurement) -> list[Row]:
    return [
        {
            "gamma": row.gamma,
            "tokens per target call": row.block_efficiency,
            "the same, i.i.d.": row.block_efficiency_iid,
            "break-even acceptance": row.break_even_acceptance,
            "predicted speedup": _known(row.predicted_speedup),
            "expected speedup": _known(row.expected_speedup),
            "MBSU": row.mbsu,
        }
        for row in found.gammas
    ]


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def _acceptance(found: Measurement, source: Source) -> Section:
    kinds = {
        "expected acceptance": found.acceptance.expected_acceptance,
        "greedy draft acceptance": found.acceptance.greedy_draft_acceptance,
        "greedy agreement": found.acceptance.greedy_agreement,
    }
    rows = [{"figure": name, **bounded("value", value)} for name, value in kinds.items()]
    value = Axis("value", "fraction of tokens", ".2f", bounds=True)
    chart = charts.intervals(rows, "figure", value)
    text = "Three figures that others call acceptance rate, on text of the target."
    blocks = [Figure("Acceptance", text, [Panel(chart)], rows, source)]
    by_position = found.acceptance.acceptance_by_position[:_MOST_POSITIONS]
    if len(by_position) > 1:
        positions: list[Row] = [
            {"position": at, "acceptance": share} for at, share in enumerate(by_position, 1)
        ]
        chart = charts.columns(
            positions,
            Axis("position", "position in the answer", "d", whole=True),
            Axis("acceptance", "expected acceptance", ".2f", zero=True),
            reference=found.acceptance.expected_acceptance.value,
        )
        text = (
            "Expected acceptance of the first, second, ... new token. The dashed line is the mean "
            "over all tokens. Few answers are long, so later positions vary more."
        )
        blocks.append(Figure("Acceptance along the text", text, [Panel(chart)], positions, source))
    terms = ("expected acceptance", "greedy draft acceptance", "greedy agreement")
    return Section("Acceptance", blocks, terms)


def _cost(found: Measurement, source: Source) -> Section:
    cost = found.cost
    rows: list[Row] = [
        {
            "model": name,
            "parameters": f"{parameters:,}",
            "ms per pass": _known(1e3 * seconds),
            "ms until the first token": None if start is None else 1e3 * start,
        }
        for name, parameters, seconds, start in (
            ("target", cost.target_parameters, cost.target_pass_s, cost.target_start_s),
            ("draft", cost.draft_parameters, cost.draft_pass_s, cost.draft_start_s),
        )
    ]
    where = f"In {cost.engine}." if cost.engine else "Median of interleaved passes over one token."
    if not found.verdict.timed:
        where = "Passes were not timed."
    blocks = [Table("Cost of a pass", rows, source, where)]
    if (speed := found.speed) is not None:
        requests = [
            {
                "requests": speed.num_requests,
                "tokens": speed.num_tokens,
                "tokens/s without draft": speed.baseline_tokens_per_s,
                "tokens/s with draft": speed.speculative_tokens_per_s,
                "acceptance rate": speed.acceptance_rate,
                "measured / predicted": speed.measured_over_predicted,
                "engine efficiency": speed.engine_efficiency,
            }
        ]
        columns = {
            "measured / predicted": "decoding speedup / predicted speedup.",
            "engine efficiency": (
                "the same with the tokens per target call of these requests; the rest is spent on "
                "longer target passes and on work outside of passes."
            ),
        }
        text = "With and without the draft, interleaved in one process."
        blocks.append(Table("Timed requests", requests, source, text, columns))
    return Section("Cost", blocks, ("cost ratio", "acceptance rate", "decoding speedup"))
