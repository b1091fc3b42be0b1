"""`paceline export`: convert a draft to the format of a serving engine."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import options
from paceline.cli.console import echo, progress_bars, stdout

if TYPE_CHECKING:
    from paceline.export import Exported


def export(
    model: Annotated[
        str, typer.Argument(help="Model to export, draft or target: directory, .gguf.")
    ],
    to: Annotated[str, typer.Option(help="Engine: vllm, sglang, llamacpp or transformers.")],
    out: Annotated[Path, typer.Option(help="Directory to create.")],
    target: Annotated[
        str | None, typer.Option(help="Target of the draft; default: from its run directory.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="float32, bfloat16, float16 or q8_0 (llamacpp only); default: as stored."
        ),
    ] = None,
    measurement: Annotated[
        Path | None, typer.Option(help="JSON of `paceline measure`: best gamma and metrics.")
    ] = None,
    gamma: Annotated[int | None, typer.Option(help="Draft tokens per block.")] = None,
    check_engine: Annotated[
        bool | None, typer.Option("--check-engine", help="Also load the export in the engine.")
    ] = None,
    overwrite: Annotated[
        bool | None, typer.Option("--overwrite", help="Replace an existing export.")
    ] = None,
    overrides: options.Overrides = None,
    dry_run: options.DryRun = False,
    json: options.Json = False,
) -> None:
    """Export a draft for an engine.

    Loads the export again and compares its logits with the draft's. Exit code 1: they differ.
    """
    from paceline.cli.preflight import check_export
    from paceline.export import ExportConfig
    from paceline.export import export as run

    wanted = options.build(
        ExportConfig,
        None,
        overrides,
        model=model,
        to=to,
        out=out,
        target=target,
        dtype=dtype,
        measurement=measurement,
        num_speculative_tokens=gamma,
        check_engine=check_engine,
        overwrite=overwrite,
    )
    check_export(wanted, dry_run=dry_run, as_json=json)
    with progress_bars() as progress:
        found = run(wanted, progress)
    if json:
        echo(found.model_dump_json(indent=2))
    else:
        _print(found)


def _print(found: "Exported") -> None:
    checks = found.checks
    stdout.print(
        f"{found.path}: {checks.num_positions} positions compared, logits differ by at most "
        f"{checks.largest_difference:.1e} of the largest, same top token in {checks.agreement:.1%}"
    )
    if checks.stored is not None:
        stdout.print(
            f"run in {checks.stored}: finite, top token of float32 in {checks.stored_agreement:.1%}"
        )
    if found.served is not None:
        stdout.print(found.served)
    for note in found.notes:
        stdout.print(f"note: {note}")
    if found.command is not None:
        stdout.print(found.command)
