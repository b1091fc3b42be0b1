"""`paceline`: the commands, and how an error leaves the program: one line and an exit code."""

from __future__ import annotations

import sys

import typer

from paceline.cli import (
    align,
    analyze,
    bench,
    corpus,
    decode,
    demo,
    draft,
    env,
    generate_data,
    measure,
    pretrain,
    report,
    sweep,
    task,
    trajectory,
    tune,
    validate,
    verify,
)
from paceline.cli.console import show_warnings_in_one_line
from paceline.errors import PacelineError
from paceline.processes import keep_freed_memory

_INTERRUPTED = 130  # what typer makes of Ctrl-C, without a word

app = typer.Typer(
    name="paceline",
    help="Draft models that keep up: measure, align, decode and ship them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for command in (
    *(draft, pretrain, generate_data, align, measure, analyze, verify, decode),
    *(trajectory, sweep, corpus, task, bench, tune, report, demo, validate, env),
):
    app.command()(getattr(command, command.__name__.rpartition(".")[2]))


def main() -> None:
    """Run the command line. Exit codes: 0 good, 1 failed or no-go, 2 wrong usage."""
    keep_freed_memory()
    show_warnings_in_one_line()
    try:
        app()
    except PacelineError as error:
        print(f"paceline: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(error.exit_code)
    except SystemExit as ending:
        if ending.code == _INTERRUPTED:
            print(  # noqa: T201
                "paceline: interrupted; a run keeps what it has written: start it again to go on, with "
                "--resume where the command has it",
                file=sys.stderr,
            )
        raise
    except BrokenPipeError:
        sys.exit(1)


if __name__ == "__main__":
    main()
