"""Runs a study until its claims are decided and keeps its rows; judges all claims from rows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import UsageError
from paceline.progress import Progress, silent
from paceline.studies.claim_file import FILE, ClaimFile, read_claims
from paceline.studies.collect import collect
from paceline.studies.rows import StudyRow, read_study_rows, write_rows
from paceline.studies.run import run_study
from paceline.studies.study_file import FOLDER, find_studies, read_study
from paceline.studies.verdicts import UNDECIDED, Finding, judge

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.studies.execute import Runner
    from paceline.studies.plan import PlannedStage
    from paceline.studies.study_file import Scale, StudyConfig


RUNS, COMMITTED = Path("runs/studies"), Path("docs/studies")


def run_and_judge(
    study: StudyConfig,
    name: str,
    scale: Scale = "cpu",
    progress: Progress = silent,
    claims: Path = FILE,
    runner: Runner | None = None,
) -> tuple[list[StudyRow], list[Finding]]:
    """Run the study; draw examples again while a claim of it is undecided.

    Writes `rows.jsonl` after each look, before the claims are judged. `runner`: as in `run_study`.

    Returns:
        Its rows, and the verdicts on its claims; none if there is no file of claims.

    Raises:
        UsageError: an input is missing.
        StudyError: a stage failed; finished stages are kept.
    """
    file = _own(read_claims(claims), name) if claims.exists() else None

    def judged(stages: Sequence[PlannedStage]) -> tuple[list[StudyRow], list[Finding]]:
        rows = collect(name, study.output, stages)
        write_rows(study.output / "rows.jsonl", rows)
        return rows, [] if file is None else judge(file, rows, {name: study.looks})

    def is_decided(stages: Sequence[PlannedStage]) -> bool:
        return all(finding.verdict != UNDECIDED for finding in judged(stages)[1])

    rows, findings = judged(run_study(study, scale, progress, is_decided, runner))
    own = [finding for finding in findings if finding.claim.study == name]
    return rows, own


def _own(file: ClaimFile, name: str) -> ClaimFile | None:
    """All claims if one of them is of this study: a paper's claims share its error rate."""
    return file if any(claim.study == name for claim in file.claims) else None


def judge_all(claims: Path = FILE, places: Sequence[Path] | None = None) -> list[Finding]:
    """Verdicts on all claims.

    Args:
        claims: File of claims.
        places: Files of rows, or directories with one directory per study; None: those of
            runs/studies, and of docs/studies for other studies.

    Raises:
        UsageError: there are no rows, or they do not have what a claim names.
    """
    file = read_claims(claims)
    rows = study_rows(places)
    looks = {name: read_study(path).looks for name, path in find_studies(FOLDER).items()}
    return judge(file, rows, looks)


def study_rows(places: Sequence[Path] | None = None) -> list[StudyRow]:
    """All rows of `row_files`; raises UsageError if there are none, or one is malformed.

    Without `places`, a directory counts only for the study of its name: a run of a study with other
    models, in another directory, is not evidence on the same claims.
    """
    rows: list[StudyRow] = []
    for path in row_files(places):
        found = read_study_rows(path)
        rows += [row for row in found if places is not None or row.study == path.parent.name]
    return rows


def row_files(places: Sequence[Path] | None = None) -> list[Path]:
    """The files of rows; a later place overrides an earlier one for the same study.

    Raises:
        UsageError: there are none.
    """
    chosen = [COMMITTED, RUNS] if places is None else list(places)
    found: dict[str, Path] = {}
    for place in chosen:
        if place.is_file():
            found[str(place)] = place
        for name in ("rows.jsonl.gz", "rows.jsonl"):
            found |= {path.parent.name: path for path in sorted(place.glob(f"*/{name}"))}
            if (place / name).is_file():
                found[place.name] = place / name
    if not found:
        where = " or ".join(map(str, chosen))
        raise UsageError(f"no rows of a study in {where}; run one: paceline study list")
    return list(found.values())
