"""Result rows as a pandas DataFrame."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from paceline.results.figures import as_values
from paceline.results.row import Row, read_rows

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pandas as pd


def load(path: str | Path, *, per: Literal["row", "unit"] = "row") -> pd.DataFrame:
    """Rows of a file, or of all runs in a directory, as a DataFrame.

    `per="row"`: a line per row: settings, number of units, totals, and each figure with the bounds
    of its 95% interval, such as `speedup`, `speedup_low`, `speedup_high`. `per="unit"`: a line per
    unit, with the sums of the row instead of figures.

    Raises:
        UsageError: there are no rows, or one has another version or is malformed.
    """
    return frame_of(read_rows(Path(path)), per=per)


def frame_of(rows: Iterable[Row], *, per: Literal["row", "unit"] = "row") -> pd.DataFrame:
    """As `load`, for rows in memory."""
    import pandas as pd  # takes half a second

    if per == "unit":
        return pd.DataFrame([line for row in rows for line in _units(row)])
    return pd.DataFrame([_line(row) for row in rows])


def _head(row: Row) -> dict[str, Any]:
    return {"command": row.source.command, "population": row.population} | row.setting


def _line(row: Row) -> dict[str, Any]:
    line = _head(row) | {"num_units": len(row.units)}
    for name, value in row.totals.items():
        line[name] = value
        if name in row.bounds:
            line[f"{name}_low"], line[f"{name}_high"] = row.bounds[name]
    for name, figure in as_values(row).items():
        line[name], line[f"{name}_low"], line[f"{name}_high"] = figure
    return line


def _units(row: Row) -> list[dict[str, Any]]:
    head = _head(row)
    return [
        head | {"unit": unit} | {name: values[place] for name, values in row.sums.items()}
        for place, unit in enumerate(row.units)
    ]
