"""Rows from what commands write, on small result files made by hand."""

import json
from pathlib import Path
from typing import Any

from paceline.core.rules import Lenient, Opt
from paceline.decode.draft_policies import Confident
from paceline.decode.strategies import Oracle, Speculative
from paceline.results.row import Row
from paceline.results.row import write_rows as write_result_rows
from paceline.studies.collect import collect
from paceline.studies.plan import PlannedStage
from support.models import tiny_hf
from support.reports import sweep_run, trajectory_row
from support.results import ALONE, example, row, write_rows

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
        f"{command}-1", command, config, folder / command, (), (), ("Table 1",),
        {"pair": "small"}, 1.0, 1.0, 1.0,
    )  # fmt: skip


def collected(folder: Path, command: Any, **config: Any) -> list[Row]:
    return collect("mine", folder, [planned(folder, command, **config)])


def manifest(folder: Path, **more: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "manifest.json").write_text(json.dumps({"environment": ENVIRONMENT} | more))


def measured(folder: Path, *rows: Row, **config: Any) -> list[Row]:
    """The rows of a study whose trajectory wrote these."""
    manifest(folder / "trajectory")
    write_result_rows(folder / "trajectory/rows.jsonl", rows)
    return collected(folder, "trajectory", **config)


def test_rows_of_commands_get_the_settings_and_the_items_of_their_stage(tmp_path: Path):
    of_draft = trajectory_row("runs/align", "end", 7, 5)
    (row,) = measured(tmp_path, of_draft)
    assert row.setting == {"pair": "small"} | of_draft.setting
    assert (row.units, row.sums, row.totals) == (of_draft.units, of_draft.sums, of_draft.totals)
    assert (row.study, row.covers, row.population) == (
        "mine", ("Table 1",), "prompts of translation"
    )  # fmt: skip
    source = row.source
    assert source.stage == "trajectory-1"
    assert source.command == (f"paceline trajectory --config {tmp_path}/stages/trajectory-1.yaml")
    assert source.fingerprints == of_draft.source.fingerprints


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


def test_a_row_has_the_sizes_of_models_that_are_here(tmp_path: Path):
    model = tmp_path / "draft model"
    hf = tiny_hf("llama")
    hf.save_pretrained(model)
    sweep_run(tmp_path / "sweep")
    config = {"base": {"draft": str(model), "target": "somewhere/else"}}
    rows = collect("mine", tmp_path, [planned(tmp_path, "sweep", **config)])
    assert len(rows) == 4
    assert rows[0].source.sizes == {"draft": sum(weight.numel() for weight in hf.parameters())}


def test_commands_that_measure_nothing_have_no_rows(tmp_path: Path):
    assert collected(tmp_path, "draft") == []
