"""Files of rows: what is written is read, as rows and as data frames; other files are refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import paceline.results
from paceline.errors import UsageError
from paceline.results import Row, Source, read_rows
from paceline.results.row import rounded, select, write_rows
from support.results import result_row

ROWS = [
    result_row({"tokens": [3, 4.5], "score": [None, 1]}, task="text", temperature=0.5),
    result_row({"tokens": [1]}, family="autoregressive", temperature=0.0),
]


def row(units: tuple[int, ...] = (0, 1, 2), **setting: str | float) -> Row:
    return Row(
        population="prompts",
        units=units,
        setting={"gamma": 3} | setting,
        sums={
            "emitted": tuple(3.0 + unit for unit in units),
            "calls": tuple(1.0 + unit % 2 for unit in units),
        },
        totals={"bleu": 12.5},
        bounds={"bleu": (11.0, 14.0)},
        source=Source(command="bench", date="2026-11-27"),
    )


def test_a_directory_gives_the_rows_of_all_runs_in_it(tmp_path: Path):
    for path in (tmp_path, tmp_path / "rows.jsonl"):
        with pytest.raises(UsageError, match=r"no result rows at .*; name a file rows"):
            read_rows(path)
    for run in ("a", "b"):
        (tmp_path / run).mkdir()
        write_rows(tmp_path / run / "rows.jsonl", [row(run=run)])
    assert [one.setting["run"] for one in read_rows(tmp_path)] == ["a", "b"]


def test_a_frame_has_settings_totals_and_figures_with_bounds(tmp_path: Path):
    write_rows(tmp_path / "rows.jsonl", [row(draft="small"), row(draft="large")])
    frame: Any = paceline.results.load(str(tmp_path))
    assert list(frame["draft"]) == ["small", "large"]
    assert list(frame["block_efficiency"]) == pytest.approx([12 / 4] * 2)
    assert (frame["block_efficiency_low"] <= frame["block_efficiency"]).all()
    assert list(frame[["bleu", "bleu_low", "bleu_high"]].iloc[0]) == [12.5, 11.0, 14.0]


def test_rows_are_selected_by_their_settings():
    rows = [row(draft="a", step=1), row(draft="b", step=1), row(draft="b", step=2)]
    assert select(rows, draft="b") == rows[1:]
    assert select(rows, draft="b", step=2) == rows[2:]


def test_a_source_names_the_gpu_if_one_was_used(monkeypatch: pytest.MonkeyPatch):
    record = {"processor": "a processor", "processor_level": "avx2", "cpu_count": 2}
    record["gpu"] = "NVIDIA H100"
    monkeypatch.setattr("paceline.results.row.environment", lambda: record)
    assert Source.here("bench").machine == "a processor (avx2, 2 cores), NVIDIA H100"
    monkeypatch.undo()
    source = Source.here("measure", sizes={"target": 7})
    assert {"python", "torch", "paceline"} <= source.versions.keys()
    assert source.sizes == {"target": 7}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"schema_version": 0}, r"rows\.jsonl row 2 has schema_version 0, .* reads 1; run"),
        ({"sums": {"calls": (1.0,)}}, "calls has 1 values for 2 units"),
        ({"sums": {}}, "row 2 is not a result row: .*needs sums, totals or an error"),
        ({"bounds": {"chrf": (1.0, 2.0)}}, "bounds of chrf"),
        (None, "line 2 is not a JSON object"),
    ],
)
def test_rows_that_contradict_themselves_or_are_none_are_one_line(
    changes: dict[str, Any] | None, said: str, tmp_path: Path
):
    file = tmp_path / "rows.jsonl"
    write_rows(file, ROWS)
    first = file.read_text().splitlines()[0]
    second = [1] if changes is None else json.loads(first) | changes
    file.write_text(f"{first}\n{json.dumps(second)}\n")
    with pytest.raises(UsageError, match=said):
        read_rows(file)


def test_a_row_that_a_killed_process_did_not_finish_is_left_out(tmp_path: Path):
    file = tmp_path / "rows.jsonl"
    write_rows(file, ROWS)
    assert read_rows(file) == ROWS
    assert rounded(np.array([1.23456789, np.nan, np.inf])) == (1.234568, None, None)
    whole = file.read_bytes()
    for torn in (20, 1):
        file.write_bytes(whole[:-torn])
        assert len(read_rows(file)) == len(ROWS) - (torn > 1)
    file.write_bytes(whole[:20] + b"\n" + whole)
    with pytest.raises(UsageError, match="is not a JSON object"):
        read_rows(file)
