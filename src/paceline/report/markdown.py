"""Markdown tables, and numbers with their 95% interval as text."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.core.bootstrap import Interval

NOTHING = "-"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a table with aligned columns."""
    cells = [[escape(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        f"| {' | '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))} |"
        for row in cells
    ]
    rule = f"|{'|'.join('-' * (width + 2) for width in widths)}|"
    return "\n".join([lines[0], rule, *lines[1:]])


def definitions(columns: Mapping[str, str]) -> str:
    """Format the definition of each column as a list."""
    return "\n".join(f"- **{name}**: {sentence}" for name, sentence in columns.items())


def number(value: float) -> str:
    """Three decimals; `-` if not finite."""
    return f"{value:.3f}" if math.isfinite(value) else NOTHING


def figure(found: Interval) -> str:
    """`1.234 [1.100, 1.400]`; `-` if not finite."""
    if not math.isfinite(found.value):
        return NOTHING
    return f"{number(found.value)} [{number(found.low)}, {number(found.high)}]"


def escape(text: str) -> str:
    """The text on one line, with no HTML, link, code or border of a table in it."""
    return re.sub(r"([\\`|<]|\](?=[(\[:]))", r"\\\1", " ".join(text.split()))
