"""`paceline tune`: choose rule, threshold and block length for a quality floor or a latency budget."""

from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import options
from paceline.cli.console import progress_bars, stderr, stdout

if TYPE_CHECKING:
    from paceline.bench.tune import Tuned


def tune(
    config: options.ConfigFile = None,
    target: options.Target = None,
    draft: options.Draft = None,
    output: Annotated[str | None, typer.Option(help="Run directory; resumes if it exists.")] = None,
    task: Annotated[str | None, typer.Option(help="arithmetic, docstrings, text or pairs.")] = None,
    quality_floor: Annotated[
        float | None, typer.Option(help="Least quality, as part of the target's.")
    ] = None,
    max_latency: Annotated[
        float | None, typer.Option(help="Most seconds a token, as part of the target's.")
    ] = None,
    temperature: options.Temperature = None,
    costs: options.Costs = None,
    overrides: options.Overrides = None,
    dry_run: options.DryRun = False,
    json: options.Json = False,
) -> None:
    """Find the fastest setting within a quality bound.

    One-pass analysis proposes settings, and measurement on other examples confirms them. Writes a
    configuration for `decode`. A setting that misses the bound is chosen in at most
    1 - confidence of all runs (`--set confidence=0.95`), whatever the number of settings tested.
    """
    from paceline.bench.tune import TuneConfig
    from paceline.bench.tune import tune as run
    from paceline.cli.preflight import check_bench
    from paceline.cli.result_tables import tuned_table

    given = {
        "target": target,
        "draft": draft,
        "output": output,
        "task__task": task,
        "costs": costs,
    }
    bounds = {"quality_floor": quality_floor, "max_latency": max_latency}
    wanted = options.build(
        TuneConfig,
        config,
        overrides,
        one_of={*bounds, "absolute_quality"},
        **given,
        **bounds,
        sampling__temperature=temperature,
    )
    if wanted.shortage:
        stderr.print(f"paceline: warning: {wanted.shortage}")
    check_bench(wanted, dry_run=dry_run)
    with progress_bars() as progress:
        found = run(wanted, progress)
    if json:
        typer.echo(found.model_dump_json(indent=2))
    else:
        stdout.print(tuned_table(found))
        stdout.print(found.statement)
        stdout.print(_what_for(found))


def _what_for(found: "Tuned") -> str:
    """Where the setting may be used."""
    wanted = found.config
    if wanted.costs is not None:
        from paceline.decode.strategies import Speculative

        strategy = found.chosen.decoding.strategy
        assert isinstance(strategy, Speculative), "tune chooses nothing else"
        told = (
            f"with the costs in {wanted.costs}: {strategy.num_speculative_tokens} tokens per block"
        )
        if found.chosen.speedup.high < 1:
            told += "; that is slower than no draft"
        if strategy.rule.name != "lossless":
            told += "; engines do not have this rule, paceline decode has"
        return told
    weights = "" if wanted.draft_weights == "auto" else f" --draft-weights {wanted.draft_weights}"
    return f"{wanted.output}/decoding.yaml: for paceline decode{weights} --config"
