"""Plots of tokens per target call over training steps and seconds."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from paceline.records import atomic_write_bytes
from paceline.report.plots import load_matplotlib

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from paceline.measure.trajectory import Checkpoint, TrajectoryRow

_SIZE = (6.0, 4.0)  # inches of one panel
_DPI = 100
_AXES = {
    "steps": lambda stop: stop.step,
    "seconds of training": lambda stop: stop.elapsed_s,
}


def draw_trajectories(rows: Sequence[TrajectoryRow], path: Path) -> None:
    """Plot a row of panels per gamma, with a line per task and sampling, as PNG.

    Successive runs are concatenated along the axis. Raises UsageError if matplotlib is missing.
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
        image = io.BytesIO()
        figure.savefig(image, format="png")
    atomic_write_bytes(path, image.getvalue())


def _draw(panel, rows: Sequence[TrajectoryRow], gamma: int, label: str) -> None:
    names = list(dict.fromkeys(name_of(row) for row in rows))
    for name in names:
        mine = [row for row in rows if name_of(row) == name and gamma in row.block_efficiency]
        taus = [row.block_efficiency[gamma] for row in mine]
        xs = along([row.stop for row in mine], label)
        panel.plot(xs, [tau.value for tau in taus], marker="o", markersize=3, label=name)
        panel.fill_between(xs, [tau.low for tau in taus], [tau.high for tau in taus], alpha=0.15)
    panel.set_xlabel(label)
    panel.set_ylabel(f"tokens per target call, gamma {gamma}")
    panel.grid(alpha=0.3)


def along(stops: Sequence[Checkpoint], label: str) -> list[float]:
    """Return the position of each draft on the axis, with runs concatenated."""
    positions: list[float] = []
    before = last = 0.0
    for index, stop in enumerate(stops):
        if index and stop.run != stops[index - 1].run:
            before = last
        last = before + _AXES[label](stop)
        positions.append(last)
    return positions


def name_of(row: TrajectoryRow) -> str:
    """Return the label of the row's line."""
    return f"{row.task} {row.sampling.name}"
