"""The page of each kind of run: its verdict, its figures, and the rows behind them."""

import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.core.bootstrap import ratio_interval
from paceline.view.page import Figure, Page, Table, flat
from paceline.view.read import read_page
from support import reports

Pages = Callable[[str], Page]


@pytest.fixture(scope="module")
def page_of(tmp_path_factory: pytest.TempPathFactory) -> Pages:
    """The page of a kind of run, made once."""

    @functools.cache
    def make(kind: str) -> Page:
        return read_page(reports.RUNS[kind](tmp_path_factory.mktemp(kind))).page

    return make


def blocks_of(page: Page, kind: Any = (Figure, Table)) -> dict[str, Any]:
    blocks = [block for section in page.sections for block in section.blocks]
    return {block.title: block for block in blocks if isinstance(block, kind)}


@pytest.mark.parametrize("kind", reports.RUNS)
def test_every_block_has_rows(kind: str, page_of: Pages):
    page = page_of(kind)
    for section in page.sections:
        assert section.blocks
        assert all(block.rows for block in section.blocks)
    assert page.source is not None
    assert page.source.command.startswith("paceline ")
    assert page.source.config is not None


VERDICTS = {
    "bench": ["lossless gamma 4: 1.30x (1.30 to 1.30)", "by proof"],
    "measure": ["1.30x (1.20 to 1.40) at gamma 2; <b>& more."],
    "served": ["at 2 positions."],
    "verify": ["5 of 5 greedy texts equal", "80 sampled tokens follow", "p 0.4"],
    "align": ["from 0.300 (0.200 to 0.400) to 0.500 (0.400 to 0.600) in 600 steps, 60 s."],
    "trajectory": ["Of 8 gains", "1.27x (1.27 to 1.27): the final draft of first", "1.90 tokens"],
    "tune": [
        "Use chow alpha 0.2, gamma 3: 1.40x (1.40 to 1.40)",
        "1.000 (",
        ") of its quality",
        "0.95",
    ],
}


@pytest.mark.parametrize("kind", reports.RUNS)
def test_a_verdict_has_its_numbers(kind: str, page_of: Pages):
    assert [part for part in VERDICTS[kind] if part not in page_of(kind).verdict] == []


def test_the_word_and_its_mark_are_those_of_the_result(page_of: Pages, tmp_path: Path):
    words = {kind: (page_of(kind).word, page_of(kind).tone) for kind in reports.RUNS}
    assert {kind: word for kind, word in words.items() if word[0]} == {
        "measure": ("GO", "good"),
        "served": ("AGREES", "good"),
        "verify": ("PASSED", "good"),
    }
    failed = read_page(reports.losslessness(tmp_path, p_value=1e-6)).page
    assert (failed.word, failed.tone) == ("FAILED", "bad")
    assert "sampled tokens do not follow its distribution (p 1e-06)" in failed.verdict
    open_ = read_page(reports.losslessness(tmp_path, p_value=math.nan)).page
    assert [fact.value for fact in open_.facts if fact.name == "G-test p"] == ["-"]


def test_the_task_of_a_tune_may_be_a_class_that_is_not_imported(tmp_path: Path):
    file = reports.RUNS["tune"](tmp_path) / "result.json"
    found = json.loads(file.read_text())
    found["config"]["task"] = {"import": "counting:Counting", "most": 3}
    file.write_text(json.dumps(found))
    assert "Task: counting:Counting" in str(read_page(tmp_path).page.about)


