"""`paceline claims`: verdicts on the papers' claims, from the rows of studies."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import options
from paceline.cli.console import stdout
from paceline.cli.html_report import check_html, write_html

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.studies.verdicts import Finding


def claims(
    rows: Annotated[
        list[Path] | None,
        typer.Option(help="Rows: a file, or a directory with one directory per study."),
    ] = None,
    file: Annotated[Path, typer.Option(help="File of claims.")] = Path("docs/claims.yaml"),
    details: Annotated[
        bool, typer.Option("--details", help="Also print what the paper says, and the command.")
    ] = False,
    save: Annotated[
        Path | None,
        typer.Option(help="Also write verdicts.json and verdicts.md to this directory."),
    ] = None,
    html: options.Html = None,
    as_json: options.Json = False,
) -> None:
    """Print the verdict on each claim of the three papers.

    Judges the rows in runs/studies. Of studies without rows there, it prints the verdicts that are
    published in docs/studies. Loads no model. See paceline study for the commands that make the
    rows.
    """
    from paceline.config import as_written
    from paceline.errors import UsageError

    check_html(html)
    from paceline.cli.study_tables import claims_table, findings_as_json, print_json
    from paceline.studies.session import current_verdicts

    found, findings = current_verdicts(rows, file)
    with as_written(rows[0] if rows else Path()):
        if html is not None and not found:
            raise UsageError(
                "no rows of a study in runs/studies, which --html draws; name some by --rows"
            )
        if save is not None:
            from paceline.studies.published import write_verdicts

            write_verdicts(findings, save)
        if as_json:
            print_json(findings_as_json(findings))
        else:
            stdout.print(claims_table(findings))
            if details:
                _print_details(findings)
        if html is None:
            return
        from paceline.view.study_background import read_background
        from paceline.view.study_page import study_page

        title = "Claims of three papers, tested"
        write_html(html, lambda: study_page(title, found, findings, read_background(found, rows)))


def _print_details(findings: "Sequence[Finding]") -> None:
    from itertools import groupby

    for _, group in groupby(findings, key=lambda one: one.claim.sentence or one.claim.id):
        own = list(group)
        first = own[0].claim
        stdout.print(f"\n{first.paper}, {first.item}")
        stdout.print(f"  the paper: {first.says}")
        for one in own:
            stdout.print(f"  {one.claim.id}: {one.claim.here}")
            stdout.print(f"    the paper's size: {one.claim.size.text} {_in_brackets(one.size)}")
            stdout.print(f"    verdict: {one.verdict} {_in_brackets(one.reason)}".rstrip())
            for line in (one.note, one.claim.remark, one.margins):
                if line:
                    stdout.print(f"    {line}")
        stdout.print(f"  command: paceline study run {first.study}")


def _in_brackets(text: str) -> str:
    return f"({text})" if text else ""
