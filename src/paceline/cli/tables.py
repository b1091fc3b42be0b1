"""Prints the tables of `view.page`: cells, and the definitions of their columns."""

from __future__ import annotations

import math
import textwrap
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table as Grid

from paceline.core.bootstrap import Interval
from paceline.results.figures import FIGURES
from paceline.view.page import UNKNOWN, columns_of, meaning_of, numeric, words_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.view.page import Table

_WIDTH = 80  # of a terminal; columns of a wider table are closer to each other


class Details(NamedTuple):
    """What is printed with --table only."""

    shown: RenderableType


def printed(*tables: Table, notes: Mapping[str, str] | None = None) -> Group:
    """Tables with their titles and texts, then the definition of each column, once.

    Args:
        tables: Tables.
        notes: Further definitions, which are printed first.
    """
    parts: list[RenderableType] = []
    for table in tables:
        parts += [line for line in (table.title, table.text) if line]
        parts += [grid(table), *([""] if len(tables) > 1 else [])]
    return Group(*parts, legend(*tables, notes=notes))


def grid(table: Table) -> Grid:
    """The cells of a table. Headings of numbers are broken into lines as wide as the numbers."""
    cells, numbers = table.cells(between="-"), numeric(table.rows)
    columns = {name: [str(row[name]) for row in cells] for name in (cells[0] if cells else ())}
    widest = {name: max(map(len, column)) for name, column in columns.items()}
    # a word of a heading is not broken
    words = {name: words_of(name) for name in columns}
    least = {name: max(map(len, words[name].split()), default=0) for name in columns}
    widths = [max(widest[name], least[name]) for name in columns]
    gap = 2 if sum(widths) + 2 * len(widths) <= _WIDTH else 1
    shown = Grid(box=None, pad_edge=False, padding=(0, gap, 0, 0))
    for name, column in columns.items():
        if name in numbers or all(map(_is_number, column)):
            width = max(least[name], widest[name])
            heading = textwrap.fill(
                words[name], width, break_long_words=False, break_on_hyphens=False
            )
            shown.add_column(heading, justify="right", min_width=width, no_wrap=True)
        else:
            path = any("/" in cell for cell in column)  # is not cut
            width = widest[name] if path else least[name]
            shown.add_column(words[name], overflow="fold", min_width=width, no_wrap=path)
    for row in cells:
        shown.add_row(*(str(cell) for cell in row.values()))
    return shown


def _is_number(cell: str) -> bool:
    """Whether a cell is a number with a remark, or stands for an absent number."""
    return cell[:1] in "0123456789" or cell in ("none", UNKNOWN)


def legend(*tables: Table, notes: Mapping[str, str] | None = None) -> Grid:
    """A line per column that has a definition, and one on intervals."""
    lines: dict[str, str] = {}
    units = dict.fromkeys(table.units for table in tables if table.units and _has_bounds(table))
    for table in tables:
        for name in columns_of(table.rows):
            if meaning := meaning_of(name):
                lines[_with_symbol(name)] = meaning
        lines |= table.columns
    lines = {**(notes or {}), **lines}
    if units:
        lines["brackets"] = f"95% intervals over {' or '.join(units)}."
    shown = Grid.grid()  # breaks lines between words
    for name, meaning in lines.items():
        shown.add_row(f"{name}: {meaning.removesuffix('.')}")
    return shown


def _with_symbol(name: str) -> str:
    """A figure with its unit and its symbol, if that is a letter and not a formula."""
    figure = FIGURES.get(name)
    if figure is None:
        return name
    more = [figure.symbol if figure.symbol.isalpha() else "", figure.unit]
    return f"{figure.words} ({', '.join(filter(None, more))})" if any(more) else figure.words


def _has_bounds(table: Table) -> bool:
    values = (value for row in table.rows for value in row.values())
    return any(isinstance(value, Interval) and not math.isnan(value.low) for value in values)
