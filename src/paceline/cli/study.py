"""Commands of the papers' studies."""

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import options
from paceline.cli.claims import claims
from paceline.cli.command import Group
from paceline.cli.console import progress_bars, stdout
from paceline.cli.report import report
from paceline.errors import UsageError
from paceline.permissions import given

if TYPE_CHECKING:
    from paceline.studies.study_file import StudyConfig

STUDY = Group("Reproduce the papers")
options.SCHEMAS["study"] = "paceline.studies.study_file:StudyConfig"


class Action(StrEnum):
    """What to do."""

    list = "list"
    show = "show"
    run = "run"
    resume = "resume"


class ScaleName(StrEnum):
    """Sizes of a study."""

    cpu = "cpu"
    gpu = "gpu"
    smoke = "smoke"


@STUDY.command()
def study(
    action: Annotated[Action, typer.Argument(help="list, show, run, or resume (same as run).")],
    name: Annotated[
        str | None, typer.Argument(help="Name in configs/studies, or a study file.")
    ] = None,
    scale: Annotated[
        ScaleName,
        typer.Option(help="Steps and examples; gpu and smoke write to gpu/ and smoke/."),
    ] = ScaleName.cpu,
    workers: Annotated[int | None, typer.Option(help="Stages that run at the same time.")] = None,
    output: Annotated[str | None, typer.Option(help="Directory of the study.")] = None,
    overrides: options.Overrides = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print stages, expected minutes and disk only.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Run the stages behind the papers' tables and figures.

    A study is a file in configs/studies: Paceline commands with their inputs and outputs. Stages
    whose inputs and settings did not change are not run again, so a stopped study resumes. Writes
    rows.jsonl to the study's directory and prints the verdicts on its claims.
    """
    if action is Action.list:
        _list(as_json=as_json)
        return
    if name is None:
        raise UsageError(f"{action} needs the name of a study; see paceline study list")
    from paceline.studies.study_file import StudyConfig, study_path

    path = study_path(name)
    named = {"workers": workers, "output": given(output)}
    chosen = {key: value for key, value in named.items() if value is not None}
    wanted = options.build(StudyConfig, path, overrides, chosen=chosen)
    if scale is not ScaleName.cpu and output is None:
        # apart from real results: claims are judged by rows of a study's own directory
        wanted = wanted.model_copy(update={"output": wanted.output / scale.value})
    if action is Action.show or dry_run:
        _show(wanted, scale, as_json=as_json)
        return
    _run(wanted, path.stem, scale, as_json=as_json)


def _list(*, as_json: bool) -> None:
    from paceline.cli.study_tables import print_json, study_list
    from paceline.studies.study_file import find_studies, read_study

    studies = {name: read_study(path) for name, path in find_studies().items()}
    if as_json:
        print_json({name: one.model_dump(mode="json") for name, one in studies.items()})
    else:
        stdout.print(study_list(studies))


def _show(wanted: "StudyConfig", scale: Any, *, as_json: bool) -> None:
    from paceline.cli.study_tables import print_json, stage_table, states_as_json
    from paceline.studies.run import states

    found = states(wanted, scale.value)
    if as_json:
        print_json(states_as_json(found))
    else:
        stdout.print(stage_table(wanted, found))


def _run(wanted: "StudyConfig", name: str, scale: Any, *, as_json: bool) -> None:
    from paceline.cli.study_tables import claims_table, findings_as_json, print_json
    from paceline.studies.session import run_and_judge

    with progress_bars() as progress:
        rows, findings = run_and_judge(wanted, name, scale.value, progress)
    if as_json:
        print_json(findings_as_json(findings))
        return
    if findings:
        stdout.print(claims_table(findings))
    stdout.print(f"{len(rows):,} result rows are in {wanted.output}/rows.jsonl")


STUDY.command()(claims)
STUDY.command()(report)
