"""One file that needs no network: what it holds, and how values and texts are written."""

import base64
import csv
import functools
import io
import json
import math
import re
import zlib
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

from paceline.cli.main import schema_of
from paceline.config import validate
from paceline.core.bootstrap import Interval
from paceline.results import figures
from paceline.view import charts, render
from paceline.view.charts import Axis
from paceline.view.page import (
    Figure,
    Page,
    Section,
    Source,
    Table,
    flat,
    interval_text,
    shown,
)
from paceline.view.read import read_page
from support import reports

NOTATION = (Path(__file__).parents[3] / "docs/notation.md").read_text(encoding="utf-8")
SOURCE = Source("paceline bench --config bench.yaml", {"seed": 3})
PLAIN = Section("One", [Table("", [{"a": 1}])])
Written = Callable[[str], str]


class Reader(HTMLParser):
    """Links and identifiers of a page, and what it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[dict[str, str]] = []
        self.loads: list[str] = []
        self.ids: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.ids += [values["id"]] if "id" in values else []
        if tag == "a":
            self.links.append(values)
        elif address := values.get("src") or values.get("href"):
            self.loads.append(address)


def file_of(text: str, kind: str) -> str:
    """The content of the first download of this kind, which a script takes from the page's data."""
    assert any(one.get("download", "").endswith(f".{kind}") for one in Reader(text).links)
    (packed,) = re.findall(r'id="data">([^<]*)</script>', text)
    return json.loads(zlib.decompress(base64.b64decode(packed)))[kind][0]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """The HTML of a kind of run, made once."""

    @functools.cache
    def make(kind: str) -> str:
        run = reports.RUNS[kind](tmp_path_factory.mktemp(kind))
        return render.render(read_page(run).page)

    return make


def page_of(*blocks: Figure | Table, source: Source | None = SOURCE) -> str:
    return render.render(Page("Title", "A verdict.", [Section("Part", blocks)], source=source))


def figure(title: str, name: str = "a") -> Figure:
    rows = [{"name": name, "step": 1, "value": 1.0}]
    chart = charts.curves(rows, "step", Axis("value", "value"), "name")
    return Figure(title, "Text.", {"": chart}, rows)


@pytest.mark.parametrize("kind", reports.RUNS)
def test_a_page_loads_nothing_and_every_link_leads_somewhere(kind: str, written: Written):
    text = written(kind)
    read = Reader(text)
    assert read.loads == ["data:,"]
    assert all(one["href"].startswith(("#", "data:")) for one in read.links)
    targets = {link["href"][1:] for link in read.links if link["href"].startswith("#")}
    assert targets <= set(read.ids)
    assert len(set(read.ids)) == len(read.ids)
    assert len(text.encode()) < 600_000


def test_text_from_results_cannot_become_markup_and_data_cannot_end_a_script(written: Written):
    assert "&lt;b&gt;&amp; more" in written("measure")
    assert "<b>& more" not in written("measure")
    text = page_of(figure("A figure", "</script><script>alert(1)"))
    assert "<script>alert" not in text


def test_the_csv_of_a_figure_has_its_rows_with_six_digits(written: Written, tmp_path: Path):
    page = read_page(reports.trajectory_run(tmp_path)).page
    rows = list(csv.DictReader(io.StringIO(file_of(written("trajectory"), "csv"))))
    shown, name = flat(page.sections[0].blocks[0].rows), "block_efficiency_low"
    found = [float(row[name]) for row in rows]
    assert found == pytest.approx([row[name] for row in shown], rel=5e-6)


def test_cells_have_their_bounds_and_unknown_values_are_dashes_and_empty_in_csv():
    rows = [
        {"a": float("nan"), "b": None, "x": Interval(1.5, 1.0, 2.0)},
        {"x": Interval(2.0, math.nan, math.nan)},
    ]
    assert render.to_csv(rows).splitlines() == ["a,b,x,x_low,x_high", ",,1.5,1.0,2.0", ",,2.0,,"]
    assert Table("", rows).cells() == [
        {"a": "-", "b": "-", "x": "1.500 (1.000 to 2.000)"},
        {"a": "-", "b": "-", "x": "2.000"},
    ]
    assert interval_text(Interval(1.25, 1.0, 2.0), ".1f", "x") == "1.2x (1.0 to 2.0)"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.12345, "0.123"),
        (1234.56, "1,234.6"),
        (2.8e-32, "2.8e-32"),
        (float("inf"), "∞"),
        (7, "7"),
        (True, "yes"),
        (None, "-"),
    ],
)
def test_numbers_in_tables(value: object, text: str):
    assert shown(value) == text


@pytest.mark.parametrize("kind", ["measure", "verify", "tune"])
def test_the_configuration_of_a_page_runs_the_command_again(kind: str, written: Written):
    values = yaml.safe_load(file_of(written(kind), "yaml"))
    config = validate(schema_of(kind), values)
    assert config.model_dump(mode="json") == values


def test_figures_point_to_their_source():
    text = page_of(figure("One"), figure("Two"))
    links = [link["href"] for link in Reader(text).links if "download" not in link]
    assert links.count("#source") == 2
    assert Reader(text).ids.count("source") == 1
    assert "made by" not in page_of(figure("One"), source=None)


def test_a_page_defines_what_its_columns_name_once_also_a_figure_registered_after_the_import():
    mine = figures.register(figures.Figure("my_figure", "what it is", (("score", figures.ONE),)))
    line = {"gamma": 2, "speedup": 1.0, "deferral_rate": 0.1, mine.name: Interval(1.0, 0.5, 2.0)}
    table = Table("A table", [line])
    try:
        text = render.render(Page("Title", "A verdict.", [Section("One", [table, table])]))
    finally:
        del figures.FIGURES[mine.name]
    terms = re.findall(r"<dt>([^<]*)", text)
    assert terms == [
        "gamma",
        "speedup",
        "target calls / tokens",
        "my figure",
        "95% interval",
    ]
    assert "what it is." in text


def test_a_page_without_charts_has_no_plotting_library():
    text = render.render(Page("Title", "A verdict.", [PLAIN]))
    assert len(text.encode()) < 40_000


def test_definitions_use_the_names_of_the_notation_and_are_complete():
    known = set(re.findall(r"`([a-z_]+)`", NOTATION))
    ours = {"accuracy", "loss", "gain"}
    ours |= {"engine_efficiency", "block_cost_ratio"}
    ours |= {"needed_block_efficiency", "perplexity", "g_statistic", "p_value"}
    assert {name for name, one in figures.FIGURES.items() if not one.ratios} - ours <= known
    assert {one.better for one in figures.FIGURES.values()} == {"more", "less"}


def test_colours_come_from_the_style_sheet_alone(tmp_path: Path):
    """Otherwise a chart would keep the colours of one theme."""
    page = read_page(reports.bench_run(tmp_path)).page
    styles = render.template("style.css")
    blocks = [block for part in page.sections for block in part.blocks]
    figures = [one for one in blocks if isinstance(one, Figure)]
    for chart in (chart for figure in figures for chart in figure.panels.values()):
        text = str(chart)
        assert re.findall(r"#[0-9a-f]{3,6}\b", text) == []
        assert all(f"--{name}:" in styles for name in re.findall(r"var\(--([\w-]+)", text))
