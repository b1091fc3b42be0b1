"""What stops a run of training, and runs that were stopped or have ended and are started again."""

import json
import os
import shutil
import signal
import threading
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.environment import begin
from paceline.errors import ConfigError, PromptError, TrainingError, UsageError
from paceline.records import read_jsonl
from paceline.train import align, loop
from paceline.train.checkpoint import read_state
from paceline.train.loop import LossGuard, StopRequest
from paceline.train.step import StepFigures
from support.data import write_lines
from support.runs import align_config, held_out, losses

STEADY: dict[str, Any] = {"kind": "adamw", "learning_rate": 3e-3, "warmup_fraction": 0}
STEADY["schedule"] = {"kind": "constant"}


def test_a_finished_run_is_left_alone_and_a_longer_one_goes_on(folder: Path, tmp_path: Path):
    out = tmp_path / "run"
    align(align_config(folder, out, num_steps=3))
    before = (out / "metrics.jsonl").read_bytes(), (out / "result.json").read_bytes()
    align(align_config(folder, out, num_steps=3), resume=True)
    assert ((out / "metrics.jsonl").read_bytes(), (out / "result.json").read_bytes()) == before
    align(align_config(folder, out, num_steps=5), resume=True)
    assert len(losses(out)) == 5
    assert json.loads((out / "result.json").read_text())["num_steps"] == 5


def test_a_longer_run_that_is_stopped_is_not_taken_for_finished(folder: Path, tmp_path: Path):
    """The result of the shorter one lies there, beside the manifest of the longer one."""
    out = tmp_path / "run"
    align(align_config(folder, out, num_steps=3))

    def interrupt(stage: str, *_: object) -> None:
        if stage == "training":
            os.kill(os.getpid(), signal.SIGINT)

    longer = align_config(folder, out, num_steps=8)
    with pytest.raises(TrainingError, match="stopped after step"):
        align(longer, resume=True, progress=interrupt)
    align(longer, resume=True)
    assert len(losses(out)) == 8
    assert json.loads((out / "result.json").read_text())["num_steps"] == 8


def test_a_run_is_not_gone_on_with_on_another_text_or_with_other_models(
    folder: Path, tmp_path: Path
):
    corpus = tmp_path / "corpus.jsonl"
    shutil.copy(folder / "corpus.jsonl", corpus)
    target = shutil.copytree(folder / "target", tmp_path / "target")
    draft = shutil.copytree(folder / "draft", tmp_path / "draft")
    changes = {"data": {"train": str(corpus)}, "target": str(target), "draft": str(draft)}
    run = align(align_config(folder, tmp_path / "run", num_steps=2, **changes))
    text = corpus.read_text()
    for num_steps in (2, 4):  # ended, or to go on
        config = align_config(folder, run, num_steps=num_steps, **changes)
        corpus.write_text(text + text.splitlines()[0] + "\n")
        with pytest.raises(ConfigError, match=r"with another data\.train: files have changed"):
            align(config, resume=True)
        corpus.write_text(text)
        for name in ("target", "draft"):
            settings = tmp_path / name / "config.json"
            before = settings.read_text()
            settings.write_text(before + "\n")
            with pytest.raises(ConfigError, match=f"with another {name}: files have changed"):
                align(config, resume=True)
            settings.write_text(before)
    corpus.unlink()
    shutil.rmtree(target)
    shutil.rmtree(draft)
    align(align_config(folder, run, num_steps=2, **changes), resume=True)  # it has ended
    assert len(losses(run)) == 2
    with pytest.raises(UsageError, match=r"target does not exist; name"):
        align(config, resume=True)
    shutil.copy(folder / "corpus.jsonl", corpus)
    shutil.copytree(folder / "target", target)
    shutil.copytree(folder / "draft", draft)
    align(config, resume=True)
    assert len(losses(run)) == 4


