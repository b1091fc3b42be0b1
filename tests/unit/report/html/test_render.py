"""One file that needs no network: what it holds, and how values and texts are written."""

import base64
import csv
import functools
import io
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

import report_runs
from paceline.cli.main import schema_of
from paceline.config import validate
from paceline.core.bootstrap import Interval
from paceline.report.html import charts, render
from paceline.report.html.definitions import TERMS
from paceline.report.html.encodings import Axis
from paceline.report.html.glossary import PAPERS
from paceline.report.html.page import Claim, Claims, Figure, Page, Panel, Prose, Section, Source
from paceline.report.html.read import read_page

NOTATION = (Path(__file__).parents[4] / "docs/notation.md").read_text(encoding="utf-8")
SOURCE = Source("paceline bench --config bench.yaml", {"seed": 3})


class Reader(HTMLParser):
    """Links, texts and tags of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[dict[str, str]] = []
        self.loads: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.tags.append(tag)
        if "id" in values:
            self.ids.append(values["id"])
        if tag == "a":
            self.links.append(values)
        elif tag != "a" and (address := values.get("src") or values.get("href")):
            self.loads.append(address)

    def file(self, ending: str) -> str:
        """The content of the first download with this ending."""
        link = next(one for one in self.links if one.get("download", "").endswith(ending))
        return base64.b64decode(link["href"].partition("base64,")[2]).decode()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The HTML of a kind of run, made once."""

    @functools.cache
    def make(kind: str) -> str:
        run = report_runs.RUNS[kind](tmp_path_factory.mktemp(kind))
        return render.render(read_page(run).page)

    return make


@pytest.mark.parametrize("kind", report_runs.RUNS)
def test_a_page_loads_nothing_and_links_only_to_itself_and_papers(
    kind: str, written: Callable[[str], str]
):
    read = Reader(written(kind))
    assert read.loads == ["data:,"]
    outside = {one["href"] for one in read.links if not one["href"].startswith(("#", "data:"))}
    assert outside <= {paper.link for paper in PAPERS.values()}
    targets = {link["href"][1:] for link in read.links if link["href"].startswith("#")}
    assert targets <= set(read.ids)
    assert len(set(read.ids)) == len(read.ids)


@pytest.mark.parametrize("kind", report_runs.RUNS)
def test_a_page_stays_below_two_megabytes(kind: str, written: Callable[[str], str]):
    assert len(written(kind).encode()) < 2_000_000


def test_text_from_results_cannot_become_markup(written: Callable[[str], str]):
    text = written("measure")
    assert "&lt;b&gt;&amp; more" in text
    assert "<b>& more" not in text
    decoded = written("decode")
    assert "&lt;time&gt;" in decoded


def test_data_in_a_script_cannot_end_it():
    rows = [{"name": "</script><script>alert(1)", "value": 1.0}]
    chart = charts.intervals(rows, "name", Axis("value", "value"))
    figure = Figure("A figure", "Text.", [Panel(chart)], rows, SOURCE)
    text = render.render(Page("Title", "A verdict.", [Section("Part", [figure])]))
    assert "</script><script>alert" not in text
    assert text.count("<script>alert") == 0


def test_the_csv_of_a_figure_has_full_precision(tmp_path: Path):
    page = read_page(report_runs.sweep_run(tmp_path)).page
    rows = list(csv.DictReader(io.StringIO(Reader(render.render(page)).file(".csv"))))
    figure = page.sections[0].blocks[0]
    assert isinstance(figure, Figure)
    assert [float(row["value_low"]) for row in rows] == [row["value_low"] for row in figure.rows]


def test_an_unknown_value_is_empty_in_csv_and_a_dash_in_the_table():
    rows = [{"a": float("nan"), "b": None, "c": 1}]
    assert render.to_csv(rows).splitlines() == ["a,b,c", ",,1"]
    assert render.merged(rows) == [{"a": "-", "b": "-", "c": "1"}]


def test_bounds_are_in_the_cell_of_their_value():
    rows = [{"x": 1.5, "x_low": 1.0, "x_high": 2.0}, {"x": 2.0, "x_low": None, "x_high": None}]
    assert render.merged(rows) == [{"x": "1.500 (1.000 to 2.000)"}, {"x": "2.000"}]


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
    assert render.shown(value) == text


@pytest.mark.parametrize("kind", ["measure", "verify", "tune"])
def test_the_configuration_of_a_page_runs_the_command_again(kind: str, tmp_path: Path):
    found = read_page(report_runs.RUNS[kind](tmp_path)).page
    values = yaml.safe_load(Reader(render.render(found)).file(".yaml"))
    config = validate(schema_of(kind), values)
    assert config.model_dump(mode="json") == values


def test_every_source_appears_once_and_figures_point_to_theirs():
    rows = [{"name": "a", "value": 1.0}]
    chart = charts.intervals(rows, "name", Axis("value", "value"))
    other = Source("paceline tune --config tune.yaml", {"seed": 4})
    figures = [
        Figure(title, "Text.", [Panel(chart)], rows, source)
        for title, source in (("One", SOURCE), ("Two", other), ("Three", SOURCE))
    ]
    page = Page("Title", "A verdict.", [Section("Part", figures)])
    assert page.sources == [SOURCE, other]
    links = [link["href"] for link in Reader(render.render(page)).links]
    assert [link for link in links if "source-" in link] == ["#source-1", "#source-2", "#source-1"]


def test_a_term_is_defined_where_it_first_occurs():
    parts = [Section(title, [Prose(["Text."])], ("speedup",)) for title in ("One", "Two")]
    text = render.render(Page("Title", "A verdict.", parts))
    assert text.count(TERMS["speedup"].meaning) == 1


def test_a_page_without_charts_has_no_plotting_library():
    text = render.render(Page("Title", "A verdict.", [Section("One", [Prose(["Text."])])]))
    assert len(text.encode()) < 40_000


def test_an_unknown_term_is_an_error():
    with pytest.raises(KeyError, match="no such term"):
        render.render(Page("Title", "A verdict.", [Section("One", [], ("no such term",))]))


def test_claims_show_effect_count_verdict_and_reason():
    claim = Claim(
        "V3 is better than V1",
        "Figure 3",
        Interval(0.1, 0.05, 0.15),
        "acceptance, V3 - V1",
        24,
        "held",
        "good",
        SOURCE.command,
        "because",
    )
    missing = Claim("Another", "Table 2", None, "speedup", None, "not measured", "neutral", "", "")
    block = Claims("Claims", [claim, missing], SOURCE)
    text = render.render(Page("Title", "A verdict.", [Section("Part", [block])]))
    for part in ("V3 is better than V1", "Figure 3", "0.100 (0.050 to 0.150)", "24", "because"):
        assert part in text
    assert '<span class="word small good">held</span>' in text
    assert block.rows[0]["effect_low"] == 0.05


def test_definitions_use_the_names_of_the_notation():
    names = [name for term in TERMS.values() for name in term.code.split(", ") if "_" in name]
    assert len(names) > 8
    assert [name for name in names if f"`{name}`" not in NOTATION] == []


def test_colours_come_from_the_style_sheet_alone(tmp_path: Path):
    """Otherwise a chart would keep the colours of one theme."""
    page = read_page(report_runs.bench_run(tmp_path)).page
    styles = render._text("style.css")
    for part in page.sections:
        for block in part.blocks:
            for panel in block.panels if isinstance(block, Figure) else ():
                text = str(panel.chart)
                assert re.findall(r"#[0-9a-f]{3,6}\b", text) == []
                assert all(f"--{name}:" in styles for name in re.findall(r"var\(--([\w-]+)", text))
