"""Figures of a study from its rows: tau of drafts, training, grids, frontiers, bounds."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from paceline.core.bootstrap import Interval, mean_interval
from paceline.results.figures import figures_of
from paceline.results.frontier import family_of
from paceline.studies.claim_file import Dominance, Paired, Side
from paceline.studies.evidence import paired_evidence, select
from paceline.studies.evidence_of_drafts import own_figures
from paceline.studies.evidence_of_frontiers import frontier_of
from paceline.view import charts
from paceline.view.bench_pages import NAMES, frontier_figure
from paceline.view.bench_run import ordered_cells
from paceline.view.charts import Axis, axis_of, plotted
from paceline.view.definitions import words_of
from paceline.view.page import Source, Table, bounded, grouped, is_unknown, lines_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from paceline.results.row import Row
    from paceline.studies.verdicts import Finding
    from paceline.view.charts import Spec
    from paceline.view.page import Block, Figure, Line

_TAIL = 0.025
_NO_TEXT = "not trained"
_NUM_RESAMPLES = 2000
_TAU, _ACCEPTANCE, _QUALITY = "block_efficiency", "expected_acceptance", "quality"
_UNKNOWN = (math.nan, math.nan, math.nan)
_FRONTIER = ("relative_quality", "deferral_rate", "rejection_rate")


class Question(NamedTuple):
    """What figures answer, and the terms that they use besides their columns."""

    text: str
    terms: tuple[str, ...] = ()


def study_blocks(rows: Sequence[Row], findings: Sequence[Finding]) -> dict[Question, list[Block]]:
    """All figures that the rows of one study allow, by the question that they answer."""
    drafts = [row for row in rows if {"label", "gamma"} <= row.setting.keys()]
    written = [row for row in drafts if "score" in row.sums and row.setting["label"] == "end"]
    grids = [row for row in rows if "column" in row.setting]
    bounds = [row for row in rows if "proven" in row.sums or "regret" in row.sums]
    cells = _groups(
        [row for row in rows if family_of(row)],
        *("part", "pair", "task", "draft", "model", "temperature"),
    )
    blocks: dict[Question, list[Block]] = {
        Question(
            "Does distillation raise the block efficiency?", ("gamma", "95% interval")
        ): _draft_blocks(_groups(drafts, "part", "task", "temperature")),
        Question(
            "Does the whole distribution over examples move up?", ("block efficiency", "dominance")
        ): [figure for one in findings for figure in _dominance(one, rows)],
        Question(
            "Is the draft that writes best also the one that drafts best?", ("95% interval",)
        ): [_own_quality(group) for group in _groups(written, "part", "task", "temperature")],
        Question("Which recipe and which text give the most acceptance?"): [
            _grid(stage, group)
            for stage, group in grouped(grids, lambda row: row.source.stage).items()
        ],
        Question("Which rule has the best quality at equal cost?", ("family", "95% interval")): [
            figure for group in cells for figure in _frontier(group)
        ],
        Question(
            "Are the bounds true, and do they say anything?",
            ("expected acceptance", "regret", "95% interval"),
        ): [_bounds(group) for group in _groups(bounds, "max_new_tokens")],
    }
    return {question: found for question, found in blocks.items() if found}


def _groups(rows: Sequence[Row], *keys: str) -> list[list[Row]]:
    """Rows with the same values of these settings."""
    return list(grouped(rows, lambda row: tuple(row.setting.get(key) for key in keys)).values())


def _where(rows: Sequence[Row], *keys: str) -> str:
    setting = rows[0].setting
    words = [str(setting[key]) for key in keys if key in setting]
    return ", ".join([*words, f"temperature {setting.get('temperature', 1):g}"])


def _source(rows: Iterable[Row]) -> Source:
    one = next(iter(rows)).source
    environment = {"commit": one.commit, "machine": one.machine, "versions": one.versions}
    return Source(one.command, None, environment)


def _mean(figure: str, rows: Sequence[Row]) -> Interval | None:
    """A figure averaged over seeds of training, with its 95% interval over examples."""
    test = Paired(
        figure=figure,
        first=Side(),
        than=0.0,
        compare="difference",
        across=("seed",) if "seed" in rows[0].setting else (),
        matters=1.0,
    )
    found = paired_evidence(test, rows, _TAIL, ())
    return None if found is None else found.part(_TAIL).at(_TAIL)


def _draft_lines(rows: Sequence[Row], *figures: str) -> list[Line]:
    """Figures of each draft, checkpoint and gamma, in order of gamma and of the training text.

    Drafts without one of the figures are left out.
    """
    lines: list[Line] = []
    for own in _groups(rows, "draft", "trained_on", "label", "gamma"):
        setting, means = own[0].setting, [_mean(one, own) for one in figures]
        draft, text = setting.get("draft", "unaligned"), setting.get("trained_on")
        line: Line = {"draft": draft, "trained on": text or _NO_TEXT, "label": setting["label"]}
        line |= {"gamma": setting["gamma"], "step": setting.get("step", 0)}
        line |= {"name": f"{draft}, {text}" if text else draft}
        for figure, mean in zip(figures, means, strict=True):
            line |= bounded(words_of(figure), mean)
        if None not in means:
            lines.append(line)
    texts = list(dict.fromkeys(line["trained on"] for line in lines))
    return sorted(lines, key=lambda line: (line["gamma"], texts.index(line["trained on"])))


def _draft_blocks(groups: Sequence[Sequence[Row]]) -> list[Block]:
    """tau of the final drafts on one axis, and acceptance over steps if checkpoints were measured.

    Groups are tasks and temperatures. A training text has the same colour in all figures.
    """
    lines = [_draft_lines(group, _TAU, _ACCEPTANCE) for group in groups]
    ends = [[line for line in each if line["label"] in ("end", "start")] for each in lines]
    axis = axis_of(_TAU).shared_by([line for each in ends for line in each])

    def chart(own: Sequence[Line], **settings: Any) -> Spec:
        start = next((line[axis.field] for line in own if line["label"] == "start"), None)
        return charts.intervals(own, "name", replace(axis, at=start), **settings)

    texts = list(dict.fromkeys(line["trained on"] for each in ends for line in each))
    settings: Line = {"by": "gamma", "group": "trained on", "names": texts}
    blocks: list[Block] = []
    for group, every, final in zip(groups, lines, ends, strict=True):
        if not final:
            continue
        where, source = _where(group, "part", "task"), _source(group)
        text = (
            f"Means over seeds of training; 95% intervals over n = {len(group[0].units):,} texts "
            "of the target. A colour per training text. The dashed line is the unaligned draft. "
            "All charts of this section have the same axis."
        )
        title = f"Tokens per target call: {where}"
        blocks.append(plotted(title, text, final, chart, source=source, **settings))
        steps = [line for line in every if line["gamma"] == every[0]["gamma"]]
        if any(str(line["label"]).startswith("step") for line in steps):
            blocks.append(_over_steps(steps, where, source))
    return blocks


def _over_steps(lines: Sequence[Line], where: str, source: Source) -> Figure:
    """Acceptance over steps; the shared initial draft is step 0 of every curve."""
    starts = [line for line in lines if line["label"] == "start"]
    trained = [line for line in lines if line["label"] != "start"]
    names = dict.fromkeys(line["name"] for line in trained)
    drawn = [line | {"name": name, "step": 0} for name in names for line in starts[:1]]
    drawn = sorted([*drawn, *trained], key=lambda line: (line["name"], line["step"]))
    text = "Means over seeds; bands are 95% intervals over texts of the target."
    title, columns = f"Acceptance over training: {where}", ("step", _ACCEPTANCE)
    return plotted(title, text, drawn, charts.curves, *columns, group="name", source=source)


def _own_quality(rows: Sequence[Row]) -> Figure:
    """Quality of each draft's own answers and its tau, a point per draft."""
    gamma = max(int(row.setting["gamma"]) for row in rows)
    lines = _draft_lines([row for row in rows if row.has(gamma=gamma)], _TAU, _QUALITY)
    text = (
        f"A point per draft, means over seeds of training; gamma {gamma}. Bars are 95% "
        f"intervals over n = {len(rows[0].units):,} examples."
    )
    title = f"Quality of drafts and tokens per target call: {_where(rows, 'part', 'task')}"
    settings: Line = {"group": "trained on", "labels": ["draft"], "source": _source(rows)}
    return plotted(title, text, lines, charts.points, _QUALITY, _TAU, **settings)


