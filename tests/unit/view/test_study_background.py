"""Study files beside rows, the setup of a study, commands for other models, terms that occur."""

import re
import shlex
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.config import validate
from paceline.core.bootstrap import Interval
from paceline.core.rule_base import Rule, name_of
from paceline.core.rules import DEFAULT_RULES, RULES
from paceline.results.built_in import PAPERS
from paceline.results.row import Row, Source, write_rows
from paceline.studies.claim_file import Claim, Paper
from paceline.studies.study_file import StudyConfig, find_studies, read_study
from paceline.studies.verdicts import HOLDS, Finding
from paceline.train.config import RECIPES
from paceline.train.sweep import SEEDS
from paceline.view.definitions import ALPHA, DEFINITIONS, OCCURRING
from paceline.view.study_background import (
    NO_BACKGROUND,
    Background,
    StageConfig,
    commands,
    read_background,
    setup,
    terms_of_findings,
    terms_of_rows,
)
from support.results import SOURCE, claim, study_row

STUDIES = Path(__file__).parents[3] / "configs/studies"


def study(output: str, **changes: Any) -> dict[str, Any]:
    stage = {
        "command": "trajectory",
        "set": {
            "target": "$target",
            "runs": ["runs/one"],
            "tasks": {"sums": "sums.jsonl"},
            "output": "$output/tau",
            "num_prompts": 10,
        },
        "outputs": ["$output/tau/rows.jsonl"],
        "minutes": {"cpu": 1, "gpu": 1},
        "disk_mb": 1,
    }
    values = {"title": "Tiny", "output": output, "variables": {"target": "models/t"}}
    return values | {"stages": {"tau": stage}} | changes


def written(folder: Path, config: str) -> tuple[list[Row], Path]:
    """Rows of the stage with this configuration file, in a directory of their own."""
    source = SOURCE.model_copy(update={"command": f"paceline trajectory --config {config}"})
    rows = [study_row({"tokens": [1.0]}, study="tiny", source=source)]
    place = folder / "rows/tiny"
    (place / "stages").mkdir(parents=True)
    write_rows(place / "rows.jsonl", rows)
    return rows, place


@pytest.fixture
def studies(tmp_path: Path) -> Path:
    folder = tmp_path / "studies"
    folder.mkdir()
    (folder / "tiny.yaml").write_text(yaml.safe_dump(study("runs/my studies/tiny")))
    (folder / "other.yaml").write_text(yaml.safe_dump(study("runs/other")))
    return folder


def test_the_study_file_gives_the_configuration_of_a_stage(tmp_path: Path, studies: Path):
    rows, place = written(tmp_path, "'runs/my studies/tiny/stages/tau.yaml'")
    found = read_background(rows, [place], studies)
    assert set(found.studies) == {"tiny"}
    assert found.config(rows[0].source)["target"] == "models/t"
    assert found.config(rows[0].source)["num_prompts"] == 10
    assert found.stages[rows[0].source.command].note.startswith("From the study file")


@pytest.mark.parametrize(("owner", "is_read"), [("tiny", True), ("another", False)])
def test_the_file_beside_the_rows_is_what_ran_if_it_is_of_their_study(
    owner: str, is_read: bool, tmp_path: Path, studies: Path
):
    rows, place = written(tmp_path, f"elsewhere/{owner}/stages/tau.yaml")
    (place / "stages/tau.yaml").write_text("target: models/mine\n")
    found = read_background(rows, [place], studies)
    assert found.config(rows[0].source) == ({"target": "models/mine"} if is_read else {})
    assert [stage.note.startswith("As it ran") for stage in found.stages.values()].count(True) == (
        is_read
    )


def test_a_link_out_of_the_directory_of_rows_is_not_read(tmp_path: Path, studies: Path):
    rows, place = written(tmp_path, "elsewhere/tiny/stages/hosts.yaml")
    (tmp_path / "hosts.yml").write_text("token: SECRET\n")
    (place / "stages/hosts.yaml").symlink_to(tmp_path / "hosts.yml")
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
    values = study("runs/tiny")
    values["stages"]["tau"]["config"] = "missing.yaml"
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(values))
    rows, place = written(tmp_path, "runs/tiny/stages/tau.yaml")
    found = read_background(rows, [place], tmp_path)
    assert set(found.studies) == {"tiny"}
    assert not found.stages


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


