"""Page of `paceline trajectory`: tokens per target call over the checkpoints of training runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.measure.trajectory import short_names
from paceline.report.html import charts
from paceline.report.html.encodings import Axis
from paceline.report.html.made_by import machine, sampling_words, source_of
from paceline.report.html.page import Fact, Figure, Page, Panel, Section, bounded

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from paceline.measure.trajectory import TrajectoryRow
    from paceline.report.html.page import Row, Source

_STEP = Axis("step", "optimizer step of the run", "d", whole=True)
_TAU = Axis("tau", "tokens per target call", ".2f", bounds=True)
_QUALITY = Axis("quality", "mean score of its own answers", ".3f", bounds=True)
_GAIN = Axis("gain", "gain over the initial draft", ".2f", bounds=True)


def trajectory_page(rows: Sequence[TrajectoryRow], manifest: Mapping[str, Any] | None) -> Page:
    """The page of measured checkpoints; `manifest` None if it is unknown."""
    manifest = manifest or {}
    source = source_of("trajectory", manifest.get("config"), manifest.get("environment"))
    names = short_names({row.stop.run for row in rows})
    cases: dict[tuple[str, str], list[TrajectoryRow]] = {}
    for row in rows:
        cases.setdefault((row.task, _sampling(row)), []).append(row)
    sections = [_section(task, key, own, names, source) for (task, key), own in cases.items()]
    best = _best(rows)
    verdict, facts = "No run has a checkpoint after its initial draft.", []
    if best is not None:
        row, gamma = best
        gain, tau = row.gain[gamma], row.block_efficiency[gamma]
        verdict = (
            f"Of {sum(len(one.gain) for one in rows)} gains in tokens per target call, the one "
            f"with the largest lower bound is {gain.value:.2f}x ({gain.low:.2f} to "
            f"{gain.high:.2f}; the interval does not allow for this choice): the "
            f"{_draft(row)} of {names[row.stop.run]} on {row.task} at "
            f"{_sampling(row)}, gamma {gamma}, with {tau.value:.2f} tokens per call."
        )
        facts = [Fact("runs", str(len(names))), Fact("drafts measured", str(_num_drafts(rows)))]
        facts.append(Fact("parameter ratio", f"{row.parameter_ratio:.3f}"))
    about = [f"Target: {manifest['config']['target']}"] if manifest else []
    about += [line for line in [machine(manifest.get("environment"))] if line]
    return Page("Drafts over training", verdict, sections, facts=facts, about=about)


def _sampling(row: TrajectoryRow) -> str:
    return sampling_words(row.sampling.model_dump())


def _draft(row: TrajectoryRow) -> str:
    return "final draft" if row.stop.label == "end" else f"draft of {row.stop.label}"


def _num_drafts(rows: Sequence[TrajectoryRow]) -> int:
    return len({(row.stop.run, row.stop.label) for row in rows})


def _best(rows: Sequence[TrajectoryRow]) -> tuple[TrajectoryRow, int] | None:
    """The row and gamma with the largest lower bound of its gain."""
    every = [(row, gamma) for row in rows for gamma in row.gain]
    return max(every, key=lambda one: one[0].gain[one[1]].low, default=None)


def _section(
    task: str,
    sampling: str,
    rows: Sequence[TrajectoryRow],
    names: Mapping[Path, str],
    source: Source,
) -> Section:
    lines = [line for row in rows for line in _lines(row, names[row.stop.run])]
    gammas = sorted({line["gamma"] for line in lines})
    where = f"{task}, {sampling}"
    panels = [
        Panel(charts.curves(_at(lines, gamma), _STEP, _TAU, "run", labels=["draft"]), _name(gamma))
        for gamma in gammas
    ]
    text = (
        f"{rows[0].num_texts} texts of the target; step 0 is the initial draft. Bands are 95% "
        "intervals over texts. Select a run in the legend to see it alone."
    )
    blocks = [Figure(f"Tokens per target call over training: {where}", text, panels, lines, source)]
    if rows[0].quality is not None:
        first = _at(lines, gammas[0])
        panels = [Panel(charts.curves(first, _STEP, _QUALITY, "run", labels=["draft"]))]
        text = "Of the answers that each draft writes by itself, without the target."
        blocks.append(Figure(f"Quality over training: {where}", text, panels, first, source))
    ends = [line for line in lines if line["gain"] is not None and _is_last(line, lines)]
    if ends:
        panels = [
            Panel(charts.intervals(_at(ends, gamma), "run", _GAIN, reference=1.0), _name(gamma))
            for gamma in gammas
        ]
        text = "Of the last draft of each run, on the same texts. Right of 1 the draft is better."
        blocks.append(Figure(f"Gain over the initial draft: {where}", text, panels, ends, source))
    return Section(where, blocks, ("block efficiency", "gamma", "95% interval", "gain", "MBSU"))


def _name(gamma: int) -> str:
    return f"gamma {gamma}"


def _at(lines: Sequence[Row], gamma: int) -> list[Row]:
    return [line for line in lines if line["gamma"] == gamma]


def _is_last(line: Row, lines: Sequence[Row]) -> bool:
    alike = [one for one in lines if (one["run"], one["gamma"]) == (line["run"], line["gamma"])]
    return alike[-1] is line


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
            **(bounded("gain", row.gain[gamma]) if row.gain else {"gain": None}),
            "MBSU": row.mbsu[gamma],
        }
        for gamma, tau in row.block_efficiency.items()
    ]
