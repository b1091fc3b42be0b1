import gc
import json
import math
import multiprocessing
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock, patch

import pytest
import torch
from scipy import stats

from paceline.config import validate
from paceline.core.bootstrap import mean_interval
from paceline.environment import begin
from paceline.errors import ConfigError, DivergedError, UsageError
from paceline.train import evaluation
from paceline.train.align import align
from paceline.train.optim import Adafactor
from paceline.train.sweep import Sweep, SweepConfig, _merged, cells_of, sweep
from support.runs import align_config


def config(folder: Path, output: Path, **changes: Any) -> SweepConfig:
    corpus = str(folder / "corpus.jsonl")
    small = {"num_prompts": 3, "max_prompt_tokens": 4, "max_new_tokens": 6, "gamma": 2}
    held_out = {"data": {"train": corpus, "held_out": corpus}, "evaluation": small}
    run = align_config(folder, output, num_steps=2, **held_out).model_dump(mode="json")
    values: dict[str, Any] = {
        "output": str(output),
        "base": {key: run[key] for key in run if key not in ("output", "seed", "objective")},
        "rows": {"kl": {"objective": "forward_kl"}, "tvd": {"objective": "tvd"}},
        "columns": {"fixed": {"fixed_fraction": 1.0}, "target": {"fixed_fraction": 0.0}},
        "seeds": [0, 1],
    }
    return validate(SweepConfig, values | changes)


class Swept(NamedTuple):
    """A sweep that has ended, and what was done on the way."""

    config: SweepConfig
    found: Sweep
    seeds_written: list[int]
    num_batches_written: int


