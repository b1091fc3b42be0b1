"""Rows from what commands write, on small result files made by hand."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from paceline.core.bootstrap import Interval
from paceline.core.rules import Lenient, Opt
from paceline.core.sampling import SamplingParams
from paceline.decode.draft_policies import Confident
from paceline.decode.strategies import Oracle, Speculative
from paceline.errors import UsageError
from paceline.measure.measurement import IntervalRow
from paceline.measure.trajectory import Checkpoint, TextFigures, TrajectoryRow
from paceline.results.row import Row
from paceline.studies.collect import collect
from paceline.studies.plan import PlannedStage
from paceline.studies.rows import StudyRow
from result_rows import ALONE, example, row, write_rows
from tiny import tiny_hf

ENVIRONMENT = {
    "processor": "a processor",
    "processor_level": "avx2",
    "cpu_count": 2,
    "python": "3.11",
    "versions": {"torch": "2"},
    "git": {"commit": "abc", "modified": True},
}


def planned(folder: Path, command: Any, **config: Any) -> PlannedStage:
    return PlannedStage(
        f"{command}-look-0", command, 0, command, config, folder / command, (), (), ("Table 1",),
        {"pair": "small"}, 1.0, 1.0, 1.0,
    )  # fmt: skip


def collected(folder: Path, command: Any, **config: Any) -> list[StudyRow]:
    return collect("mine", folder, [planned(folder, command, **config)])


def manifest(folder: Path, **more: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "manifest.json").write_text(json.dumps({"environment": ENVIRONMENT} | more))


INTERVAL = IntervalRow.of(Interval(1.0, 1.0, 1.0))


def measured(run: str, label: str, *, mark: str = "f", **changes: Any) -> TrajectoryRow:
    """A draft on three prompts."""
    values = {
        "stop": Checkpoint(
            run=Path(run), label=label, step=7, elapsed_s=1.0, path=Path(run), fingerprint=mark
        ),
        "task": "numbers",
        "sampling": SamplingParams(temperature=0.6, top_p=0.9),
        "num_texts": 3,
        "num_tokens": 6,
        "parameter_ratio": 0.25,
        "expected_acceptance": INTERVAL,
        "block_efficiency": {2: INTERVAL},
        "gain": {} if label == "start" else {2: INTERVAL},
        "mbsu": {2: 1.0},
        "texts": TextFigures(
            tokens=(1, 2, 3),
            acceptance=(0.5, 1.0, 1.5),
            agreement=(1, 1, 2),
            emitted={2: (1, 2, 3)},
            blocks={2: (1, 1, 2)},
        ),
    }
    return TrajectoryRow(**values | changes)


def trajectory(folder: Path, *rows: TrajectoryRow, **config: Any) -> list[StudyRow]:
    manifest(folder / "trajectory", target_fingerprint="t1")
    lines = [json.dumps(one.model_dump(mode="json")) + "\n" for one in rows]
    (folder / "trajectory/rows.jsonl").write_text("".join(lines))
    return collected(folder, "trajectory", **config)


def test_a_draft_of_a_trajectory_has_the_sums_of_its_texts(tmp_path: Path):
    (found,) = trajectory(tmp_path, measured("runs/align", "end"), skip_prompts=40)
    assert found.units == (40, 41, 42)
    assert found.sums == {
        "tokens": (1, 2, 3),
        "acceptance": (0.5, 1.0, 1.5),
        "agreement": (1, 1, 2),
        "emitted_2": (1, 2, 3),
        "blocks_2": (1, 1, 2),
    }
    assert found.setting == {
        "pair": "small",
        "task": "numbers",
        "label": "end",
        "step": 7,
        "parameter_ratio": 0.25,
        "draft": "align",
        "temperature": 0.6,
        "top_p": 0.9,
    }
    assert (found.study, found.covers, found.population) == (
        "mine", ("Table 1",), "prompts of numbers"
    )  # fmt: skip


def test_a_draft_whose_own_answers_were_scored_has_their_scores(tmp_path: Path):
    texts = measured("run", "end").texts.model_copy(update={"score": (0.5, 0.0, 1.0)})
    (found,) = trajectory(tmp_path, measured("run", "end", texts=texts))
    assert found.sums["score"] == (0.5, 0.0, 1.0)


def test_a_row_says_where_it_comes_from(tmp_path: Path):
    (found,) = trajectory(tmp_path, measured("runs/align", "end"))
    source = found.source
    assert (source.stage, source.commit, source.modified) == ("trajectory-look-0", "abc", True)
    assert source.command == (
        f"paceline trajectory --config {tmp_path}/stages/trajectory-look-0.yaml"
    )
    assert source.machine == "a processor (avx2, 2 cores)"
    assert source.versions == {"python": "3.11", "torch": "2"}
    assert source.fingerprints == {"target_fingerprint": "t1"}


def test_a_row_names_the_gpu_if_one_was_used(tmp_path: Path):
    manifest(tmp_path / "bench", environment=ENVIRONMENT | {"gpu": "NVIDIA H100"})
    write_rows(tmp_path / "bench", [row(ALONE, [example()])])
    (found,) = collected(tmp_path, "bench")
    assert found.source.machine == "a processor (avx2, 2 cores), NVIDIA H100"


def test_runs_of_a_sweep_have_its_names_and_share_one_initial_draft(tmp_path: Path):
    runs = [
        f"runs/recipes/{recipe}/text/seed-{seed}" for recipe in ("gkd", "kd") for seed in (0, 1)
    ]
    rows = [measured(run, label) for run in runs for label in ("start", "end")]
    found = trajectory(tmp_path, *rows)
    starts = [one for one in found if one.setting["label"] == "start"]
    assert len(starts) == 1
    assert not {"draft", "seed", "step"} & starts[0].setting.keys()
    ends = [one.setting for one in found if one.setting["label"] == "end"]
    assert [(one["draft"], one["trained_on"], one["seed"]) for one in ends] == [
        ("gkd", "text", 0), ("gkd", "text", 1), ("kd", "text", 0), ("kd", "text", 1)
    ]  # fmt: skip


def test_initial_drafts_that_differ_have_names(tmp_path: Path):
    rows = [measured(run, "start", mark=run) for run in ("runs/a", "runs/b")]
    names = [one.setting["draft"] for one in trajectory(tmp_path, *rows)]
    assert names == ["start of a", "start of b"]


def test_a_draft_is_no_initial_one_because_its_texts_are_too_short_for_tau(tmp_path: Path):
    short = measured("runs/a", "end", gain={}, block_efficiency={}, mbsu={})
    (found,) = trajectory(tmp_path, short)
    assert found.setting["label"] == "end"


def test_rows_of_an_older_trajectory_are_refused(tmp_path: Path):
    trajectory(tmp_path)
    (tmp_path / "trajectory/rows.jsonl").write_text('{"schema_version": 0}\n')
    with pytest.raises(UsageError, match="has rows of an older Paceline; remove it and run"):
        collected(tmp_path, "trajectory")


def cells(folder: Path, *rows: Row) -> list[Row]:
    manifest(folder / "bench", context="c0ffee")
    write_rows(folder / "bench", rows)
    return collected(folder, "bench")


def test_a_cell_of_a_bench_has_the_counts_of_its_examples(tmp_path: Path):
    answers = [example(1 / 3, 2.0, 7, calls=3, examined=9, rejected=1), example(baseline_s=None)]
    made = row(ALONE, answers), row(Opt(0.3), answers, gamma=5)
    alone, cell = cells(tmp_path, *made)
    assert (cell.units, cell.population) == ((0, 1), "examples")
    expected = {
        "score": (0.333333, 1.0),
        "tokens": (7, 11),
        "prefill_tokens": (1, 1),
        "emitted": (6, 10),
        "calls": (3, 10),
        "drafted": (9, 0),
        "accepted": (8, 0),
        "examined": (9, 0),
        "rejected": (1, 0),
        "seconds": (2.0, 1.0),
        "target_score": (0.333333, 1.0),
        "target_seconds": (1.0, None),
        "target_tokens": (11, None),
    }
    assert {name: cell.sums[name] for name in expected} == expected
    common = {"pair": "small", "metric": "accuracy", "temperature": 1.0}
    assert alone.setting == common | {"family": "autoregressive", "strategy": "autoregressive"}
    names = {"family": "opt", "setting": "alpha 0.3, gamma 5", "strategy": "speculative"}
    assert cell.setting == common | names | {"rule": "opt", "alpha": 0.3, "gamma": 5}
    assert cell.source.fingerprints == {"context": "c0ffee"}


def test_cells_that_differ_have_settings_that_differ(tmp_path: Path):
    strategies = [
        Lenient("linear", 0.5),
        Lenient("square", 0.5),
        Oracle(rule=Opt(0.3)),
        Speculative(rule=Opt(0.3), num_speculative_tokens=4),
        Speculative(rule=Opt(0.3), num_speculative_tokens=4, policy=Confident(0.5)),
        Speculative(rule=Opt(0.3), num_speculative_tokens=4, policy=Confident(0.7)),
    ]
    found = cells(tmp_path, *(row(strategy, [example()]) for strategy in strategies))
    settings = [json.dumps(one.setting, sort_keys=True) for one in found]
    assert len(set(settings)) == len(strategies)


def test_cells_that_failed_have_no_row(tmp_path: Path):
    rows = [row(ALONE, [example()]), row(Opt(0.3), error="no memory")]
    assert len(cells(tmp_path, *rows)) == 1


def test_a_cell_of_a_sweep_has_a_value_per_seed(tmp_path: Path):
    manifest(tmp_path / "sweep/kd/text/seed-0", inputs={"draft": "d1"})
    runs = [
        {"row": "kd", "column": "text", "seed": 0, "after": {"loss": 1.5, "tau": 2, "who": "x"}},
        {"row": "gkd", "column": "text", "seed": 0, "after": {"loss": 1.25, "tau": 3}},
        {"row": "kd", "column": "text", "seed": 1, "diverged": "the loss is nan"},
        {"row": "gkd", "column": "text", "seed": 1, "after": {"loss": 1.0, "tau": None}},
    ]
    (tmp_path / "sweep/sweep.json").write_text(json.dumps(runs))
    one, other = collected(tmp_path, "sweep")
    assert one.setting == {"pair": "small", "row": "kd", "column": "text"}
    assert (one.units, one.population) == ((0, 1), "seeds of training")
    assert one.sums == {"loss": (1.5, None), "tau": (2.0, None), "who": (None, None)}
    assert other.sums == {"loss": (1.25, 1.0), "tau": (3.0, None), "who": (None, None)}
    assert one.source.commit == "abc"
    assert one.source.fingerprints == {"draft": "d1"}


def test_a_row_has_the_day_of_the_outputs_and_the_sizes_of_models_that_are_here(tmp_path: Path):
    model = tmp_path / "draft model"
    hf = tiny_hf("llama")
    hf.save_pretrained(model)
    manifest(tmp_path / "sweep/kd/text/seed-0")
    file = tmp_path / "sweep/sweep.json"
    file.write_text(json.dumps([{"row": "kd", "column": "text", "seed": 0, "after": {"tau": 2}}]))
    noon = 1_764_072_000  # 2025-11-25, 12:00 UTC
    os.utime(file, (noon, noon))
    config = {"base": {"draft": str(model), "target": "somewhere/else"}}
    stage = planned(tmp_path, "sweep", **config)._replace(outputs=(file,))
    (one,) = collect("mine", tmp_path, [stage])
    assert one.source.date == "2025-11-25"
    assert one.source.sizes == {"draft": sum(weight.numel() for weight in hf.parameters())}


def test_commands_that_measure_nothing_have_no_rows(tmp_path: Path):
    assert collected(tmp_path, "draft") == []
