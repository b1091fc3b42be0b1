"""`paceline study` on a tiny study: runs once, survives kills and Ctrl-C, says what is wrong.

Stages are processes as users start them. Studies that get a signal are forks of a process that
has imported the libraries; the others run in this one, most on copies of the whole one.
"""

import fcntl
import json
import resource
import shutil
import signal
import textwrap
from pathlib import Path

import pytest
import yaml

from paceline.results.row import read_rows
from support.processes import finish, run_command, start
from support.runs import cells, comparable, tiny_study, write_study
from support.texts import Run, one_line, refused, succeeded

# one after the other on the same worker, as all compare with the same run of the study
pytestmark = pytest.mark.first

STUDY = ("study", "run", "tiny.yaml")

# argv: a list of [folder, pattern of files, signal, how its logs are locked then]. A study of the
# folder gets the signal as soon as there is such a file. -> the exit codes.
_NURSERY = textwrap.dedent("""
    import fcntl, json, os, signal, sys, time
    from pathlib import Path
    import paceline.studies.session
    from paceline.cli.main import main

    codes = []
    for folder, pattern, sent, lock in json.loads(sys.argv[1]):
        study = os.fork()
        if study == 0:
            # a shell starts programs in the background with Ctrl-C ignored
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.chdir(folder)
            sys.argv = ["paceline", "study", "run", "tiny.yaml"]
            main()
        while not any(Path(folder).glob(f"runs/tiny/{pattern}")):
            if os.waitpid(study, os.WNOHANG)[0]:
                sys.exit(f"ended before {pattern}")
            time.sleep(0.01)
        os.kill(study, sent)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(study, 0)[1]))
        for log in Path(folder).glob("runs/tiny/logs/*.log") if lock else ():
            with log.open("ab") as stream:
                fcntl.flock(stream, lock)
    print(json.dumps(codes))
""")
# Files of a stage in progress, in the order in which one worker makes them, and whether the next
# study begins after the stages have ended, or while they still end.
MOMENTS = {
    "logs/align.log": fcntl.LOCK_EX,
    "align/checkpoints/*": 0,
    "align/draft/*": fcntl.LOCK_EX,
    "tau/*": 0,
    "cells/*": fcntl.LOCK_EX,
}


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
    done = run_command(folder, *STUDY, "--workers", "2")
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
    written = (whole / "runs/tiny/tau/rows.jsonl").read_text().splitlines()
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
    succeeded(run, *STUDY)
    assert logs(folder) == before
    assert (folder / "runs/tiny/rows.jsonl").read_bytes() == rows
    _, out, _ = run("study", "show", "tiny.yaml", "--json")
    done = {stage["stage"]: stage["done"] for stage in json.loads(out)}
    assert done == {"align": True, "tau": True, "cells": True}


def signalled(*plan: tuple[Path, str, int, int]) -> tuple[list[int], str]:
    """The exit codes of studies that get signals, and what they said."""
    done = finish(start(_NURSERY, json.dumps([[str(folder), *rest] for folder, *rest in plan])))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def test_a_kill_in_each_stage_changes_no_row_and_leaves_no_process(
    new: Path, whole: Path, tmp_path: Path
):
    folder = copied(new, tmp_path)
    plan = [(folder, pattern, signal.SIGKILL, lock) for pattern, lock in MOMENTS.items()]
    codes, _ = signalled(*plan)
    assert codes == [-signal.SIGKILL] * len(MOMENTS)
    done = run_command(folder, *STUDY)
    assert done.returncode == 0, done.stderr
    expected = comparable(read_rows(whole / "runs/tiny/rows.jsonl"))
    assert comparable(read_rows(folder / "runs/tiny/rows.jsonl")) == expected
    assert not (folder / "runs/tiny/replaced").exists()


