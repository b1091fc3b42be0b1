"""`paceline tune`: choose rule, threshold and block length within a quality or latency bound."""

from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import options
from paceline.cli.console import echo, progress_bars, stderr, stdout
from paceline.cli.html_report import check_html, write_html_of_run

if TYPE_CHECKING:
    from paceline.bench.tune import Tuned


_ServedBy = Annotated[
    str | None,
    typer.Option("--for", help="paceline or vllm: decode the settings as this serves them."),
]


def tune(
    config: options.ConfigFile = None,
    target: options.Target = None,
    draft: options.Draft = None,
    output: Annotated[str | None, typer.Option(help="Run directory; resumes if it exists.")] = None,
    task: Annotated[
        str | None, typer.Option(help="Task, such as arithmetic or translation.")
    ] = None,
    quality_floor: Annotated[
        float | None, typer.Option(help="Minimum quality, as a fraction of the target's.")
    ] = None,
    max_latency: Annotated[
        float | None, typer.Option(help="Maximum time per token, as a fraction of the target's.")
    ] = None,
    temperature: options.Temperature = None,
    served_by: _ServedBy = None,
    costs: options.Costs = None,
    overrides: options.Overrides = None,
    dry_run: options.DryRun = False,
    json: options.Json = False,
    html: options.Html = None,
) -> None:
    """Find the best setting within a bound.

    Finds the fastest setting of a minimum quality, or the best quality within a latency. Predicts
    all settings, measures the best, confirms them on other examples, and writes the chosen one as a
    configuration for `decode`. It misses the bound with probability 1 - confidence or less
    (`--set confidence=0.95`), for any number of tested settings.
    """
    from paceline.bench.tune import TuneConfig
    from paceline.bench.tune import tune as run
    from paceline.cli.preflight import check_bench
    from paceline.cli.result_tables import tuned_table

    check_html(html)
    given = {"target": target, "draft": draft, "output": output, "task__task": task, "costs": costs}
    bounds = {"quality_floor": quality_floor, "max_latency": max_latency}
    wanted = options.build(
        TuneConfig,
        config,
        overrides,
        one_of={*bounds, "absolute_quality"},
        **given,
        **bounds,
        sampling__temperature=temperature,
        served_by=served_by,
    )
    if wanted.shortage:
        stderr.print(f"paceline: warning: {wanted.shortage}")
    check_bench(wanted, dry_run=dry_run, as_json=json)
    with progress_bars() as progress:
        found = run(wanted, progress)
    if json:
        echo(found.model_dump_json(indent=2))
    else:
        stdout.print(tuned_table(found))
        stdout.print(found.statement)
        stdout.print(_usage(found))
    write_html_of_run(html, wanted.output)


def _usage(found: "Tuned") -> str:
    """How to use the chosen setting."""
    from paceline.decode.strategies import Speculative

    wanted = found.config
    in_vllm = f"serve it in vLLM with PACELINE_RULE={wanted.output}/decoding.yaml"
    if wanted.costs is not None:
        strategy = found.chosen.decoding.strategy
        assert isinstance(strategy, Speculative), "with costs, tune only chooses Speculative"
        gamma = strategy.num_speculative_tokens
        text = f"with the costs in {wanted.costs}: {gamma} tokens per block"
        if found.chosen.speedup.high < 1:
            text += "; this is slower than decoding without a draft"
        if strategy.rule.name != "lossless":
            only_ours = "only paceline decode supports this rule, engines do not"
            text += f"; {in_vllm if wanted.served_by == 'vllm' else only_ours}"
        return text
    strategy = found.chosen.decoding.strategy
    if wanted.served_by == "vllm" and isinstance(strategy, Speculative):
        return f"{in_vllm} and {strategy.num_speculative_tokens} tokens per block"
    weights = "" if wanted.draft_weights == "auto" else f" --draft-weights {wanted.draft_weights}"
    return f"{wanted.output}/decoding.yaml: use it with paceline decode{weights} --config"
