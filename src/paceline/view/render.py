"""Writes a page as one HTML file that needs no network: template, style, charts, data.

The plotting library and the data of charts and downloads are compressed, which a page of many
charts needs to stay below a megabyte. Tables are HTML, which is read without scripts.
"""

from __future__ import annotations

import base64
import functools
import json
import zlib
from importlib import resources
from typing import TYPE_CHECKING, Any

import jinja2
import vl_convert

from paceline.config import dump_yaml
from paceline.core.bootstrap import Interval
from paceline.records import atomic_write_text
from paceline.version import __version__
from paceline.view import charts
from paceline.view.page import (
    Figure,
    Table,
    columns_of,
    definitions_of,
    flat,
    numeric,
    words_of,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from paceline.view.page import Line, Page

_MOST_ROWS = 60  # of the table below a chart
_VEGA_LITE = "6.4"  # the version that Vega-Altair 6 writes


def render(page: Page) -> str:
    rows = [row for block in page.blocks for row in block.rows]
    bounds = any(isinstance(value, Interval) for row in rows for value in row.values())
    return (
        _environment()
        .get_template("page.html.j2")
        .render(
            page=page,
            definitions=definitions_of(columns_of(rows), intervals=bounds),
            style=template("style.css"),
            script=template("page.js"),
            library=_library() if any(isinstance(block, Figure) for block in page.blocks) else "",
            data=_packed(json.dumps(_data(page), allow_nan=False, separators=(",", ":"))),
            most_rows=_MOST_ROWS,
            version=__version__,
        )
        .lstrip()
    )


def _data(page: Page) -> dict[str, Any]:
    """What scripts draw and offer: charts, rows as CSV, each in the page's order; configuration."""
    figures = [block for block in page.blocks if isinstance(block, Figure)]
    config = None if page.source is None else page.source.config
    return {
        "config": charts.CONFIG,
        "charts": [chart for figure in figures for chart in figure.panels.values()],
        "csv": [to_csv(block.rows) for block in page.blocks if block.rows and page.source],
        "yaml": [] if config is None else [dump_yaml(config, allow_unicode=True)],
    }


def write(page: Page, path: Path) -> None:
    atomic_write_text(path, render(page))


def to_csv(rows: Sequence[Line]) -> str:
    """The rows as CSV, numbers with six significant digits; empty where a value is unknown."""
    import pandas as pd  # takes half a second

    def short(value: Any) -> Any:
        return float(f"{value:.6g}") if isinstance(value, float) else value

    # as objects, so that whole numbers stay whole beside unknown ones
    lines = [{name: short(value) for name, value in row.items()} for row in flat(rows)]
    return pd.DataFrame(lines, dtype=object).to_csv(index=False)


@functools.cache
def _environment() -> jinja2.Environment:
    found = jinja2.Environment(
        loader=jinja2.FunctionLoader(template),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {
        "cells": lambda rows: Table("", rows).cells(),
        "slug": lambda text: "-".join("".join(c if c.isalnum() else " " for c in text).split()),
        "numeric": _numbers_of_columns,
        "words": words_of,
    }
    return found


def _numbers_of_columns(rows: Sequence[Line], lines: Sequence[Mapping[str, Any]]) -> list[int]:
    """The columns of numbers, counted from 1."""
    return [at for at, name in enumerate(lines[0], 1) if name in numeric(rows)]


def template(name: str) -> str:
    return (resources.files("paceline.view") / "templates" / name).read_text("utf-8")


@functools.cache
def _library() -> str:
    """Vega, Vega-Lite and their embedding as one script."""
    return _packed(vl_convert.javascript_bundle(vl_version=_VEGA_LITE))  # pyright: ignore[reportCallIssue]


def _packed(text: str) -> str:
    """The text, compressed, in letters that are safe inside a script element."""
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()
