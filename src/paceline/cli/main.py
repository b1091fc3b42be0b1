"""The `paceline` program: registers the commands; errors become one line and an exit code."""

from __future__ import annotations

import gc
import io
import os
import sys
from typing import Annotated, Any

import typer
import typer.core

import paceline

from paceline.cli import make, measure, decode, other  # noqa: F401  # isort: skip
from paceline.cli.command import COMMANDS, HELP_OPTIONS
from paceline.cli.console import (
    Output,
    check_output,
    describe_crash,
    echo,
    say,
    show_warnings_in_one_line,
)
from paceline.cli.options import SCHEMAS, schema_of
from paceline.errors import INTERRUPTED, PacelineError
from paceline.processes import keep_freed_memory, spin_briefly

__all__ = ["SCHEMAS", "app", "main", "schema_of"]

_INTERRUPTED = (
    "interrupted; training and benches keep what they have written: run the same command "
    "again to continue, with --resume if the command has that option"
)
_HELP = """\
Speculative decoding with small draft models: create, align, measure and decode.

Exit codes: 0 good or GO, 1 NO-GO or a failed check, 2 wrong usage, 3 no verdict or not
completed, 130 interrupted."""


class _Program(typer.core.TyperGroup):
    """All commands."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.commands = COMMANDS


app = typer.Typer(
    name="paceline",
    cls=_Program,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings=HELP_OPTIONS,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        echo(f"paceline {paceline.__version__}")
        raise typer.Exit


@app.callback(help=_HELP)
def options_of_all(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Speculative decoding with small draft models: create, align, measure and decode."""


def main() -> None:
    """Run the command line and exit; see `paceline --help` for the exit codes."""
    # progress bars and messages of these libraries, and of processes that this one starts
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_VERBOSITY", "critical")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "critical")
    os.environ["PYTHONSAFEPATH"] = "1"  # processes import nothing from the working directory
    keep_freed_memory()
    spin_briefly()
    # what imports make stays; by default, the collector looks at all of it six times
    gc.set_threshold(10_000, 10, 10)
    show_warnings_in_one_line()
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout is sys.__stdout__:
        # characters that the terminal's encoding lacks become escapes instead of errors
        how = {"encoding": sys.stdout.encoding, "line_buffering": sys.stdout.line_buffering}
        sys.stdout = Output(sys.stdout.detach(), errors="backslashreplace", **how)
    sys.exit(_exit_code())


def _exit_code() -> int:
    try:
        try:
            code = app(prog_name="paceline", standalone_mode=False) or 0
        finally:
            check_output()
    except PacelineError as error:
        say(str(error))
        return error.exit_code
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else 0
    except KeyboardInterrupt:  # outside of a command
        code = INTERRUPTED
    except Exception as error:
        if hasattr(error, "format_message"):
            return _say_usage(error)
        crash = describe_crash(error)
        say(str(crash))
        return crash.exit_code
    if code == INTERRUPTED:
        say(_INTERRUPTED)
    return code


def _say_usage(error: Any) -> int:
    """One line on a wrong option or command, which Typer's parser raised. -> its exit code."""
    message = error.format_message().rstrip(".?")
    if message:  # else no command was given, and the help is printed
        where = "paceline" if error.ctx is None else error.ctx.command_path
        say(f"{message[:1].lower()}{message[1:]}; see {where} -h")
    return error.exit_code


if __name__ == "__main__":
    main()
