"""Page of `paceline bench`: frontiers, acceptance, predictions, and the claims of a paper."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.bench.measured_frontier import is_lossless
from paceline.bench.schema import ORACLE, TARGET_ALONE, family, setting
from paceline.core.bootstrap import Interval
from paceline.decode.strategies import Speculative
from paceline.report import claims
from paceline.report.html import charts
from paceline.report.html.bench_figures import (
    acceptance_figure,
    families_of,
    prediction_figures,
    seconds_figure,
)
from paceline.report.html.encodings import Axis
from paceline.report.html.made_by import machine, models, source_of
from paceline.report.html.page import (
    Claim,
    Claims,
    Fact,
    Figure,
    Page,
    Panel,
    Prose,
    Section,
    Table,
    bounded,
)
from paceline.report.plots import curves as ordered_curves

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.bench.measured_frontier import Frontier, Reached
    from paceline.bench.schema import ResultRow
    from paceline.report.html.page import Block, Row, Source, Tone
    from paceline.report.run_folder import Results
    from paceline.report.run_folder import Section as Cells

_TONES: dict[str, Tone] = {claims.HELD: "good", claims.BROKEN: "bad"}
_SPEED = Axis("speedup", "speedup", ".2f", bounds=True)


def bench_page(results: Results) -> Page:
    """The page of a bench."""
    manifest = results.manifest or {}
    config = manifest.get("config")
    source = source_of("bench", config, manifest.get("environment"))
    sections: list[Section] = []
    several = len(results.sections) > 1
    for cells in results.sections:
        sections += _sections(cells, results, source, suffix=f", {cells.name}" if several else "")
    if failed := [row for cells in results.sections for row in cells.failed]:
        rows = [{**_names(row), "reason": row.error or "no reason recorded"} for row in failed]
        sections.append(Section("Failed cells", [Table("Failed cells", rows, source)]))
    done = [row for row in results.rows if row.status == "done"]
    missing = sum(len(cells.missing) for cells in results.sections)
    return Page(
        title="Quality and speed of decoding settings",
        verdict=" ".join(_verdict(cells, several=several) for cells in results.sections),
        facts=_facts(results, len(done), missing),
        sections=sections,
        about=_about(config, manifest.get("environment"), done),
    )


def _about(config: dict[str, Any] | None, environment: Any, done: Sequence[ResultRow]) -> list[str]:
    lines = models(config) if config else ["No manifest: models, seed and machine are unknown"]
    if config:
        engine = (config.get("engine") or {}).get("engine")
        lines.append(f"Task: {config['task']['task']}" + (f", in {engine}" if engine else ""))
    if done:
        lines += [f"{name}: {text}" for name, text in done[0].signatures.items()]
    return [*lines, *([line] if (line := machine(environment)) else [])]


def _facts(results: Results, done: int, missing: int) -> list[Fact]:
    failed = len(results.rows) - done
    detail = ", ".join(
        f"{count} {word}" for count, word in ((failed, "failed"), (missing, "not run yet")) if count
    )
    facts = [Fact("cells", str(done), detail)]
    frontier = next((one.frontier for one in results.sections if one.frontier), None)
    if frontier is not None:
        facts.append(Fact("examples", str(frontier.num_examples), f"{frontier.num_timed} timed"))
        if frontier.target.metric:
            quality = frontier.quality(frontier.target)
            words = f"{frontier.target.metric}, {quality.low:.3f} to {quality.high:.3f}"
            facts.append(Fact("target's quality", f"{quality.value:.3f}", words))
        again = frontier.against_itself()
        if again.value == again.value:
            bounds = f"{again.low:.3f} to {again.high:.3f}"
            facts.append(Fact("target against itself", f"{again.value:.3f}x", bounds))
    return facts


def _verdict(cells: Cells, *, several: bool) -> str:
    at = f"At {cells.name}, " if several else ""
    frontier = cells.judged
    if frontier is None:
        return f"{at}{cells.silence}".strip()
    others = [row for row in frontier.rows if _counts(row)]
    best = frontier.fastest(others, 1.0)
    if best is None or best.value.value <= 1:
        text = "no setting with at least the target's quality is faster than the target alone"
        if best is not None:
            text += f": the fastest, {_name(best.row)}, has {_bounds(best.value)}"
        return _capital(f"{at}{text}.")
    sure = "" if best.value.low > 1 else "; its interval includes 1"
    quality, low, high = best.bound
    kept = "by proof" if is_lossless(best.row) else f"{quality:.2f} ({low:.2f} to {high:.2f})"
    return _capital(
        f"{at}the fastest setting with at least the target's quality is {_name(best.row)}: "
        f"{_bounds(best.value)} the target's speed{sure}. Quality / target's: {kept}."
    )


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _bounds(value: Interval) -> str:
    return f"{value.value:.2f}x ({value.low:.2f} to {value.high:.2f})"


def _counts(row: ResultRow) -> bool:
    name = family(row.decoding)
    return name != TARGET_ALONE and not name.startswith(ORACLE)


def _name(row: ResultRow) -> str:
    return f"{family(row.decoding)} {setting(row.decoding)}".strip()


def _names(row: ResultRow) -> Row:
    return {"family": family(row.decoding), "setting": setting(row.decoding) or "-"}


def _sections(cells: Cells, results: Results, source: Source, suffix: str) -> list[Section]:
    frontier = cells.frontier
    if frontier is None:
        return [Section(f"Cells{suffix}", [Prose([cells.silence or ""])])]
    found: list[Section] = []
    terms = ("speedup", "relative quality", "quality", "family", "95% interval", "lossless")
    if cells.judged is not None:
        blocks: list[Block] = [_frontier(frontier, source), _summary(frontier, source)]
        found.append(Section(f"Quality and speed{suffix}", blocks, terms))
    blocks = []
    if (figure := acceptance_figure(frontier, source)) is not None:
        blocks.append(figure)
    if (figure := seconds_figure(frontier, source)) is not None:
        blocks.append(figure)
    if blocks:
        more = ("rejection rate", "acceptance rate", "deferral rate", "dominance", *terms)
        found.append(Section(f"Acceptance and time{suffix}", blocks, more))
    if figures := prediction_figures(frontier, results.predictions, source):
        more = ("rejection rate", "predicted speedup", "decoding speedup")
        found.append(Section(f"Predicted and measured{suffix}", figures, more))
    if cells.judged is not None and (block := _claims(cells.judged, source)) is not None:
        found.append(Section(f"Claims of the paper{suffix}", [block], ("95% interval",)))
    rows = [_cell(frontier, row) for row in sorted(frontier.rows, key=_name)]
    found.append(Section(f"All cells{suffix}", [Table("All cells", rows, source)], terms))
    return found


def _cell(frontier: Frontier, row: ResultRow) -> Row:
    return {
        **_names(row),
        **_unless_unknown("quality", frontier.quality(row)),
        **_unless_unknown("quality / target's", frontier.relative_quality(row)),
        **bounded("speedup", frontier.speedup(row)),
        **_unless_unknown("decoding speedup", frontier.decoding_speedup(row)),
        **_unless_unknown("rejection rate", frontier.rejection_rate(row)),
        **_unless_unknown("deferral rate", frontier.deferral_rate(row)),
        **row.corpus_scores,
        **_corpus_bounds(row),
    }


def _corpus_bounds(row: ResultRow) -> Row:
    found: Row = {}
    for name, bounds in row.corpus_intervals.items():
        found |= bounded(name, Interval(row.corpus_scores[name], *bounds))
    return found


def _unless_unknown(name: str, value: Interval) -> Row:
    return bounded(name, value) if value.value == value.value else {name: None}


def _frontier(frontier: Frontier, source: Source) -> Figure:
    rows: list[Row] = []
    for curve in ordered_curves(frontier):
        for row in curve.cells:
            strategy = row.decoding.strategy
            gamma = strategy.num_speculative_tokens if isinstance(strategy, Speculative) else 0
            rows.append(
                {
                    **_names(row),
                    "gamma": str(gamma),
                    **bounded("quality", frontier.relative_quality(row)),
                    **bounded("speedup", frontier.speedup(row)),
                    **bounded("calls", frontier.deferral_rate(row)),
                }
            )
    quality = Axis("quality", "quality / target's", ".2f", bounds=True)
    calls = Axis("calls", "target passes / tokens", ".2f", bounds=True)
    names = families_of(frontier)
    timed = [row for row in rows if not row["family"].startswith(ORACLE)]
    panels = [
        Panel(_curve(timed, _SPEED, quality, (1.0, 1.0), names), "Against speedup"),
        Panel(_curve(rows, calls, quality, (None, 1.0), names), "Against target passes"),
    ]
    text = (
        "Each point is a setting; a line joins the settings of a family in the order of their "
        "thresholds. Bars are 95% intervals. Dashed: the target alone. Up and to the right is "
        "better on the first chart, up and to the left on the second. Oracles run both models, "
        "so they have no speedup. Select a family in the legend to see it alone."
    )
    return Figure("Quality against cost", text, panels, rows, source)


def _curve(
    rows: Sequence[Row],
    x: Axis,
    y: Axis,
    at: tuple[float | None, float],
    names: Sequence[str],
) -> Any:
    given = {"labels": ["setting"], "detail": "gamma", "reference": at, "names": names}
    return charts.frontier(rows, x, y, "family", **given)


def _summary(frontier: Frontier, source: Source) -> Table:
    rows: list[Row] = []
    for name, cells in sorted(frontier.families().items()):
        if name == TARGET_ALONE:
            continue
        fastest, finest = frontier.fastest(cells, 1.0), frontier.finest(cells, 1.0)
        rows.append(
            {
                "family": name,
                "cells": len(cells),
                **_reached("speedup at the target's quality", fastest, "quality"),
                **_reached("quality within the target's latency", finest, "speedup"),
            }
        )
    columns = {
        "speedup at the target's quality": (
            "largest speedup of the cells with at least the target's quality, and the quality / "
            "target's of this cell."
        ),
        "quality within the target's latency": (
            "best quality / target's of the cells that are at least as fast as the target, and the "
            "speedup of this cell."
        ),
    }
    text = (
        "The cells are chosen on a random half of the examples. Their figures are those of the "
        "other half, so that the best of many cells does not look better than it is."
    )
    return Table("Best setting of each family", rows, source, text, columns)


def _reached(name: str, best: Reached | None, bound: str) -> Row:
    place = f"setting ({name.split()[0]})"
    if best is None:
        return {name: None, place: "not reached"}
    low, high = best.bound.low, best.bound.high
    words = (
        f"{setting(best.row.decoding)}; {bound} {best.bound.value:.2f} ({low:.2f} to {high:.2f})"
    )
    return {**bounded(name, best.value), place: words.lstrip("; ")}


def _claims(frontier: Frontier, source: Source) -> Claims | None:
    findings = claims.judge(frontier)
    if all(one.verdict == claims.UNMEASURED for one in findings):
        return None
    found: list[Claim] = []
    unmeasured: list[str] = []
    for one in findings:
        if one.verdict == claims.UNMEASURED:
            unmeasured.append(one.claim.label)
            continue
        decisive = one.decisive
        pair = "" if decisive is None else f": {decisive.first.name} - {decisive.second.name}"
        found.append(
            Claim(
                claim=f"{one.claim.label}. {one.claim.sentence}",
                source=one.statistic.source.removeprefix("the paper's: "),
                effect=None if decisive is None else decisive.difference,
                effect_name=f"{one.statistic.name}{pair}",
                count=one.statistic.cost.num_examples(frontier),
                verdict=one.verdict,
                tone=_TONES.get(one.verdict, "neutral"),
                command=source.command,
                reason=one.reason,
            )
        )
    text = (
        'From "Faster Cascades via Speculative Decoding" (Narasimhan et al. 2024). The effect is '
        "the difference of the two families in the statistic; the pair with the strongest evidence "
        "against the claim is shown. report.md of the same run explains the statistics."
    )
    if unmeasured:
        labels = ", ".join(dict.fromkeys(unmeasured))
        text += f" Not measured here, because a family has no finished cell: {labels}."
    return Claims("Claims, evaluated on these cells", found, source, text)