def test_ctrl_c_ends_the_study_with_130_and_its_stages(new: Path, tmp_path: Path):
    at_once = fcntl.LOCK_EX | fcntl.LOCK_NB  # raises if a stage holds a log
    codes, said = signalled((copied(new, tmp_path), "align/*", signal.SIGINT, at_once))
    assert codes == [130]
    assert "interrupted" in said.splitlines()[-1]


@pytest.mark.slow
def test_two_workers_of_ray_give_the_rows_of_one_machine(new: Path, whole: Path, tmp_path: Path):
    pytest.importorskip("ray", reason="Ray is not installed")
    folder = copied(new, tmp_path)
    # two stages that wait for none
    again = cells() | {"outputs": ["$output/again/rows.jsonl"]}
    again["set"]["output"] = "$output/again"
    two = tiny_study() | {"stages": {"cells": cells(), "again": again}}
    (folder / "tiny.yaml").write_text(yaml.safe_dump(two, sort_keys=False), encoding="utf-8")
    program = (  # its own process: Ray leaves warnings and threads behind
        "from paceline.processes import connect_to_ray; "
        "connect_to_ray(num_cpus=2, include_dashboard=False); "
        "from paceline.cli.main import main; main()"
    )
    command = [*STUDY, "--workers", "2", "--set", "runner=ray"]
    done = finish(start(program, *command, cwd=folder, env={"RAY_USAGE_STATS_ENABLED": "0"}))
    assert done.returncode == 0, done.stderr
    rows = comparable(read_rows(folder / "runs/tiny/rows.jsonl"))
    every = read_rows(whole / "runs/tiny/rows.jsonl")
    one = comparable([row for row in every if "family" in row.setting])
    assert rows[:2] == one
    assert [row["sums"] for row in rows[2:]] == [row["sums"] for row in one]


def test_a_dry_run_prints_stages_minutes_and_disk_and_writes_nothing(
    run: Run, new: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = copied(new, tmp_path, monkeypatch)
    before = sorted(folder.rglob("*"))
    out = succeeded(run, *STUDY, "--dry-run")
    lines = [line.split() for line in out.splitlines()]
    for stage in ("align", "tau", "cells"):
        (line,) = (line for line in lines if line and line[0] == stage)
        assert line[2:] == ["to", "run", "0.01", "0.01", "1"]
    assert ["to", "run,", "in", "all", "0.03", "0.03", "3"] in lines
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
        (("run", "tiny.yaml", "--set", "workerz=1"), "workerz: unknown key; did you mean workers?"),
        (("run", "distilspec"), "no study distilspec in configs/studies; did you mean"),
        (("run",), "run needs the name of a study"),
        (("run", "none.yaml"), "no configuration file at none.yaml"),
        (
            ("run", "tiny.yaml", "--set", "stages.tau.set.target=$dta/target"),
            "stage tau: unknown variable $dta; did you mean $data?",
        ),
        (
            ("run", "tiny.yaml", "--set", "stages.tau.set.output=elsewhere"),
            "stage tau writes to elsewhere, which is not a directory of its own",
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
    assert said in refused(run, "study", *arguments)
    assert not (folder / "runs").exists()


def test_a_stage_whose_input_is_gone_is_named_and_nothing_is_lost(
    run: Run, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = copied(whole, tmp_path, monkeypatch)
    (folder / "data/prompts.jsonl").unlink()
    line = refused(run, *STUDY)
    said = "stage tau needs data/prompts.jsonl, which is not there; make the tiny models"
    assert said in line
    assert (folder / "runs/tiny/tau/rows.jsonl").exists()


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
    file = folder / "runs/tiny/tau/rows.jsonl"
    file.write_text(file.read_text().replace('"schema_version": 1', '"schema_version": 0'))
    older = file.read_bytes()
    line = refused(run, *STUDY)
    said = "runs/tiny/tau/rows.jsonl row 1 has schema_version 0, this Paceline reads 1; run the"
    assert said in line
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
    assert "is a file for paceline align" in refused(run, "study", "run", file)