def test_a_run_goes_on_by_its_directory_alone_and_where_its_files_have_moved_to(
    folder: Path, tmp_path: Path
):
    """As on another machine: the configuration is that of the run, with the paths of today."""
    before, after = tmp_path / "before", tmp_path / "after"
    shutil.copytree(folder, before)
    align(align_config(before, tmp_path / "run", num_steps=3))
    before.rename(after)
    out = (tmp_path / "run").rename(tmp_path / "moved")
    words = ["align", "--resume", "--output", str(out), "--num-steps", "5"]
    assert isinstance(CliRunner().invoke(app, words).exception, UsageError)  # the paths are gone
    words += ["--target", str(after / "target"), "--draft", str(after / "draft")]
    words += ["--set", f"data.train={after / 'corpus.jsonl'}"]
    refused = CliRunner().invoke(app, [*words, "--set", "max_completion_tokens=7"]).exception
    assert isinstance(refused, ConfigError)
    assert "(max_completion_tokens was 11, is now 7)" in str(refused)
    assert CliRunner().invoke(app, words).exit_code == 0
    for num_steps in (3, 5):
        align(align_config(after, tmp_path / "still", num_steps=num_steps), resume=True)
    assert losses(out) == losses(tmp_path / "still")


def test_ctrl_c_saves_says_how_to_go_on_and_costs_nothing(folder: Path, tmp_path: Path):
    whole = align(align_config(folder, tmp_path / "whole", recipe="imit_kd"))
    config = align_config(folder, tmp_path / "cut", recipe="imit_kd")
    calls = 0

    def interrupt(stage: str, done: float, total: float, note: str = "") -> None:
        nonlocal calls
        calls += stage == "training"
        if calls == 4:
            calls += 1
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(TrainingError, match=r"stopped after step 4 .* resume the run") as caught:
        align(config, progress=interrupt)
    assert "step-00000004" in str(caught.value)
    assert losses(align(config, resume=True)) == losses(whole)


