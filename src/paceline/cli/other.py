"""Commands about models, configurations and the machine, and the demo."""

from json import dumps
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli import options
from paceline.cli.command import Group, end_dry_run
from paceline.cli.console import echo, stdout
from paceline.cli.report import report
from paceline.errors import UsageError

OTHER = Group("Inspect and try")


@OTHER.command()
def inspect(
    model: Annotated[str, typer.Argument(help="Model: directory, .gguf file or hub name.")],
    chat: Annotated[
        str | None,
        typer.Option(help="Rows (.jsonl, .parquet, directory) whose first example is shown."),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Show what is read in a model and what it was compared with.

    The model is loaded and compared with transformers and tokenizers. Run it first on a new model,
    and add its output to a bug report. Exit code 1: a check failed.
    """
    from paceline.cli.result_tables import model_lines
    from paceline.data import CorpusConfig
    from paceline.export.model_report import inspect as run

    report = run(model, None if chat is None else CorpusConfig(path=chat))
    if as_json:
        echo(report.model_dump_json(indent=2))
    else:
        for line in model_lines(report):
            stdout.print(line)
    raise typer.Exit(0 if report.passed else 1)


def _known_kind(kind: str) -> str:
    if kind not in options.kinds():
        raise typer.BadParameter(f"{kind!r} is not one of {', '.join(options.kinds())}")
    return kind


@OTHER.command()
def validate(
    kind: Annotated[
        str,
        typer.Argument(
            help="Command that the file configures.",
            callback=_known_kind,
            autocompletion=options.kinds,
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

    schema = options.schema_of(kind)
    if defaults:
        echo(describe_defaults(schema), nl=False)
        return
    if config is None and not overrides:
        raise UsageError(
            f"no file to check; name one, or list all keys with validate {kind} --defaults"
        )
    echo(to_yaml(options.build(schema, config, overrides)), nl=False)


@OTHER.command()
def env(as_json: options.Json = False) -> None:
    """Show versions, processor, memory and GPUs."""
    from paceline.environment import environment, hardware, versions_of_extras
    from paceline.native import library_in_use

    facts = {**environment(), "c_library": library_in_use(), **hardware()}
    facts["versions"] = versions_of_extras() | facts["versions"]
    if as_json or not stdout.is_terminal:
        echo(dumps(facts, indent=2))
    else:
        for name, value in _rows("", facts):
            stdout.print(f"{name:<24} {value}")


def _rows(prefix: str, values: dict[str, Any]) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for name, value in values.items():
        label = f"{prefix}{name.removesuffix('_bytes')}".replace("_", " ")
        if isinstance(value, dict):
            rows += _rows(f"{label} ", value)
        elif isinstance(value, list):
            for number, part in enumerate(value):
                cells = [c for _, c in _rows("", part)] if isinstance(part, dict) else [str(part)]
                rows.append((f"{label} {number}", ", ".join(cells)))
            if not value:
                rows.append((label, "none"))
        elif name.endswith("_bytes"):
            rows.append((label, f"{value / 1e9:.1f} GB"))
        else:
            words = {None: "none", True: "yes", False: "no"}
            rows.append((label, str(words.get(value, value))))
    return rows


OTHER.command()(report)


@OTHER.command()
def demo(
    target: Annotated[str, typer.Option(help="Target model: directory, .gguf file or hub name.")],
    out: Annotated[Path, typer.Option(help="Output directory.")] = Path("runs/demo"),
    config: Annotated[
        Path, typer.Option("--config", help="YAML file of the configuration of align.")
    ] = Path("configs/align/demo.yaml"),
    minutes: Annotated[float, typer.Option(help="Training time of the alignment.")] = 6.0,
    layers: Annotated[
        str | None,
        typer.Option(help="Target layers to keep in the draft; default: 0, 1, 2 and the last."),
    ] = None,
    dry_run: options.DryRun = False,
) -> None:
    """Create, align, measure and verify a draft.

    Resumes an earlier run in the same directory. Exit code 0: decoding is lossless, and the verdict
    at temperature 0 or 1 is GO; 1: it is NO-GO at both, or a test failed; 3: no verdict.
    """
    from paceline.cli.demo import Demo, before_and_after
    from paceline.data.input_checks import InputChecks
    from paceline.measure.verdict import best_code
    from paceline.models.drafts.layers import check_layers

    checks = InputChecks()
    facts = checks.model("target", target)
    kept = options.numbers("--layers", layers or f"0,1,2,{facts.num_layers - 1}")
    steps = Demo(target, out, kept)
    align = steps.plan(config, minutes)  # fail early
    checks.drafting(target)
    check_layers(kept, facts.num_layers)
    steps.check()
    checks.output(out)
    if dry_run:
        end_dry_run(checks)
    steps.prepare()
    before = [steps.measure("before", t) for t in (1.0, 0.0)]
    steps.align(align)
    after = [steps.measure("after", t) for t in (1.0, 0.0)]
    gamma = after[0].best_gamma or 1
    report = steps.verify(gamma)
    steps.decode(gamma)
    stdout.print(before_and_after(before, after))
    stdout.print(f"The aligned draft is in {steps.drafts['after']}, all figures are in {out}.")
    verdict = best_code([each.verdict.exit_code for each in after])
    raise typer.Exit(verdict if report.passed else report.exit_code)
