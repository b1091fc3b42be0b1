"""Configurations of stages: beside the rows, else from the study file, else none."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.report.html.background import read_background
from paceline.studies.rows import StudyRow, write_rows
from study_rows import SOURCE, study_row


def study(output: str, **changes: Any) -> dict[str, Any]:
    stage = {
        "command": "trajectory",
        "set": {
            "target": "$target",
            "runs": ["runs/one"],
            "tasks": {"sums": "sums.jsonl"},
            "output": "$output/tau/look-$look",
            "num_prompts": 10,
        },
        "outputs": ["$output/tau/look-$look/rows.jsonl"],
        "minutes": {"cpu": 1, "gpu": 1},
        "disk_mb": 1,
    }
    values = {"title": "Tiny", "output": output, "looks": 2, "variables": {"target": "models/t"}}
    return values | {"stages": {"tau": stage}} | changes


def written(folder: Path, config: str, name: str = "tiny") -> tuple[list[StudyRow], Path]:
    """Rows of the stage with this configuration file, in a directory of their own."""
    source = SOURCE.model_copy(update={"command": f"paceline trajectory --config {config}"})
    rows = [study_row({"tokens": [1.0]}, study=name, source=source)]
    place = folder / "rows" / name
    place.mkdir(parents=True)
    write_rows(place / "rows.jsonl", rows)
    return rows, place


@pytest.fixture
def studies(tmp_path: Path) -> Path:
    folder = tmp_path / "studies"
    folder.mkdir()
    (folder / "tiny.yaml").write_text(yaml.safe_dump(study("runs/my studies/tiny")))
    (folder / "other.yaml").write_text(yaml.safe_dump(study("runs/other")))
    return folder


def test_the_study_file_gives_the_configuration_of_each_look(tmp_path: Path, studies: Path):
    for look in (0, 1):
        config = f"'runs/my studies/tiny/stages/tau-look-{look}.yaml'"
        rows, place = written(tmp_path / str(look), config)
        found = read_background(rows, [place], studies)
        assert set(found.studies) == {"tiny"}
        assert found.config(rows[0].source)["target"] == "models/t"
        assert found.config(rows[0].source)["skip_prompts"] == 10 * look
        assert found.stages[rows[0].source.command].note.startswith("From the study file")


def test_the_file_beside_the_rows_is_what_ran(tmp_path: Path, studies: Path):
    rows, place = written(tmp_path, "elsewhere/tiny/stages/tau-look-0.yaml")
    (place / "stages").mkdir()
    (place / "stages/tau-look-0.yaml").write_text("target: models/mine\n")
    found = read_background(rows, [place], studies)
    assert found.config(rows[0].source) == {"target": "models/mine"}
    assert "As it ran" in found.stages[rows[0].source.command].note


def test_a_file_of_another_study_is_not_taken(tmp_path: Path, studies: Path):
    rows, place = written(tmp_path, "elsewhere/another/stages/tau-look-0.yaml")
    (place / "stages").mkdir()
    (place / "stages/tau-look-0.yaml").write_text("target: models/mine\n")
    assert read_background(rows, [place], studies).config(rows[0].source) == {}


@pytest.mark.parametrize("command", ["paceline bounds", "paceline bounds --config", ""])
def test_without_a_study_file_or_a_configuration_nothing_is_known(command: str, tmp_path: Path):
    rows, place = written(tmp_path, "x.yaml")
    source = SOURCE.model_copy(update={"command": command})
    rows = [rows[0].model_copy(update={"source": source})]
    found = read_background(rows, [place], tmp_path / "none")
    assert not found.studies
    assert not found.stages
    assert found.config(source) == {}


def test_a_study_that_names_a_missing_file_is_known_without_its_stages(tmp_path: Path):
    folder = tmp_path / "studies"
    folder.mkdir()
    values = study("runs/tiny")
    values["stages"]["tau"]["config"] = "missing.yaml"
    (folder / "tiny.yaml").write_text(yaml.safe_dump(values))
    rows, place = written(tmp_path, "runs/tiny/stages/tau-look-0.yaml")
    found = read_background(rows, [place], folder)
    assert set(found.studies) == {"tiny"}
    assert not found.stages


def test_a_link_out_of_the_directory_of_rows_is_not_read(tmp_path: Path, studies: Path):
    rows, place = written(tmp_path, "elsewhere/tiny/stages/hosts.yaml")
    (tmp_path / "hosts.yml").write_text("token: SECRET\n")
    (place / "stages").mkdir()
    (place / "stages/hosts.yaml").symlink_to(tmp_path / "hosts.yml")
    assert read_background(rows, [place], studies).config(rows[0].source) == {}
