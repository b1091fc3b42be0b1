"""A study's stages, its inputs and its failures, with a runner that starts no process."""

import json
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import yaml

from paceline.config import validate
from paceline.errors import ConfigError, StudyError, UsageError
from paceline.records import RunDirectory
from paceline.results.row import Row, read_rows, write_rows
from paceline.studies import run as module
from paceline.studies import session
from paceline.studies.claim_file import read_claims
from paceline.studies.plan import PlannedStage, plan
from paceline.studies.published import as_markdown, write_verdicts
from paceline.studies.run import check_inputs, run_study, states
from paceline.studies.session import (
    current_verdicts,
    judge_all,
    row_files,
    run_and_judge,
    study_rows,
)
from paceline.studies.study_file import StudyConfig
from paceline.studies.verdicts import HOLDS, UNDECIDED, UNMEASURED, Finding, judge
from support.results import claim, study_row
from support.runs import tiny_study


class Writer:
    """A runner that writes the outputs of the planned stages."""

    def __init__(self, stages: Sequence[PlannedStage]) -> None:
        self.stages = {stage.name: stage for stage in stages}
        self.ran: list[str] = []
        self.failing: set[str] = set()
        self.written: dict[str, str] = {}
        self.error: BaseException | None = None
        self.was_stopped = False

    def __call__(self, command: Sequence[str], log: Path) -> int:
        name = Path(command[2]).stem
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("paceline: no more memory\n")
        if self.error is not None:
            raise self.error
        self.ran.append(name)
        for output in self.stages[name].outputs:
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_text(self.written.get(name, name))
        return 3 if name in self.failing else 0

    def stop(self) -> None:
        self.was_stopped = True


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StudyConfig:
    """The tiny study with empty inputs."""
    monkeypatch.chdir(tmp_path)
    for name in ("target/model.safetensors", "draft/model.safetensors"):
        (tmp_path / "data" / name).parent.mkdir(parents=True)
        (tmp_path / "data" / name).touch()
    for name in ("corpus.jsonl", "prompts.jsonl"):
        (tmp_path / "data" / name).touch()
    return validate(StudyConfig, tiny_study())


@pytest.fixture
def writer(study: StudyConfig, monkeypatch: pytest.MonkeyPatch) -> Writer:
    made = Writer(plan(study))
    monkeypatch.setattr(module, "LocalRunner", lambda _: made)
    return made


def stoppable(command: Callable[[Sequence[str], Path], int], writer: Writer) -> Any:
    """A runner with another command; `stop` is the writer's."""
    runner = Mock(side_effect=command)
    runner.stop = writer.stop
    return runner


class Again:
    """Which stages of a study run again."""

    def __init__(self, study: StudyConfig, writer: Writer) -> None:
        self.study, self.writer = study, writer

    def run(self) -> list[str]:
        """-> the stages that ran."""
        self.writer.ran.clear()
        run_study(self.study)
        return self.writer.ran

    def done(self) -> list[bool]:
        return [state.is_done for state in states(self.study)]


@pytest.fixture
def again(study: StudyConfig, writer: Writer) -> Again:
    return Again(study, writer)


def test_nothing_runs_again_if_nothing_changed(again: Again):
    assert again.done() == [False] * 3
    assert sorted(again.run()) == ["align", "cells", "tau"]
    assert again.done() == [True] * 3
    assert again.run() == []


def test_another_content_runs_the_stage_and_those_that_depend_on_it(again: Again):
    again.run()
    Path("data/corpus.jsonl").write_text("another")
    again.writer.written["align"] = "another draft"
    assert again.done() == [False, False, True]
    assert again.run() == ["align", "tau"]


def test_a_stage_whose_inputs_are_made_again_as_they_were_is_left_alone(again: Again):
    again.run()
    Path("data/corpus.jsonl").write_text("another")
    assert again.run() == ["align"]
    assert again.done() == [True] * 3


def test_a_new_date_of_the_same_content_runs_nothing(again: Again):
    again.run()
    Path("data/corpus.jsonl").touch()
    assert again.run() == []


