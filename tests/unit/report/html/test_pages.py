"""The page of each kind of run: its verdict, its figures, and the rows behind them."""

import functools
import json
from collections.abc import Callable
from pathlib import Path

import pytest

import report_runs
from paceline.core.bootstrap import mean_interval
from paceline.report.html.page import Claims, Figure, Page, Section, TextPicture
from paceline.report.html.read import read_page

Pages = Callable[[str], Page]


@pytest.fixture(scope="module")
def page_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Page]:
    """The page of a kind of run, made once."""

    @functools.cache
    def make(kind: str) -> Page:
        return read_page(report_runs.RUNS[kind](tmp_path_factory.mktemp(kind))).page

    return make


def figures_of(page: Page) -> dict[str, Figure]:
    blocks = [block for section in page.sections for block in section.blocks]
    return {block.title: block for block in blocks if isinstance(block, Figure)}


def section(page: Page, title: str) -> Section:
    return next(one for one in page.sections if one.title == title)


@pytest.mark.parametrize("kind", report_runs.RUNS)
def test_every_block_names_its_command_and_has_rows(kind: str, page_of: Pages):
    page = page_of(kind)
    assert page.sources
    for part in page.sections:
        for block in part.blocks:
            assert block.source.command.startswith("paceline "), block  # pyright: ignore
            assert block.rows, block  # pyright: ignore
            assert block.source.config is not None  # pyright: ignore


@pytest.mark.parametrize("kind", report_runs.RUNS)
def test_a_verdict_is_one_sentence_with_a_number(kind: str, page_of: Pages):
    verdict = page_of(kind).verdict
    assert not verdict[0].islower()
    assert verdict.endswith((".", "more."))
    assert any(letter.isdigit() for letter in verdict), verdict


def test_a_bench_names_its_fastest_setting_at_the_targets_quality(page_of: Pages):
    """Lossless has the target's quality by proof; every other cell misses more answers."""
    page = page_of("bench")
    assert page.verdict.startswith(
        "The fastest setting with at least the target's quality is lossless gamma 4: 1.30x"
    )


def test_a_bench_plots_every_finished_setting_with_both_intervals(page_of: Pages):
    rows = figures_of(page_of("bench"))["Quality against cost"].rows
    assert [(row["family"], row["setting"]) for row in rows] == [
        ("lossless", "gamma 4"),
        ("chow", "alpha 0.2, gamma 4"),
        ("opt", "alpha 0.2, gamma 4"),
        ("opt", "alpha 0.4, gamma 4"),
    ]
    slowest = rows[0]
    assert slowest["speedup"] == pytest.approx(1.3)
    assert slowest["quality_low"] <= slowest["quality"] <= slowest["quality_high"]
    assert rows[-1]["quality"] == pytest.approx(15 / 20)


def test_a_family_has_one_colour_in_all_charts_of_a_bench(page_of: Pages):
    figures = figures_of(page_of("bench"))
    charts = [*figures["Quality against cost"].panels, *figures["Predicted and measured"].panels]
    scales = [
        layer["encoding"]["color"]["scale"]
        for panel in charts
        for layer in panel.chart["layer"]
        if "scale" in layer.get("encoding", {}).get("color", {})
    ]
    assert len(scales) > 6
    assert all(scale == scales[0] for scale in scales)


def test_a_bench_compares_the_time_per_token_of_examples(page_of: Pages):
    rows = figures_of(page_of("bench"))["Time per token over examples"].rows
    alone = [row for row in rows if row["decoding"] == "target alone"]
    assert [row["share"] for row in alone] == pytest.approx([n / 24 for n in range(1, 25)])
    assert alone[0]["ms per token"] == pytest.approx(1e3 / 11)


def test_a_bench_shows_measured_claims_and_names_the_others(page_of: Pages):
    page = page_of("bench")
    (block,) = section(page, "Claims of the paper").blocks
    assert isinstance(block, Claims)
    assert {one.claim[0] for one in block.claims} == {"b"}  # opt against chow
    assert all(one.count == 24 for one in block.claims)
    assert "Not measured here" in block.text


def test_a_bench_lists_failed_cells_with_their_reasons(page_of: Pages):
    (table,) = section(page_of("bench"), "Failed cells").blocks
    rows = table.rows  # pyright: ignore
    assert rows == [
        {"family": "chow", "setting": "alpha 0.9, gamma 4", "reason": "ran out of memory"}
    ]