@pytest.mark.parametrize(
    ("prints", "configs", "lines"),
    [
        ([("a", {"truth": "t2"})], {}, ["truth: path not recorded, fingerprint t2"]),
        (
            [("a", {"target": "t1"}), ("b", {"target": "t1"})],
            {"a": {"target": "models/t"}},
            ["target: models/t, fingerprint t1"],
        ),
        (
            [("a", {"draft": "a"}), ("b", {"draft": "b"})],
            {"a": {"draft": "models/d"}, "b": {"draft": "models/d"}},
            ["draft: models/d, fingerprint a, fingerprint b"],  # it was replaced in between
        ),
    ],
)
def test_a_model_has_one_line(prints: Any, configs: Any, lines: list[str]):
    sources = [source(name, fingerprints=marks) for name, marks in prints]
    rows = [study_row({"tokens": [1.0]}, source=one) for one in sources]
    assert entries(*rows, background=known(**configs))["models"] == lines


def test_examples_of_several_rows_are_counted_once():
    code = {"population": "examples of code 0123456789abcdef"}
    rows = [
        study_row({"tokens": [1.0] * 3}, [0, 1, 2], **code),
        study_row({"tokens": [1.0] * 3}, [2, 3, 4], **code),
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
    files = ["texts/t.jsonl", "texts/a.jsonl", "texts/b.jsonl.gz"]
    assert entries(row, background=known(bench=config))["data"] == files


def test_settings_machine_and_days_are_listed():
    first, second = (source(day, date=f"2026-11-{day}") for day in ("25", "24"))
    rows = [
        study_row({"calls": [1.0]}, gamma=5, temperature=1.0, seed=0, source=first),
        study_row({"calls": [1.0]}, gamma=3, temperature=0.0, source=second),
    ]
    found = entries(*rows)
    assert found["settings"] == ["temperature: 0, 1", "gamma: 3, 5", "seed of training: 0"]
    assert found["machine"] == ["a machine"]
    assert found["date"] == ["2026-11-24", "2026-11-25"]
    assert not {"models", "cost"} & set(found)
    assert entries(study_row({"tokens": [1.0]}))["date"] == ["not recorded in these rows"]


def test_the_minutes_of_stages_add():
    stage = {"command": "bounds", "disk_mb": 1, "minutes": {"cpu": 2, "gpu": 1}}
    stages = {
        "train": stage | {"outputs": ["$output/a/x"]},
        "tau": stage | {"outputs": ["$output/b/x"], "minutes": {"cpu": 3, "gpu": 1}},
    }
    made = validate(StudyConfig, study("runs/tiny", stages=stages))
    found = entries(study_row({"tokens": [1.0]}), background=Background({"tiny": made}, {}))
    assert found["cost"] == [
        "expected: 5 minutes on two CPU cores, 2 on a GPU",
        "minutes of each stage on two cores: train 2, tau 3",
    ]


@pytest.mark.parametrize("name", find_studies(STUDIES))
def test_the_commands_for_other_models_run(name: str, monkeypatch: pytest.MonkeyPatch):
    """One plans the study with the given paths; the last has options that exist."""
    monkeypatch.chdir(STUDIES.parents[1])
    made = read_study(STUDIES / f"{name}.yaml")
    block = commands(name, made)
    lines = block.code.replace("\\\n", " ").splitlines()
    install, run, judge = (shlex.split(line) for line in lines)
    assert install[:2] == ["pip", "install"]
    given = {word: f"mine/{word.lower()}" for word, _ in block.entries if word.isupper()}
    for word, path in given.items():
        run = [part.replace(f"={word}", f"={path}") for part in run]
    shown = CliRunner().invoke(app, [*run[1:], "--dry-run", "--json"])
    assert shown.exit_code == 0, shown.output
    inputs = " ".join(text for stage in made.stages.values() for text in stage.inputs)
    for variable in made.variables:
        assert (f"mine/{variable}" in shown.stdout) == (f"${variable}" in inputs)
    assert f"runs/mine/{name}/" in shown.stdout
    helped = CliRunner().invoke(app, [judge[1], "--help"])
    assert all(option in helped.output for option in judge if option.startswith("--"))


def test_the_commands_carry_the_study_file():
    block = commands("bounds", read_study(STUDIES / "bounds.yaml"))
    assert block.source is not None
    assert block.source.file == "bounds.yaml"
    text = yaml.safe_dump(block.source.config)
    assert validate(StudyConfig, yaml.safe_load(text)) == read_study(STUDIES / "bounds.yaml")
    assert dict(block.entries)["MEDIUM"] == [
        "a directory with model.safetensors; here it was runs/garden/medium/model."
    ]


def finding(test: dict[str, Any], **changes: Any) -> Finding:
    made = validate(Claim, claim(test, **changes))
    return Finding(made, HOLDS, Interval(1.0, 0.5, 1.5), 2.0, 1.0, 12, "", "")


def paired(first: dict[str, Any], second: dict[str, Any], **changes: Any) -> dict[str, Any]:
    sides = {"first": {"where": first}, "second": {"where": second}}
    return {"kind": "paired", "figure": "block_efficiency", "matters": 0.1} | sides | changes


def test_every_recipe_and_paper_has_a_definition_with_its_address():
    for name in RECIPES:
        assert OCCURRING[name].definition.startswith("recipe: ")
        assert OCCURRING[name].link == PAPERS["DistillSpec"].link
    assert set(PAPERS) == set(get_args(Paper))
    numbers = {name: DEFINITIONS[name].source for name in PAPERS}
    assert numbers == {
        "DistillSpec": "arXiv 2310.08461",
        "Faster Cascades": "arXiv 2405.19261",
        "Direct Alignment": "arXiv 2403.00858",
    }


@pytest.mark.parametrize("kind", [kind for kind in RULES if not kind.exact])
def test_every_rule_has_a_definition_with_its_address_and_default_settings(kind: type[Rule]):
    found = OCCURRING[name_of(kind)]
    assert re.fullmatch(r"rule: [a-z].*\.", found.definition)
    assert found.link in {paper.link for paper in PAPERS.values()}
    assert [type(rule) for rule in DEFAULT_RULES].count(kind) > 1


@pytest.mark.parametrize(
    ("setting", "terms"),
    [
        ({"draft": "forward_kl"}, ["KLD"]),
        ({"draft": "tvd_plus_plus"}, ["TVD++", "TVD"]),
        ({"draft": "start of run-1"}, ["unaligned"]),
        ({"label": "start"}, ["unaligned"]),
        ({"draft": "gkd"}, ["gkd"]),
        ({"draft": "mine", "task": "documentation", "family": "new 0.5"}, []),
        ({"rule": "opt_log", "alpha": 0.1}, ["opt_log", "TVD", ALPHA]),
        ({"family": "chow", "alpha": 0.2}, ["chow", ALPHA]),
    ],
)
def test_names_in_rows_are_explained(setting: Any, terms: list[str]):
    assert terms_of_rows([study_row({"tokens": [1.0]}, **setting)]) == terms


def test_what_the_tests_and_texts_of_claims_name_is_explained():
    sides = paired({"draft": ["gkd", "imit_kd"]}, {"label": "start"}, rows={"task": "code"})
    assert terms_of_findings([finding(sides)]) == ["gkd", "imit_kd", "unaligned"]
    families = {"kind": "frontier", "statistic": "curve", "matters": 0.1}
    families |= {"firsts": ["token_v3"], "seconds": ["lossy beta 1.0", "unknown"]}
    assert terms_of_findings([finding(families)]) == ["token_v3", "lossy", ALPHA]
    said = {"says": "TVD++ beats KLD, and TVDs do not.", "here": "MBSU is larger."}
    texts = finding(paired({"draft": "a"}, {"draft": "b"}), **said)
    assert terms_of_findings([texts]) == ["MBSU", "TVD++", "TVD", "KLD"]
    formula = paired({"draft": "kld"}, {"label": "start"}, figure="mbsu")
    assert terms_of_findings([finding(formula)]) == ["MBSU", "KLD", "unaligned"]
    every = [study_row({"regret": [1.0]}, draft=name, alpha=0.1) for name in OCCURRING]
    assert set(terms_of_rows(every)) <= set(DEFINITIONS)
