"""Page of `paceline measure --engine`: an engine's counters beside the prediction."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.report.html import charts
from paceline.report.html.encodings import Axis
from paceline.report.html.made_by import machine, models, sampling_words, source_of
from paceline.report.html.measure_page import interval_words, sentence
from paceline.report.html.page import Fact, Figure, Page, Panel, Section, Table, bounded

if TYPE_CHECKING:
    from paceline.measure.agreement import BlockFigures
    from paceline.measure.served import ServedMeasurement
    from paceline.report.html.page import Block, Row, Source


def served_page(found: ServedMeasurement) -> Page:
    """The page of a measurement in an engine."""
    config = found.config.model_dump(mode="json")
    source = source_of("measure", found.config, found.environment)
    agreement = found.agreement
    tone = "good" if agreement.agrees else "bad" if agreement.decided else "neutral"
    about = [
        *models(config),
        f"{found.num_requests} requests, {found.num_tokens} tokens, "
        f"{sampling_words(config['sampling'])}, gamma {found.config.num_speculative_tokens}",
        machine(found.environment),
        *found.notes,
    ]
    return Page(
        title=f"The draft in {found.engine} {found.engine_version}".strip(),
        word=agreement.word.upper(),
        tone=tone,
        verdict=sentence(agreement.reason),
        facts=_facts(found),
        sections=[_blocks(found, source), *_speed(found, source)],
        about=[line for line in about if line],
    )


def _facts(found: ServedMeasurement) -> list[Fact]:
    tau, ratio = found.served.block_efficiency, found.agreement.ratio
    facts = [
        Fact("tokens per target call", f"{tau.value:.2f}", interval_words(tau)),
        Fact("served / predicted", f"{ratio.value:.3f}", interval_words(ratio, ".3f")),
    ]
    if (speed := found.speed) is not None:
        value = f"{speed.speedup.value:.2f}x"
        facts.insert(0, Fact("speedup", value, interval_words(speed.speedup)))
    return facts


def _blocks(found: ServedMeasurement, source: Source) -> Section:
    sides = {"engine's counters": found.served, "prediction": found.predicted}
    whole: list[Row] = [
        {"from": name, **bounded("tau", side.block_efficiency)} for name, side in sides.items()
    ]
    axis = Axis("tau", "tokens per target call", ".2f", bounds=True)
    text = "1 + accepted tokens per block, with 95% intervals over requests."
    chart = charts.intervals(whole, "from", axis)
    blocks: list[Block] = [Figure("Tokens per target call", text, [Panel(chart)], whole, source)]
    rows = [row for name, side in sides.items() for row in _positions(name, side)]
    if rows:
        chart = charts.curves(
            rows,
            Axis("position", "position in the block", "d", whole=True),
            Axis("acceptance", "share of blocks that accept it", ".2f", bounds=True),
            "from",
        )
        text = "Share of the blocks that accept the first, second, ... drafted token."
        blocks.append(Figure("Acceptance by position", text, [Panel(chart)], rows, source))
    terms = ("block efficiency", "draft acceptance rate", "95% interval", "gamma")
    return Section("Blocks", blocks, terms)


def _positions(name: str, side: BlockFigures) -> list[Row]:
    return [
        {"from": name, "position": number, **bounded("acceptance", share)}
        for number, share in enumerate(side.acceptance_by_position or [], 1)
    ]


def _speed(found: ServedMeasurement, source: Source) -> list[Section]:
    blocks: list[Block] = []
    if (speed := found.speed) is not None:
        row: Row = {
            "tokens/s without draft": speed.plain_tokens_per_s,
            "tokens/s with draft": speed.speculative_tokens_per_s,
            **bounded("speedup", speed.speedup),
            "equal texts": speed.num_equal,
            "near-ties": speed.num_near_ties,
        }
        text = f"With and without the draft; {found.starts.words}."
        blocks.append(Table("Whole requests", [row], source, text))
    if (costs := found.costs) is not None:
        rows: list[Row] = [
            {
                "requests at a time": str(step.batch_size),
                "gamma": step.gamma,
                **bounded("ms per step", _in_ms(step.seconds)),
            }
            for step in costs.steps
        ]
        chart = charts.curves(
            rows,
            Axis("gamma", "drafted tokens per block; 0: without the draft", "d", whole=True),
            Axis("ms per step", "ms per step", ".2f", bounds=True),
            "requests at a time",
        )
        text = f"Seconds of an engine step, with 95% intervals; {costs.starts.words}."
        blocks.append(Figure("Cost of a step", text, [Panel(chart)], rows, source))
    return [Section("Speed", blocks, ("speedup",))] if blocks else []


def _in_ms(seconds):
    return seconds.model_copy(
        update={name: 1e3 * getattr(seconds, name) for name in ("value", "low", "high")}
    )
