"""Pages of results as one HTML file that needs no network, from result rows only.

page.py               the model of a page: a verdict, and sections of charts, tables and text;
                      `lines_of` and `table_of` make lines of settings and figures from rows;
                      the words and definitions of columns
charts.py             charts by Vega-Altair: frontiers and curves;
                      `plotted` makes a figure from lines and the names of their columns
render.py             page -> HTML by the template
read.py               a run directory or a result file -> its page
tables.py             tables of results, for pages and the terminal
*_pages.py            the pages of each kind of run

Modules other than `page` and `tables` import the libraries of the extra
`report`; call `require` first.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

from paceline.environment import how_to_install
from paceline.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.view.page import Page

__all__ = ["Report", "require", "write_report"]

_LIBRARIES = ("altair", "vl_convert", "jinja2")


class Report(NamedTuple):
    """A page, and where it is written."""

    page: Page
    path: Path


def require() -> None:
    """Check that pages and charts can be made; raises UsageError if a library is not installed."""
    missing = [name for name in _LIBRARIES if find_spec(name) is None]
    if missing:
        raise UsageError(f"reports need {', '.join(missing)}: {how_to_install('report')}")


def write_report(run: Path, html: Path | None = None) -> Report:
    """Write the page of a run directory into it, or that of a result file beside it.

    `html`: The file to write instead.

    Raises:
        UsageError: the path is no run, its rows cannot be read, or a library is not installed.
        StorageError: the page cannot be written.
    """
    require()
    from paceline.view.read import read_page
    from paceline.view.render import write

    found = read_page(run)
    if html is not None:
        found = found._replace(path=html)
    write(found.page, found.path)
    return found
