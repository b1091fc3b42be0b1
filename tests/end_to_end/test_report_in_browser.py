"""Reports in Chromium: figures, hover, keyboard, themes, contrast, widths, no network.

`make report-test` installs the browser and the driver; without them these tests are skipped.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.view import render
from paceline.view.read import read_page
from support import reports

driver = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed: make report-test"
)
CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed: make report-test"),
]
WIDTHS = (1280, 390)
THEMES = ("light", "dark")

LIGHT = """
  const channel = (v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const parse = (text) => (text.match(/[\\d.]+/g) ?? [0, 0, 0, 0]).map(Number);
  const contrast = (pair) => (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
"""
# Every text with less contrast to its background than 4.5 : 1, as [text, ratio].
LOW_CONTRAST = f"""() => {{ {LIGHT}
  const behind = (node) => {{
    for (let at = node; at; at = at.parentElement) {{
      const colour = parse(getComputedStyle(at).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) return colour;
    }}
    return [255, 255, 255];
  }};
  const found = [];
  for (const node of document.body.querySelectorAll("*")) {{
    const own = [...node.childNodes].some((one) => one.nodeType === 3 && one.data.trim());
    if (!own || ["SCRIPT", "STYLE", "NOSCRIPT"].includes(node.tagName)) continue;
    const style = getComputedStyle(node);
    const drawn = node instanceof SVGElement;
    if (!node.getClientRects().length) continue;
    const ratio = contrast([parse(drawn ? style.fill : style.color), behind(node)].map(light));
    if (ratio < 4.5) found.push([node.textContent.trim().slice(0, 40), ratio]);
  }}
  return found;
}}"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A page of every kind of run."""
    folder = tmp_path_factory.mktemp("pages")
    found: dict[str, Path] = {}
    for kind, make in reports.RUNS.items():
        found[kind] = folder / f"{kind}.html"
        render.write(read_page(make(folder / kind)).page, found[kind])
    return found


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Debian's Chromium; as root it runs only without its sandbox."""
    options = ["--no-sandbox"] if os.geteuid() == 0 else []
    with driver.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=options)
        yield chromium
        chromium.close()


class Opened:
    """A page, with everything that it complained about or asked for."""

    def __init__(self, browser: Any, file: Path, width: int = 1280, theme: str = "light") -> None:
        self.tab = browser.new_page(
            viewport={"width": width, "height": 900}, color_scheme=theme, reduced_motion="reduce"
        )
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.tab.on("console", lambda message: self.complaints.append(message.text))
        self.tab.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.tab.on("request", lambda request: self.requests.append(request.url))
        self.tab.goto(file.as_uri())
        if self.tab.query_selector(".chart"):
            self.tab.wait_for_selector("html[data-ready=yes]", timeout=120_000)

    def close(self) -> None:
        self.tab.close()


@pytest.fixture
def visit(browser: Any, pages: dict[str, Path]) -> Iterator[Any]:
    """Open the page of a kind of run."""
    opened: list[Opened] = []

    def go(kind: str, width: int = 1280, theme: str = "light") -> Opened:
        opened.append(Opened(browser, pages[kind], width, theme))
        return opened[-1]

    yield go
    for one in opened:
        one.close()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", reports.RUNS)
def test_every_figure_is_drawn_within_the_page_without_a_complaint_or_a_request(
    kind: str, width: int, visit: Any
):
    page = visit(kind, width)
    charts = page.tab.query_selector_all(".chart")
    marks = [chart.query_selector_all('[role="graphics-symbol"]') for chart in charts]
    assert all(marks)
    assert charts or kind in ("verify", "tune")
    assert page.complaints == []
    assert [url for url in page.requests if not url.startswith(("file:", "data:"))] == []
    if width == 390:
        assert page.tab.evaluate("document.documentElement.scrollWidth") <= 390
        sticks_out = """() => [...document.querySelectorAll(".chart svg")]
            .map((one) => one.getBoundingClientRect().right).filter((right) => right > 390)"""
        assert page.tab.evaluate(sticks_out) == []


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("kind", reports.RUNS)
def test_all_text_can_be_read_in_both_themes(kind: str, theme: str, visit: Any):
    page = visit(kind, theme=theme)
    page.tab.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true })")
    assert page.tab.evaluate(LOW_CONTRAST) == []


