"""What was measured, and commands for other models that the command line accepts."""

import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.config import validate
from paceline.report.html.background import NO_BACKGROUND, Background, StageConfig
from paceline.report.html.setup_blocks import commands, setup
from paceline.studies.collect import SEEDS
from paceline.studies.rows import Source
from paceline.studies.study_file import StudyConfig, find_studies, read_study
from study_rows import SOURCE, study_row

STUDIES = Path(__file__).parents[4] / "configs/studies"


def source(command: str, **changes: Any) -> Source:
    return SOURCE.model_copy(update={"command": command} | changes)


def entries(*rows: Any, background: Background = NO_BACKGROUND) -> dict[str, list[str]]:
    found = setup("tiny", rows, background)
    assert {name for name, _ in found.entries} <= {"models", "examples", "machine", "date"}
    return {name: list(lines) for name, lines in [*found.entries, *found.more]}


def known(**configs: dict[str, Any]) -> Background:
    """Configurations by command."""
    return Background({}, {name: StageConfig(config, "") for name, config in configs.items()})


def test_models_have_the_path_size_and_fingerprint_that_any_command_recorded():
    sweep = source("sweep", sizes={"target": 5_700_000, "draft": 1_155_000})
    tau = source("tau", fingerprints={"target_fingerprint": "t1"}, sizes={"target": 5_700_000})
    rows = [study_row({"tokens": [1.0]}, source=one) for one in (sweep, tau)]
    rows.append(study_row({"tokens": [1.0]}, source=tau, parameter_ratio=0.2026))
    config = {"target": "models/t", "draft": "models/d"}
    background = known(sweep={"base": config}, tau={"target": "models/t"})
    assert entries(*rows, background=background)["models"] == [
        "target: models/t, 5.7 million parameters, fingerprint t1",
        "draft: models/d, 1.16 million parameters",
        "the draft has 20.3% of the target's parameters",
    ]


def test_a_model_without_a_configuration_has_its_fingerprint():
    row = study_row({"tokens": [1.0]}, source=source("bounds", fingerprints={"truth": "t2"}))
    assert entries(row)["models"] == ["truth: path not recorded, fingerprint t2"]


def test_a_model_whose_path_one_command_records_has_one_line():
    sources = [source(name, fingerprints={"target": "t1"}) for name in ("known", "unknown")]
    rows = [study_row({"tokens": [1.0]}, source=one) for one in sources]
    found = entries(*rows, background=known(known={"target": "models/t"}))
    assert found["models"] == ["target: models/t, fingerprint t1"]


def test_a_model_that_was_replaced_has_both_fingerprints():
    looks = [source(name, fingerprints={"draft": name}) for name in ("a", "b")]
    rows = [study_row({"tokens": [1.0]}, source=one) for one in looks]
    found = entries(*rows, background=known(a={"draft": "models/d"}, b={"draft": "models/d"}))
    assert found["models"] == ["draft: models/d, fingerprint a, fingerprint b"]


def test_examples_are_counted_once_and_looks_add():
    rows = [
        study_row({"tokens": [1.0] * 3}, [0, 1, 2], population="examples of code 0123456789abcdef"),
        study_row({"tokens": [1.0] * 3}, [2, 3, 4], population="examples of code 0123456789abcdef"),
        study_row({"tau": [1.0] * 2}, population=SEEDS),
    ]
    assert entries(*rows)["examples"] == ["5 examples of code", "2 seeds of training"]


def test_data_are_files_and_not_prompts_of_tasks():
    config = {
        "target": "models/a.b",
        "task": {"corpus": "texts/t.jsonl", "prompt": "Translate. {source}", "score": "mine:Score"},
        "columns": {"one": {"data": {"train": ["texts/a.jsonl", "texts/b.jsonl.gz"]}}},
    }
    row = study_row({"tokens": [1.0]}, source=source("bench"))
    assert entries(row, background=known(bench=config))["data"] == [
        "texts/t.jsonl",
        "texts/a.jsonl",
        "texts/b.jsonl.gz",
    ]


def test_settings_machine_and_days_are_listed():
    first, second = (source(day, date=f"2026-11-{day}") for day in ("25", "24"))
    rows = [
        study_row({"blocks_5": [1.0]}, temperature=1.0, seed=0, source=first),
        study_row({"blocks_3": [1.0]}, temperature=0.0, source=second),
    ]
    found = entries(*rows)
    assert found["settings"] == ["temperature: 0, 1", "gamma: 3, 5", "seed of training: 0"]
    assert found["machine"] == ["a machine"]
    assert found["date"] == ["2026-11-24", "2026-11-25"]
    assert "models" not in found
    assert "cost" not in found


def test_a_day_that_older_rows_lack_is_said_to_be_missing():
    assert entries(study_row({"tokens": [1.0]}))["date"] == ["not recorded in these rows"]


def test_the_minutes_of_further_looks_are_those_of_stages_that_are_drawn_again():
    stage = {"command": "bounds", "disk_mb": 1, "minutes": {"cpu": 2, "gpu": 1}}
    stages = {
        "train": stage | {"outputs": ["$output/a/x"]},
        "tau": stage | {"outputs": ["$output/b/look-$look/x"], "minutes": {"cpu": 3, "gpu": 1}},
    }
    study = validate(
        StudyConfig, {"title": "Tiny", "output": "runs/tiny", "looks": 2, "stages": stages}
    )
    found = entries(study_row({"tokens": [1.0]}), background=Background({"tiny": study}, {}))
    assert found["cost"] == [
        "expected: 5 minutes on two CPU cores, 2 on a GPU",
        "minutes of each stage on two cores: train 2, tau 3",
        "3 minutes more if claims are undecided and more examples are drawn",
    ]


@pytest.mark.parametrize("name", find_studies(STUDIES))
def test_the_commands_for_other_models_run(name: str, monkeypatch: pytest.MonkeyPatch):
    """One plans the study with the given paths; the last has options that exist."""
    monkeypatch.chdir(STUDIES.parents[1])
    study = read_study(STUDIES / f"{name}.yaml")
    block = commands(name, study)
    install, run, judge = (shlex.split(line.replace("\\\n", " ")) for line in block.lines)
    assert install[:2] == ["pip", "install"]
    given = {word: f"mine/{word.lower()}" for word, _ in block.places}
    for word, path in given.items():
        run = [part.replace(f"={word}", f"={path}") for part in run]
    shown = CliRunner().invoke(app, [*run[1:], "--dry-run", "--json"])
    assert shown.exit_code == 0, shown.output
    inputs = " ".join(text for stage in study.stages.values() for text in stage.inputs)
    for variable in study.variables:
        assert (f"mine/{variable}" in shown.stdout) == (f"${variable}" in inputs)
    assert f"runs/mine/{name}/" in shown.stdout
    helped = CliRunner().invoke(app, [judge[1], "--help"])
    assert all(option in helped.output for option in judge if option.startswith("--"))


def test_the_commands_carry_the_study_file():
    block = commands("bounds", read_study(STUDIES / "bounds.yaml"))
    assert block.source.file == "bounds.yaml"
    text = yaml.safe_dump(block.source.config)
    assert validate(StudyConfig, yaml.safe_load(text)) == read_study(STUDIES / "bounds.yaml")
    assert dict(block.places)["MEDIUM"] == (
        "a directory with model.safetensors; here it was runs/garden/medium/model."
    )
