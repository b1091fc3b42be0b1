"""The playground in Chromium: decoding, stopping, probabilities, keyboard, widths, contrast."""

from collections.abc import Iterator
from typing import Any

import pytest

from end_to_end.test_report_in_browser import LOW_CONTRAST, THEMES, WIDTHS, browser, pytestmark
from paceline.models import HfModel
from support.play import peaked_pair, served

__all__ = ["browser", "pytestmark"]  # what pytest reads here


class Served:
    """The page of a pair, whose target can be made to fail."""

    def __init__(self, pair: tuple[HfModel, HfModel], address: str) -> None:
        self.address, self.fails = address, False
        pair[0].hf.register_forward_pre_hook(self._pass)

    def _pass(self, *_: Any) -> None:
        if self.fails:
            raise RuntimeError("<img src=x onerror=alert(1)>")


@pytest.fixture(scope="module")
def page() -> Iterator[Served]:
    pair = peaked_pair(max_position_embeddings=2048)
    with served(pair) as address:
        yield Served(pair, address)


@pytest.fixture
def visit(browser: Any, page: Served) -> Iterator[Any]:
    """Open the page; no test may leave a complaint or ask another server."""
    tabs: list[Any] = []
    complaints: list[str] = []

    def go(width: int = 1280, theme: str = "light") -> Any:
        page.fails = False
        tab = browser.new_page(
            viewport={"width": width, "height": 900}, color_scheme=theme, reduced_motion="reduce"
        )
        tabs.append(tab)
        tab.on("console", lambda message: complaints.append(message.text))
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        tab.on("request", lambda request: complaints.extend(elsewhere(request.url)))
        tab.goto(page.address)
        tab.locator("#start:enabled").wait_for()
        return tab

    def elsewhere(url: str) -> list[str]:
        return [] if url.startswith((page.address, "data:")) else [url]

    yield go
    for tab in tabs:
        tab.close()
    assert complaints == []


def decoded(tab: Any, prompt: str, tokens: int = 16) -> None:
    tab.get_by_label("Prompt").fill(prompt)
    tab.get_by_label("Max new tokens").fill(str(tokens))
    tab.get_by_label("Prompt").press("Control+Enter")
    tab.locator("#status", has_text="Ended").wait_for()


def begin_long_text(tab: Any) -> None:
    tab.get_by_label("Prompt").fill("the cat")
    tab.get_by_label("Max new tokens").fill("1500")
    tab.locator("#start").click()
    tab.locator("#draft .token").nth(9).wait_for(state="attached")


@pytest.mark.parametrize("width", WIDTHS)
def test_a_text_streams_with_sources_and_figures_and_fits_the_width(width: int, visit: Any):
    tab = visit(width)
    decoded(tab, "the cat")
    names = "all => all.map((one) => one.className.replace('token ', ''))"
    sources = tab.locator("#draft .token").evaluate_all(names)
    kept = [source for source in sources if source not in ("rejected", "unexamined")]
    assert len(kept) == 16
    assert {"prefill", "rejected", "recovered"} <= set(sources)
    accepted, examined = sources.count("accepted"), sources.count("recovered")
    said = f"({accepted} of {accepted + examined} examined draft tokens)"
    assert tab.locator("#figures-draft").inner_text().endswith(said)
    assert tab.locator("#figures-plain").inner_text().startswith("16 tokens in ")
    rejected = tab.locator("#counts li", has_text="rejected").inner_text()
    assert rejected == f"rejected {sources.count('rejected')}"
    assert tab.evaluate("document.documentElement.scrollWidth") <= width


def test_pointing_at_a_token_shows_its_probabilities(visit: Any):
    tab = visit()
    decoded(tab, "the cat")
    tab.locator("#draft .token.recovered").first.hover()
    said = tab.locator("#token").inner_text()
    assert ": recovered, target 0." in said
    assert ", draft 0." in said


def test_stop_ends_a_long_text_and_the_next_one_starts(visit: Any):
    tab = visit()
    begin_long_text(tab)
    tab.keyboard.press("Escape")
    tab.locator("#status", has_text="Stopped").wait_for()
    assert tab.locator("#draft .token").count() < 1500
    decoded(tab, "the cat", 3)


def test_a_model_that_fails_during_a_text_says_so_as_text(visit: Any, page: Served):
    tab = visit()
    begin_long_text(tab)
    page.fails = True
    tab.get_by_role("alert").filter(has_text="the model failed: RuntimeError: <img").wait_for()
    assert tab.locator("img").count() == 0
    assert 10 <= tab.locator("#draft .token").count() < 1500
    assert tab.locator("#status").inner_text() == ""
    assert tab.locator("#models").inner_text().startswith("target tiny <b>target</b>")
    page.fails = False
    decoded(tab, "the cat", 3)
    assert tab.get_by_role("alert").inner_text() == ""


def test_the_parameters_of_the_chosen_rule_are_sent(visit: Any):
    tab = visit()
    tab.get_by_label("Rule").select_option("lenient")
    tab.get_by_label("epsilon").fill("0.01")
    tab.get_by_label("Then also without").uncheck()
    with tab.expect_request("**/decode") as sent:
        decoded(tab, "the cat")
    assert sent.value.post_data_json["rule"] == {
        "rule": "lenient",
        "kind": "square",
        "epsilon": 0.01,
    }
    assert tab.locator("#plain").inner_text() == ""


@pytest.mark.parametrize("theme", THEMES)
def test_all_text_can_be_read_and_the_keyboard_reaches_all_controls(theme: str, visit: Any):
    tab = visit(theme=theme)
    decoded(tab, "the cat")
    assert tab.evaluate(LOW_CONTRAST) == []
    reached: list[str] = []
    for _ in range(30):
        tab.keyboard.press("Tab")
        reached.append(tab.evaluate("document.activeElement.name || document.activeElement.id"))
    controls = tab.evaluate(
        "[...document.querySelectorAll('button, input, select, textarea')]"
        ".filter((one) => one.checkVisibility() && !one.disabled).map((one) => one.name || one.id)"
    )
    assert set(controls) <= set(reached)
    named = (
        "[...document.querySelectorAll('input, select, textarea')].map((one) => one.labels.length)"
    )
    assert 0 not in tab.evaluate(named)
