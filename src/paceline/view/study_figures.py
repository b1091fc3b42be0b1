"""Figures of a study from its rows: tau of drafts, training, grids, frontiers, bounds."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from paceline.core.bootstrap import Interval, mean_interval
from paceline.results.figures import figures_of
from paceline.results.frontier import family_of
from paceline.studies.claim_file import Dominance, Paired, Side
from paceline.studies.evidence import paired_evidence, select
from paceline.studies.evidence_of_drafts import own_figures
from paceline.studies.evidence_of_frontiers import frontier_of
from paceline.view import charts
from paceline.view.bench_run import curves as ordered_curves
from paceline.view.charts import Axis
from paceline.view.page import Figure, Panel, Source, Table, bounded

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from paceline.results.row import Row as ResultRow
    from paceline.studies.study_file import Label
    from paceline.studies.verdicts import Finding
    from paceline.view.page import Block, Row

_TAIL = 0.025
_NO_TEXT = "not trained"
_NUM_RESAMPLES = 2000
_TAU = Axis("tau", "tokens per target call (tau)", ".2f", bounds=True)
_STEP = Axis("step", "optimizer step", "d", whole=True)
_ACCEPTANCE = Axis("acceptance", "expected acceptance", ".3f", bounds=True)
_SCORE = Axis("score", "mean score of the draft's own answers", ".3f", bounds=True)
_REJECTION = Axis("rejection", "rejected / examined drafted tokens", ".2f", bounds=True)
_CALLS = Axis("calls", "target calls / tokens", ".2f", bounds=True)
_QUALITY = Axis("quality", "quality / target's", ".2f", bounds=True)


class Question(NamedTuple):
    """What figures answer, and the terms that they use."""

    text: str
    terms: tuple[str, ...]


_TAU_OF_DRAFTS = Question(
    "Does distillation raise the block efficiency?",
    ("block efficiency", "gamma", "expected acceptance", "95% interval"),
)
_ALL_EXAMPLES = Question(
    "Does the whole distribution over examples move up?", ("block efficiency", "dominance")
)
_OWN_QUALITY = Question(
    "Is the draft that writes best also the one that drafts best?",
    ("block efficiency", "quality", "95% interval"),
)
_RECIPES = Question(
    "Which recipe and which text give the most acceptance?", ("expected acceptance",)
)
_RULES = Question(
    "Which rule has the best quality at equal cost?",
    ("relative quality", "rejection rate", "deferral rate", "family", "95% interval"),
)
_BOUNDS = Question(
    "Are the bounds true, and do they say anything?",
    ("expected acceptance", "regret", "95% interval"),
)


def study_blocks(
    rows: Sequence[ResultRow], findings: Sequence[Finding]
) -> dict[Question, list[Block]]:
    """All figures that the rows of one study allow, by the question that they answer."""
    measured = [row for row in rows if {"label", "gamma"} <= row.setting.keys()]
    drafts = _draft_blocks(_groups(measured, "part", "task", "temperature"))
    frontiers: list[Block] = []
    cells = [row for row in rows if family_of(row)]
    for group in _groups(cells, "part", "pair", "task", "draft", "model", "temperature"):
        frontiers += _frontier(group)
    blocks = {
        _TAU_OF_DRAFTS: drafts,
        _ALL_EXAMPLES: [figure for one in findings for figure in _dominance(one, rows)],
        _OWN_QUALITY: _own_quality([row for row in measured if "score" in row.sums]),
        _RECIPES: _grids([row for row in rows if "column" in row.setting]),
        _RULES: frontiers,
        _BOUNDS: [
            _bounds(group)
            for group in _groups(
                [row for row in rows if "proven" in row.sums or "regret" in row.sums],
                "max_new_tokens",
            )
        ],
    }
    return {question: found for question, found in blocks.items() if found}


def _groups(rows: Sequence[ResultRow], *keys: str) -> list[list[ResultRow]]:
    found: dict[tuple[Label | None, ...], list[ResultRow]] = {}
    for row in rows:
        found.setdefault(tuple(row.setting.get(key) for key in keys), []).append(row)
    return list(found.values())


def _where(rows: Sequence[ResultRow], *keys: str) -> str:
    setting = rows[0].setting
    words = [str(setting[key]) for key in keys if key in setting]
    return ", ".join([*words, f"temperature {setting.get('temperature', 1):g}"])


def _source(rows: Iterable[ResultRow]) -> Source:
    one = next(iter(rows)).source
    environment = {"commit": one.commit, "machine": one.machine, "versions": one.versions}
    return Source(one.command, None, environment)


def _mean(
    rows: Sequence[ResultRow], over: str, under: str | None, across: tuple[str, ...]
) -> Interval | None:
    """The figure, averaged over the values of `across`, with its 95% interval over examples."""
    test = Paired(
        over=over,
        under=under,
        first=Side(),
        than=0.0,
        compare="difference",
        across=across,
        matters=1.0,
    )
    found = paired_evidence(test, rows, _TAIL, ())
    return None if found is None else found.part(_TAIL).at(_TAIL)


def _draft_blocks(groups: Sequence[Sequence[ResultRow]]) -> list[Block]:
    """tau of the final drafts on one axis, and acceptance over steps if checkpoints were measured.

    Groups are tasks and temperatures.
    """
    lines = [_draft_lines(group) for group in groups]
    ends = [[line for line in each if line["label"] in ("end", "start")] for each in lines]
    axis = _TAU.shared_by([line for each in ends for line in each])
    texts = dict.fromkeys(line["trained on"] for each in ends for line in each)
    blocks: list[Block] = []
    for group, every, final in zip(groups, lines, ends, strict=True):
        if not final:
            continue
        where, source = _where(group, "part", "task"), _source(group)
        blocks.append(_draft_figure(final, axis, list(texts), len(group[0].units), where, source))
        steps = [line for line in every if line["gamma"] == every[0]["gamma"]]
        if any(str(line["label"]).startswith("step") for line in steps):
            blocks.append(_over_steps(steps, where, source))
    return blocks


def _draft_lines(rows: Sequence[ResultRow]) -> list[Row]:
    """tau and acceptance of each draft at each gamma, in order of the training text."""
    lines: list[Row] = []
    for (draft, trained_on, label, gamma), group in _by_draft(rows).items():
        tau, acceptance = _means(group, "acceptance", "tokens")
        if tau is None or acceptance is None:
            continue
        line: Row = {"draft": draft, "trained on": trained_on or _NO_TEXT, "label": label}
        line |= {"gamma": gamma, "step": group[0].setting.get("step", 0)}
        line |= {"name": f"{draft}, {trained_on}" if trained_on else draft}
        lines.append(line | bounded("tau", tau) | bounded("acceptance", acceptance))
    texts = list(dict.fromkeys(line["trained on"] for line in lines))
    return sorted(lines, key=lambda line: (line["gamma"], texts.index(line["trained on"])))


def _means(
    rows: Sequence[ResultRow], over: str, under: str | None
) -> tuple[Interval | None, Interval | None]:
    """tau of a draft and another figure, averaged over its seeds of training."""
    across = ("seed",) if "seed" in rows[0].setting else ()
    return _mean(rows, "emitted", "calls", across), _mean(rows, over, under, across)


def _draft_figure(
    ends: Sequence[Row], axis: Axis, texts: Sequence[str], count: int, where: str, source: Source
) -> Figure:
    """A panel per gamma; a colour per training text, the same in all figures of the study."""
    starts = {line["gamma"]: line["tau"] for line in ends if line["label"] == "start"}
    gammas = dict.fromkeys(line["gamma"] for line in ends)
    panels = [
        Panel(
            charts.intervals(
                [line for line in ends if line["gamma"] == gamma],
                "name",
                axis,
                group="trained on",
                beside=False,
                names=texts,
                reference=starts.get(gamma),
            ),
            f"gamma {gamma}",
        )
        for gamma in gammas
    ]
    text = (
        f"Means over seeds of training; 95% intervals over n = {count:,} texts of the target. A "
        "colour per training text. The dashed line is the unaligned draft. All charts of this "
        "section have the same axis."
    )
    return Figure(f"Tokens per target call: {where}", text, panels, ends, source)


def _own_quality(rows: Sequence[ResultRow]) -> list[Block]:
    """Quality of each draft's own answers and its tau, a point per draft."""
    blocks: list[Block] = []
    for group in _groups(
        [row for row in rows if row.setting["label"] == "end"], "part", "task", "temperature"
    ):
        gamma = max(int(row.setting["gamma"]) for row in group)
        lines: list[Row] = []
        for (draft, trained_on, _, of_draft), own in _by_draft(group).items():
            if of_draft != gamma:
                continue
            tau, score = _means(own, "score", None)
            if tau is not None and score is not None:
                line: Row = {"draft": draft, "trained on": trained_on or _NO_TEXT, "gamma": gamma}
                lines.append(line | bounded("tau", tau) | bounded("score", score))
        chart = charts.points(lines, _SCORE, _TAU, "trained on", labels=["draft"])
        text = (
            f"A point per draft, means over seeds of training; gamma {gamma}. Bars are 95% "
            f"intervals over n = {len(group[0].units):,} examples."
        )
        title = f"Quality of drafts and tokens per target call: {_where(group, 'part', 'task')}"
        blocks.append(Figure(title, text, [Panel(chart)], lines, _source(group)))
    return blocks


