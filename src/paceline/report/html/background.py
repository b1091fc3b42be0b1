"""What study files say about rows: the study, and the configuration of each stage."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.config import read_yaml
from paceline.errors import ConfigError
from paceline.places import leads_out
from paceline.studies.collect import command_of
from paceline.studies.execute import StageFolder
from paceline.studies.plan import plan
from paceline.studies.session import row_files
from paceline.studies.study_file import FOLDER, find_studies, read_study

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.studies.rows import Source, StudyRow
    from paceline.studies.study_file import StudyConfig

_STUDY_FILE = "From the study file as it is now; the stage's own file is not beside these rows."


class StageConfig(NamedTuple):
    """The configuration of a stage, and where it was read."""

    config: Mapping[str, Any]
    note: str


class Background(NamedTuple):
    """Study files beside rows; empty if there are none.

    Attributes:
        studies: The study files by name.
        stages: The configurations by the command of a row's source.
    """

    studies: Mapping[str, StudyConfig]
    stages: Mapping[str, StageConfig]

    def config(self, source: Source) -> Mapping[str, Any]:
        """The configuration of the command that made a row; empty if it is not known."""
        found = self.stages.get(source.command)
        return {} if found is None else found.config


NO_BACKGROUND = Background({}, {})


def read_background(
    rows: Sequence[StudyRow], places: Sequence[Path] | None = None, folder: Path = FOLDER
) -> Background:
    """Read the study files of rows, and the configurations of their stages.

    A configuration is `stages/STAGE.yaml` beside the rows; else what the study file makes of the
    stage, if the stage's output is in the directory that the study file names.

    Args:
        rows: The rows.
        places: Where they were read, as in `study_rows`.
        folder: Directory of the study files.
    """
    names = dict.fromkeys(row.study for row in rows)
    paths = {name: path for name, path in find_studies(folder).items() if name in names}
    studies = {name: read_study(path) for name, path in paths.items()}
    stages: dict[str, StageConfig] = {}
    for study in studies.values():
        stages |= _planned(study)
    folders = {path.parent for path in row_files(places)}
    for source in {row.source.command: row.source for row in rows}.values():
        name = Path(_config_file(source)).name
        for folder in sorted(folders):
            path = folder / "stages" / name
            is_there = bool(name) and path.is_file() and not leads_out(path, folder)
            if is_there and _is_of(path, source):
                stages[source.command] = StageConfig(
                    read_yaml(path), f"As it ran, from stages/{name} beside the rows."
                )
    return Background(studies, stages)


def _planned(study: StudyConfig) -> dict[str, StageConfig]:
    """The configurations of all stages by command; none if a file that they name is missing."""
    try:
        stages = plan(study)
    except ConfigError:
        return {}
    files = StageFolder(study.output)
    return {command_of(one, files): StageConfig(one.config, _STUDY_FILE) for one in stages}


def _config_file(source: Source) -> str:
    words = shlex.split(source.command)
    return words[words.index("--config") + 1] if "--config" in words[:-1] else ""


def _is_of(path: Path, source: Source) -> bool:
    """Whether the file is in the directory of the row's study, wherever that was moved to."""
    return path.parts[-3:] == Path(_config_file(source)).parts[-3:]
