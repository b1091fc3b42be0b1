"""What is written goes through no link: it is replaced, or the run is refused."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.errors import ConfigError, StorageError
from paceline.records import RunDirectory, append_jsonl, atomic_directory, atomic_write_text


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A directory outside of the run, with a file that no run may touch."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home/letter").write_text("precious\n")
    return tmp_path / "home"


@pytest.mark.parametrize("there", ["letter", "missing"])
def test_a_link_is_replaced_and_what_it_leads_to_stays(tmp_path: Path, home: Path, there: str):
    path = tmp_path / "report.html"
    path.symlink_to(home / there)
    atomic_write_text(path, "<html>")
    assert not path.is_symlink()
    assert path.read_text() == "<html>"
    (tmp_path / "plots").symlink_to(home)
    with atomic_directory(tmp_path / "plots") as scratch:
        (scratch / "a.png").write_text("a")
    assert [path.name for path in (tmp_path / "plots").iterdir()] == ["a.png"]
    assert [path.name for path in home.iterdir()] == ["letter"]
    assert (home / "letter").read_text() == "precious\n"


def test_rows_are_appended_through_no_link(tmp_path: Path, home: Path):
    (tmp_path / "metrics.jsonl").symlink_to(home / "letter")
    with pytest.raises(StorageError, match="a link, which is not followed"):
        append_jsonl(tmp_path / "metrics.jsonl", {"step": 1})
    assert (home / "letter").read_text() == "precious\n"


@pytest.mark.parametrize("name", ["checkpoints", "metrics.jsonl", "dangling"])
def test_a_run_with_a_link_out_of_it_is_refused(tmp_path: Path, home: Path, name: str):
    link = tmp_path / "run" / name
    link.parent.mkdir(parents=True)
    leads = {"metrics.jsonl": home / "letter", "dangling": home / "missing"}
    link.symlink_to(os.path.relpath(leads.get(name, home), link.parent))
    run = RunDirectory(tmp_path / "run")
    with pytest.raises(ConfigError, match=rf"{name} is a link out of .*; remove it"), run.alone():
        pytest.fail("the run has begun")


def test_links_inside_of_a_run_and_above_it_are_the_users_own(tmp_path: Path):
    (tmp_path / "disk/run/step-1").mkdir(parents=True)
    (tmp_path / "disk/run/latest").symlink_to("step-1")
    (tmp_path / "runs").symlink_to(tmp_path / "disk")
    run = RunDirectory(tmp_path / "runs/run")
    with run.alone():
        run.write_result({"latest": 1})
        atomic_write_text(run.path / "latest/figure", "1")
    assert (tmp_path / "disk/run/step-1/figure").read_text() == "1"
    assert json.loads((tmp_path / "disk/run/result.json").read_text()) == {"latest": 1}


def test_the_systems_own_link_to_the_output_is_not_replaced(tmp_path: Path):
    program = (
        "from pathlib import Path; from paceline.records import atomic_write_text; "
        "atomic_write_text(Path('/proc/self/fd/1'), 'text')"
    )
    with (tmp_path / "out").open("wb") as stream:
        subprocess.run([sys.executable, "-c", program], stdout=stream, check=True)
    assert (tmp_path / "out").read_text() == "text"
    assert Path("/proc/self/fd/1").is_symlink()
    assert Path("/dev/stdout").is_symlink()