def _by_draft(rows: Sequence[ResultRow]) -> dict[tuple[str, str, str, int], list[ResultRow]]:
    """Rows by draft, training text, checkpoint and gamma, with all seeds of each."""
    found: dict[tuple[str, str, str, int], list[ResultRow]] = {}
    for row in rows:
        given = row.setting
        draft = str(given.get("draft", "unaligned"))
        place = (draft, str(given.get("trained_on", "")), str(given["label"]), int(given["gamma"]))
        found.setdefault(place, []).append(row)
    return found


def _over_steps(lines: Sequence[Row], where: str, source: Source) -> Figure:
    """Acceptance over steps; the shared initial draft is step 0 of every curve."""
    starts = [line for line in lines if line["label"] == "start"]
    names = dict.fromkeys(line["name"] for line in lines if line["label"] != "start")
    drawn = [line | {"name": name, "step": 0} for name in names for line in starts[:1]]
    drawn += [line for line in lines if line["label"] != "start"]
    drawn.sort(key=lambda line: (line["name"], line["step"]))
    chart = charts.curves(drawn, _STEP, _ACCEPTANCE, "name")
    text = "Means over seeds; bands are 95% intervals over texts of the target."
    return Figure(f"Acceptance over training: {where}", text, [Panel(chart)], drawn, source)