def test_a_measurement_says_go_in_the_words_of_its_verdict(page_of: Pages):
    page = page_of("measure")
    assert (page.word, page.tone) == ("GO", "good")
    assert page.verdict == "Measured 1.30x (1.20 to 1.40) at gamma 2; <b>& more."


def test_a_measurement_plots_predictions_and_measured_speedups(page_of: Pages):
    rows = figures_of(page_of("measure"))["Speedup by gamma"].rows
    assert len(rows) == 3 * 3 + 2
    whole = rows[-1]
    assert whole == {
        "gamma": 2,
        "kind": "measured, whole requests",
        "speedup": 1.3,
        "speedup_low": 1.2,
        "speedup_high": 1.4,
    }


def test_a_served_measurement_puts_counters_beside_the_prediction(page_of: Pages):
    page = page_of("served")
    assert (page.word, page.title) == ("AGREES", "The draft in vLLM 0.32.0")
    rows = figures_of(page)["Acceptance by position"].rows
    assert [(row["from"], row["position"]) for row in rows] == [
        *(("engine's counters", place) for place in (1, 2)),
        *(("prediction", place) for place in (1, 2)),
    ]


@pytest.mark.parametrize(("p_value", "word"), [(0.4, "PASSED"), (1e-6, "FAILED")])
def test_a_test_of_losslessness_passes_or_fails(p_value: float, word: str, tmp_path: Path):
    page = read_page(report_runs.losslessness(tmp_path, p_value=p_value)).page
    assert page.word == word
    assert ("follow its distribution" in page.verdict) == (word == "PASSED")


def test_cells_of_the_g_test_have_their_expected_number(page_of: Pages):
    rows = figures_of(page_of("verify"))["Tokens in each cell"].rows
    assert [row["tokens"] for row in rows] == [22, 19, 18, 21]
    assert {row["expected"] for row in rows} == {20.0}


def test_a_training_run_says_how_far_its_headline_came(page_of: Pages):
    page = page_of("align")
    assert page.verdict == (
        "On held-out text, expected acceptance rose from 0.300 (0.200 to 0.400) to 0.500 "
        "(0.400 to 0.600) in 600 steps, 60 s."
    )


def test_loss_is_averaged_over_steps_and_keeps_its_range(page_of: Pages):
    rows = figures_of(page_of("align"))["Loss over training"].rows
    assert len(rows) == 200  # 600 steps in groups of 3
    losses = [2.0 - step / 600 for step in (1, 2, 3)]
    assert rows[0]["loss"] == pytest.approx(sum(losses) / 3)
    assert (rows[0]["loss_low"], rows[0]["loss_high"]) == (min(losses), max(losses))


def test_a_run_without_a_result_says_that_it_has_not_finished(tmp_path: Path):
    folder = report_runs.training_run(tmp_path, "Pretrain")
    (folder / "result.json").unlink()
    page = read_page(folder).page
    assert page.word == "NOT FINISHED"
    assert page.verdict.endswith(
        "from 0.300 (0.200 to 0.400) to 0.400 (0.300 to 0.500) in 600 steps, 60 s."
    )


def test_a_trajectory_has_a_panel_for_each_gamma(page_of: Pages):
    figures = figures_of(page_of("trajectory"))
    over_training = figures["Tokens per target call over training: translation, temperature 0"]
    assert [panel.title for panel in over_training.panels] == ["gamma 3", "gamma 5"]
    assert len(over_training.rows) == 2 * 3 * 2
    gains = figures["Gain over the initial draft: translation, temperature 0"].rows
    assert {row["draft"] for row in gains} == {"end"}
    assert {row["gain"] for row in gains} == {1.2}


def test_quality_of_drafts_is_shown_over_training_if_it_was_measured(tmp_path: Path):
    folder = report_runs.trajectory_run(tmp_path)
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    for place, row in enumerate(rows):
        row["quality"] = report_runs.interval(place / 10)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    figures = figures_of(read_page(folder).page)
    over_training = figures["Quality over training: translation, temperature 0"]
    assert [row["quality"] for row in over_training.rows] == [0.0, 0.1, 0.2, 0.3, 0.4, 0.5]