def _name(side: Side) -> str:
    """The draft of a side; an initial draft has no name."""
    return str(side.where.get("draft", "unaligned"))


def _dominance(finding: Finding, rows: Sequence[Row]) -> list[Figure]:
    test = finding.claim.test
    if not isinstance(test, Dominance):
        return []
    sides = {_name(side): own_figures(test, side, rows) for side in (test.first, test.second)}
    samples = {name: list(values.values()) for name, values in sides.items() if values}
    if len(samples) < 2:
        return []
    counts = dict.fromkeys(f"n = {len(values):,} examples" for values in samples.values())
    text = (
        f"{finding.claim.here} A curve further right has larger values at every rank. Verdict: "
        f"{finding.verdict}. {' and '.join(counts)} of each draft."
    )
    drawn = charts.dominance_rows(samples, "tau", "draft")
    axis = Axis("tau", "tokens per target call of an example", ".2f")
    title = f"Tau per example: {finding.claim.id}"
    settings: Line = {"source": _source(select(rows, test.rows, test.first.where))}
    return [plotted(title, text, drawn, charts.dominance, axis, group="draft", **settings)]


def _grid(stage: str, rows: Sequence[Row]) -> Figure:
    """A heat map of a sweep: mean acceptance over seeds."""

    def mean(_: str, row: Row) -> Interval:
        values = [v for v in row.sums.get(_ACCEPTANCE, ()) if v is not None]
        return mean_interval(torch.tensor(values)) if len(values) > 1 else Interval(*_UNKNOWN)

    lines = lines_of(rows, ("row", "column"), (_ACCEPTANCE,), measure=mean)
    text = f"Means over {len(rows[0].units)} seeds of training."
    title, columns = f"Expected acceptance by recipe and text: {stage}", ("row", "column")
    return plotted(title, text, lines, charts.heat_map, *columns, _ACCEPTANCE, source=_source(rows))


