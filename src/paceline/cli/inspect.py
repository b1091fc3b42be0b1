"""`paceline inspect`: what Paceline reads in a model, and what it can do with it."""

from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import options
from paceline.cli.console import echo, stdout

if TYPE_CHECKING:
    from paceline.export.model_report import ModelReport


def inspect(
    model: Annotated[str, typer.Argument(help="Model: directory, .gguf file or hub name.")],
    chat: Annotated[
        str | None,
        typer.Option(help="Rows (.jsonl, .parquet, directory) whose first example is shown."),
    ] = None,
    json: options.Json = False,
) -> None:
    """Show what is read in a model and what it was compared with.

    The model is loaded and compared with transformers and tokenizers. Run it first on a new model,
    and add its output to a bug report. Exit code 1: a check failed.
    """
    from paceline.data import CorpusConfig
    from paceline.export.model_report import inspect as run

    report = run(model, None if chat is None else CorpusConfig(path=chat))
    if json:
        echo(report.model_dump_json(indent=2))
        raise typer.Exit(0 if report.passed else 1)
    show(report)
    raise typer.Exit(0 if report.passed else 1)


def show(report: "ModelReport") -> None:
    """Print a report, also of a dry run."""
    for name, value in report.facts.items():
        stdout.print(f"{name:<20} {value}")
    for use in report.uses:
        stdout.print(f"{'can' if use.fault is None else 'cannot':<20} {use.name}", end="")
        stdout.print("" if use.fault is None else f": {use.fault}")
    for example in report.examples:
        stdout.print(
            f"{'example':<20} {example.where}: {example.num_given} tokens given, "
            f"{len(example.trained_tokens)} trained [[...]]"
        )
        stdout.print(f"{example.given}[[{example.trained}]]")
    for warning in report.warnings:
        stdout.print(f"{'warning':<20} {warning}")
    for fault in report.faults:
        stdout.print(f"{'failed':<20} {fault}")
