"""Rows from what commands write, on small result files made by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.core.rules import Lenient, Opt
from paceline.decode.draft_policies import Confident
from paceline.decode.strategies import Oracle, Speculative
from paceline.errors import UsageError
from paceline.results.row import Row
from paceline.results.row import write_rows as write_result_rows
from paceline.studies.collect import collect
from paceline.studies.plan import PlannedStage
from paceline.studies.rows import StudyRow
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
        f"{command}-look-0", command, 0, command, config, folder / command, (), (), ("Table 1",),
        {"pair": "small"}, 1.0, 1.0, 1.0,
    )  # fmt: skip


def collected(folder: Path, command: Any, **config: Any) -> list[StudyRow]:
    return collect("mine", folder, [planned(folder, command, **config)])


def manifest(folder: Path, **more: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "manifest.json").write_text(json.dumps({"environment": ENVIRONMENT} | more))


def measured(folder: Path, *rows: Row, **config: Any) -> list[StudyRow]:
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
    assert source.stage == "trajectory-look-0"
    assert source.command == (
        f"paceline trajectory --config {tmp_path}/stages/trajectory-look-0.yaml"
    )
    assert source.fingerprints == of_draft.source.fingerprints


def test_a_row_names_the_gpu_if_one_was_used(tmp_path: Path):
    manifest(tmp_path / "bench", environment=ENVIRONMENT | {"gpu": "NVIDIA H100"})
    write_rows(tmp_path / "bench", [row(ALONE, [example()])])
    (found,) = collected(tmp_path, "bench")
    assert found.source.machine == "a processor (avx2, 2 cores), NVIDIA H100"


def test_rows_of_another_version_are_refused(tmp_path: Path):
    measured(tmp_path)
    (tmp_path / "trajectory/rows.jsonl").write_text('{"schema_version": 0}\n')
    with pytest.raises(UsageError, match="has schema_version 0, this Paceline reads 1; run the"):
        collected(tmp_path, "trajectory")


def cells(folder: Path, *rows: Any, **config: Any) -> list[StudyRow]:
    task = {"task": "translation", "corpus": "a.jsonl"}
    manifest(folder / "bench", context="c0ffee", config={"task": task} | config)
    write_rows(folder / "bench", rows)
    return collected(folder, "bench", skip_examples=5)


def test_a_cell_of_a_bench_has_the_counts_of_its_examples(tmp_path: Path):
    answers = [example(0.25, 2.0, 7, calls=3, examined=9, rejected=1), example(baseline_s=None)]
    alone, cell = cells(tmp_path, row(ALONE, answers), row(Opt(0.3), answers, gamma=5))
    assert cell.units == (5, 6)
    assert cell.sums == {
        "score": (0.25, 1.0),
        "tokens": (7, 11),
        "prefill_tokens": (1, 1),
        "calls": (3, 10),
        "examined": (9, 0),
        "rejected": (1, 0),
        "seconds": (2.0, None),
        "target_seconds": (1.0, None),
        "target_tokens": (11, None),
    }
    common = {"pair": "small", "task": "translation", "temperature": 1.0}
    assert alone.setting == common | {"family": "autoregressive"}
    assert cell.setting == common | {"family": "opt", "alpha": 0.3, "gamma": 5}
    assert cell.decoding == row(Opt(0.3), answers, gamma=5).decoding
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


def test_benches_of_other_texts_do_not_share_examples(tmp_path: Path):
    tasks = [{"task": "pairs", "corpus": name} for name in ("a", "b", "a")]
    names = [
        cells(tmp_path / str(number), row(ALONE, [example()]), task=task)[0].population
        for number, task in enumerate(tasks)
    ]
    assert names[0] == names[2] != names[1]


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