def _frontier(rows: Sequence[Row]) -> list[Block]:
    """Quality against rejection rate and against target calls, a line per family."""
    frontier = frontier_of(rows, _NUM_RESAMPLES)
    if frontier is None or "score" not in frontier.target.sums:
        return []
    lines = lines_of(ordered_cells(frontier), NAMES, _FRONTIER, measure=frontier.measure)
    if all(is_unknown(line["rejection rate"]) for line in lines):
        return []
    where = _where(rows, "part", "pair", "model", "draft", "task")
    text = (
        f"{frontier.num_examples:,} examples. Further left is cheaper, further up is better; the "
        "dashed line is the target's quality. Bars are 95% intervals over examples."
    )
    return [frontier_figure(f"Quality and cost: {where}", text, lines, _source(rows))]


def _bounds(rows: Sequence[Row]) -> Table:
    """Acceptance and its bounds, regret and its bounds, as means. The rows are of one stage."""
    lines: list[Line] = []
    for row in rows:
        setting = row.setting
        if "proven" in row.sums:
            accepted_N = torch.tensor(row.sums["acceptance"])
            lines.append({"": "acceptance, measured"} | bounded("value", mean_interval(accepted_N)))
        rule = f" of {setting['rule']} {setting['alpha']:g}" if "rule" in setting else ""
        lines += [
            {"": f"{figure.words}{rule}"} | bounded("value", figure.measure(row))
            for figure in figures_of(row)
        ]
    length = rows[0].setting.get("max_new_tokens")
    title = f"Bounds, at most {length} tokens ({rows[0].source.stage})"
    return Table(title, lines, _source(rows))
