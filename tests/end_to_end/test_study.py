"""`paceline study` on a tiny study: runs once, survives kills and Ctrl-C, says what is wrong.

Most studies and their stages are copies of a process that has imported the libraries; those of
the tests of kills and of Ctrl-C are ended from outside. Stages that Ray runs, and the one that
fails, are started as a user's are.
"""

import fcntl
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from paceline.results.row import read_rows
from support.processes import Program
from support.runs import STAGES_ARE_COPIES, alignment, cells, comparable, tiny_study, write_study
from support.texts import one_line

# one after the other on the same worker, as all compare with the same run of the study
pytestmark = pytest.mark.first

Run = Callable[..., tuple[int, str, str]]
STUDY = ("study", "run", "tiny.yaml")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}

# argv: those of the command line
_STUDY = STAGES_ARE_COPIES + "command_line(*sys.argv[1:])\n"

# argv: the folder of the study that is timed, that of the killed one
_NURSERY = STAGES_ARE_COPIES + textwrap.dedent("""
    import json, random, time

    def study(folder, seconds=None):
        child = os.fork()
        if child == 0:
            os.chdir(folder)
            command_line("study", "run", "tiny.yaml", "--workers", "2")
        if seconds is not None:
            time.sleep(seconds)
            os.kill(child, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def seconds_until_free(folder):
        '''Until no process of a stage holds its log.'''
        started = time.monotonic()
        for log in Path(folder).glob("runs/tiny/logs/*.log"):
            with log.open("ab") as stream:
                fcntl.flock(stream, fcntl.LOCK_EX)
        return time.monotonic() - started

    timed, killed = sys.argv[1:]
    started = time.monotonic()
    codes = {"timed": study(timed)}
    whole = time.monotonic() - started
    rng = random.Random(0)
    codes["killed"], codes["free"] = [], []
    for number in range(10):
        codes["killed"].append(study(killed, rng.uniform(0.02, 0.09) * whole))
        if number % 2:  # else the next study begins while stages still end
            codes["free"].append(seconds_until_free(killed))
    codes["last"] = study(killed)
    print(json.dumps(codes))
""")


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The study's file and inputs; nothing has run."""
    folder = tmp_path_factory.mktemp("new")
    write_study(folder)
    return folder


