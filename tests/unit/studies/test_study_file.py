from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.config import validate
from paceline.errors import ConfigError, UsageError
from paceline.studies.study_file import (
    FOLDER,
    StudyConfig,
    filled,
    find_studies,
    read_study,
    study_path,
)

ROOT = Path(__file__).parents[3]
STAGE = {
    "command": "trajectory",
    "set": {"target": "$target"},
    "outputs": ["$output/tau/rows.jsonl"],
    "minutes": {"cpu": 1, "gpu": 1},
    "disk_mb": 1,
}


def study(stage: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    values = {"title": "T", "output": "runs/x", "variables": {"target": "model"}}
    return values | {"stages": {"tau": STAGE | (stage or {})}} | changes


def test_variables_are_replaced_in_nested_texts_and_not_in_keys():
    value = {"$a": ["$a/x", {"k": "$a and ${b}"}, 3, None], "cost": "$$5"}
    assert filled(value, {"a": "A", "b": "B"}) == {
        "$a": ["A/x", {"k": "A and B"}, 3, None],
        "cost": "$5",
    }


@pytest.mark.parametrize(
    ("stage", "said"),
    [
        ({"set": {"target": "$trget"}}, r"unknown variable \$trget; did you mean \$target\?"),
        ({"inputs": ["$zzz/x"]}, r"unknown variable \$zzz; add zzz to variables"),
        ({"scales": {"smoke": {"a": ["$outpt"]}}}, r"\$outpt; did you mean \$output\?"),
        ({"labels": {"pair": "5 $"}}, r"has a \$ without a name; write \$\$ for a \$"),
    ],
)
def test_a_variable_that_is_not_known_is_named_with_its_stage(stage: dict[str, Any], said: str):
    with pytest.raises(ConfigError, match=f"^stage tau: .*{said}"):
        validate(StudyConfig, study(stage))


def test_the_name_of_output_is_reserved():
    with pytest.raises(ConfigError, match="variables has output, which is reserved; rename it"):
        validate(StudyConfig, study(variables={"output": "x", "target": "m"}))


def test_an_unknown_key_is_one_line_with_the_file_and_the_key_that_was_meant(tmp_path: Path):
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(study({"minutez": 3})))
    with pytest.raises(ConfigError) as caught:
        read_study(file)
    assert str(caught.value).startswith(f"{file}: ")
    assert "stages.tau.minutez: unknown key; did you mean minutes?" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_studies_are_found_by_name_or_path(tmp_path: Path):
    (tmp_path / "recipes.yaml").write_text(yaml.safe_dump(study()))
    assert list(find_studies(tmp_path)) == ["recipes"]
    assert study_path("recipes", tmp_path) == tmp_path / "recipes.yaml"
    assert study_path("any/where.yaml", tmp_path) == Path("any/where.yaml")
    with pytest.raises(UsageError, match=r"no study recipe in .*; did you mean recipes\?"):
        study_path("recipe", tmp_path)
    with pytest.raises(UsageError, match="choose one of recipes"):
        study_path("zzz", tmp_path)


def test_outside_a_clone_own_studies_are_beside_those_of_paceline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    own = {path.stem for path in (ROOT / FOLDER).iterdir()}
    assert set(find_studies()) == own
    FOLDER.mkdir(parents=True)
    (FOLDER / "bounds.yaml").write_text(yaml.safe_dump(study()))
    (FOLDER / "recipes.yaml").write_text(yaml.safe_dump(study()))
    assert set(find_studies()) == own | {"recipes"}
    assert read_study(study_path("bounds")).title == "T"
    assert read_study(study_path("cascades_t5")) == read_study(ROOT / FOLDER / "cascades_t5.yaml")