def _name(side: Side) -> str:
    """The draft of a side; an initial draft has no name."""
    draft = side.where.get("draft", "unaligned")
    return draft if isinstance(draft, str) else str(draft)


def _dominance(finding: Finding, rows: Sequence[ResultRow]) -> list[Figure]:
    test = finding.claim.test
    if not isinstance(test, Dominance):
        return []
    sides = {_name(side): own_figures(test, side, rows) for side in (test.first, test.second)}
    samples = {name: list(values.values()) for name, values in sides.items() if values}
    if len(samples) < 2:
        return []
    drawn = charts.dominance_rows(samples, "tau", "draft")
    axis = Axis("tau", "tokens per target call of an example", ".2f")
    text = (
        f"{finding.claim.here} A curve further right has larger values at every rank. Verdict: "
        f"{finding.verdict}."
    )
    counts = dict.fromkeys(f"n = {len(values):,} examples" for values in samples.values())
    panel = Panel(charts.dominance(drawn, axis, "draft"), f"{' and '.join(counts)} of each draft")
    source = _source(select(rows, test.rows, test.first.where))
    return [Figure(f"Tau per example: {finding.claim.id}", text, [panel], drawn, source)]


def _grids(rows: Sequence[ResultRow]) -> list[Block]:
    """Heat maps of sweeps: mean acceptance over seeds."""
    blocks: list[Block] = []
    by_stage: dict[str, list[ResultRow]] = {}
    for row in rows:
        by_stage.setdefault(row.source.stage, []).append(row)
    for stage, group in by_stage.items():
        lines: list[Row] = []
        for row in group:
            values = [v for v in row.sums.get("expected_acceptance", ()) if v is not None]
            mean = mean_interval(torch.tensor(values)) if len(values) > 1 else None
            value = {"acceptance": math.nan} if mean is None else bounded("acceptance", mean)
            lines.append({"row": row.setting["row"], "column": row.setting["column"]} | value)
        chart = charts.heat_map(lines, "row", "column", _ACCEPTANCE)
        text = f"Means over {len(group[0].units)} seeds of training."
        title = f"Expected acceptance by recipe and text: {stage}"
        blocks.append(Figure(title, text, [Panel(chart)], lines, _source(group)))
    return blocks


def _frontier(rows: Sequence[ResultRow]) -> list[Block]:
    """Quality against rejection rate and against target calls, a line per family."""
    frontier = frontier_of(rows, _NUM_RESAMPLES)
    if frontier is None or "score" not in frontier.target.sums:
        return []
    lines: list[Row] = []
    for curve in ordered_curves(frontier):
        for cell in curve.cells:
            rejection = frontier.measure("rejection_rate", cell)
            line: Row = {"family": family_of(cell), "setting": cell.setting.get("setting", "-")}
            line |= bounded("quality", frontier.measure("relative_quality", cell))
            line |= bounded("calls", frontier.measure("deferral_rate", cell))
            lines.append(line | bounded("rejection", rejection))
    examined = [line for line in lines if line["rejection"] == line["rejection"]]
    if not examined:
        return []
    panels = [
        Panel(
            charts.frontier(
                examined, _REJECTION, _QUALITY, "family", labels=["setting"], reference=(None, 1.0)
            ),
            "against the rejection rate",
        ),
        Panel(
            charts.frontier(
                lines, _CALLS, _QUALITY, "family", labels=["setting"], reference=(None, 1.0)
            ),
            "against the fraction of target calls",
        ),
    ]
    where = _where(rows, "part", "pair", "model", "draft", "task")
    text = (
        f"{frontier.num_examples:,} examples. Further left is cheaper, further up is better; the "
        "dashed line is the target's quality. Bars are 95% intervals over examples."
    )
    return [Figure(f"Quality and cost: {where}", text, panels, lines, _source(rows))]


def _bounds(rows: Sequence[ResultRow]) -> Table:
    """Acceptance and its bounds, regret and its bounds, as means. The rows are of one stage."""
    lines: list[Row] = []
    for row in rows:
        if "proven" in row.sums:
            measured = _mean([row], "acceptance", None, ())
            if measured is not None:
                lines.append({"": "acceptance, measured"} | bounded("value", measured))
        given = row.setting
        rule = f" of {given['rule']} {given['alpha']:g}" if "rule" in given else ""
        for figure in figures_of(row):
            lines.append({"": f"{figure.words}{rule}"} | bounded("value", figure.measure(row)))
    length = rows[0].setting.get("max_new_tokens")
    title = f"Bounds, at most {length} tokens ({rows[0].source.stage})"
    return Table(title, lines, _source(rows))
