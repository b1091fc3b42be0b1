"""Runs a study and keeps its rows; judges all claims from rows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from paceline.config import as_written
from paceline.errors import UsageError
from paceline.places import shipped
from paceline.progress import Progress, silent
from paceline.records import RunDirectory
from paceline.results.row import Row, read_rows, write_rows
from paceline.studies.claim_file import FILE, read_claims
from paceline.studies.collect import collect
from paceline.studies.published import read_verdicts
from paceline.studies.run import run_study
from paceline.studies.verdicts import Finding, judge

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.studies.execute import Runner
    from paceline.studies.study_file import Scale, StudyConfig


RUNS, VERDICTS = Path("runs/studies"), Path("docs/studies/verdicts.json")


def run_and_judge(
    study: StudyConfig,
    name: str,
    scale: Scale = "cpu",
    progress: Progress = silent,
    claims: Path = FILE,
    runner: Runner | None = None,
) -> tuple[list[Row], list[Finding]]:
    """Run the study, write its rows to `rows.jsonl`, and judge its claims.

    `runner`: as in `run_study`.

    Returns:
        Its rows, and the verdicts on its claims; none if there is no file of claims.

    Raises:
        UsageError: an input is missing.
        StudyError: a stage failed; finished stages are kept.
    """
    file = read_claims(claims) if shipped(claims).exists() else None
    stages = run_study(study, scale, progress, runner)
    with RunDirectory(study.output).alone():  # no other process moves the outputs of stages away
        rows = collect(name, study.output, stages)
        write_rows(study.output / "rows.jsonl", rows)
    # with the claims of other studies: a paper's share its error rate
    findings = [] if file is None else judge(file, rows)
    return rows, [one for one in findings if one.claim.study == name]


def current_verdicts(
    places: Sequence[Path] | None = None, claims: Path = FILE
) -> tuple[list[Row], list[Finding]]:
    """Rows, and the verdicts on all claims.

    Args:
        places: As in `study_rows`. None: of studies that have rows in runs/studies, their verdicts
            are judged now; those of other studies are the published ones.
        claims: File of claims.

    Raises:
        UsageError: as `judge_all`; or there are neither rows nor published verdicts.
    """
    published = []
    if places is None:
        published = read_verdicts(shipped(VERDICTS), read_claims(claims))
    if published and not any(RUNS.glob("*/rows.jsonl*")):
        return [], published
    rows = study_rows(places)
    with as_written(RUNS if places is None else places[0]):
        findings = judge_all(rows, claims)
    own = {row.study for row in rows}
    others = {one.claim.id: one for one in published if one.claim.study not in own}
    return rows, [others.get(one.claim.id, one) for one in findings]


def judge_all(rows: Sequence[Row], claims: Path = FILE) -> list[Finding]:
    """Verdicts on all claims.

    Args:
        rows: Rows of any studies, as `study_rows` reads them.
        claims: File of claims.

    Raises:
        UsageError: the file of claims is missing or malformed.
    """
    return judge(read_claims(claims), rows)


def study_rows(places: Sequence[Path] | None = None) -> list[Row]:
    """All rows of studies.

    Args:
        places: Files of rows, directories of one study, or directories with one directory per
            study. None: those of runs/studies; there a directory counts only for the study of its
            name, because a run with other models, in another directory, is not evidence on the
            same claims.

    Raises:
        UsageError: there are no files of rows, or a row is malformed or of another version.
    """
    rows: list[Row] = []
    for path in row_files(places):
        found = read_rows(path)
        rows += [row for row in found if places is not None or row.study == path.parent.name]
    return rows


def row_files(places: Sequence[Path] | None = None) -> list[Path]:
    """The files of rows; a later place overrides an earlier one for the same study.

    Raises:
        UsageError: there are none.
    """
    chosen = [RUNS] if places is None else list(places)
    found: dict[str, Path] = {}
    for place in chosen:
        if places is not None and not place.exists():
            raise UsageError(f"{place} does not exist; name a file of rows, or a directory")
        if place.is_file():
            found[str(place)] = place
        names = ("rows.jsonl.gz", "rows.jsonl")
        if own := [place / name for name in names if (place / name).is_file()]:
            found[place.name] = own[-1]  # of one study; its stages have rows of their own
            continue
        for name in names:
            found |= {path.parent.name: path for path in sorted(place.glob(f"*/{name}"))}
    if not found:
        where = " or ".join(map(str, chosen))
        raise UsageError(f"no rows of a study in {where}; run one: paceline study list")
    return list(found.values())
