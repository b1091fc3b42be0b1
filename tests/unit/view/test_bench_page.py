"""The page of a bench, from rows made by hand: figures of cells, best cells, sections, remarks."""

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.core.rules import Chow, ChowLog, Diff, Lossless, Opt
from paceline.decode.strategies import (
    BigLittle,
    Oracle,
)
from paceline.errors import UsageError
from paceline.results.frontier import Frontier
from paceline.results.row import Row
from paceline.view.bench_pages import ordered_cells
from paceline.view.page import Page, flat
from paceline.view.read import read_page
from support import reports
from support.results import ALONE, example, row, steady, write_rows

ROWS = [
    steady(ALONE, 0.5),
    steady(Chow(0.2), 0.5, 2.0),
    steady(Chow(0.6), 0.4, 4.0),
    steady(Opt(0.2), 0.45, 2.5),
]
BEST, CELLS = "Best setting of each family", "All cells"


def page_of(folder: Path, rows: list[Row], **config: Any) -> Page:
    config = {"task": {"task": "sums"}} | config
    reports.manifest(folder, "Bench", **config)
    return read_page(write_rows(folder, rows)).page


def rows_of(page: Page, title: str) -> list[dict[str, Any]]:
    blocks = [block for section in page.sections for block in section.blocks]
    return flat(next(block for block in blocks if block.title == title).rows)


def by_family(page: Page, title: str) -> dict[str, dict[str, Any]]:
    return {line["family"]: line for line in rows_of(page, title)}


def test_every_cell_has_its_figures(tmp_path: Path):
    cell = row(
        Chow(0.2),
        [
            example(1.0, 3.0, 21, baseline_s=8.0, first_s=1.0, examined=20, rejected=4, calls=5),
            example(0.0, 2.0, 11, baseline_s=None, first_s=1.0, examined=10, rejected=5, calls=5),
        ],
    )
    page = page_of(tmp_path, [row(ALONE, [example(1.0), example(1.0)]), cell])
    found = by_family(page, CELLS)
    speedup = (8 / 11) / (3 / 21)
    assert {
        name: found["chow"][name] for name in found["chow"] if not name.endswith(("_low", "_high"))
    } == {
        "family": "chow",
        "setting": "alpha 0.2, gamma 4",
        "quality": 0.5,
        "relative_quality": 0.5,
        "speedup": pytest.approx(speedup),
        "decoding_speedup": pytest.approx((8 / 10) / (2 / 20)),
        "rejection_rate": pytest.approx(9 / 30),
        "deferral_rate": pytest.approx(10 / 30),
    }
    assert found["chow"]["quality_low"] == pytest.approx(0.0125, abs=0.002)  # exact: 0.0125
    assert found["autoregressive"]["deferral_rate_high"] == 1.0


def test_best_cells_name_the_setting_and_its_quality(tmp_path: Path):
    slow = steady(Diff(0.2), 0.5, 0.8)
    found = by_family(page_of(tmp_path, [*ROWS, slow]), BEST)
    columns = ("speedup at the target's quality", "setting", "its quality")
    shown = {name: [line[key] for key in columns] for name, line in found.items()}
    assert shown == {
        "chow": [2.0, "alpha 0.2, gamma 4", 1.0],
        "diff": [pytest.approx(0.8), "alpha 0.2, gamma 4", 1.0],
        "opt": [None, "not reached", None],
    }


def test_failed_cells_have_a_reason(tmp_path: Path):
    broken = [row(ChowLog(0.2), error="ran out of memory"), row(Chow(0.9), error="broken")]
    page = page_of(tmp_path, [*ROWS, *broken])
    assert [(line["family"], line["cells"]) for line in rows_of(page, BEST)] == [
        *(("chow", 2), ("opt", 1)),
    ]
    assert [line["reason"] for line in rows_of(page, "Failed cells")] == [
        "ran out of memory",
        "broken",
    ]
    assert page.facts[0].detail == "2 failed"


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        (
            [steady(ALONE, None, metric=None), steady(Chow(0.2), None, 2.0, metric=None)],
            "The task has no metric, so there is no quality",
        ),
        ([steady(ALONE, 0.0), steady(Chow(0.2), 0.0, 2.0)], "The target itself scores 0"),
        ([steady(Chow(0.2))], "The target alone has no finished cell"),
    ],
)
def test_what_cannot_be_compared_is_the_verdict(rows: list[Row], reason: str, tmp_path: Path):
    page = page_of(tmp_path, rows)
    assert reason in page.verdict
    assert "Quality and speed" not in [section.title for section in page.sections]


