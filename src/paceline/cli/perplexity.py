"""`paceline perplexity`: measure how well a model predicts plain text."""

from typing import Annotated

import typer

from paceline.cli import options
from paceline.cli.console import echo, progress_bars, stdout


def perplexity(
    model: Annotated[
        str | None, typer.Option(help="Model: directory, .gguf file or hub name.")
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(help="Documents: .txt (one per line), .jsonl, .parquet, directory, hub."),
    ] = None,
    config: options.ConfigFile = None,
    overrides: options.Overrides = None,
    dry_run: options.DryRun = False,
    json: options.Json = False,
) -> None:
    """Measure how well a model predicts plain text.

    Perplexity compares models with the same tokenizer, bits per byte any models.
    """
    from paceline.cli.preflight import check_perplexity
    from paceline.measure.perplexity import PerplexityConfig
    from paceline.measure.perplexity import perplexity as run

    wanted = options.build(PerplexityConfig, config, overrides, model=model, text=text)
    check_perplexity(wanted, dry_run=dry_run, as_json=json)
    with progress_bars() as progress:
        found = run(wanted, progress)
    if json:
        echo(found.model_dump_json(indent=2))
        return
    stdout.print(f"perplexity     {found.perplexity}")
    stdout.print(f"bits per byte  {found.bits_per_byte}")
    stdout.print(
        f"on {found.num_tokens:,} tokens, {found.num_bytes:,} bytes, {found.num_documents:,} "
        "documents; 95% intervals over documents"
    )
