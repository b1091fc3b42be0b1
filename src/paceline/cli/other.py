"""Commands about models, configurations and the machine."""

from json import dumps
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import options
from paceline.cli.command import check_html, command
from paceline.cli.console import echo, stdout
from paceline.errors import UsageError

OTHER = "Inspect and try"  # a panel of the help


@command(OTHER)
def inspect(
    model: Annotated[str, typer.Argument(help="Model: directory, .gguf file or hub name.")],
    prompts: Annotated[
        str | None,
        typer.Option(help="Rows (.jsonl, .parquet, directory) whose first example is shown."),
    ] = None,
    details: Annotated[
        bool, typer.Option("--details", help="Also how it is run, and what it was compared with.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Show what is read in a model, and one prompt as the model gets it.

    The model is loaded and compared with transformers and tokenizers. Run it first on a new model,
    and add its output with --details to a bug report. Exit code 1: a check failed.
    """
    from paceline.cli.result_tables import model_lines
    from paceline.data import CorpusConfig
    from paceline.export.model_report import inspect as run

    report = run(model, None if prompts is None else CorpusConfig(path=prompts))
    if as_json:
        echo(report.model_dump_json(indent=2))
    else:
        for line in model_lines(report, details=details or prompts is not None):
            stdout.print(line)
    raise typer.Exit(0 if report.passed else 1)


@command(OTHER)
def validate(
    kind: Annotated[
        str,
        typer.Argument(
            help="Command that the file configures.",
            autocompletion=lambda: list(options.SCHEMAS),
        ),
    ],
    config: Annotated[Path | None, typer.Argument(help="YAML file to check.")] = None,
    overrides: options.Overrides = None,
    defaults: Annotated[
        bool, typer.Option("--defaults", help="List all keys with default and description instead.")
    ] = False,
) -> None:
    """Check a configuration file, or list its keys.

    Prints the configuration with all defaults filled in, or one error.
    """
    from paceline.cli.defaults import describe_defaults
    from paceline.config import to_yaml

    if kind not in options.SCHEMAS:
        raise UsageError(f"{kind!r} is not one of {', '.join(options.SCHEMAS)}")
    schema = options.schema_of(kind)
    if defaults:
        echo(describe_defaults(schema), nl=False)
        return
    if config is None and not overrides:
        raise UsageError(
            f"no file to check; name one, or list all keys with validate {kind} --defaults"
        )
    echo(to_yaml(options.build(schema, config, overrides)), nl=False)


@command(OTHER)
def env() -> None:
    """Show versions, processor, memory and GPUs, as JSON."""
    from paceline.environment import environment, hardware
    from paceline.native import library_in_use

    echo(dumps({**environment(), "c_library": library_in_use(), **hardware()}, indent=2))


@command(OTHER)
def report(
    folder: Annotated[
        Path, typer.Argument(metavar="RUN", help="Run directory, or a file written with --json.")
    ],
    html: Annotated[
        Path | None, typer.Option("--html", help="Write the report to this file instead.")
    ] = None,
) -> None:
    """Write the result of a run as one HTML file.

    The page has a verdict, charts, tables and definitions.

    Writes report.html into the directory of a bench, tune, trajectory, align or pretrain; next to
    a file that measure, verify or tune wrote with --json. Loads no model.
    """
    from paceline.view import write_report

    check_html(html)
    written = write_report(folder, html)
    heading = f"{written.page.word}: " if written.page.word else ""
    echo(f"{heading}{written.page.verdict}\n\n{written.path}")
