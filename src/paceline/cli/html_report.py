"""Writes the HTML report of a command's result."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.cli.console import say
from paceline.cli.crash import describe_crash
from paceline.errors import PacelineError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from paceline.view.page import Page


def check_html(file: Path | None) -> None:
    """Check the file and the libraries before a long run; raises a PacelineError."""
    if file is not None:
        from paceline.data.input_checks import check_output_file
        from paceline.view import require

        require()
        check_output_file(file, "--html")


def write_html(file: Path | None, make: Callable[[], Page]) -> None:
    """Write the page if a file is given, and say where it is. Call it after the result is printed.

    Raises:
        StorageError: the file cannot be written.
    """
    if file is not None:
        from paceline.view.render import write

        write(make(), file)
        say(f"HTML report: {file}")


def write_html_of_verdict(file: Path | None, make: Callable[[], Page]) -> None:
    """As `write_html`, but an error is only printed: the exit code is that of the verdict."""
    try:
        write_html(file, make)
    except PacelineError as error:
        say(str(error))
    except Exception as error:
        say(f"the HTML report was not written: {describe_crash(error)}")


def write_html_of_run(file: Path | None, run: Path) -> None:
    """Write the page of a run directory if a file is given; raises as `write_html`."""

    def make() -> Page:
        from paceline.view.read import read_page

        return read_page(run).page

    write_html(file, make)