def test_another_setting_runs_its_stage(again: Again):
    again.run()
    values = tiny_study()
    values["stages"]["cells"]["set"]["num_examples"] = 9
    again.study = validate(StudyConfig, values)
    assert again.done() == [True, True, False]
    assert again.run() == ["cells"]


def test_an_output_that_is_gone_is_made_again(again: Again):
    again.run()
    Path("runs/tiny/cells/rows.jsonl").unlink()
    assert again.run() == ["cells"]


def test_what_a_stopped_study_had_finished_is_kept(again: Again):
    again.run()
    Path("data/prompts.jsonl").write_text("another")
    again.writer.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        again.run()
    assert again.writer.was_stopped
    assert again.done() == [True, False, False]
    Path("data/prompts.jsonl").write_text("")
    assert not again.done()[2], "it may have written over what it had"


def test_a_study_that_is_stopped_leaves_no_stage_running(
    study: StudyConfig, writer: Writer, monkeypatch: pytest.MonkeyPatch
):
    both_run, ended = threading.Barrier(2), threading.Event()

    def command(command: Sequence[str], log: Path) -> int:
        both_run.wait(10)
        if Path(command[2]).stem == "align":
            raise KeyboardInterrupt
        while not writer.was_stopped:
            time.sleep(0.01)
        time.sleep(0.1)  # a process takes a while to end
        ended.set()
        return -15

    monkeypatch.setattr(module, "LocalRunner", lambda _: stoppable(command, writer))
    with pytest.raises(KeyboardInterrupt):
        run_study(study.model_copy(update={"workers": 2}))
    assert ended.is_set()


def test_a_mark_that_is_damaged_stands_for_no_run(again: Again):
    again.run()
    Path("runs/tiny/stages/cells.json").write_text("{torn")
    assert again.done() == [True, True, False]


def test_a_failure_names_its_stage_and_keeps_the_others(study: StudyConfig, writer: Writer):
    writer.failing.add("cells")
    with pytest.raises(
        StudyError, match=r"stage cells failed: no more memory; .* fix the cause and run the"
    ):
        run_study(study)
    assert writer.was_stopped
    done = {state.stage.name: state.is_done for state in states(study)}
    assert (done["align"], done["cells"]) == (True, False)
    writer.failing.clear()
    writer.ran.clear()
    run_study(study)
    assert "align" not in writer.ran
    assert "cells" in writer.ran


def test_a_crash_in_a_stages_thread_is_raised_as_it_is(study: StudyConfig, writer: Writer):
    writer.error = ZeroDivisionError("a bug")
    with pytest.raises(ZeroDivisionError, match=r"^a bug$"):
        run_study(study)


def test_progress_is_in_expected_minutes_and_never_above_the_total(
    study: StudyConfig, writer: Writer
):
    seen: list[tuple[float, float]] = []
    run_study(study, progress=lambda _, done, total, note="": seen.append((done, total)))
    assert seen
    assert all(0 <= done <= total for done, total in seen)
    assert all(total > 0 for _, total in seen), "also of stages that take no time"


def test_two_studies_do_not_share_a_directory(study: StudyConfig, writer: Writer):
    with RunDirectory(study.output).alone(), pytest.raises(ConfigError, match="another process"):
        run_study(study)
    assert writer.ran == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"inputs": ["nothing"]},
            "stage align needs nothing, which is not there; make the tiny models",
        ),
        ({"inputs": ["data"]}, "stage align needs data, which is a directory; name the files"),
        (
            {"inputs": ["$output/cells/rows.jsonl"]},
            "stage align needs runs/tiny/cells/rows.jsonl, which cells writes; move cells up",
        ),
    ],
)
def test_inputs_are_checked_before_anything_runs(
    study: StudyConfig, writer: Writer, change: dict[str, Any], said: str
):
    values = tiny_study()
    values["stages"]["align"] |= change
    changed = validate(StudyConfig, values)
    with pytest.raises(UsageError, match=said):
        run_study(changed)
    assert writer.ran == []
    with pytest.raises(UsageError):
        check_inputs(changed, plan(changed))


TEST = {"kind": "paired", "figure": "quality", "first": {}, "than": 1.0, "matters": 0.1}


