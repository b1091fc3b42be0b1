"""`paceline score`: score a model behind a URL on a task."""

from typing import Annotated

import typer

from paceline.cli import options
from paceline.cli.console import echo, progress_bars, stdout


def score(
    config: options.ConfigFile = None,
    url: Annotated[
        str | None, typer.Option(help="URL of a server with an OpenAI-compatible endpoint.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Tokenizer of the served model: directory or hub name.")
    ] = None,
    output: Annotated[str | None, typer.Option(help="Run directory; resumes if it exists.")] = None,
    temperature: options.Temperature = None,
    overrides: options.Overrides = None,
    dry_run: options.DryRun = False,
    as_json: options.Json = False,
) -> None:
    """Score a model behind a URL on a task.

    Asks the server for answers to test examples and scores them as bench does. Needs the key task.
    """
    from paceline.bench.score import ScoreConfig
    from paceline.bench.score import score as run
    from paceline.cli.preflight import check_score

    given = {"tokenizer": tokenizer, "output": output, "writer__url": url}
    sampling = options.sampling_keys(temperature, None, None, None)
    wanted = options.build(ScoreConfig, config, overrides, **given, **sampling)
    check_score(wanted, dry_run=dry_run, as_json=as_json)
    with progress_bars() as progress:
        found = run(wanted, progress)
    if as_json:
        echo(found.model_dump_json(indent=2))
        return
    quality = "no metric" if found.score is None else f"{found.metric} {found.score}"
    stdout.print(f"{quality} on {found.num_examples:,} examples, {', '.join(found.servers)}")
    for name, value in found.corpus_scores.items():
        bounds = found.corpus_intervals.get(name)
        shown = "" if bounds is None else f" ({bounds[0]:.2f} to {bounds[1]:.2f})"
        stdout.print(f"{name} {value:.2f}{shown}")
    stdout.print(
        f"{found.num_tokens:,} tokens, {found.num_cut:,} answers cut at max_new_tokens "
        f"{wanted.max_new_tokens}; answers are in {wanted.output}/metrics.jsonl"
    )