def test_a_resumed_run_has_what_is_left_of_its_seconds(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    clock = count()  # each look at it takes a second
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    budget = {"num_steps": None, "max_seconds": 40.0, "checkpoints": {"every_seconds": None}}
    whole = align(align_config(folder, tmp_path / "whole", **budget))
    config, steps = align_config(folder, tmp_path / "cut", **budget), count()

    def interrupt(stage: str, *_: object) -> None:
        if stage == "training" and next(steps) == 4:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(TrainingError, match="stopped after step"):
        align(config, progress=interrupt)
    found = losses(align(config, resume=True))
    assert len(losses(whole)) > 8
    assert abs(len(found) - len(losses(whole))) <= 1


def test_pretraining_text_goes_on_where_it_was(folder: Path, tmp_path: Path):
    """Through several epochs of it, each with a mark, in a run that is stopped twice."""
    texts = [{"text": f"{word} " * 9} for word in ("the cat", "a hat", "one pan", "no inn")]
    known = write_lines(tmp_path / "known.jsonl", *texts)
    data = {"train": str(folder / "corpus.jsonl"), "pretraining": str(known)}
    changes = {"data": data | {"pretraining_fraction": 0.5}, "optimizer": STEADY}
    whole = align(align_config(folder, tmp_path / "whole", num_steps=14, **changes))
    for num_steps in (5, 11, 14):
        run = align(
            align_config(folder, tmp_path / "run", num_steps=num_steps, **changes), resume=True
        )
    assert losses(run) == losses(whole)
    assert read_jsonl(run / "packing.jsonl"), "an epoch is shorter than that"


def test_a_mistake_that_set_up_finds_leaves_the_directory_free(folder: Path, tmp_path: Path):
    corpus = str(folder / "corpus.jsonl")
    wrong = {"train": corpus, "held_out": str(folder / "nothing.jsonl")}
    with pytest.raises(PromptError, match="no file or directory at"):
        align(align_config(folder, tmp_path / "run", **held_out(folder) | {"data": wrong}))
    failure = patch("paceline.train.evaluation.AgreementEvaluator", side_effect=KeyboardInterrupt)
    with failure, pytest.raises(KeyboardInterrupt):
        align(align_config(folder, tmp_path / "run", **held_out(folder)))
    assert (tmp_path / "run" / "held_out.jsonl").exists(), "the target wrote before that"
    other = held_out(folder, max_new_tokens=5)
    run = align(align_config(folder, tmp_path / "run", num_steps=1, **other))
    texts = read_jsonl(run / "held_out.jsonl")
    assert max(len(row["completion"]) for row in texts) <= 5, "not those of the first try"


def test_a_prompt_without_completion_is_found_before_the_first_step(folder: Path, tmp_path: Path):
    """A run could not be gone on with on a mended text."""
    rows = [{"prompt": "the cat", "completion": " sat"}, {"prompt": "a hat"}]
    data = {"train": str(write_lines(tmp_path / "pairs.jsonl", *rows))}
    for fraction in (0.1, 1.0):
        config = align_config(folder, tmp_path / "run", data=data, fixed_fraction=fraction)
        with pytest.raises(PromptError, match="has a prompt but no completion"):
            align(config)
    align(align_config(folder, tmp_path / "run", data=data, fixed_fraction=0.0, num_steps=1))


@pytest.mark.filterwarnings("ignore:the chat template gets the date")
def test_a_run_that_goes_on_on_another_day_writes_the_date_of_its_beginning(
    folder: Path, tmp_path: Path
):
    pair = shutil.copytree(folder, tmp_path / "pair")
    for name in ("target", "draft"):
        template = "{{ strftime_now('%d %b') }}{% for m in messages %}<{{ m.content }}{% endfor %}"
        (pair / name / "chat_template.jinja").write_text(template)
    said = [{"role": r, "content": c} for r, c in (("user", "a cat"), ("assistant", "an inn"))]
    write_lines(pair / "corpus.jsonl", *[{"messages": said}] * 4)

    def run(name: str, day: str, num_steps: int = 4) -> list[float]:
        changes = {"num_steps": num_steps, "max_prompt_tokens": 30, "optimizer": STEADY}
        config = align_config(pair, tmp_path / name, **changes)
        with begin({"environment": {"began": day}}):
            return losses(align(config, resume=True))

    days = "2026-11-28 23:59:59", "2026-11-29 00:00:01"
    first, second = (run(f"whole {day}", day) for day in days)
    assert run("run", days[0], 2) == first[:2] != second[:2]
    assert run("run", days[1]) == first
    manifest = tmp_path / "run" / "manifest.json"
    assert json.loads(manifest.read_text())["environment"]["began"] == days[0]
    manifest.write_text(manifest.read_text().replace('"began"', '"earlier"'))
    assert len(run("run", days[1], 5)) == 5  # of a version that did not record it
    assert json.loads(manifest.read_text())["environment"]["began"] == days[1]


def test_a_finish_on_another_scale_is_no_explosion(folder: Path, tmp_path: Path):
    """TVD is at most its weight of 0.01; the forward KL of this pair begins near 10."""
    finish = {"objective": "forward_kl", "begin": 0.6}
    changes = {"objective": {"kind": "tvd", "weight": 0.01}, "finish": finish}
    run = align(align_config(folder, tmp_path / "run", num_steps=50, **changes))
    assert max(losses(run)[:30]) < 0.01
    assert min(losses(run)[-3:]) > 0.1, "ten times the usual loss, three times in a row"


def test_a_run_that_is_resumed_knows_which_objective_its_recent_losses_are_of(
    folder: Path, tmp_path: Path
):
    changes = {"objective": {"kind": "tvd", "weight": 0.01}, "max_loss_ratio": 10.0}
    changes["finish"] = {"objective": "forward_kl", "begin": 0.5}
    often = {"checkpoints": {"every_steps": 25}}
    whole = align(align_config(folder, tmp_path / "run", num_steps=50, **changes, **often))
    states = [read_state(path) for path in sorted((whole / "checkpoints").iterdir())]
    assert [(state.phase, len(state.recent_losses)) for state in states] == [(0, 25), (1, 25)]
    shutil.rmtree(whole / "checkpoints" / "step-00000050")
    (whole / "result.json").unlink()
    before = losses(whole)
    assert (
        losses(align(align_config(folder, whole, num_steps=50, **changes), resume=True)) == before
    )


SAVED = Path("runs/x/checkpoints/step-00000040")


def figures(loss: float = 1.0, norm: float = 1.0) -> StepFigures:
    return StepFigures(loss=loss, gradient_norm=norm, num_tokens=1, chunk_tokens=256)


def settled() -> LossGuard:
    return LossGuard(10.0, [1.0] * 30)


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_stops_at_once_and_names_step_and_checkpoint(loss: float):
    said = f"became {loss} at step 41; .* {SAVED}/model; restart from it"
    with pytest.raises(TrainingError, match=said):
        settled().check(41, figures(loss), SAVED)
    with pytest.raises(TrainingError, match="no checkpoint was saved yet"):
        settled().check(1, figures(loss), None)


def test_an_explosion_is_three_steps_above_ten_times_the_median():
    guard = settled()
    guard.check(1, figures(10.5), SAVED)
    assert not guard.calm
    guard.check(2, figures(1e6), SAVED)
    with pytest.raises(TrainingError, match="exploded: 11 at step 3, median 1"):
        guard.check(3, figures(11.0), SAVED)


@pytest.mark.parametrize(
    ("guard", "given"),
    [
        (settled(), [50.0 if step % 3 == 2 else 1.0 for step in range(20)]),
        (LossGuard(10.0), [1.0, 100.0, 100.0, 100.0, 100.0]),
        (LossGuard(2.0), [1.01**step for step in range(300)]),
    ],
    ids=["one strange batch", "a young run", "a median that moves"],
)
def test_some_losses_are_no_explosion(guard: LossGuard, given: list[float]):
    for step, loss in enumerate(given):
        guard.check(step, figures(loss), SAVED)
    assert guard.calm


@pytest.mark.parametrize("median", [-1e-9, 0.0, 1e-7])
def test_a_loss_near_zero_does_not_explode_by_rounding(median: float):
    guard = LossGuard(10.0, [median] * 30)
    for step in range(20):
        guard.check(step, figures(2e-6), SAVED)
        assert guard.calm
    for step in (21, 22):
        guard.check(step, figures(0.5), SAVED)
    with pytest.raises(TrainingError, match=r"exploded: 0\.5 at step 23"):
        guard.check(23, figures(0.5), SAVED)


@pytest.mark.parametrize(("usual", "above"), [(100.0, 1001.0), (0.01, 0.2)])
def test_a_loss_of_another_objective_is_compared_with_losses_of_its_own(usual: float, above: float):
    guard = settled()
    for step in range(1, 31):  # a hundred times the first objective's, or its hundredth
        guard.check(step, figures(usual), SAVED, phase=1)
    assert guard.calm
    assert (guard.phase, list(guard.recent)) == (1, [usual] * 30)
    for step in (31, 32):
        guard.check(step, figures(above), SAVED, phase=1)
    with pytest.raises(TrainingError, match=f"exploded: {above:g} at step 33, median {usual:g}"):
        guard.check(33, figures(above), SAVED, phase=1)


def test_a_gradient_that_is_no_number_three_times_in_a_row_ends_the_run():
    guard = settled()
    for norms in ([float("nan"), float("inf"), 1.0], [float("inf")] * 2):
        for norm in norms:
            guard.check(1, figures(norm=norm), SAVED)
    with pytest.raises(TrainingError, match="gradient was not finite in 3 steps, up to step 9"):
        guard.check(9, figures(norm=float("nan")), SAVED)


def test_ctrl_c_is_a_wish_and_the_second_one_an_order():
    before = signal.getsignal(signal.SIGINT)
    with StopRequest() as request:
        signal.raise_signal(signal.SIGINT)
        assert request.asked
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_outside_the_main_thread_signals_are_left_alone():
    seen: list[bool] = []

    def work() -> None:
        with StopRequest() as request:
            seen.append(request.asked)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False]
