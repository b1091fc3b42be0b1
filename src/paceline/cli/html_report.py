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


def write_html(file: Path | None, make: Callable[[], Page], *, is_verdict: bool = False) -> None:
    """Write the page if a file is given, and say where it is. Call it after the result is printed.

    `is_verdict`: an error is only printed, as the exit code is that of the verdict.

    Raises:
        StorageError: the file cannot be written.
    """
    if file is None:
        return
    from paceline.view.render import write

    try:
        write(make(), file)
    except Exception as error:
        if not is_verdict:
            raise
        known = isinstance(error, PacelineError)
        say(str(error) if known else f"the HTML report was not written: {describe_crash(error)}")
    else:
        say(f"HTML report: {file}")
