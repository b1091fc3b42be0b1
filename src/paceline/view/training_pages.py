"""Pages of `pretrain`, `align` and `trajectory`: drafts over and after training."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from paceline.core.bootstrap import Interval
from paceline.measure.trajectory import START, draft_name, gain_of
from paceline.results.figures import FIGURES
from paceline.results.row import grouped
from paceline.view import charts
from paceline.view.charts import Axis, plotted
from paceline.view.page import (
    Fact,
    Figure,
    Page,
    Section,
    Table,
    about,
    case_of,
    interval_text,
    sentence,
    shown,
    source_of,
    words_of,
)
from paceline.view.tables import before_and_after, checkpoint_line, evaluated

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.results.row import Row
    from paceline.view.page import Block, Line

    Figures = Mapping[str, float]

# Figures of an evaluation; the first that occurs gives the verdict.
_EVALUATED = (
    *("expected_acceptance", "accuracy", "loss"),
    *("block_efficiency", "greedy_agreement"),
)
_MOST_POINTS = 240


def training_page(
    command: str,
    manifest: Mapping[str, Any],
    metrics: Sequence[Mapping[str, Any]],
    result: Mapping[str, Any] | None,
) -> Page:
    """The page of a run; `command` is `align` or `pretrain`, `result` None while it runs."""
    config = manifest["config"]
    source = source_of(command, config, manifest.get("environment"))
    steps = [row for row in metrics if "loss" in row]
    points = [(row["step"], row["evaluation"]) for row in metrics if row.get("evaluation")]
    if result is not None and result.get("after"):
        points.append((result["num_steps"], result["after"]))
    known = [name for name in _EVALUATED if any(name in figures for _, figures in points)]
    sections = [_held_out(points, known)] if points else []
    facts: list[Fact] = []
    spent = f"{len(steps):,} steps, 0 s"
    if steps:
        sections.append(_loss(steps))
        duration = _duration(steps[-1]["elapsed_s"])
        spent = f"{len(steps):,} steps, {duration}"
        facts.append(
            Fact("tokens", f"{sum(row['num_tokens'] for row in steps):,}", f"in {duration}")
        )
    return Page(
        title="Training of a draft" if command == "align" else "Training of a model",
        word="" if result is not None else "NOT FINISHED",
        verdict=_change(points, known, spent),
        facts=facts,
        sections=sections,
        about=about(source, f"Output: {config['output']}"),
        source=source,
    )


def _change(points: Sequence[tuple[int, Figures]], known: Sequence[str], spent: str) -> str:
    if not points:
        return f"Trained for {spent}, without held-out text."
    (_, first), (_, last) = points[0], points[-1]
    name = next((name for name in known if name in last), "")
    if len(points) < 2 or name not in first:
        return f"Trained for {spent}."
    before, after = first[name], last[name]
    changed = "rose" if after > before else "fell" if after < before else "stayed"
    texts = [shown(evaluated(figures, name), ".3f") for figures in (first, last)]
    return f"On held-out text, {words_of(name)} {changed} from {texts[0]} to {texts[1]} in {spent}."


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _held_out(points: Sequence[tuple[int, Figures]], known: Sequence[str]) -> Section:
    rows: list[Line] = [
        {"figure": words_of(name), "step": step, "value": evaluated(figures, name)}
        for name in known
        for step, figures in points
        if name in figures
    ]
    panels = {
        sentence(words)[:-1]: charts.curves(own, "step", Axis("value", words), "figure")
        for words, own in grouped(rows, lambda row: row["figure"]).items()
    }
    text = (
        "Before training, at each evaluation, and of the saved model. Bands are 95% intervals over "
        "texts, where they are recorded."
    )
    blocks: list[Block] = [Figure("Held-out figures over training", text, panels, rows)]
    if len(points) > 1:
        blocks.append(before_and_after(points[0][1], points[-1][1], known, "Before and after"))
    return Section("On held-out text", blocks)


def _loss(steps: Sequence[Mapping[str, Any]]) -> Section:
    size = math.ceil(len(steps) / _MOST_POINTS)
    parts = [steps[start : start + size] for start in range(0, len(steps), size)]
    rows: list[Line] = []
    for part in parts:
        row: Line = {"curve": "loss", "step": part[-1]["step"], "seconds": part[-1]["elapsed_s"]}
        losses = [one["loss"] for one in part]
        row["loss"] = losses[0] if size == 1 else _range(losses)
        rows.append(row)
    each = f" Each point is the mean of {size} steps, the band their range." if size > 1 else ""
    text = f"Training loss per token, on text that changes from step to step.{each}"
    axes = "step", Axis("loss", "loss")
    chart = plotted("Loss over training", text, rows, charts.curves, *axes, group="curve")
    return Section("Loss", [chart])


def _range(losses: Sequence[float]) -> Interval:
    """Their mean, from the least to the largest."""
    return Interval(sum(losses) / len(losses), min(losses), max(losses))


def trajectory_page(rows: Sequence[Row], manifest: Mapping[str, Any] | None) -> Page:
    """The page of measured checkpoints; `manifest` None if it is unknown."""
    manifest = manifest or {}
    source = source_of("trajectory", manifest.get("config"), manifest.get("environment"))
    sections = [_case(where, own) for where, own in grouped(rows, case_of).items()]
    gains = [(gain, row) for row in rows if (gain := gain_of(row, rows)) is not None]
    verdict, facts = "No run has a checkpoint after its initial draft.", []
    if gains:
        gain, row = max(gains, key=lambda pair: pair[0].low)
        label = row.setting["label"]
        draft = "final draft" if label == "end" else f"draft of {label}"
        tau = FIGURES["block_efficiency"].value(row)
        verdict = (
            f"Of {len(gains)} gains in tokens per target call, the one with the largest lower "
            f"bound is {interval_text(gain, '.2f', 'x')}: the {draft} of {draft_name(row)} on "
            f"{case_of(row)}, gamma {row.setting['gamma']}, with {tau:.2f} tokens per call. The "
            "interval does not allow for this choice."
        )
        runs = {row.source.run for row in rows}
        drafts = {row.source.fingerprints["draft"] for row in rows}
        facts = [Fact("runs", str(len(runs))), Fact("drafts measured", str(len(drafts)))]
        if whole := row.source.sizes.get("target"):
            facts.append(Fact("parameter ratio", f"{row.source.sizes['draft'] / whole:.3f}"))
    title = "Drafts over training"
    return Page(title, verdict, sections, facts=facts, about=about(source), source=source)


def _case(where: str, rows: Sequence[Row]) -> Section:
    """The figures of one task and sampling, a panel per gamma."""
    lines: list[Line] = []
    for place, every in grouped(rows, lambda row: row.source.run).items():
        own = [row for row in every if not row.has(label=START)]
        begun = {row.source.fingerprints["start"] for row in own}
        starts = [
            row
            for row in rows
            if row.has(label=START)
            and (row.source.fingerprints["draft"] in begun if own else row.source.run == place)
        ]
        run = draft_name((own or starts)[0])
        lines += [
            {"run": run, "draft": row.setting["label"], "step": row.setting.get("step", 0)}
            | checkpoint_line(row, rows)
            for row in (*starts, *own)
        ]
    first = [line for line in lines if line["gamma"] == lines[0]["gamma"]]
    last = {(line["run"], line["gamma"]): line for line in lines}
    ends = [line for line in lines if line["gain"] is not None and line in last.values()]
    text = (
        f"{len(rows[0].units)} texts of the target; step 0 is the initial draft. Bands are 95% "
        "intervals over texts. Select a run in the legend to see it alone."
    )
    title = f"Tokens per target call over training: {where}"
    tau, by_run = ("step", "block_efficiency"), {"group": "run", "labels": ["draft"]}
    blocks: list[Block] = [plotted(title, text, lines, charts.curves, *tau, by="gamma", **by_run)]
    if "score" in rows[0].sums:
        title = f"Quality over training: {where}"
        text = "Of the answers that each draft writes by itself, without the target."
        blocks.append(plotted(title, text, first, charts.curves, "step", "quality", **by_run))
    if ends:
        text = "Of the last draft of each run, on the same texts. Above 1 the draft is better."
        gains = [{name: line[name] for name in ("run", "gamma", "gain")} for line in ends]
        blocks.append(Table(f"Gain over the initial draft: {where}", gains, text=text))
    return Section(where, blocks)
