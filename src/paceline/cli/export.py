"""`paceline export`: a draft as an engine loads it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import options
from paceline.cli.console import progress_bars, stdout

if TYPE_CHECKING:
    from paceline.export import Exported


def export(
    model: Annotated[str, typer.Argument(help="Draft to export, or a target: directory, .gguf.")],
    to: Annotated[str, typer.Option(help="vllm, sglang, llamacpp or transformers.")],
    out: Annotated[Path, typer.Option(help="Directory to make.")],
    target: Annotated[
        str | None, typer.Option(help="The draft's target; default: that of its run.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="float32, bfloat16, float16, or for llamacpp q8_0; default: as stored."),
    ] = None,
    measurement: Annotated[
        Path | None, typer.Option(help="JSON of `paceline measure`: best gamma, figures.")
    ] = None,
    gamma: Annotated[int | None, typer.Option(help="Tokens drafted per block.")] = None,
    check_engine: Annotated[
        bool | None, typer.Option("--check-engine", help="Also load it in the engine.")
    ] = None,
    overwrite: Annotated[
        bool | None, typer.Option("--overwrite", help="Replace what is there.")
    ] = None,
    overrides: options.Overrides = None,
    dry_run: options.DryRun = False,
    json: options.Json = False,
) -> None:
    """Export a draft for an engine.

    The export is read back and compared with the draft before it is kept. The exit code is 1 if it
    differs.
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
    check_export(wanted, dry_run=dry_run)
    with progress_bars() as progress:
        found = run(wanted, progress)
    if json:
        typer.echo(found.model_dump_json(indent=2))
    else:
        _print(found)


def _print(found: "Exported") -> None:
    checks = found.checks
    stdout.print(
        f"{found.path}: {checks.num_positions} positions read back, largest difference of logits "
        f"{checks.largest_difference:.1e} of the largest, same likeliest token in {checks.agreement:.1%}"
    )
    if found.served is not None:
        stdout.print(found.served)
    for note in found.notes:
        stdout.print(f"note: {note}")
    if found.command is not None:
        stdout.print(found.command)