def claims_file(folder: Path, *claims: dict[str, Any]) -> Path:
    path = folder / "claims.yaml"
    path.write_text(yaml.safe_dump({"claims": list(claims)}))
    return path


def test_a_claim_that_does_not_fit_the_rows_is_not_measured_and_costs_no_row(
    study: StudyConfig, writer: Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    rows = [study_row({"calls": [1.0] * 20})]
    monkeypatch.setattr(session, "collect", lambda *_: rows)
    _, (found,) = run_and_judge(study, "tiny", claims=claims_file(tmp_path, claim(TEST)))
    assert (found.verdict, found.num_units) == (UNMEASURED, 0)
    assert "quality needs score, which a row of" in found.reason
    assert read_rows(study.output / "rows.jsonl") == rows


def test_rows_of_all_stages_are_written_and_its_claims_are_judged_once(
    study: StudyConfig, writer: Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Two stages measure other examples at the same setting, and the first alone is noisy."""
    made = [
        study_row({"score": [0.5 + 1.2 * (n % 2) for n in range(8)]}, range(8)),
        study_row({"score": [2.5] * 200}, range(8, 208)),
    ]
    judged: list[Sequence[Row]] = []

    def collected(_name: str, _output: Path, stages: Sequence[PlannedStage]) -> list[Row]:
        assert sorted(writer.ran) == sorted(stage.name for stage in stages)
        assert writer.was_stopped
        with (
            pytest.raises(ConfigError, match="another process"),
            RunDirectory(study.output).alone(),
        ):
            pass
        return made

    def counted(file: Any, rows: Sequence[Row]) -> list[Finding]:
        assert read_rows(study.output / "rows.jsonl") == made
        judged.append(rows)
        return judge(file, rows)

    monkeypatch.setattr(session, "collect", collected)
    monkeypatch.setattr(session, "judge", counted)
    other = claim(TEST, id="other", study="unmeasured")
    rows, findings = run_and_judge(study, "tiny", claims=claims_file(tmp_path, claim(TEST), other))
    assert rows == made
    assert judged == [made]
    assert [(one.claim.id, one.verdict) for one in findings] == [("one", HOLDS)]


def test_a_study_without_claims_has_no_verdicts(
    study: StudyConfig, writer: Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(session, "collect", lambda *_: [study_row({"score": [1.0]})])
    _, findings = run_and_judge(study, "tiny", claims=tmp_path / "none.yaml")
    assert findings == []
    assert sorted(writer.ran) == ["align", "cells", "tau"]


def test_a_later_place_overrides_an_earlier_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="no rows of a study in runs/studies; run one"):
        row_files()
    for place in ("released/a", "released/b", "runs/studies/b", "runs/studies/b/smoke"):
        name = "rows.jsonl.gz" if place.startswith("released") else "rows.jsonl"
        write_rows(tmp_path / place / name, [])
    assert row_files() == [Path("runs/studies/b/rows.jsonl")]
    files = row_files([Path("released"), Path("runs/studies/b")])
    assert files[:2] == [Path("released/a/rows.jsonl.gz"), Path("runs/studies/b/rows.jsonl")]


def test_published_verdicts_stand_for_studies_without_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """What is read is what was written; a claim that has changed since is not measured."""
    monkeypatch.chdir(tmp_path)
    rows = [study_row({"score": [2.0 + n / 100 for n in range(20)]})]
    file = claims_file(tmp_path, claim(TEST), claim(TEST, id="changed"), claim(TEST, id="new"))
    findings = judge(read_claims(file), rows)
    monkeypatch.setattr(session, "VERDICTS", tmp_path / "verdicts.json")
    write_verdicts(findings[:2], tmp_path)
    changed = claim(TEST | {"matters": 0.5}, id="changed")
    file = claims_file(tmp_path, claim(TEST), changed, claim(TEST, id="new"))
    found, (same, other, new) = current_verdicts(None, file)
    assert found == []
    fourth = claims_file(tmp_path, *(claim(TEST, id=name) for name in "abc"), claim(TEST))
    assert "there are more claims since" in current_verdicts(None, fourth)[1][-1].reason
    assert (same.verdict, same.num_units, same.command) == (
        findings[0].verdict, findings[0].num_units, findings[0].command
    )  # fmt: skip
    assert same.effect == pytest.approx(findings[0].effect, rel=1e-5)
    assert other.reason == "the claim has changed since it was judged; run its study"
    assert new.reason == "it was not judged yet; run its study"
    assert other.verdict == new.verdict == UNMEASURED
    table = as_markdown(findings)
    assert f"| `one` | {findings[0].claim.here} | {findings[0].effect_text} |" in table


def test_a_directory_counts_only_for_the_study_of_its_name_unless_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A run of tiny with other models, in another directory, is no evidence on its claims."""
    monkeypatch.chdir(tmp_path)
    own, other = study_row({"score": [1.0]}), study_row({"score": [2.0]})
    write_rows(Path("runs/studies/tiny/rows.jsonl"), [own])
    write_rows(Path("runs/studies/mine/rows.jsonl"), [other])
    assert study_rows() == [own]
    assert study_rows([Path("runs/studies/mine")]) == [other]
    assert study_rows([Path("runs/studies/mine/rows.jsonl")]) == [other]
    assert study_rows([Path("runs/studies")]) == [other, own]


def test_all_claims_are_judged_from_rows_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "rows.jsonl", [study_row({"score": [0.5, 1.7] * 4})])
    file = claims_file(tmp_path, claim(TEST), claim(TEST, id="two", study="other"))
    rows = study_rows([tmp_path / "rows.jsonl"])
    findings = judge_all(rows, file)
    assert [one.verdict for one in findings] == [UNDECIDED, UNMEASURED]
    assert json.loads((tmp_path / "rows.jsonl").read_text())["study"] == "tiny"


FOREIGN = {
    "rows.jsonl": "precious\n",
    "stages/align.json": '{"image": 1}',
    "stages/align.yaml": "precious: 1\n",
    "logs/align.log": "precious\n",
}


@pytest.mark.parametrize("names", [list(FOREIGN), ["rows.jsonl"], ["logs/align.log"]])
def test_a_directory_with_other_files_is_no_output_of_a_study(
    study: StudyConfig, writer: Writer, names: list[str]
):
    for name in names:
        (study.output / name).parent.mkdir(parents=True, exist_ok=True)
        (study.output / name).write_text(FOREIGN[name])
    with pytest.raises(ConfigError, match=r"holds .* and no stage of a study; choose another"):
        run_and_judge(study, "tiny")
    assert not writer.ran
    assert {name: (study.output / name).read_text() for name in names} == {
        name: FOREIGN[name] for name in names
    }


def test_a_study_runs_after_another_scale_of_it(study: StudyConfig, writer: Writer):
    smoke = study.model_copy(update={"output": study.output / "smoke"})
    writer.stages = {stage.name: stage for stage in plan(smoke)}
    run_study(smoke)
    writer.stages = {stage.name: stage for stage in plan(study)}
    run_study(study)
    assert sorted(writer.ran) == sorted(2 * list(writer.stages))


def test_a_file_in_the_place_of_a_scale_is_not_of_a_study(study: StudyConfig, writer: Writer):
    (study.output / "smoke").mkdir(parents=True)
    (study.output / "smoke" / "precious").touch()
    with pytest.raises(ConfigError, match="holds smoke and no stage of a study"):
        run_study(study)
    assert not writer.ran


def test_a_model_of_several_files_is_named_by_its_directory(study: StudyConfig, tmp_path: Path):
    (tmp_path / "data" / "target" / "model.safetensors").unlink()
    (tmp_path / "data" / "target" / "config.json").touch()
    with pytest.raises(UsageError, match=r"is not there; name .*target in the stage's inputs"):
        check_inputs(study, plan(study))


@pytest.mark.parametrize("left", [[".tmp"], ["stages/align.json", "align/x"]])
def test_a_study_that_was_killed_early_goes_on(study: StudyConfig, writer: Writer, left: list[str]):
    for name in left:
        (study.output / name).parent.mkdir(parents=True, exist_ok=True)
        (study.output / name).write_text('{"digest": "0", "folder": "align"}')
    run_study(study)
    assert "align" in writer.ran
