"""Links and names of other people lead to no file outside of their directories."""

from pathlib import Path

import pytest
import yaml

from paceline.config import read_yaml, validate
from paceline.errors import ConfigError, UsageError
from paceline.measure.trajectory import TrajectoryConfig
from paceline.places import TEMPLATES, copy_files, leads_out, shipped

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


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "home/.ssh").mkdir(parents=True)
    (tmp_path / "home/.ssh/id_rsa").write_text("SECRET")
    return tmp_path / "home"


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


def test_of_directories_only_that_of_templates_is_copied_and_no_link_out_of_one(
    tmp_path: Path, home: Path
):
    model, out = tmp_path / "model", tmp_path / "out"
    model.mkdir()
    out.mkdir()
    (model / "tokenizer_extra").symlink_to(home / ".ssh")
    (model / "merges.txt").write_text("mine")
    (model / "vocab.txt").symlink_to("merges.txt")
    copy_files(sorted(model.iterdir()), out)
    assert {path.name: path.read_text() for path in out.iterdir()} == {
        "merges.txt": "mine",
        "vocab.txt": "mine",
    }
    (model / TEMPLATES).mkdir()
    (model / TEMPLATES / "tool_use.jinja").write_text("mine")
    copy_files([model / TEMPLATES], out)
    assert (out / TEMPLATES / "tool_use.jinja").read_text() == "mine"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / TEMPLATES).symlink_to(home / ".ssh")
    with pytest.raises(UsageError, match=f"{TEMPLATES} is a link out of"):
        copy_files([tmp_path / "other" / TEMPLATES], out)
    (model / "vocab.key").symlink_to("../home/.ssh/id_rsa")
    with pytest.raises(UsageError, match=r"vocab\.key is a link out of .*; put the file in its"):
        copy_files([model / "vocab.key"], out)
    assert not (out / "vocab.key").exists()


def test_files_of_the_hub_are_links_to_blobs_of_their_own_repository(tmp_path: Path, home: Path):
    snapshot = tmp_path / "models--a--b/snapshots/1"
    for folder in (snapshot / "data", tmp_path / "models--a--b/blobs", tmp_path / "other/blobs"):
        folder.mkdir(parents=True)
    blob = tmp_path / "models--a--b/blobs/0"
    blob.write_text("{}")
    (tmp_path / "other/blobs/0").write_text("{}")
    for name, target in {
        "a": blob,
        "data/b": blob,
        "c": tmp_path / "other/blobs/0",
        "d": home / ".ssh/id_rsa",
        "e": tmp_path / "models--a--b",
    }.items():
        (snapshot / name).symlink_to(target)
    names = ("a", "data/b", "c", "d", "e")
    assert [leads_out(snapshot / name, snapshot) for name in names] == [
        False,
        False,
        True,
        True,
        True,
    ]
    assert not leads_out(snapshot / "data/b", snapshot / "data")


def test_blobs_that_are_themselves_a_link_are_not_the_hubs(tmp_path: Path, home: Path):
    (tmp_path / "evil/snapshots/1").mkdir(parents=True)
    (tmp_path / "evil/blobs").symlink_to(home / ".ssh")
    link = tmp_path / "evil/snapshots/1/vocab.key"
    link.symlink_to("../../blobs/id_rsa")
    assert leads_out(link, link.parent)


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
