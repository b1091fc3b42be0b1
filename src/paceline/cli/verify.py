"""`paceline verify`: test that speculative decoding keeps the target's distribution."""

from json import dumps
from typing import Annotated

import typer

from paceline.cli import options
from paceline.cli.console import echo, progress_bars, stdout
from paceline.cli.html_report import check_html, write_html_of_verdict


def verify(
    target: options.Target = None,
    draft: options.Draft = None,
    prompts: options.Prompts = None,
    config: options.ConfigFile = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    draft_temperature: options.DraftTemperature = None,
    self_test: Annotated[
        bool | None, typer.Option("--self-test", help="Also test a broken rule, which must fail.")
    ] = None,
    overrides: options.Overrides = None,
    dry_run: options.DryRun = False,
    json: options.Json = False,
    html: options.Html = None,
) -> None:
    """Test that decoding with a draft is lossless.

    Compares greedy texts token by token, and sampled texts by a G-test. Exit code 1: a test failed.
    """
    from paceline.cli.preflight import check_measured
    from paceline.cli.result_tables import losslessness_lines
    from paceline.measure import VerifyConfig, verify_losslessness

    check_html(html)
    sampling = options.sampling_keys(temperature, top_p, top_k, draft_temperature)
    models = {"target": target, "draft": draft, "prompts": prompts}
    wanted = options.build(
        VerifyConfig, config, overrides, self_test=self_test, **models, **sampling
    )
    check_measured(wanted, dry_run=dry_run, as_json=json, drafts=True)
    with progress_bars() as progress:
        report = verify_losslessness(wanted, progress)
    if json:
        verdict = report.model_dump(mode="json") | {"passed": report.passed}
        echo(dumps(verdict, indent=2))
    else:
        for line in losslessness_lines(report):
            stdout.print(line)
    if html is not None:
        from paceline.view.measure_pages import verify_page

        write_html_of_verdict(html, lambda: verify_page(report))
    raise typer.Exit(0 if report.passed else 1)
