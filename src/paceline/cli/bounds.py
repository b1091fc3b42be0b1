"""`paceline bounds`: the theorems' bounds beside what they bound."""

from paceline.cli import options
from paceline.cli.console import echo, progress_bars, stdout


def bounds(
    target: options.Target = None,
    draft: options.Draft = None,
    prompts: options.Prompts = None,
    config: options.ConfigFile = None,
    output: options.Output = None,
    temperature: options.Temperature = None,
    overrides: options.Overrides = None,
    dry_run: options.DryRun = False,
    json: options.Json = False,
) -> None:
    """Compare acceptance and regret with their bounds.

    Acceptance with theorem 4.1 of DistillSpec, as proven and as printed. With a third model as the
    truth (--set truth=MODEL), also the regret of OPT and OPTLog with lemmas 5 and 7 of speculative
    cascades.
    """
    from paceline.cli.preflight import check_bounds
    from paceline.cli.study_tables import bounds_table
    from paceline.measure.bounds import BoundsConfig
    from paceline.measure.bounds import bounds as run

    wanted = options.build(
        BoundsConfig,
        config,
        overrides,
        target=target,
        draft=draft,
        prompts=prompts,
        output=output,
        sampling__temperature=temperature,
    )
    check_bounds(wanted, dry_run=dry_run, as_json=json)
    with progress_bars() as progress:
        found = run(wanted, progress)
    if json:
        echo(found.model_dump_json(indent=2))
    else:
        stdout.print(bounds_table(found))
        stdout.print(f"results are in {wanted.output}/result.json")