def test_the_button_changes_the_theme_of_text_and_charts(visit: Any):
    page = visit("bench")
    colour = "getComputedStyle(document.body).backgroundColor"
    point = (
        """getComputedStyle(document.querySelector('.chart [aria-roledescription="point"]')).fill"""
    )
    automatic = page.tab.evaluate(colour), page.tab.evaluate(point)
    button = page.tab.locator("#theme")
    button.click()
    assert (page.tab.evaluate(colour), page.tab.evaluate(point)) == automatic
    button.click()
    assert button.inner_text() == "Theme: dark"
    dark = page.tab.evaluate(colour), page.tab.evaluate(point)
    assert dark[0] != automatic[0]
    assert dark[1] != automatic[1]
    page.tab.reload()
    page.tab.wait_for_selector("html[data-ready=yes]")
    assert page.tab.evaluate(colour) == dark[0]  # the choice is kept


def test_the_theme_follows_the_system(visit: Any):
    colour = "getComputedStyle(document.body).backgroundColor"
    light, dark = (visit("verify", theme=theme).tab.evaluate(colour) for theme in THEMES)
    assert light != dark


def test_hovering_over_a_point_shows_its_values_which_a_screen_reader_gets_too(visit: Any):
    page = visit("bench")
    points = page.tab.locator('.chart [aria-roledescription="point"]')
    points.first.hover()
    tooltip = page.tab.locator("#vg-tooltip-element.visible")
    tooltip.wait_for()
    shown = tooltip.inner_text()
    assert "chow" in shown
    assert "1.40" in shown
    assert "95% interval from" in shown
    labels = points.evaluate_all("(marks) => marks.map((mark) => mark.getAttribute('aria-label'))")
    assert any("speedup: 1.5" in label and "family: opt" in label for label in labels)


def test_the_keyboard_reaches_everything_and_shows_where_it_is(visit: Any):
    page = visit("measure")
    here = """() => {
      const at = document.activeElement;
      const name = ["skip", "scroll"].find((one) => at.classList.contains(one));
      return [name ?? at.tagName, getComputedStyle(at).outlineWidth];
    }"""
    reached: list[str] = []
    for _ in range(60):
        page.tab.keyboard.press("Tab")
        name, outline = page.tab.evaluate(here)
        if name == "BODY":
            break
        assert outline == "3px", name
        reached.append(name)
    assert reached[0] == "skip"
    assert {"BUTTON", "A", "scroll", "SUMMARY"} <= set(reached)


def test_a_selected_family_stands_out(visit: Any):
    page = visit("bench")
    faint = """() => [...document.querySelectorAll('.chart')][0]
        .querySelectorAll('[aria-roledescription="point"][opacity="0.12"]').length"""
    assert page.tab.evaluate(faint) == 0
    page.tab.locator(".chart").first.locator(".role-legend-symbol path").first.click(force=True)
    page.tab.locator('.chart [opacity="0.12"]').first.wait_for(state="attached")
    assert page.tab.evaluate(faint) > 0


@pytest.mark.parametrize("theme", THEMES)
def test_a_page_prints_on_paper_without_controls(theme: str, visit: Any):
    page = visit("bench", width=390, theme=theme)
    page.tab.emulate_media(media="print", color_scheme=theme)
    hidden = page.tab.evaluate(
        "['#theme', 'nav', 'details.data'].every((name) => "
        "getComputedStyle(document.querySelector(name)).display === 'none')"
    )
    assert hidden
    assert page.tab.locator(".definitions").first.is_visible()
    assert page.tab.evaluate("getComputedStyle(document.body).backgroundColor") == (
        "rgb(255, 255, 255)"
    )
    assert page.tab.evaluate(LOW_CONTRAST) == []
    assert len(page.tab.pdf()) > 10_000


def test_downloads_carry_the_rows_and_a_link_opens_the_configuration(visit: Any):
    tab = visit("bench").tab
    with tab.expect_download() as started:
        tab.locator("a[download$='.csv']").first.click()
    file = started.value
    assert file.suggested_filename == "Quality-against-cost.csv"
    lines = Path(file.path()).read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith(
        "family,setting,gamma,quality,quality_low,quality_high,relative_quality"
    )
    assert len(lines) == 5
    tab.locator("figure a", has_text="configuration").nth(2).click()
    shown = tab.locator("article pre:visible")
    shown.wait_for()
    assert "task: arithmetic" in shown.inner_text()


def test_tables_and_definitions_remain_without_scripts(browser: Any, pages: dict[str, Path]):
    tab = browser.new_page(java_script_enabled=False)
    tab.goto(pages["bench"].as_uri())
    assert "the data below do not" in tab.content()
    tab.locator("summary", has_text="Table of these data").first.click()
    assert tab.locator("details.data table").first.is_visible()
    assert tab.locator(".definitions").first.is_visible()
    tab.close()
