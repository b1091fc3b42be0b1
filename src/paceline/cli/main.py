"""The `paceline` program: registers the commands; errors become one line and an exit code."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Annotated

import typer

import paceline
from paceline.cli.console import checked_output, echo, say, show_warnings_in_one_line
from paceline.cli.crash import describe_crash, guarded
from paceline.cli.options import with_permissions
from paceline.errors import INTERRUPTED, PacelineError
from paceline.processes import ignore_working_directory, keep_freed_memory

_INTERRUPTED = (
    "interrupted; a run keeps what it has written: run the same command again to continue, with "
    "--resume if the command has that option"
)

app = typer.Typer(
    name="paceline",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        echo(f"paceline {paceline.__version__}")
        raise typer.Exit


@app.callback()
def options_of_all(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Speculative decoding with small draft models: create, align, measure and decode.

    Exit codes: 0 good or GO, 1 NO-GO or a failed check, 2 wrong usage, 3 not completed,
    130 interrupted.
    """


for name in (  # each in a module of its name, in the order of the help
    *(
        "inspect",
        "draft",
        "pretrain",
        "generate_data",
        "align",
        "measure",
        "analyze",
        "bounds",
        "verify",
    ),
    *(
        "decode",
        "export",
        "trajectory",
        "sweep",
        "corpus",
        "task",
        "perplexity",
        "score",
        "bench",
        "tune",
    ),
    *("study", "claims", "report", "demo", "validate", "env"),
):
    command = getattr(import_module(f"paceline.cli.{name}"), name)
    app.command()(guarded(with_permissions(command)))


def main() -> None:
    """Run the command line and exit; see `paceline --help` for the exit codes."""
    ignore_working_directory()
    keep_freed_memory()
    show_warnings_in_one_line()
    sys.exit(_exit_code())


def _exit_code() -> int:
    try:
        with checked_output():
            app()
    except PacelineError as error:
        say(str(error))
        return error.exit_code
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else 0
        if code == INTERRUPTED:
            say(_INTERRUPTED)
        return code
    except KeyboardInterrupt:  # outside of a command
        say(_INTERRUPTED)
        return INTERRUPTED
    except Exception as error:
        crash = describe_crash(error)
        say(str(crash))
        return crash.exit_code
    return 0


if __name__ == "__main__":
    main()