@pytest.fixture(scope="module")
def whole(new: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same after an undisturbed run."""
    folder = tmp_path_factory.mktemp("whole") / "study"
    shutil.copytree(new, folder)
    done = Program(_STUDY, STUDY, cwd=folder).wait()
    assert done.returncode == 0, done.stderr
    assert done.stdout == "8 result rows are in runs/tiny/rows.jsonl\n"
    return folder


def copied(source: Path, place: Path, monkeypatch: pytest.MonkeyPatch | None = None) -> Path:
    """A copy with the times of its files; the working directory, if a monkeypatch is given."""
    shutil.copytree(source, place / "study")
    if monkeypatch is not None:
        monkeypatch.chdir(place / "study")
    return place / "study"


def logs(folder: Path) -> dict[str, int]:
    """Sizes of the logs: they grow whenever a stage runs."""
    return {path.name: path.stat().st_size for path in folder.glob("runs/tiny/logs/*.log")}


def test_rows_have_their_units_their_figures_and_their_source(whole: Path):
    rows = read_rows(whole / "runs/tiny/rows.jsonl")
    cells = [row for row in rows if "family" in row.setting]
    drafts = [row for row in rows if "family" not in row.setting]
    assert len(cells) == 2
    assert all(row.units == tuple(range(8)) for row in cells)
    assert {row.setting["family"] for row in cells} == {"autoregressive", "lossless"}
    assert all(row.setting["pair"] == "tiny" for row in cells)
    labels = [str(row.setting["label"]) for row in drafts]
    assert sorted(labels) == ["end"] * 2 + ["start"] * 2 + ["step 5"] * 2
    assert all(row.units == tuple(range(12)) for row in drafts)
    assert all(row.covers == ("DistillSpec Table C.1",) for row in drafts)
    written = (whole / "runs/tiny/tau-0/rows.jsonl").read_text().splitlines()
    assert [json.loads(line)["sums"]["calls"] for line in written] == [
        list(row.sums["calls"]) for row in drafts
    ]
    assert all(row.source.fingerprints and row.source.versions["torch"] for row in rows)


def test_a_second_run_executes_nothing_and_writes_the_same_rows(
    run: Run, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = copied(whole, tmp_path, monkeypatch)
    before, rows = logs(folder), (folder / "runs/tiny/rows.jsonl").read_bytes()
    (folder / "data/corpus.jsonl").touch()  # the time of a file does not matter, its content does
    code, _, err = run(*STUDY)
    assert code == 0, err
    assert logs(folder) == before
    assert (folder / "runs/tiny/rows.jsonl").read_bytes() == rows
    _, out, _ = run("study", "show", "tiny.yaml", "--json")
    done = {stage["stage"]: stage["done"] for stage in json.loads(out)}
    assert done == {"align": True, "tau-look-0": True, "cells": True, "tau-look-1": False}


def test_ten_kills_change_no_row_and_leave_no_process(new: Path, whole: Path, tmp_path: Path):
    folders = [copied(new, tmp_path / name) for name in ("timed", "killed")]
    done = Program(_NURSERY, folders).wait()
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["timed"], found["last"]) == (0, 0), done.stderr
    assert set(found["killed"]) <= {-signal.SIGKILL, 0}, done.stderr
    assert found["killed"].count(-signal.SIGKILL) >= 5, "the study was slow when it was timed"
    assert max(found["free"]) < 60, "else a stage went on without its study"
    expected = comparable(read_rows(whole / "runs/tiny/rows.jsonl"))
    for folder in folders:
        assert comparable(read_rows(folder / "runs/tiny/rows.jsonl")) == expected
        assert not (folder / "runs/tiny/replaced").exists()


# A shell starts programs in the background with Ctrl-C ignored, and their children inherit it.
_INTERRUPTIBLE = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"


def test_ctrl_c_ends_the_study_with_130_and_its_stages(new: Path, tmp_path: Path):
    folder = copied(new, tmp_path)
    study = Program(_INTERRUPTIBLE + _STUDY, STUDY, cwd=folder)
    log = folder / "runs/tiny/logs/align.log"
    while not log.exists() or not log.stat().st_size:
        assert study.runs, study.wait().stderr
        time.sleep(0.05)
    study.send_signal(signal.SIGINT)
    done = study.wait()
    assert done.returncode == 130
    assert "interrupted" in done.stderr.splitlines()[-1]
    with log.open("ab") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if a stage holds it


@pytest.mark.slow
def test_two_workers_of_ray_give_the_rows_of_one_machine(new: Path, whole: Path, tmp_path: Path):
    pytest.importorskip("ray", reason="Ray is not installed")
    folder = copied(new, tmp_path)
    # two stages that wait for none, as every stage is a program with its own imports
    two = tiny_study() | {"stages": {"align": alignment(), "cells": cells()}}
    (folder / "tiny.yaml").write_text(yaml.safe_dump(two, sort_keys=False), encoding="utf-8")
    program = (  # its own process: Ray leaves warnings and threads behind
        "from paceline.processes import connect_to_ray; "
        "connect_to_ray(num_cpus=2, include_dashboard=False); "
        "from paceline.cli.main import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *STUDY, "--workers", "2", "--set", "runner=ray"],
        cwd=folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = read_rows(folder / "runs/tiny/rows.jsonl")
    every = read_rows(whole / "runs/tiny/rows.jsonl")
    one = [row for row in every if "family" in row.setting]
    assert len(rows) == 2
    assert comparable(rows) == comparable(one)


def test_a_dry_run_prints_stages_minutes_and_disk_and_writes_nothing(
    run: Run, new: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = copied(new, tmp_path, monkeypatch)
    before = sorted(folder.rglob("*"))
    code, out, _ = run(*STUDY, "--dry-run")
    assert code == 0
    lines = [line.split() for line in out.splitlines()]
    for stage in ("align", "tau-look-0", "cells", "tau-look-1"):
        (line,) = (line for line in lines if line and line[0] == stage)
        assert line[2:] == ["to", "run", "0.01", "0.01", "1"]
    assert ["to", "run,", "in", "all", "0.04", "0.04", "4"] in lines
    assert sorted(folder.rglob("*")) == before


def test_the_smoke_scale_leaves_results_alone(
    run: Run, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    copied(whole, tmp_path, monkeypatch)
    _, out, _ = run("study", "show", "tiny.yaml", "--scale", "smoke", "--json")
    assert {stage["done"] for stage in json.loads(out)} == {False}
    assert all("runs/tiny/smoke/" in path for s in json.loads(out) for path in s["outputs"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("run", "tiny.yaml", "--set", "lookz=1"), "lookz: unknown key; did you mean looks?"),
        (("run", "distilspec"), "no study distilspec: there is no configs/studies here"),
        (("run",), "run needs the name of a study"),
        (("list",), "there is no configs/studies here"),
        (("run", "none.yaml"), "no configuration file at none.yaml"),
        (
            ("run", "tiny.yaml", "--set", "stages.tau.set.target=$dta/target"),
            "stage tau: unknown variable $dta; did you mean $data?",
        ),
        (
            ("run", "tiny.yaml", "--set", "stages.tau.set.output=elsewhere"),
            "stage tau-look-0 writes to elsewhere, which is not a directory of its own",
        ),
    ],
)
def test_a_mistake_in_a_study_is_one_line(
    run: Run,
    new: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    said: str,
):
    folder = copied(new, tmp_path, monkeypatch)
    code, _, err = run("study", *arguments)
    assert (code, said in one_line(err)) == (2, True), err
    assert not (folder / "runs").exists()


def test_a_stage_whose_input_is_gone_is_named_and_nothing_is_lost(
    run: Run, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = copied(whole, tmp_path, monkeypatch)
    (folder / "data/prompts.jsonl").unlink()
    code, _, err = run(*STUDY)
    assert code == 2
    said = "stage tau-look-0 needs data/prompts.jsonl, which is not there; make the tiny models"
    assert said in one_line(err)
    assert (folder / "runs/tiny/tau-0/rows.jsonl").exists()


def test_a_task_without_references_fails_its_stage_alone(
    run: Run, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = copied(whole, tmp_path, monkeypatch)
    before = logs(folder)
    rows = [json.dumps({"prompt": f"number {number}"}) for number in range(9)]
    (folder / "data/bare.jsonl").write_text("\n".join(rows))
    task = "{task: pairs, corpus: $data/bare.jsonl, metric: exact_match}"
    code, _, err = run(*STUDY, "--set", f"stages.cells.set.task={task}")
    assert code == 3
    line = err.splitlines()[-1]
    assert line.startswith("paceline: stage cells failed: ")
    assert "completion" in line
    assert line.endswith("run the study again (log: runs/tiny/logs/cells.log)")
    assert {name for name, size in logs(folder).items() if size > before[name]} == {"cells.log"}
    (kept,) = folder.glob("runs/tiny/replaced/*/cells/rows.jsonl")
    assert kept.read_bytes() == (whole / "runs/tiny/cells/rows.jsonl").read_bytes()


def test_rows_of_an_older_schema_are_named_and_stay(
    run: Run, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = copied(whole, tmp_path, monkeypatch)
    file = folder / "runs/tiny/tau-0/rows.jsonl"
    file.write_text(file.read_text().replace('"schema_version": 1', '"schema_version": 0'))
    older = file.read_bytes()
    code, _, err = run(*STUDY)
    assert code == 2
    said = "runs/tiny/tau-0/rows.jsonl row 1 has schema_version 0, this Paceline reads 1; run the"
    assert said in one_line(err)
    assert file.read_bytes() == older


def test_a_full_disk_is_one_line_and_the_rows_that_were_there_stay(
    run: Run, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = copied(whole, tmp_path, monkeypatch)
    rows = folder / "runs/tiny/rows.jsonl"
    before = rows.read_bytes()
    assert len(before) > 8_000
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8_000, limit[1]))
    try:
        code, _, err = run(*STUDY)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert code == 3
    assert "could not write runs/tiny/rows.jsonl: the disk is full" in one_line(err)
    assert rows.read_bytes() == before


def test_a_study_of_another_commands_file_is_called_so(run: Run, tmp_path: Path):
    file = tmp_path / "align.yaml"
    settings = tiny_study()["stages"]["align"]["set"]
    file.write_text(yaml.safe_dump(settings))
    code, _, err = run("study", "run", file)
    assert code == 2
    assert "is a file for paceline align" in one_line(err)
