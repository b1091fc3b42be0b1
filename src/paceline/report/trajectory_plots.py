"""Tokens per target call over steps and over seconds of training, drawn from the rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.measure.trajectory import name_of as sampling_name
from paceline.report.plots import load_matplotlib

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from paceline.measure.trajectory import Stop, TrajectoryRow

_SIZE = (6.0, 4.0)  # inches of one panel
_DPI = 100
_AXES = {
    "steps": lambda stop: stop.step,
    "seconds of training": lambda stop: stop.elapsed_s,
}


def draw_trajectories(rows: Sequence[TrajectoryRow], path: Path) -> None:
    """A row of panels a gamma: tau of every draft, a line for each task and sampling.

    Runs follow one another: a run's steps and seconds begin where those of the one before ended.

    Raises:
        UsageError: matplotlib is not installed.
    """
    mpl, figure_class = load_matplotlib()
    gammas = sorted({gamma for row in rows for gamma in row.block_efficiency})
    with mpl.rc_context({"svg.hashsalt": "paceline", "font.size": 10}):
        figure = figure_class(figsize=(_SIZE[0] * len(_AXES), _SIZE[1] * len(gammas)), dpi=_DPI)
        panels = figure.subplots(len(gammas), len(_AXES), squeeze=False, sharey="row")
        for gamma, line in zip(gammas, panels, strict=True):
            for (label, _), panel in zip(_AXES.items(), line, strict=True):
                _draw(panel, rows, gamma, label)
        panels[0][0].legend(fontsize=8)
        figure.tight_layout()
        figure.savefig(path)


def _draw(panel, rows: Sequence[TrajectoryRow], gamma: int, label: str) -> None:
    names = list(dict.fromkeys(name_of(row) for row in rows))
    for name in names:
        mine = [row for row in rows if name_of(row) == name and gamma in row.block_efficiency]
        taus = [row.block_efficiency[gamma] for row in mine]
        places = along([row.stop for row in mine], label)
        panel.plot(places, [tau.value for tau in taus], marker="o", markersize=3, label=name)
        panel.fill_between(places, [t.low for t in taus], [t.high for t in taus], alpha=0.15)
    panel.set_xlabel(label)
    panel.set_ylabel(f"tokens per target call, gamma {gamma}")
    panel.grid(alpha=0.3)


def along(stops: Sequence[Stop], label: str) -> list[float]:
    """Where each draft stands, runs laid end to end."""
    places: list[float] = []
    before = last = 0.0
    for index, stop in enumerate(stops):
        if index and stop.run != stops[index - 1].run:
            before = last
        last = before + _AXES[label](stop)
        places.append(last)
    return places


def name_of(row: TrajectoryRow) -> str:
    """Of the line that a row belongs to."""
    return f"{row.task} {sampling_name(row.sampling)}"