def test_a_measurement_plots_predictions_and_measured_speedups(page_of: Pages):
    blocks = blocks_of(page_of("measure"))
    rows = flat(blocks["Speedup by gamma"].rows)
    assert len(rows) == 3 * 3 + 2
    sums = {name: torch.tensor(part) for name, part in reports.timed_requests()["sums"].items()}
    alone, own = ((sums[f"{side}seconds"], sums[f"{side}tokens"]) for side in ("target_", ""))
    speedup = ratio_interval(alone, own[::-1])
    names = ("speedup", "speedup_low", "speedup_high")
    assert rows[-1]["kind"] == "measured, whole requests"
    assert [rows[-1][name] for name in ("gamma", *names)] == pytest.approx([2, *speedup])
    (requests,) = flat(blocks["Timed requests"].rows)
    assert [requests[name] for name in names] == pytest.approx(speedup)
    after = [sums[f"{side}seconds"].sum() - 16 * 0.1 for side in ("target_", "")]
    predicted = 1.9 / (0.2 * 2 + 1)
    assert requests["engine_efficiency"] == pytest.approx(float(after[0] / after[1]) / predicted)
    gammas = flat(blocks["Predictions for each gamma"].rows)
    taus = {1: 1.6, 2: 1.8, 4: 2.2}
    assert [row["gamma"] for row in gammas] == ["1", "2*", "4"]
    assert [row["block_efficiency"] for row in gammas] == pytest.approx(list(taus.values()))
    expected = [tau / (0.2 * gamma + 1) for gamma, tau in taus.items()]
    assert [row["mbsu"] for row in gammas] == pytest.approx(expected)


def test_a_served_measurement_puts_counters_beside_the_prediction(page_of: Pages):
    rows = flat(blocks_of(page_of("served"))["Acceptance by position"].rows)
    assert [(row["counts"], row["position"]) for row in rows] == [
        *(("served", 0), ("predicted", 0), ("served", 1), ("predicted", 1)),
    ]
    assert [row["position_acceptance"] for row in rows] == pytest.approx([0.5] * 2 + [0.4] * 2)


def test_loss_is_averaged_over_steps_and_keeps_its_range(page_of: Pages):
    rows = flat(blocks_of(page_of("align"))["Loss over training"].rows)
    assert len(rows) == 200  # 600 steps in groups of 3
    losses = [2.0 - step / 600 for step in (1, 2, 3)]
    assert rows[0]["loss"] == pytest.approx(sum(losses) / 3)
    assert (rows[0]["loss_low"], rows[0]["loss_high"]) == (min(losses), max(losses))


def test_a_run_without_a_result_says_that_it_has_not_finished(tmp_path: Path):
    folder = reports.training_run(tmp_path, "Pretrain")
    (folder / "result.json").unlink()
    page = read_page(folder).page
    assert page.word == "NOT FINISHED"
    assert "to 0.400 (0.300 to 0.500) in 600 steps, 60 s." in page.verdict


def test_a_trajectory_has_a_panel_for_each_gamma(page_of: Pages):
    figures = blocks_of(page_of("trajectory"))
    over_training = figures["Tokens per target call over training: translation, temperature 0"]
    assert list(over_training.panels) == ["gamma 3", "gamma 5"]
    assert len(over_training.rows) == 2 * 3 * 2
    gains = flat(figures["Gain over the initial draft: translation, temperature 0"].rows)
    assert [row["gamma"] for row in gains] == [3, 5, 3, 5]
    assert [row["gain"] for row in gains] == pytest.approx([1.9 / 1.5] * 4)


def test_quality_of_drafts_is_shown_over_training_if_it_was_measured(tmp_path: Path):
    folder = reports.trajectory_run(tmp_path)
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    for place, row in enumerate(rows):
        row["sums"]["score"] = [place // 2 / 10] * 8
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    figures = blocks_of(read_page(folder).page)
    rows = flat(figures["Quality over training: translation, temperature 0"].rows)
    assert [row["quality"] for row in rows] == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4, 0.5])


def test_a_single_unit_has_an_infinite_bound_which_json_cannot_hold(tmp_path: Path):
    file = reports.served(tmp_path)
    values = json.loads(file.read_text())
    for row in values["rows"]:
        row["units"] = row["units"][:1]
        row["sums"] = {name: counts[:1] for name, counts in row["sums"].items()}
    file.write_text(json.dumps(values))
    figure = blocks_of(read_page(file).page)["Acceptance by position"]
    json.dumps(figure.panels, allow_nan=False)