def test_each_sampling_has_sections_of_its_own(tmp_path: Path):
    others = [steady(ALONE, 0.4, top_p=0.9), steady(Chow(0.2), 0.4, 3.0, top_p=0.9)]
    page = page_of(tmp_path, [*ROWS, *others, row(ALONE, temperature=0.0, error="broken")])
    counts = {
        section.title: len(section.blocks[0].rows)
        for section in page.sections
        if section.title.startswith(CELLS)
    }
    assert counts == {"All cells, temperature 1": 4, "All cells, temperature 1, top-p 0.9": 2}
    assert page.verdict.startswith("At temperature 0: the target alone has no finished cell")


def test_the_run_is_described(tmp_path: Path):
    page = page_of(tmp_path, ROWS, target="big")
    assert page.facts[1].value == "20"
    assert {"Target: big", "Context of the rows: c0ffee"} <= set(page.about)
    again = next(fact for fact in page.facts if fact.name == "target against itself")
    assert (again.value, again.detail) == ("1.000x", "1.000 to 1.000")


def test_figures_of_all_answers_are_columns_of_their_cells(tmp_path: Path):
    figures = {"totals": {"bleu": 27.4, "chrf": 51.0}, "bounds": {"chrf": (48.0, 54.5)}}
    rows = [cell.model_copy(update=figures) for cell in ROWS[:2]]
    rows[0].source.fingerprints["bleu"] = "nrefs:1"
    page = page_of(tmp_path, [*rows, *ROWS[2:]])
    first = rows_of(page, CELLS)[0]
    assert (first["bleu"], first["chrf_low"], first["chrf_high"]) == (27.4, 48.0, 54.5)
    assert "bleu: nrefs:1" in page.about


def test_rows_are_those_of_the_bench_that_the_manifest_is_of(tmp_path: Path):
    """A first bench, another in the same folder, and the first again, with no more to do."""
    others = [steady(ALONE, 0.5, context="0ther"), steady(Chow(0.2), 0.5, 2.0, context="0ther")]
    page_of(tmp_path, [*ROWS, *others])
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    counts = {}
    for context in ("c0ffee", "0ther"):
        (tmp_path / "manifest.json").write_text(json.dumps(manifest | {"context": context}))
        counts[context] = len(rows_of(read_page(tmp_path).page, CELLS))
    assert counts == {"c0ffee": len(ROWS), "0ther": 2}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest | {"context": "none"}))
    with pytest.raises(UsageError, match="has no result rows of this bench"):
        read_page(tmp_path)


def test_a_line_joins_the_cells_of_one_gamma_or_fallback_by_their_threshold():
    cells = [steady(Chow(alpha), gamma=gamma) for alpha in (0.9, 0.1, 0.5) for gamma in (4, 1)]
    cells += [
        steady(BigLittle(fallback=fallback, rollback=rollback))
        for fallback in (0.3, 0.7)
        for rollback in (4.0, 1.0)
    ]
    found = [cell.setting for cell in ordered_cells(Frontier([steady(ALONE), *cells]))]
    lines = [(one["family"], one.get("gamma", one.get("fallback"))) for one in found]
    assert list(dict.fromkeys(lines)) == [
        *(("big_little", 0.3), ("big_little", 0.7), ("chow", 1), ("chow", 4)),
    ]
    assert lines == sorted(lines, key=list(dict.fromkeys(lines)).index)
    assert [one["rollback"] for one in found[:4]] == [1.0, 4.0] * 2
    assert [one["alpha"] for one in found[4:]] == [0.1, 0.5, 0.9] * 2


def test_temperatures_that_print_alike_have_frontiers_of_their_own(tmp_path: Path):
    """Six digits of both are those of 0.3."""
    other = [steady(ALONE, 0.4, temperature=0.3), steady(Chow(0.2), 0.4, 3.0, temperature=0.3)]
    near = [steady(ALONE, 0.4, temperature=0.30000001)]
    page = page_of(tmp_path, [*other, *near])
    assert [len(section.blocks[0].rows) for section in page.sections if CELLS in section.title] == [
        *(2, 1)
    ]


def test_a_family_has_one_colour_in_all_charts_and_an_oracle_has_no_speed(tmp_path: Path):
    rows = [*ROWS, steady(Oracle(rule=Diff(0.2)), 0.6, 0.7), steady(Lossless(), 0.5, 1.5)]
    page = page_of(tmp_path, rows)
    figures = {block.title: block for block in page.sections[0].blocks}
    panels: Any = figures["Quality against cost"].panels  # pyright: ignore
    scales = [
        layer["encoding"]["color"]["scale"]
        for chart in panels.values()
        for layer in chart["layer"]
        if "scale" in layer.get("encoding", {}).get("color", {})
    ]
    assert len(scales) > 6
    assert all(scale == scales[0] for scale in scales)
    drawn = [{row["family"] for row in chart["data"]["values"]} for chart in panels.values()]
    assert drawn[1] - drawn[0] == {"oracle_cascade diff"}
