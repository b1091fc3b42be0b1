"""Page of a training run (`paceline pretrain`, `paceline align`): loss and held-out figures."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from paceline.report.html import charts
from paceline.report.html.encodings import Axis
from paceline.report.html.made_by import machine, models, source_of
from paceline.report.html.page import Fact, Figure, Page, Panel, Section, Table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.report.html.page import Block, Row, Source

_MOST_POINTS = 240
_STEP = Axis("step", "optimizer step", "d", whole=True)
_SECONDS = Axis("seconds", "seconds of training", ".0f")
_BOUNDS = ("_low", "_high")
_KNOWN = {  # figures of the evaluation, the first that occurs gives the verdict
    "expected_acceptance": "expected acceptance",
    "rule_acceptance": "acceptance under the rule",
    "accuracy": "accuracy",
    "loss": "held-out loss",
    "block_efficiency": "tokens per target call",
    "greedy_agreement": "greedy agreement",
    "rule_tvd": "distance to the rule's target (TVD)",
}


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
    evaluations = [row for row in metrics if row.get("evaluation")]
    points = [(row["step"], row["evaluation"]) for row in evaluations]
    if result is not None and result.get("after"):
        points.append((result["num_steps"], result["after"]))
    sections = [_held_out(points, source)] if points else []
    if steps:
        sections.append(_loss(steps, source))
    seconds = steps[-1]["elapsed_s"] if steps else 0.0
    about = [*models(config), f"Output: {config['output']}", machine(manifest.get("environment"))]
    return Page(
        title="Training of a draft" if command == "align" else "Training of a model",
        word="" if result is not None else "NOT FINISHED",
        verdict=_verdict(points, len(steps), seconds),
        facts=_facts(points, steps, seconds),
        sections=sections,
        about=[line for line in about if line],
    )


def _verdict(points: Sequence[tuple[int, Mapping[str, float]]], steps: int, seconds: float) -> str:
    spent = f"{steps:,} steps, {_duration(seconds)}"
    if not points:
        return f"Trained for {spent}, without held-out text."
    (_, first), (_, last) = points[0], points[-1]
    name = next((name for name in _KNOWN if name in last), None)
    if name is None or len(points) < 2 or name not in first:
        return f"Trained for {spent}."
    before, after = first[name], last[name]
    changed = "rose" if after > before else "fell" if after < before else "stayed"
    return (
        f"On held-out text, {_KNOWN[name]} {changed} from {_figure(first, name)} to "
        f"{_figure(last, name)} in {spent}."
    )


def _figure(figures: Mapping[str, float], name: str) -> str:
    text = f"{figures[name]:.3f}"
    if f"{name}_low" in figures:
        text += f" ({figures[f'{name}_low']:.3f} to {figures[f'{name}_high']:.3f})"
    return text


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _facts(
    points: Sequence[tuple[int, Mapping[str, float]]],
    steps: Sequence[Mapping[str, Any]],
    seconds: float,
) -> list[Fact]:
    facts: list[Fact] = []
    if points:
        last = points[-1][1]
        facts += [
            Fact(words, f"{last[name]:.3f}", f"{points[0][1][name]:.3f} before")
            for name, words in _KNOWN.items()
            if name in last and name in points[0][1]
        ][:4]
    if steps:
        tokens = sum(row["num_tokens"] for row in steps)
        facts.append(Fact("tokens", f"{tokens:,}", f"in {_duration(seconds)}"))
    return facts


def _held_out(points: Sequence[tuple[int, Mapping[str, float]]], source: Source) -> Section:
    known = [name for name in _KNOWN if any(name in figures for _, figures in points)]
    rows: list[Row] = []
    for name in known:
        for step, figures in points:
            if name in figures:
                row: Row = {"figure": _KNOWN[name], "step": step, "value": figures[name]}
                row |= {f"value{end}": figures.get(f"{name}{end}") for end in _BOUNDS}
                rows.append(row)
    panels: list[Panel] = []
    for name in known:
        mine = [row for row in rows if row["figure"] == _KNOWN[name]]
        y = Axis("value", _KNOWN[name], ".3~f", bounds=True)
        panels.append(Panel(charts.curves(mine, _STEP, y, "figure"), _KNOWN[name].capitalize()))
    text = (
        "Before training, at each evaluation, and of the saved model. Bands are 95% intervals over "
        "texts, where they are recorded."
    )
    blocks: list[Block] = [Figure("Held-out figures over training", text, panels, rows, source)]
    ends = [
        {"": label, **{_KNOWN[name]: figures.get(name) for name in known}}
        for label, (_, figures) in (("before", points[0]), ("after", points[-1]))
    ]
    if len(points) > 1:
        blocks.append(Table("Before and after", ends, source))
    terms = ("expected acceptance", "greedy agreement", "block efficiency", "95% interval")
    used = [term for term in terms if _has(term, known)]
    return Section("On held-out text", blocks, used)


def _has(term: str, known: Sequence[str]) -> bool:
    names = {"block efficiency": "block_efficiency"}
    needed = names.get(term, term.replace(" ", "_"))
    return term == "95% interval" or needed in known


def _loss(steps: Sequence[Mapping[str, Any]], source: Source) -> Section:
    size = math.ceil(len(steps) / _MOST_POINTS)
    parts = [steps[start : start + size] for start in range(0, len(steps), size)]
    rows: list[Row] = [
        {
            "curve": "loss",
            "step": part[-1]["step"],
            "seconds": part[-1]["elapsed_s"],
            "loss": _mean(part, "loss"),
            "loss_low": min(row["loss"] for row in part),
            "loss_high": max(row["loss"] for row in part),
            "gradient norm": _mean(part, "gradient_norm"),
            "learning rate": part[-1].get("learning_rate"),
            "tokens per s": _mean(part, "tokens_per_s"),
        }
        for part in parts
    ]
    if size == 1:
        rows = [{k: v for k, v in row.items() if k[:5] != "loss_"} for row in rows]
    y = Axis("loss", "loss", ".3~f", bounds=size > 1)
    panels = [
        Panel(charts.curves(rows, _STEP, y, "curve", points=False), "Over steps"),
        Panel(charts.curves(rows, _SECONDS, y, "curve", points=False), "Over time"),
    ]
    each = f"Each point is the mean of {size} steps, the band their range." if size > 1 else ""
    text = f"Training loss per token, on text that changes from step to step. {each}".strip()
    norm = Axis("gradient norm", "gradient norm", ".3~f")
    rate = Axis("tokens per s", "tokens per second", "~s")
    more = [
        Panel(charts.curves(rows, _STEP, norm, "curve", points=False), "Gradient norm"),
        Panel(charts.curves(rows, _STEP, rate, "curve", points=False), "Tokens per second"),
    ]
    blocks = [
        Figure("Loss over training", text, panels, rows, source),
        Figure("Gradient norm and throughput", "Means of the same steps.", more, rows, source),
    ]
    return Section("Loss", blocks, ("loss",))


def _mean(part: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [row[name] for row in part if row.get(name) is not None]
    return sum(values) / len(values) if values else None
