"""Names of other people lead to no file outside of their directories."""

from pathlib import Path

import pytest
import yaml

from paceline.config import read_yaml, validate
from paceline.errors import ConfigError
from paceline.measure.trajectory import TrajectoryConfig
from paceline.places import TEMPLATES, copy_files, shipped

ROOT = Path(__file__).parents[2]
NAMES = [
    "../../up",
    "/abs/elsewhere",
    "a/b",
    ".",
    "..",
    ".git",
    "",
    " ",
    "a\nb",
    "\x1b[2J",
    "n" * 250,
]


def test_a_file_here_is_before_that_of_paceline_and_a_path_of_neither_is_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    quick, other = Path("configs/align/quick.yaml"), Path("configs/align/other.yaml")
    assert shipped(quick).read_text() == (ROOT / quick).read_text()
    assert read_yaml(quick) == yaml.safe_load((ROOT / quick).read_text())
    assert (shipped(other), shipped(tmp_path / quick)) == (other, tmp_path / quick)
    quick.parent.mkdir(parents=True)
    quick.write_text("seed: 5")
    assert read_yaml(quick) == {"seed": 5}


def test_of_directories_only_that_of_templates_is_copied(tmp_path: Path):
    model, out = tmp_path / "model", tmp_path / "out"
    for folder in (model / "tokenizer_extra", model / TEMPLATES, out):
        folder.mkdir(parents=True)
    (model / "merges.txt").write_text("mine")
    (model / "vocab.txt").symlink_to("merges.txt")
    (model / TEMPLATES / "tool_use.jinja").write_text("mine")
    copy_files(sorted(model.iterdir()), out)
    found = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert found == {"merges.txt", "vocab.txt", f"{TEMPLATES}/tool_use.jinja"}
    assert not (out / "vocab.txt").is_symlink()


@pytest.mark.parametrize(
    ("key", "name"),
    [
        *(("tasks", name) for name in NAMES),
        ("scored_tasks", NAMES[0]),
    ],
)
def test_a_name_of_a_configuration_is_one_part_of_a_path(tmp_path: Path, key: str, name: str):
    values = {"output": str(tmp_path / "out"), key: {name: {}}}
    with pytest.raises(ConfigError, match=r"is not the name of a file|is longer than") as caught:
        validate(TrajectoryConfig, values)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["1e-4", "top 5", "temperature 0.3", "größer"])
def test_ordinary_names_are_names(name: str):
    with pytest.raises(ConfigError) as caught:  # for other keys
        validate(TrajectoryConfig, {"tasks": {name: {"path": "x.jsonl"}}})
    assert "tasks" not in str(caught.value)
