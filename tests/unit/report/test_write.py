"""Tables and the whole report, from rows made by hand."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.bench.measured_frontier import Frontier
from paceline.bench.schema import ResultRow
from paceline.bench.workbench import Grid
from paceline.cli.main import app
from paceline.core.bootstrap import Interval
from paceline.core.rules import Chow, ChowLog, Diff, Lossless, Opt
from paceline.decode.strategies import Oracle, ResponseByResponse
from paceline.errors import UsageError
from paceline.report import bench_tables, markdown, write, write_report
from paceline.report.run_folder import Results, read_results
from result_rows import ALONE, example, read_tables, row, steady, write_rows

ROWS = [
    steady(ALONE, 0.5),
    steady(Chow(0.2), 0.5, 2.0),
    steady(Chow(0.6), 0.4, 4.0),
    steady(Opt(0.2), 0.45, 2.5),
]


def read(folder: Path, rows: list[ResultRow]) -> Results:
    return read_results(write_rows(folder, rows))


def summary_lines(results: Results) -> dict[str, dict[str, str]]:
    (lines,) = read_tables(bench_tables.summary_table(results.sections[0]))
    return {line["family"]: line for line in lines}


def cell_lines(results: Results) -> list[dict[str, str]]:
    section = results.sections[0]
    assert section.frontier is not None
    (lines,) = read_tables(bench_tables.cells_table(section, section.frontier))
    return lines


def write_manifest(folder: Path, **config: Any) -> None:
    environment = {"versions": {"torch": "2.13.0"}, "processor": "a processor", "cpu_count": 2}
    content = {"config": config, "environment": environment}
    (folder / "manifest.json").write_text(json.dumps(content), encoding="utf-8")


def test_every_cell_has_its_figures(tmp_path: Path):
    cell = row(
        Chow(0.2),
        [
            example(1.0, 3.0, 21, baseline_s=8.0, first_s=1.0, examined=20, rejected=4, calls=5),
            example(0.0, 2.0, 11, baseline_s=None, first_s=1.0, examined=10, rejected=5, calls=5),
        ],
    )
    alone = row(ALONE, [example(1.0), example(1.0)])
    found = {line["family"]: line for line in cell_lines(read(tmp_path, [alone, cell]))}
    values = {name: text.partition(" ")[0] for name, text in found["chow"].items()}
    speedup = (8 / 11) / (3 / 21)
    assert values["quality"] == "0.500"
    assert values["quality / target's"] == "0.500"
    assert values["speedup"] == f"{speedup:.3f}"
    assert values["decoding speedup"] == f"{(8 / 10) / (2 / 20):.3f}"
    assert values["relative latency"] == f"{1 / speedup:.3f}"
    assert values["rejection rate"] == f"{9 / 30:.3f}"
    assert values["deferral rate"] == f"{10 / 30:.3f}"
    assert found["chow"]["quality"] == "0.500 [0.011, 0.988]"  # 0.013 to 0.987 exactly
    assert found["autoregressive"]["rejection rate"] == "-"
    assert found["autoregressive"]["deferral rate"] == "1.000 [1.000, 1.000]"


def test_cells_are_sorted_by_family_and_then_by_speed(tmp_path: Path):
    order = [(line["family"], line["setting"]) for line in cell_lines(read(tmp_path, ROWS))]
    assert order == [
        ("autoregressive", "-"),
        ("chow", "alpha 0.6, gamma 4"),
        ("chow", "alpha 0.2, gamma 4"),
        ("opt", "alpha 0.2, gamma 4"),
    ]


def test_every_column_is_defined_below_the_tables(tmp_path: Path):
    write_report(write_rows(tmp_path, ROWS))
    text = (tmp_path / "report.md").read_text()
    summary, _, _, cells = read_tables(text)
    for column in (*summary[0], *cells[0]):
        assert f"- **{column}**: " in text, column


def test_both_summaries_name_the_setting_and_its_other_figure(tmp_path: Path):
    found = summary_lines(read(tmp_path, ROWS))
    chow = list(found["chow"].values())
    assert [value.partition(" [")[0] for value in chow] == [
        *("chow", "2"),
        *("2.000", "alpha 0.2, gamma 4", "1.000"),
        *("1.000", "alpha 0.2, gamma 4", "2.000"),
    ]
    assert "autoregressive" not in found


def test_what_is_not_reached_says_so(tmp_path: Path):
    slow = steady(Diff(0.2), 0.5, 0.8)
    found = summary_lines(read(tmp_path, [*ROWS, slow]))
    lines = {
        name: [value.partition(" [")[0] for value in line.values()] for name, line in found.items()
    }
    assert lines["opt"][2:6] == ["not reached", "-", "-", "0.900"]
    assert lines["diff"][2:] == [
        *("0.800", "alpha 0.2, gamma 4", "1.000"),
        *("not reached", "-", "-"),
    ]


def test_failed_cells_have_a_reason_and_an_empty_family_a_line(tmp_path: Path):
    broken = row(ChowLog(0.2), error="ran out of memory |\n  or so")
    results = read(tmp_path, [*ROWS, broken])
    assert list(summary_lines(results)["chow_log"].values())[1:3] == ["0", "no finished cell"]
    assert cell_lines(results)[-1]["setting"] == "no finished cell"
    write_report(tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "ran out of memory \\| or so" in text
    assert "4 finished, 1 failed" in text


def test_one_failed_cell_does_not_empty_its_family(tmp_path: Path):
    results = read(tmp_path, [*ROWS, row(Chow(0.9), error="broken")])
    assert summary_lines(results)["chow"]["cells"] == "2"


def test_a_task_without_metric_has_speeds_and_one_clear_line(tmp_path: Path):
    rows = [steady(ALONE, None, metric=None), steady(Chow(0.2), None, 2.0, metric=None)]
    written = write_report(write_rows(tmp_path, rows))
    text = written.path.read_text()
    line = "The task has no metric, so there is no quality to compare with speed."
    assert text.count(line) == 3  # of the summaries, the claims, the plots
    (cells,) = read_tables(text)
    assert "speedup" in cells[0]
    assert not {"quality", "quality / target's"} & set(cells[0])
    assert "**quality" not in text
    assert not (tmp_path / "plots").exists()
    assert line in written.summary


def test_a_temperature_without_the_target_alone_leaves_the_others_as_they_are(tmp_path: Path):
    rows = [*ROWS, steady(Chow(0.2), temperature=0.0), row(ALONE, temperature=0.0, error="broken")]
    results = read(tmp_path, rows)
    assert [section.name for section in results.sections] == ["temperature 0", "temperature 1"]
    text = write_report(tmp_path).path.read_text()
    assert "nothing to compare 1 finished cells with; run the bench again" in text
    assert (tmp_path / "plots/temperature-1.png").exists()
    assert not (tmp_path / "plots/temperature-0.png").exists()


def test_a_target_that_is_always_wrong_is_one_line(tmp_path: Path):
    rows = [steady(ALONE, 0.0), steady(Chow(0.2), 0.0, 2.0)]
    text = write_report(write_rows(tmp_path, rows)).path.read_text()
    assert text.count("The target's own quality is 0") == 3


def test_another_nucleus_is_another_section(tmp_path: Path):
    others = [steady(ALONE, 0.4, top_p=0.9), steady(Chow(0.2), 0.4, 3.0, top_p=0.9)]
    found = {section.name: section for section in read(tmp_path, [*ROWS, *others]).sections}
    assert {name: len(section.done) for name, section in found.items()} == {
        "temperature 1": 4,
        "temperature 1, top-p 0.9": 2,
    }
    assert found["temperature 1, top-p 0.9"].slug == "temperature-1-top-p-0.9"


def test_where_an_answer_comes_at_once_there_is_no_decoding_speedup(tmp_path: Path):
    """A response that the draft wrote comes whole; one that the target wrote anew does not."""
    answers = [example(0.5, 0.5, first_s=0.5)] * 19 + [example(0.5, 0.5, first_s=0.4)]
    kept = row(ResponseByResponse(alpha=0.9), answers)
    found = {line["family"]: line for line in cell_lines(read(tmp_path, [*ROWS, kept]))}
    assert found["sequence_cascade"]["decoding speedup"] == "-"
    assert found["sequence_cascade"]["speedup"] == "2.000 [2.000, 2.000]"


def test_the_run_is_described(tmp_path: Path):
    write_rows(tmp_path, ROWS)
    grid = Grid.model_validate(
        {
            "temperatures": [1.0],
            "rules": [{"rule": "chow", "alpha": [0.2, 0.6]}, {"rule": "diff", "alpha": 0.1}],
        }
    )
    write_manifest(
        tmp_path, target="big", seed=5, num_examples=4, grid=grid.model_dump(mode="json")
    )
    results = read_results(tmp_path)
    facts = bench_tables.run_lines(results)
    assert "cells: 4 finished, 0 failed, 1 of the grid not run yet" in facts
    assert "examples: 20, of which 20 were timed with the target alone; metric: accuracy" in facts
    assert {"target: big", "seed: 5", "versions: torch 2.13.0", "cpu_count: 2"} <= set(facts)
    assert any("c0ffee" in fact for fact in facts)
    assert summary_lines(results)["diff"]["cells"] == "0"


def test_rows_are_those_of_the_bench_that_the_manifest_is_of(tmp_path: Path):
    """A first bench, another in the same folder, and the first again, with no more to do."""
    others = [one.model_copy(update={"context": "0ther"}) for one in ROWS[:2]]
    write_rows(tmp_path, [*ROWS, *others])
    write_manifest(tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    counts = {}
    for context in ("c0ffee", "0ther"):
        (tmp_path / "manifest.json").write_text(json.dumps(manifest | {"context": context}))
        results = read_results(tmp_path)
        assert any(context in fact for fact in bench_tables.run_lines(results))
        counts[context] = len(results.rows)
    assert counts == {"c0ffee": len(ROWS), "0ther": 2}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest | {"context": "none"}))
    with pytest.raises(UsageError, match="only result rows of another bench; run `paceline bench`"):
        read_results(tmp_path)


def test_without_manifest_the_report_says_what_is_not_known(tmp_path: Path):
    facts = bench_tables.run_lines(read(tmp_path, ROWS))
    assert facts[-1] == "no manifest.json: models, seed and machine are unknown"


@pytest.mark.slow
def test_a_report_is_whole_and_the_same_again(tmp_path: Path):
    rows = [*ROWS, steady(Oracle(rule=Diff(0.2)), 0.6, 0.7), steady(Lossless(), 0.5, 1.5)]
    rows += [steady(ALONE, 0.5, temperature=0.0), steady(Chow(0.2), 0.5, 2.0, temperature=0.0)]
    folder = write_rows(tmp_path, rows)
    path = write_report(folder).path
    first = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    (folder / "plots/temperature-9.png").write_bytes(b"from an earlier bench")
    assert write_report(folder).path == path == folder / "report.md"
    assert {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()} == first
    assert sorted(file.name for file in (folder / "plots").iterdir()) == [
        f"temperature-{temperature}.{kind}" for temperature in "01" for kind in ("png", "svg")
    ]
    text = path.read_text()
    assert text.count("against itself: 1.000 [1.000, 1.000].") == 2
    assert "![temperature 0](plots/temperature-0.png)" in text
    assert "Predicted and measured" not in text


def test_a_folder_without_rows_asks_for_the_bench(tmp_path: Path):
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(UsageError, match="has no result rows; run `paceline bench`") as error:
            write_report(folder)
        assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_a_line_that_is_not_json_is_one_line(tmp_path: Path):
    write_rows(tmp_path, ROWS)
    path = tmp_path / "results.jsonl"
    path.write_text("{torn\n" + path.read_text())
    with pytest.raises(UsageError, match="not JSON") as error:
        read_results(tmp_path)
    assert "\n" not in str(error.value)


def predict(folder: Path, **rates: float | None) -> None:
    lines = [
        {
            "schema_version": 2,
            "key": key,
            "predicted_rejection": rate,
            "predicted_surprisal": 0.5,
            "predicted_speedup": 1.5,
        }
        for key, rate in rates.items()
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "predictions.jsonl").write_text(text)


def test_predictions_are_counted_where_something_was_measured(tmp_path: Path):
    """Rejected 1 of 10 and 3 of 10 by turns: 0.2, with a standard error of 0.02."""
    examples = [example(examined=10, rejected=1), example(examined=10, rejected=3)] * 12
    cells = [row(rule, examples) for rule in (Chow(0.2), Chow(0.4), Diff(0.2), Opt(0.2))]
    alone = row(ALONE, [example()] * 24)
    write_rows(tmp_path, [alone, *cells])
    inside, outside, unknown, _ = (cell.key for cell in cells)
    rates = {inside: 0.22, outside: 0.31, unknown: None, alone.key: 0.2, "another cell": 0.1}
    predict(tmp_path, **rates)
    text = write_report(tmp_path).path.read_text()
    assert "Inside: 1 of 2." in text
    found = next(lines for lines in read_tables(text) if "predicted" in lines[0])
    speeds = ["1.500", *["1.000 [1.000, 1.000]"] * 2]
    measured = found[0].pop("measured"), found[1].pop("measured")
    assert [text.partition(" ")[0] for text in measured] == ["0.200", "0.200"]
    assert [list(line.values()) for line in found] == [
        ["chow", "alpha 0.2, gamma 4", "0.220", "yes", *speeds],
        ["chow", "alpha 0.4, gamma 4", "0.310", "NO", *speeds],
    ]


def test_a_prediction_that_is_none_is_one_line(tmp_path: Path):
    write_rows(tmp_path, ROWS)
    (tmp_path / "predictions.jsonl").write_text('{"schema_version": 2, "key": "k"}\n')
    with pytest.raises(
        UsageError, match=r"predictions\.jsonl has a row that is not a prediction"
    ) as error:
        write_report(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_the_command_prints_both_summaries_and_the_place(tmp_path: Path):
    shown = CliRunner().invoke(app, ["report", str(write_rows(tmp_path, ROWS))])
    assert shown.exit_code == 0, shown.output
    (lines,) = read_tables(shown.output)
    assert [line["family"] for line in lines] == ["chow", "opt"]
    assert shown.output.splitlines()[-1] == str(tmp_path / "report.md")


def test_a_figure_without_a_number_is_a_dash():
    nan, inf = float("nan"), float("inf")
    assert markdown.figure(Interval(nan, nan, nan)) == markdown.number(inf) == "-"
    assert markdown.figure(Interval(1.0, nan, nan)) == "1.000 [-, -]"


def test_a_frontier_of_the_target_alone_has_an_empty_summary(tmp_path: Path):
    results = read(tmp_path, [steady(ALONE)])
    assert isinstance(results.sections[0].judged, Frontier)
    assert write_report(tmp_path).path.exists()


def test_figures_of_all_answers_are_a_table_of_their_own(tmp_path: Path):
    figures = {
        "corpus_scores": {"bleu": 27.4004, "chrf": 51.0},
        "corpus_intervals": {"chrf": (48.0, 54.5)},
        "signatures": {"bleu": "nrefs:1"},
    }
    rows = [cell.model_copy(update=figures) for cell in ROWS[:2]]
    results = read(tmp_path, [*rows, *ROWS[2:]])
    text = write.render(results)
    (lines,) = read_tables(bench_tables.corpus_table(results.sections[0].done) or "")
    found = {f"{line['family']} {line['setting']}": line["bleu"] for line in lines}
    assert found["chow alpha 0.2, gamma 4"] == "27.400"
    assert found["chow alpha 0.6, gamma 4"] == markdown.NOTHING
    assert "in each metric's scale" in text
    assert "51.000 [48.000, 54.500]" in text
    assert "- bleu: nrefs:1\n" in text
    assert bench_tables.corpus_table(ROWS) is None


@pytest.mark.slow
def test_plots_replace_a_link_and_no_other_files(tmp_path: Path):
    folder, home = write_rows(tmp_path, ROWS), tmp_path / "home"
    home.mkdir()
    (home / "letter").write_text("precious")
    home.rename(folder / "plots")
    with pytest.raises(UsageError, match=r"letter is no plot of this report.*; move it"):
        write_report(folder)
    assert not (folder / "report.md").exists()
    (folder / "plots").rename(home)
    (folder / "plots").symlink_to(home)
    write_report(folder)
    assert not (folder / "plots").is_symlink()
    assert [path.name for path in home.iterdir()] == ["letter"]


def test_text_of_rows_is_no_markup():
    text = "<img src=x onerror=a> [b](http://c) [d]: e `f` | g\nh 1.0 [0.9, 1.1]"
    shown = markdown.table([text], [["1.000 [0.900, 1.100]"]])
    wanted = r"\<img src=x onerror=a> [b\](http://c) [d\]: e \`f\` \| g h 1.0 [0.9, 1.1]"
    assert shown.splitlines()[0] == f"| {wanted} |"
    assert "1.000 [0.900, 1.100]" in shown


def test_a_report_replaces_no_other_text(tmp_path: Path):
    folder = write_rows(tmp_path, ROWS)
    (folder / "report.md").write_text("my notes")
    with pytest.raises(UsageError, match=r"report\.md is no report of Paceline"):
        write_report(folder)
    assert (folder / "report.md").read_text() == "my notes"