def test_rows_of_runs_that_a_trajectory_left_out_are_not_shown(tmp_path: Path):
    folder = report_runs.trajectory_run(tmp_path)
    report_runs.manifest(folder, "Trajectory", target="t", runs=["runs/second"])
    (figure, _) = figures_of(read_page(folder).page).values()
    assert {row["run"] for row in figure.rows} == {"second"}


def test_runs_of_a_sweep_are_shown_under_its_name(tmp_path: Path):
    folder = report_runs.trajectory_run(tmp_path)
    report_runs.manifest(folder, "Trajectory", target="t", runs=["runs"])
    (figure, _) = figures_of(read_page(folder).page).values()
    assert {row["run"] for row in figure.rows} == {"first", "second"}


def test_runs_may_be_named_by_relative_and_absolute_paths(tmp_path: Path):
    folder = report_runs.trajectory_run(tmp_path)
    text = (folder / "rows.jsonl").read_text().replace("runs/first", f"{Path.cwd()}/runs/first")
    (folder / "rows.jsonl").write_text(text)
    runs = [f"{Path.cwd()}/runs/first", "runs/second"]
    report_runs.manifest(folder, "Trajectory", target="t", runs=runs)
    (figure, _) = figures_of(read_page(folder).page).values()
    assert {row["run"] for row in figure.rows} == {"first", "second"}


def test_tune_names_the_chosen_setting_and_its_bound(page_of: Pages):
    page = page_of("tune")
    assert page.verdict == (
        "Use chow alpha 0.2, gamma 3: 1.40x (1.35 to 1.45) the target's speed and 1.000 of its "
        "quality, within a quality of at least 0.95 of the target's."
    )
    panels = figures_of(page)["Tested settings"].panels
    assert [panel.title for panel in panels] == ["To choose", "To confirm, on other examples"]


def test_a_sweep_shows_means_over_seeds_with_students_intervals(page_of: Pages):
    import torch

    figures = figures_of(page_of("sweep"))
    cells = figures["Expected acceptance of each cell"].rows
    expected = mean_interval(torch.tensor([0.5, 0.51], dtype=torch.float64))
    assert cells[0]["value"] == pytest.approx(expected.value)
    assert cells[0]["value_low"] == pytest.approx(expected.low)
    differences = figures["Difference in expected acceptance to forward kl"].rows
    assert [row["column"] for row in differences] == ["fixed", "mixed", "all columns"]
    assert [row["difference"] for row in differences] == pytest.approx([0.1] * 3)


def test_a_diverged_run_empties_its_cell_and_is_counted(tmp_path: Path):
    page = read_page(report_runs.sweep_run(tmp_path, diverged=True)).page
    assert page.facts[-1].value == "1"
    figure = figures_of(page)["Expected acceptance of each cell"]
    assert len(figure.panels[0].chart["data"]["values"]) == 3
    assert page.verdict.startswith("The best expected acceptance is that of forward kl")


def test_decoded_text_keeps_the_source_and_block_of_each_token(page_of: Pages):
    (picture, _) = page_of("decode").sections[0].blocks
    assert isinstance(picture, TextPicture)
    assert "".join(token.text for token in picture.tokens) == "Once upon a <time> there was"
    assert [(token.source, token.block) for token in picture.tokens] == [
        ("prefill", 0),
        *(("accepted", 1), ("accepted", 1), ("bonus", 1)),
        *(("accepted", 2), ("recovered", 2)),
    ]


def test_decoded_text_counts_tokens_per_target_call(page_of: Pages):
    verdict = page_of("decode").verdict
    assert verdict == (
        "6 tokens took 2 target calls after the prompt, 2.50 tokens per call: 3 of 4 drafted "
        "tokens were accepted."
    )


def test_a_sweep_without_a_manifest_is_recognised_by_its_rows(tmp_path: Path):
    folder = report_runs.sweep_run(tmp_path)
    (folder / "manifest.json").unlink()
    assert "The best expected acceptance" in read_page(folder).page.verdict


def test_json_keeps_no_infinite_bound(tmp_path: Path):
    """A single unit has an interval to infinity, which JSON cannot hold."""
    file = report_runs.served(tmp_path)
    values = json.loads(file.read_text())
    values["served"]["block_efficiency"] = {"value": 1.5, "low": 0.0, "high": "Infinity"}
    file.write_text(json.dumps(values))
    figure = figures_of(read_page(file).page)["Tokens per target call"]
    json.dumps(figure.panels[0].chart, allow_nan=False)
