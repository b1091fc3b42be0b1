"""Pages of `paceline bench` and `paceline tune`: quality and speed of decoding settings."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from paceline.bench.answers import SAMPLED, context_of, family, read_rows
from paceline.core.bootstrap import Interval
from paceline.errors import UsageError
from paceline.extensions import IMPORT
from paceline.results.frontier import ORACLE, TARGET_ALONE, Frontier, family_of, is_lossless
from paceline.results.row import grouped
from paceline.view import charts
from paceline.view.page import (
    Fact,
    Figure,
    Page,
    Section,
    Table,
    about,
    interval_text,
    lines_of,
    sampling_words,
    sentence,
    source_of,
)
from paceline.view.tables import name_of, tuned_tables

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from paceline.bench.tune import Tuned
    from paceline.results.row import Row
    from paceline.view.page import Line

_MEASURED = (
    *("quality", "relative_quality", "speedup", "decoding_speedup"),
    *("rejection_rate", "deferral_rate"),
)
_NAMES = ("family", "setting", "gamma")
_COSTS = {
    "Against speedup": "speedup",
    "Against target passes": "deferral_rate",
    "Against rejection rate": "rejection_rate",
}
_BEST = "speedup at the target's quality"
_UNBOUNDED = (math.nan, math.nan)
_NO_TARGET = "the target alone has no finished cell to compare others with; run the bench again"
_DIGESTS = ("context", "key")


def bench_page(folder: Path, manifest: Mapping[str, Any]) -> Page:
    """The page of a bench; raises UsageError if it has no rows."""
    rows = read_rows(folder, manifest.get("context"))
    if not rows:
        raise UsageError(
            f"{folder} has no result rows of this bench; run `paceline bench` with this output "
            "first"
        )
    config = manifest.get("config")
    source = source_of("bench", config, manifest.get("environment"))
    parts = sorted(grouped(rows, _sampling).items())
    done = [row for row in rows if not row.error]
    num_failed = len(rows) - len(done)
    facts = [Fact("cells", str(len(done)), f"{num_failed} failed" if num_failed else "")]
    verdicts: list[str] = []
    sections: list[Section] = []
    for _, cells in parts:
        name = f", {sampling_words(cells[0].setting)}" if len(parts) > 1 else ""
        finished = [row for row in cells if not row.error]
        verdict = _NO_TARGET
        if any(family_of(row) == TARGET_ALONE for row in finished):
            frontier = Frontier(finished)
            verdict = _verdict(frontier)
            sections += _sections(frontier, name)
            facts += _facts(frontier, name)
        verdicts.append(sentence(f"At {name[2:]}: {verdict}" if name else verdict))
    if failed := [row for row in rows if row.error]:
        lines = lines_of(failed, ("family", "setting"))
        named = [line | {"reason": row.error} for line, row in zip(lines, failed, strict=True)]
        sections.append(Section("Failed cells", [Table("Failed cells", named)]))
    task = "No manifest: models, seed and machine are unknown"
    if config:
        engine = (config.get("engine") or {}).get("engine")
        name = config["task"].get("task") or config["task"].get("import")  # a task of the user
        task = f"Task: {name}" + (f", in {engine}" if engine else "")
    context = f"Context of the rows: {context_of(rows[-1])}"
    marks = done[0].source.fingerprints if done else {}
    signatures = [f"{name}: {text}" for name, text in marks.items() if name not in _DIGESTS]
    return Page(
        title="Quality and speed of decoding settings",
        verdict=" ".join(verdicts),
        facts=facts,
        sections=sections,
        about=about(source, task, context, *signatures),
        source=source,
    )


def _sampling(row: Row) -> tuple[float, ...]:
    """The sampling parameters, the temperature first."""
    return tuple(float(row.setting.get(name, 0)) for name in SAMPLED)


def _facts(frontier: Frontier, name: str) -> list[Fact]:
    timed = f"{frontier.num_timed} timed"
    facts = [Fact(f"examples{name}", str(frontier.num_examples), timed)]
    if metric := frontier.target.setting.get("metric"):
        quality = frontier.measure("quality", frontier.target)
        facts.append(Fact.of(f"target's quality ({metric}){name}", quality, ".3f"))
    again = frontier.against_itself()
    if not math.isnan(again.value):
        facts.append(Fact.of(f"target against itself{name}", again, ".3f", "x"))
    return facts


def _silence(frontier: Frontier) -> str:
    """Why quality and speed cannot be compared; empty if they can."""
    if "score" not in frontier.target.sums:
        return "the task has no metric, so there is no quality to compare with speed"
    if not frontier.value("quality", frontier.target) > 0:
        return (
            "the target itself scores 0 on all examples, so no relative quality is defined; "
            "compare answers with references: if answers are cut, raise max_new_tokens; if they go "
            "on, set task.stop; for a chat model, set task.chat"
        )
    return ""


def _verdict(frontier: Frontier) -> str:
    if silence := _silence(frontier):
        return silence
    best = frontier.fastest([row for row in frontier.rows if _counts(row)], 1.0)
    if best is None or best.speedup.value <= 1:
        text = "no setting with at least the target's quality is faster than the target alone"
        if best is not None:
            speed = interval_text(best.speedup, ".2f", "x")
            text += f": the fastest, {_name(best.row)}, has {speed}"
        return text
    sure = "" if best.speedup.low > 1 else "; its interval includes 1"
    kept = "by proof" if is_lossless(best.row) else interval_text(best.quality, ".2f")
    return (
        f"the fastest setting with at least the target's quality is {_name(best.row)}: "
        f"{interval_text(best.speedup, '.2f', 'x')} the target's speed{sure}. Quality / target's: "
        f"{kept}"
    )


def _counts(row: Row) -> bool:
    name = family_of(row)
    return name != TARGET_ALONE and not name.startswith(ORACLE)


def _name(row: Row) -> str:
    return f"{family_of(row)} {row.setting.get('setting', '')}".strip()


def _sections(frontier: Frontier, suffix: str) -> list[Section]:
    rows = _lines(frontier)
    table = Table("All cells", [{k: v for k, v in row.items() if k != "gamma"} for row in rows])
    cells = Section(f"All cells{suffix}", [table])
    if _silence(frontier):
        return [cells]
    drawn = [row for row in rows if row["family"] != TARGET_ALONE]
    text = (
        "Each point is a setting; a line joins the settings of a family in the order of their "
        "thresholds. Bars are 95% intervals. Dashed: the target alone. Up and to the right is "
        "better on the first chart, up and to the left on the others. Oracles run both models, "
        "so they have no speedup. Select a family in the legend to see it alone."
    )
    figure = _frontier_figure("Quality against cost", text, drawn)
    return [Section(f"Quality and speed{suffix}", [figure, _best_cells(frontier)]), cells]


def ordered_cells(frontier: Frontier) -> list[Row]:
    """The cells in lines of a chart: by family, gamma (or fallback) and threshold.

    The target alone is left out.
    """

    def place(row: Row) -> tuple[Any, ...]:
        numbers = [value for value in row.setting.values() if isinstance(value, int | float)]
        return (family_of(row), row.setting.get("gamma", 0), *numbers)

    return sorted((row for row in frontier.rows if family_of(row) != TARGET_ALONE), key=place)


def _lines(frontier: Frontier) -> list[Line]:
    """All figures of the cells, those of the target alone last."""
    rows = [*ordered_cells(frontier), frontier.target]
    lines = lines_of(rows, _NAMES)
    scored = "score" in frontier.target.sums
    figures = [name for name in _MEASURED if scored or not name.endswith("quality")]
    for row, line in zip(rows, lines, strict=True):
        line |= {name: frontier.measure(name, row) for name in figures}
        for name, value in row.totals.items():
            line[name] = Interval(value, *row.bounds.get(name, _UNBOUNDED))
    return lines


def _frontier_figure(title: str, text: str, lines: Sequence[Line]) -> Figure:
    """Quality relative to the target's against each cost that the cells have, a line per family.

    Oracles run both models, so they have no speedup.
    """
    drawn = [
        {name: value for name, value in line.items() if "speedup" not in name}
        if line["family"].startswith(ORACLE)
        else line
        for line in lines
    ]
    names = list(dict.fromkeys(line["family"] for line in lines))
    more: dict[str, Any] = {"labels": ["setting"], "detail": "gamma", "names": names}
    panels = {
        heading: charts.frontier(drawn, cost, "relative_quality", "family", **more)
        for heading, cost in _COSTS.items()
        if charts.known(drawn, cost, "relative_quality")
    }
    return Figure(title, text, panels, drawn)


def _best_cells(frontier: Frontier) -> Table:
    rows: list[Line] = []
    for name, own in sorted(grouped(frontier.rows, family_of).items()):
        if name != TARGET_ALONE:
            row: Line = {"family": name, "cells": len(own)}
            row |= {_BEST: None, "setting": "not reached", "its quality": None}
            if (best := frontier.fastest(own, 1.0)) is not None:
                place = best.row.setting.get("setting", "")
                row |= {_BEST: best.speedup, "setting": place, "its quality": best.quality}
            rows.append(row)
    columns = {
        _BEST: (
            "largest speedup of the cells with at least the target's quality; then the setting, "
            "and its quality / target's."
        )
    }
    text = (
        "The cells are chosen on a random half of the examples. Their figures are those of the "
        "other half, so that the best of many cells does not look better than it is. A lossless "
        "rule has the target's quality by proof; above temperature 0 it samples other texts, so "
        "its mean score differs from the target's by chance."
    )
    return Table("Best setting of each family", rows, text=text, columns=columns)


def tune_page(found: Tuned, environment: Mapping[str, Any] | None = None) -> Page:
    config = found.config
    source = source_of("tune", config, environment)
    own = config.task[IMPORT] if isinstance(config.task, dict) else config.task.task
    task = f"Task: {own}, {sampling_words(vars(config.sampling))}"
    return Page(
        title="The best setting within a bound",
        verdict=_verdict_of_tune(found),
        facts=[
            Fact("settings measured", str(len({name_of(one.decoding) for one in found.tried}))),
            Fact("tested on other examples", str(found.num_tests)),
            Fact("confidence", f"{config.confidence:g}"),
            Fact("examples", f"{config.num_examples} + {config.num_confirmed}"),
        ],
        sections=[Section("Settings", [one for one in tuned_tables(found) if one.rows])],
        about=[found.statement, *about(source, task)],
        source=source,
    )


def _verdict_of_tune(found: Tuned) -> str:
    chosen, config = found.chosen, found.config
    if family(chosen.decoding) == TARGET_ALONE:
        return f"No setting is better than decoding without a draft, within {config.bound}."
    relative = chosen.measure("relative_quality")
    quality = "" if math.isnan(relative.value) else f" and {relative} of its quality"
    speed = interval_text(chosen.measure("speedup"), ".2f", "x")
    name = name_of(chosen.decoding)
    return f"Use {name}: {speed} the target's speed{quality}, within {config.bound}."