@pytest.fixture(scope="module", autouse=True)
def _what_is_there_stays() -> None:
    """Each run of a sweep ends with a collection of garbage, which looks at less then."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def swept(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Swept:
    made = config(folder, tmp_path_factory.mktemp("swept") / "out")
    with watched_writing() as (written, sample):
        found = sweep(made)
    return Swept(made, found, written, sample.call_count)


def one_cell(swept: Swept) -> dict[str, Any]:
    """A part of the grid; looking at a run that has ended takes half a second."""
    made = swept.config
    return {"rows": {"kl": made.rows["kl"]}, "columns": {"fixed": made.columns["fixed"]}}


def figures_of(found: Sweep) -> dict[tuple[str, str, int], float | None]:
    """The compared figure of each run."""
    return {
        (str(row.setting["row"]), str(row.setting["column"]), seed): value
        for row in found.rows
        for seed, value in zip(row.units, row.sums[found.figure], strict=True)
    }


@contextmanager
def watched_writing() -> Iterator[tuple[list[int], Mock]]:
    """The seeds of held-out texts that are written, and the calls that write them."""
    written: list[int] = []
    write, sample = evaluation._text, Mock(wraps=evaluation.sample_completions)

    def counting(*args: Any) -> str:
        written.append(args[3])
        return write(*args)

    with (
        patch.object(evaluation, "_text", counting),
        patch.object(evaluation, "sample_completions", sample),
    ):
        yield written, sample


@pytest.mark.slow
def test_a_sweep_is_its_runs_and_what_has_ended_is_not_made_again(swept: Swept):
    out, found = swept.config.output, swept.found
    began = json.loads((out / "manifest.json").read_text())["environment"]["began"]
    assert len(figures_of(found)) == 2 * 2 * 2
    for (row, column, seed), value in figures_of(found).items():
        run = out / row / column / f"seed-{seed}"
        whole = json.loads((run / "manifest.json").read_text())
        manifest, environment = whole["config"], whole["environment"]
        assert environment["began"] == began
        assert manifest["objective"][0]["kind"] == {"kl": "forward_kl", "tvd": "tvd"}[row]
        assert manifest["fixed_fraction"] == {"fixed": 1.0, "target": 0.0}[column]
        assert manifest["seed"] == seed
        assert (
            json.loads((run / "result.json").read_text())["after"]["expected_acceptance"] == value
        )
    stamps = {path: path.stat().st_mtime_ns for path in out.rglob("result.json")}
    part = swept.config.model_copy(update=one_cell(swept))
    with begin({"environment": {"began": "2050-01-01 00:00:00"}}):
        assert figures_of(sweep(part)).items() < figures_of(found).items()
    assert json.loads((out / "manifest.json").read_text())["environment"]["began"] == began
    assert stamps == {path: path.stat().st_mtime_ns for path in stamps}


@pytest.mark.slow
def test_cells_of_one_seed_are_judged_on_one_text_that_the_target_wrote_once(
    swept: Swept, tmp_path: Path
):
    assert swept.seeds_written == [0, 1]
    assert swept.num_batches_written == 2, "three prompts are one batch"
    shared = sorted((swept.config.output / "held_out").iterdir())
    assert len(shared) == 2
    texts = {path.read_text() for path in swept.config.output.rglob("seed-*/held_out.jsonl")}
    assert texts == {path.read_text() for path in shared}
    (cell, *_) = cells_of(swept.config)
    with watched_writing() as (written, _):
        alone = align(cell.config.model_copy(update={"output": tmp_path / "alone"}))
    assert written == [0]
    assert (alone / "held_out.jsonl").read_text() in texts
    assert not (alone.parent / "held_out").exists()


@pytest.mark.slow
def test_two_workers_find_what_one_finds_also_where_one_of_them_dies(
    folder: Path, tmp_path: Path, swept: Swept
):
    columns = one_cell(swept)["columns"]
    made = config(folder, tmp_path / "two", workers=2, columns=columns)
    killed: list[int] = []

    def kill(stage: str, done: int, *_: Any) -> None:
        if done == 1:
            child = multiprocessing.active_children()[0]
            killed.append(child.pid or 0)
            child.kill()

    two, one = figures_of(sweep(made, kill)), figures_of(swept.found)
    assert len(killed) == 1
    assert len(two) == 4
    assert two == pytest.approx({run: one[run] for run in two}, abs=1e-5)
    names = [
        {path.name for path in (output / "held_out").glob("*.jsonl")}
        for output in (swept.config.output, made.output)
    ]
    assert names[0] == names[1]
    assert len(names[0]) == 2


@pytest.mark.slow
def test_what_is_wrong_in_a_worker_is_said_as_one_process_says_it(folder: Path, tmp_path: Path):
    """What is found before a run begins, such as a missing text, needs no worker."""
    frozen = {"frozen": {"freeze_layers": 2}}
    with pytest.raises(UsageError, match="freeze_layers is 2, but the draft has 2 layers"):
        sweep(config(folder, tmp_path / "out", workers=2, columns=frozen))


@pytest.mark.slow
def test_differences_are_paired_by_text_and_seed(swept: Swept):
    made, found = swept.config, swept.found
    values = figures_of(found)
    by_seed = [
        sum((values["tvd", c, seed] or 0) - (values["kl", c, seed] or 0) for c in made.columns) / 2
        for seed in (0, 1)
    ]
    assert found.reference == "kl"
    wanted = mean_interval(torch.tensor(by_seed, dtype=torch.float64))
    assert found.difference("tvd") == pytest.approx(wanted)


def test_a_cell_that_cannot_be_is_said_before_any_run(folder: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match="objective"):
        sweep(config(folder, tmp_path / "out", rows={"a": {}, "b": {"objective": "no such thing"}}))
    assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigError, match="needs evaluation"):
        sweep(config(folder, tmp_path / "out", figure="rule_tvd"))
    with pytest.raises(ConfigError, match=r"seeds \(0, 0\) has duplicates"):
        config(folder, tmp_path / "out", seeds=[0, 0])
    with pytest.raises(ConfigError, match="reference c is not a row"):
        config(folder, tmp_path / "out", reference="c")


def continued(swept: Swept, output: Path, **changes: Any) -> SweepConfig:
    """A sweep in a copy of the runs of another."""
    shutil.copytree(swept.config.output, output)
    return swept.config.model_copy(update={"output": output, **changes})


@pytest.mark.slow
def test_a_cell_that_diverges_is_said_once_and_the_others_are_run(swept: Swept, tmp_path: Path):
    """A mean over runs of other rates would be of nothing."""
    steps = {"kind": "adamw", "learning_rate": 1e30, "warmup_fraction": 0}
    wild = {"objective": "tvd", "optimizer": steps}
    cells = one_cell(swept)
    cells["rows"]["wild"] = wild
    made = continued(swept, tmp_path / "out", **cells)
    found = sweep(made)
    assert math.isnan(found.cell("wild", "fixed").value)
    assert math.isfinite(found.cell("kl", "fixed").value)
    calmer = made.rows | {"wild": wild | {"optimizer": steps | {"learning_rate": 1e-4}}}
    with pytest.raises(ConfigError, match="holds a run with another optimizer"):
        sweep(made.model_copy(update={"rows": calmer}))
    metrics = tmp_path / "out" / "wild" / "fixed" / "seed-0" / "metrics.jsonl"
    metrics.unlink()
    assert figures_of(sweep(made)) == figures_of(found)
    assert not metrics.exists()


@pytest.mark.slow
def test_a_sweep_is_gone_on_with_as_it_began_or_not_at_all(swept: Swept, tmp_path: Path):
    """A mean over runs of another length would be of nothing."""
    longer = continued(swept, tmp_path / "out", base=swept.config.base | {"num_steps": 4})
    with pytest.raises(ConfigError, match=r"another num_steps \(num_steps was 2, is now 4\)"):
        sweep(longer)


@pytest.mark.slow
def test_a_cell_that_diverged_is_tried_again_where_more_is_borne(swept: Swept, tmp_path: Path):
    made = continued(swept, tmp_path / "out", **one_cell(swept))
    with patch("paceline.train.sweep.align", side_effect=DivergedError("the loss went up")):
        assert math.isnan(sweep(made).cell("kl", "fixed").value)
    assert math.isnan(sweep(made).cell("kl", "fixed").value), "it is not begun anew"
    bolder = made.model_copy(update={"base": made.base | {"max_loss_ratio": 99.0}})
    assert math.isfinite(sweep(bolder).cell("kl", "fixed").value)


def test_a_change_within_a_section_leaves_the_rest_of_it(folder: Path, tmp_path: Path):
    other = {"data": {"train": "other.jsonl"}, "optimizer": {"kind": "adafactor"}}
    (cell, *_) = cells_of(config(folder, tmp_path / "out", columns={"other": other}))
    assert cell.config.data.train.path == "other.jsonl"
    assert cell.config.data.held_out is not None
    assert cell.config.optimizer == Adafactor()


def test_a_rule_is_chosen_whole():
    lossy = {"rule": {"rule": "lossy", "alpha": 0.3, "beta": "tuned"}, "loss": "rejection"}
    chow = {"rule": {"rule": "chow_log", "alpha": 2.0}}
    assert _merged({"objective": lossy}, {"objective": chow}) == {
        "objective": chow | {"loss": "rejection"}
    }
    jsd = {"objective": {"kind": "jsd", "beta": 0.3}}
    assert _merged(jsd, {"objective": chow}) == {"objective": chow}
    assert _merged({"objective": lossy}, jsd) == jsd


def test_seeds_come_one_after_the_other(folder: Path, tmp_path: Path):
    seeds = [cell.seed for cell in cells_of(config(folder, tmp_path / "out"))]
    assert seeds == [0] * 4 + [1] * 4


@pytest.mark.parametrize("count", [2, 11])
def test_the_interval_of_a_mean_is_student_s(count: int):
    values = torch.randn(count, generator=torch.Generator().manual_seed(count), dtype=torch.float64)
    got = mean_interval(values)
    error = float(values.std()) / count**0.5
    low, high = stats.t.interval(0.95, count - 1, loc=float(values.mean()), scale=error)
    assert (got.low, got.high) == pytest.approx((low, high), rel=2e-3)


def test_one_value_has_no_interval():
    with pytest.raises(ValueError, match="at least 2 values, got 1"):
        mean_interval(torch.ones(1))
