"""Pages of `paceline bench` and `paceline tune`: quality and speed of decoding settings."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from paceline.bench.answers import context_of
from paceline.bench.prediction import REJECTION, SPEEDUP, SURPRISAL
from paceline.bench.settings import family
from paceline.core.bootstrap import LEAST_UNITS, Interval
from paceline.results.figures import FIGURES
from paceline.results.frontier import ORACLE, TARGET_ALONE, family_of, is_lossless
from paceline.view import charts
from paceline.view.bench_run import ordered_cells
from paceline.view.charts import Axis, plotted
from paceline.view.definitions import words_of
from paceline.view.page import (
    Fact,
    Figure,
    Page,
    Panel,
    Section,
    Table,
    Text,
    about,
    interval_text,
    lines_of,
    number,
    sampling_words,
    sentence,
    source_of,
)
from paceline.view.tables import name_of, tuned_tables

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.bench.tune import Tuned
    from paceline.results.frontier import Frontier, Reached
    from paceline.results.row import Row
    from paceline.view.bench_run import Cells, Results
    from paceline.view.page import Line

_ROUNDING = 1e-6  # rounding error of sums of probabilities
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
_REJECTED = "rejection_rate"
_UNBOUNDED = (math.nan, math.nan)
_STEPS = {"choosing": "To choose", "confirming": "To confirm, on other examples"}
_DIGESTS = ("context", "key")


def bench_page(results: Results) -> Page:
    """The page of a bench."""
    manifest = results.manifest or {}
    config = manifest.get("config")
    source = source_of("bench", config, manifest.get("environment"))
    several = len(results.parts) > 1
    sections: list[Section] = []
    for cells in results.parts:
        sections += _sections(cells, f", {cells.name}" if several else "")
    if failed := [row for row in results.rows if row.error]:
        lines = lines_of(failed, ("family", "setting"))
        named = [line | {"reason": row.error} for line, row in zip(lines, failed, strict=True)]
        sections.append(Section("Failed cells", [Table("Failed cells", named)]))
    task = "No manifest: models, seed and machine are unknown"
    if config:
        engine = (config.get("engine") or {}).get("engine")
        name = config["task"].get("task") or config["task"].get("import")  # a task of the user
        task = f"Task: {name}" + (f", in {engine}" if engine else "")
    done = [row for row in results.rows if not row.error]
    context = f"Context of the rows: {context_of(results.rows[-1])}"
    marks = done[0].source.fingerprints if done else {}
    signatures = [f"{name}: {text}" for name, text in marks.items() if name not in _DIGESTS]
    return Page(
        title="Quality and speed of decoding settings",
        verdict=" ".join(_verdict(cells, several=several) for cells in results.parts),
        facts=_facts(results, len(done)),
        sections=sections,
        about=about(source, task, context, *signatures, _few(done)),
        source=source,
    )


def _few(done: Sequence[Row]) -> str:
    """A remark if half of the examples cannot give intervals."""
    timed = [s for s in done[0].sums["target_seconds"] if s is not None] if done else ()
    if not done or len(timed) >= 2 * LEAST_UNITS:
        return ""
    return (
        f"Fewer than {2 * LEAST_UNITS} timed examples: half of them choose the best settings, and "
        "the other half are too few for intervals with 95% coverage"
    )


def _facts(results: Results, done: int) -> list[Fact]:
    counts = {
        "failed": len(results.rows) - done,
        "not run yet": sum(len(cells.missing) for cells in results.parts),
    }
    detail = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
    facts = [Fact("cells", str(done), detail)]
    for cells in results.parts:
        if (frontier := cells.frontier) is None:
            continue
        at = f", {cells.name}" if len(results.parts) > 1 else ""
        if len(facts) == 1:
            timed = f"{frontier.num_timed} timed"
            facts.append(Fact("examples", str(frontier.num_examples), timed))
        if metric := frontier.target.setting.get("metric"):
            quality = frontier.measure("quality", frontier.target)
            facts.append(Fact.of(f"target's quality ({metric}){at}", quality, ".3f"))
        again = frontier.against_itself()
        if not math.isnan(again.value):
            facts.append(Fact.of(f"target against itself{at}", again, ".3f", "x"))
    return facts


def _verdict(cells: Cells, *, several: bool) -> str:
    at = f"At {cells.name}, " if several else ""
    frontier = cells.judged
    if frontier is None:
        return f"At {cells.name}: {cells.silence}" if several else cells.silence
    best = frontier.fastest([row for row in frontier.rows if _counts(row)], 1.0)
    if best is None or best.value.value <= 1:
        text = "no setting with at least the target's quality is faster than the target alone"
        if best is not None:
            speed = interval_text(best.value, ".2f", "x")
            text += f": the fastest, {_name(best.row)}, has {speed}"
        return sentence(f"{at}{text}")
    sure = "" if best.value.low > 1 else "; its interval includes 1"
    kept = "by proof" if is_lossless(best.row) else interval_text(best.bound, ".2f")
    return sentence(
        f"{at}the fastest setting with at least the target's quality is "
        f"{_name(best.row)}: {interval_text(best.value, '.2f', 'x')} the target's "
        f"speed{sure}. Quality / target's: {kept}."
    )


def _counts(row: Row) -> bool:
    name = family_of(row)
    return name != TARGET_ALONE and not name.startswith(ORACLE)


def _name(row: Row) -> str:
    return f"{family_of(row)} {row.setting.get('setting', '')}".strip()


def _sections(cells: Cells, suffix: str) -> list[Section]:
    frontier = cells.frontier
    if frontier is None:
        return [Section(f"Cells{suffix}", [Text("", cells.silence)])]
    rows = _lines(frontier)
    table = Table("All cells", [{k: v for k, v in row.items() if k != "gamma"} for row in rows])
    drawn = [row for row in rows if row["family"] != TARGET_ALONE]
    text = (
        "Each point is a setting; a line joins the settings of a family in the order of their "
        "thresholds. Bars are 95% intervals. Dashed: the target alone. Up and to the right is "
        "better on the first chart, up and to the left on the others. Oracles run both models, "
        "so they have no speedup. Select a family in the legend to see it alone."
    )
    figure = _frontier_figure("Quality against cost", text, drawn)
    blocks = {
        "Quality and speed": [figure, _best_cells(frontier, cells)] if cells.judged else [],
        "Acceptance": _rejections(rows),
        "Predicted and measured": _predictions(drawn),
        "All cells": [table],
    }
    return [Section(f"{title}{suffix}", found) for title, found in blocks.items() if found]


def _lines(frontier: Frontier) -> list[Line]:
    """All figures of the cells, those of the target alone last."""

    def measure(name: str, row: Row) -> Interval | None:
        is_missing = name.endswith("quality") and "score" not in frontier.target.sums
        return None if is_missing else frontier.measure(name, row)

    rows = [*ordered_cells(frontier), frontier.target]
    lines = lines_of(rows, _NAMES, _MEASURED, measure=measure)
    for row, line in zip(rows, lines, strict=True):
        latency = FIGURES["relative_latency"]
        line |= {latency.name: latency.of_base(row, number(line, "speedup"))}
        if SPEEDUP in row.totals:
            line |= {name: row.totals.get(name) for name in (REJECTION, SPEEDUP)}
        for name, value in row.totals.items():
            if name not in (REJECTION, SURPRISAL, SPEEDUP):
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
    lists = {"labels": ["setting"], "detail": "gamma", "group": "family"}
    return plotted(title, text, drawn, charts.frontier, _COSTS, "relative_quality", **lists)


def _best_cells(frontier: Frontier, cells: Cells) -> Table:
    rows: list[Line] = []
    for name, own in sorted(frontier.families().items()):
        if name != TARGET_ALONE:
            row: Line = {"family": name, "cells": len(own)}
            row |= _reached("speedup at the target's quality", frontier.fastest(own, 1.0))
            rows.append(row | _reached("quality within its latency", frontier.finest(own, 1.0)))
    rows += [{"family": name, "cells": 0} for name in cells.empty_families]
    columns = {
        "speedup at the target's quality": (
            "largest speedup of the cells with at least the target's quality; then the setting, "
            "and its quality / target's."
        ),
        "quality within its latency": (
            "best quality / target's of the cells that are at least as fast as the target; then "
            "the setting, and its speedup."
        ),
    }
    text = (
        "The cells are chosen on a random half of the examples. Their figures are those of the "
        "other half, so that the best of many cells does not look better than it is. A lossless "
        "rule has the target's quality by proof; above temperature 0 it samples other texts, so "
        "its mean score differs from the target's by chance."
    )
    return Table("Best setting of each family", rows, text=text, columns=columns)


def _reached(name: str, best: Reached | None) -> Line:
    figure, bound = name.split()[0], {"speedup": "quality", "quality": "speedup"}
    if best is None:
        return {name: None, f"setting ({figure})": "not reached", f"its {bound[figure]}": None}
    place = {f"setting ({figure})": best.row.setting.get("setting", "")}
    return {name: best.value, **place, f"its {bound[figure]}": best.bound}


def _rejections(rows: Sequence[Line]) -> list[Figure]:
    """Rejection rate of every cell with a rule."""
    known = [row for row in rows if charts.is_finite(number(row, _REJECTED))]
    lines = [
        {"cell": f"{row['family']} {row['setting'] or '-'}", **row}
        for row in sorted(known, key=lambda row: number(row, _REJECTED))
    ]
    text = "Fewer rejections mean longer blocks. Sorted; bars are 95% intervals over examples."
    title = "Rejection rate by rule"
    return [plotted(title, text, lines, charts.intervals, "cell", _REJECTED)] if lines else []


def _predictions(drawn: Sequence[Line]) -> list[Figure]:
    """Predicted against measured rejection rates and speedups; none without predictions."""
    figures = _REJECTED, "decoding_speedup"
    measured = {sentence(words_of(name))[:-1]: name for name in figures}
    predicted = {title: f"predicted_{name}" for title, name in measured.items()}
    compared = [
        (line[_REJECTED], line[REJECTION])
        for line in drawn
        if all(charts.is_finite(number(line, name)) for name in (_REJECTED, REJECTION))
    ]
    inside = sum(rate.low - _ROUNDING <= value <= rate.high + _ROUNDING for rate, value in compared)
    text = (
        "Predicted from one pass of both models over the target's answers, without decoding. On "
        "the dashed diagonal, prediction and measurement agree; bars are 95% intervals. Predicted "
        f"rejection rates inside the measured interval: {inside} of {len(compared)}; the interval "
        "ignores the error of the prediction."
    )
    lines = [line for line in drawn if REJECTION in line]
    families = list(dict.fromkeys(line["family"] for line in drawn))  # as in other figures
    settings = {"labels": ["setting"], "group": "family", "names": families, "diagonal": True}
    columns = (charts.points, predicted, measured)
    figure = plotted("Predicted and measured", text, lines, *columns, **settings)
    return [figure] if figure.panels else []


def tune_page(found: Tuned, environment: Mapping[str, Any] | None = None) -> Page:
    """The page of a tuned setting."""
    config = found.config
    source = source_of("tune", config, environment)
    tables = tuned_tables(found)
    blocks: list[Figure | Table] = [_tested(found, tables[:2]), *tables[2:]]
    task = f"Task: {config.task.task}, {sampling_words(vars(config.sampling))}"
    return Page(
        title="The best setting within a bound",
        verdict=_verdict_of_tune(found),
        facts=[
            Fact("settings measured", str(len({name_of(one.decoding) for one in found.tried}))),
            Fact("tested on other examples", str(found.num_tests)),
            Fact("confidence", f"{config.confidence:g}"),
            Fact("examples", f"{config.num_examples} + {config.num_confirmed}"),
        ],
        sections=[Section("Settings", blocks)],
        about=[found.statement, *about(source, task)],
        source=source,
    )


def _tested(found: Tuned, tables: Sequence[Table]) -> Figure:
    config = found.config
    rows = [{"examples": table.title} | row for table in tables for row in table.rows]
    least = None if config.max_latency is None else 1 / config.max_latency
    axes = (
        Axis("speedup", at=least or 1.0),
        Axis("relative_quality", at=config.quality_floor or 1.0),
    )
    names = list(dict.fromkeys(row["family"] for row in rows))
    panels = [
        Panel(
            charts.frontier(table.rows, *axes, "family", names=names, labels=["setting", "met"]),
            table.title,
        )
        for table in tables
    ]
    text = (
        "Each point is a setting. Candidates are measured on the choosing examples; the best are "
        "tested on the confirming ones. Dashed: the bound and the target alone. Lower limit: the "
        "lower confidence limit of the bounded figure. Met: whether the bound is met, by "
        "the lower limit or by proof on confirming examples."
    )
    return Figure("Tested settings", text, panels, rows)


def _verdict_of_tune(found: Tuned) -> str:
    chosen, config = found.chosen, found.config
    if family(chosen.decoding) == TARGET_ALONE:
        return f"No setting is better than decoding without a draft, within {config.bound}."
    relative = chosen.measure("relative_quality").value
    quality = "" if math.isnan(relative) else f" and {relative:.3f} of its quality"
    speed = interval_text(chosen.measure("speedup"), ".2f", "x")
    name = name_of(chosen.decoding)
    return f"Use {name}: {speed} the target's speed{quality}, within {config.bound}."
