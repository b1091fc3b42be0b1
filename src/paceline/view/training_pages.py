"""Pages of `pretrain` and `align`, `trajectory` and `sweep`: drafts over and after training."""

from __future__ import annotations

import math
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, Literal

from paceline.core.bootstrap import Interval
from paceline.measure.trajectory import short_names
from paceline.train.sweep import Sweep, SweepConfig
from paceline.view import charts
from paceline.view.charts import Axis
from paceline.view.definitions import FIGURES, words_of
from paceline.view.page import (
    Fact,
    Figure,
    Page,
    Panel,
    Section,
    Table,
    about,
    bounded,
    interval_text,
    sampling_words,
    sentence,
    source_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from paceline.measure.trajectory import Checkpoint, TrajectoryRow
    from paceline.view.page import Block, Row

    Figures = Mapping[str, float]

# Figures of an evaluation; the first that occurs gives the verdict.
_EVALUATED = (
    *("expected_acceptance", "rule_acceptance", "accuracy", "loss"),
    *("block_efficiency", "greedy_agreement", "rule_tvd"),
)
_MOST_POINTS = 240
_BOUNDS = ("_low", "_high")
_STEP = Axis("step", "optimizer step", "d", whole=True)
_SECONDS = Axis("seconds", "seconds of training", ".0f")
_TAU = Axis("tau", words_of("block_efficiency"), ".2f", bounds=True)
_QUALITY = Axis("quality", "mean score of its own answers", ".3f", bounds=True)
_GAIN = Axis("gain", "gain over the initial draft", ".2f", bounds=True)
_ALL = "all columns"


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
    if points:
        (_, first), (_, last) = points[0], points[-1]
        both = [name for name in known if name in last and name in first]
        facts += [
            Fact(words_of(name), f"{last[name]:.3f}", f"{first[name]:.3f} before")
            for name in both[:4]
        ]
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
    texts = [_with_bounds(figures, name) for figures in (first, last)]
    return f"On held-out text, {words_of(name)} {changed} from {texts[0]} to {texts[1]} in {spent}."


def _with_bounds(figures: Figures, name: str) -> str:
    ends = (figures.get(f"{name}{end}", math.nan) for end in _BOUNDS)
    return interval_text(Interval(figures[name], *ends), ".3f")


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _held_out(points: Sequence[tuple[int, Figures]], known: Sequence[str]) -> Section:
    rows: list[Row] = []
    panels: list[Panel] = []
    for name in known:
        words = words_of(name)
        own: list[Row] = [
            {"figure": words, "step": step, "value": figures[name]}
            | {f"value{end}": figures.get(f"{name}{end}") for end in _BOUNDS}
            for step, figures in points
            if name in figures
        ]
        y = Axis("value", words, ".3~f", bounds=True)
        panels.append(Panel(charts.curves(own, _STEP, y, "figure"), sentence(words)[:-1]))
        rows += own
    text = (
        "Before training, at each evaluation, and of the saved model. Bands are 95% intervals over "
        "texts, where they are recorded."
    )
    blocks: list[Block] = [Figure("Held-out figures over training", text, panels, rows)]
    ends: list[Row] = [
        {"": label, **{words_of(name): figures.get(name) for name in known}}
        for label, (_, figures) in (("before", points[0]), ("after", points[-1]))
    ]
    if len(points) > 1:
        blocks.append(Table("Before and after", ends))
    terms = [FIGURES[name].term for name in known]
    return Section("On held-out text", blocks, [*terms, "95% interval"])


def _loss(steps: Sequence[Mapping[str, Any]]) -> Section:
    size = math.ceil(len(steps) / _MOST_POINTS)
    parts = [steps[start : start + size] for start in range(0, len(steps), size)]
    rows: list[Row] = []
    for part in parts:
        row: Row = {"curve": "loss", "step": part[-1]["step"], "seconds": part[-1]["elapsed_s"]}
        row |= {"loss": _mean(part, "loss")}
        if size > 1:
            losses = [one["loss"] for one in part]
            row |= {"loss_low": min(losses), "loss_high": max(losses)}
        row |= {"gradient norm": _mean(part, "gradient_norm")}
        row |= {"learning rate": part[-1].get("learning_rate")}
        rows.append(row | {"tokens per s": _mean(part, "tokens_per_s")})
    loss = Axis("loss", "loss", bounds=size > 1)
    norm, rate = Axis("gradient norm"), Axis("tokens per s", "tokens per second", "~s")

    def panel(title: str, x: Axis, y: Axis) -> Panel:
        return Panel(charts.curves(rows, x, y, "curve", size=24), title)

    each = f" Each point is the mean of {size} steps, the band their range." if size > 1 else ""
    text = f"Training loss per token, on text that changes from step to step.{each}"
    panels = [panel("Over steps", _STEP, loss), panel("Over time", _SECONDS, loss)]
    more = [panel("Gradient norm", _STEP, norm), panel("Tokens per second", _STEP, rate)]
    blocks = [
        Figure("Loss over training", text, panels, rows),
        Figure("Gradient norm and throughput", "Means of the same steps.", more, rows),
    ]
    return Section("Loss", blocks, ("loss",))


def _mean(part: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [row[name] for row in part if row.get(name) is not None]
    return sum(values) / len(values) if values else None


def trajectory_page(rows: Sequence[TrajectoryRow], manifest: Mapping[str, Any] | None) -> Page:
    """The page of measured checkpoints; `manifest` None if it is unknown."""
    manifest = manifest or {}
    source = source_of("trajectory", manifest.get("config"), manifest.get("environment"))
    names = short_names({row.stop.run for row in rows})
    cases: dict[str, list[TrajectoryRow]] = {}
    for row in rows:
        cases.setdefault(f"{row.task}, {_sampling(row)}", []).append(row)
    sections = [_case(where, own, names) for where, own in cases.items()]
    gains = [(row, gamma) for row in rows for gamma in row.gain]
    verdict, facts = "No run has a checkpoint after its initial draft.", []
    if gains:
        row, gamma = max(gains, key=lambda one: one[0].gain[one[1]].low)
        draft = "final draft" if row.stop.label == "end" else f"draft of {row.stop.label}"
        verdict = (
            f"Of {len(gains)} gains in tokens per target call, the one with the largest lower "
            f"bound is {interval_text(row.gain[gamma], '.2f', 'x')}: the {draft} of "
            f"{names[row.stop.run]} on {row.task} at {_sampling(row)}, gamma {gamma}, with "
            f"{row.block_efficiency[gamma].value:.2f} tokens per call. The interval does not allow "
            "for this choice."
        )
        drafts = {(row.stop.run, row.stop.label) for row in rows}
        facts = [Fact("runs", str(len(names))), Fact("drafts measured", str(len(drafts)))]
        facts.append(Fact("parameter ratio", f"{row.parameter_ratio:.3f}"))
    title = "Drafts over training"
    return Page(title, verdict, sections, facts=facts, about=about(source), source=source)


def _sampling(row: TrajectoryRow) -> str:
    return sampling_words(vars(row.sampling))


def _case(where: str, rows: Sequence[TrajectoryRow], names: Mapping[Path, str]) -> Section:
    """The figures of one task and sampling, a panel per gamma."""
    lines = [line for row in rows for line in _lines(row, names[row.stop.run])]
    first = [line for line in lines if line["gamma"] == lines[0]["gamma"]]
    last = {(line["run"], line["gamma"]): line for line in lines}
    ends = [line for line in lines if line["gain"] is not None and line in last.values()]

    def over_steps(own: Sequence[Row], y: Axis) -> dict[str, Any]:
        return charts.curves(own, _STEP, y, "run", labels=["draft"])

    text = (
        f"{rows[0].num_texts} texts of the target; step 0 is the initial draft. Bands are 95% "
        "intervals over texts. Select a run in the legend to see it alone."
    )
    panels = _by_gamma(lines, lambda own: over_steps(own, _TAU))
    blocks = [Figure(f"Tokens per target call over training: {where}", text, panels, lines)]
    if rows[0].quality is not None:
        text = "Of the answers that each draft writes by itself, without the target."
        panels = [Panel(over_steps(first, _QUALITY))]
        blocks.append(Figure(f"Quality over training: {where}", text, panels, first))
    if ends:
        text = "Of the last draft of each run, on the same texts. Right of 1 the draft is better."
        panels = _by_gamma(ends, lambda own: charts.intervals(own, "run", _GAIN, reference=1.0))
        blocks.append(Figure(f"Gain over the initial draft: {where}", text, panels, ends))
    return Section(where, blocks, ("block efficiency", "95% interval"))


def _by_gamma(
    lines: Sequence[Row], draw: Callable[[Sequence[Row]], Mapping[str, Any]]
) -> list[Panel]:
    gammas = sorted({line["gamma"] for line in lines})
    return [
        Panel(draw([line for line in lines if line["gamma"] == gamma]), f"gamma {gamma}")
        for gamma in gammas
    ]


def _lines(row: TrajectoryRow, name: str) -> list[Row]:
    return [
        {
            "run": name,
            "draft": row.stop.label,
            "step": row.stop.step,
            "seconds": row.stop.elapsed_s,
            "gamma": gamma,
            **bounded("acceptance", row.expected_acceptance),
            **(bounded("quality", row.quality) if row.quality is not None else {}),
            **bounded("tau", tau),
            **bounded("gain", row.gain[gamma] if row.gain else None),
            "MBSU": row.mbsu[gamma],
        }
        for gamma, tau in row.block_efficiency.items()
    ]


def draw_trajectories(rows: Sequence[TrajectoryRow], path: Path) -> None:
    """Write an image of tau over steps and over seconds, a column per gamma.

    Successive runs are concatenated along the axis. Raises StorageError.
    """
    lines: list[Row] = []
    for name in dict.fromkeys(_line_name(row) for row in rows):
        own = [row for row in rows if _line_name(row) == name]
        stops = [row.stop for row in own]
        places = zip(own, along(stops, "step"), along(stops, "elapsed_s"), strict=True)
        lines += [
            {"line": name, "gamma": gamma, "step": step, "seconds": seconds, **bounded("tau", tau)}
            for row, step, seconds in places
            for gamma, tau in row.block_efficiency.items()
        ]
    panels = [
        panel
        for x in (_STEP, _SECONDS)
        for panel in _by_gamma(lines, partial(charts.curves, x=x, y=_TAU, group="line"))
    ]
    charts.save(panels, path, columns=len(panels) // 2)


def _line_name(row: TrajectoryRow) -> str:
    return f"{row.task} {row.sampling.name}"


def along(stops: Sequence[Checkpoint], figure: Literal["step", "elapsed_s"]) -> list[float]:
    """The position of each draft on an axis, with runs concatenated."""
    positions: list[float] = []
    before = last = 0.0
    for index, stop in enumerate(stops):
        if index and stop.run != stops[index - 1].run:
            before = last
        last = before + getattr(stop, figure)
        positions.append(last)
    return positions


def sweep_page(runs: Sequence[Mapping[str, Any]], manifest: Mapping[str, Any]) -> Page:
    """The page of the rows of `sweep.json`."""
    config = manifest["config"]
    source = source_of("sweep", config, manifest.get("environment"))
    found = [name for name in FIGURES if any(name in (run.get("after") or {}) for run in runs)]
    sweeps = {
        name: _sweep(runs, config, name) for name in dict.fromkeys([config["figure"], *found])
    }
    sections = [_figure_of_sweep(one, name) for name, one in sweeps.items()]
    rows = [_run(run, found) for run in runs]
    sections.append(Section("All runs", [Table("Each run", rows)]))
    shape = sweeps[config["figure"]].config
    return Page(
        title="Alignment runs compared",
        verdict=_best_row(sweeps[config["figure"]], config["figure"]),
        facts=[
            Fact("rows by columns", f"{len(shape.rows)} by {len(shape.columns)}"),
            Fact("seeds", str(len(shape.seeds))),
            Fact("runs that diverged", str(sum("diverged" in run for run in runs))),
        ],
        sections=sections,
        about=["Intervals are Student's 95% intervals over seeds; few seeds give wide ones."],
        source=source,
    )


def _sweep(runs: Sequence[Mapping[str, Any]], config: Mapping[str, Any], figure: str) -> Sweep:
    """A figure of the runs; NaN where a run diverged or lacks it."""
    names = [list(dict.fromkeys(run[key] for run in runs)) for key in ("row", "column", "seed")]
    values = dict.fromkeys(product(*names), math.nan)
    for run in runs:
        value = (run.get("after") or {}).get(figure, math.nan)
        values[run["row"], run["column"], run["seed"]] = value
    shape = SweepConfig.model_construct(  # not validated: nothing of the file is run
        rows=dict.fromkeys(names[0]),
        columns=dict.fromkeys(names[1]),
        seeds=tuple(names[2]),
        reference=config.get("reference"),
    )
    return Sweep(shape, values)


def _best_row(found: Sweep, figure: str) -> str:
    """The best row over all columns, and whether it is better than the second."""
    lower = FIGURES[figure].better == "less"
    columns = list(found.config.columns)

    def mean(row: str) -> float:
        return sum(found.cell(row, column).value for column in columns) / len(columns)

    rows = [row for row in found.config.rows if math.isfinite(mean(row))]
    ranked = sorted(rows, key=mean, reverse=not lower)
    if not ranked:
        return "Every row has a run that diverged."
    best, *others = ranked
    text = f"The best {words_of(figure)} is that of {_words(best)}, {mean(best):.3f} on average"
    if not others:
        return f"{text}."
    gap = found.difference(best, others[0])
    sure = gap.high < 0 if lower else gap.low > 0
    standing = "ahead of" if sure else "not clearly ahead of"
    return f"{text}, {standing} {_words(others[0])} by {interval_text(gap, '+.3f')}."


def _figure_of_sweep(found: Sweep, figure: str) -> Section:
    name, reference, shape = words_of(figure), found.reference, found.config
    cells = [
        {"row": _words(row), "column": _words(column), **bounded("value", found.cell(row, column))}
        for row in shape.rows
        for column in shape.columns
    ]
    text = f"Mean over {len(shape.seeds)} seeds of the aligned draft on held-out text."
    heat = charts.heat_map(cells, "row", "column", Axis("value", name, ".3f", bounds=True))
    title = sentence(name)[:-1]
    blocks = [Figure(f"{title} of each cell", text, [Panel(heat)], cells)]
    spans = {_words(column): [column] for column in shape.columns}
    if len(spans) > 1:
        spans[_ALL] = list(shape.columns)

    def gap(row: str, columns: Sequence[str]) -> Interval:
        return found.difference(row, reference, columns)

    rows: list[Row] = [
        {"row": _words(row), "column": span, **bounded("difference", gap(row, columns))}
        for row in shape.rows
        if row != reference
        for span, columns in spans.items()
    ]
    if rows:
        x = Axis("difference", f"difference to {_words(reference)}", "+.3f", bounds=True)
        chart = charts.intervals(rows, "row", x, group="column", reference=0.0)
        text = (
            f"Row - {_words(reference)}, paired by column and seed, with the 95% interval over "
            "seeds. A difference whose interval crosses the dashed line is not established."
        )
        heading = f"Difference in {name} to {_words(reference)}"
        blocks.append(Figure(heading, text, [Panel(chart)], rows))
    return Section(title, blocks, (FIGURES[figure].term, "95% interval"))


def _run(run: Mapping[str, Any], figures: Sequence[str]) -> Row:
    after = run.get("after") or {}
    row: Row = {"row": _words(run["row"]), "column": _words(run["column"])}
    row |= {"seed": str(run["seed"]), **{words_of(name): after.get(name) for name in figures}}
    row |= {"steps": run.get("num_steps"), "seconds": run.get("elapsed_s")}
    return row | ({"diverged": run["diverged"]} if "diverged" in run else {})


def _words(name: str) -> str:
    return str(name).replace("_", " ")
