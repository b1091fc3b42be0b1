"""The playground in Chromium: decoding, stopping, replaying, keyboard, widths, contrast, token."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from end_to_end.test_report_in_browser import LOW_CONTRAST, THEMES, WIDTHS, browser, pytestmark
from paceline.decode.strategies import DecodingConfig, Speculative, build_decoder
from paceline.decode.text_prompts import pieces_of
from paceline.decode.trace import Trace
from paceline.models import HfModel
from support.play import peaked_pair, served

__all__ = ["browser", "pytestmark"]  # what pytest reads here


class Served:
    """The page of a pair, whose target can be made to fail."""

    def __init__(self, pair: tuple[HfModel, HfModel], address: str) -> None:
        self.pair, self.address, self.fails = pair, address, False
        pair[0].hf.register_forward_pre_hook(self._pass)

    def _pass(self, *_: Any) -> None:
        if self.fails:
            raise RuntimeError("<img src=x onerror=alert(1)>")


@pytest.fixture(scope="module")
def page() -> Iterator[Served]:
    pair = peaked_pair(max_position_embeddings=2048)
    with served(pair) as listening:
        yield Served(pair, listening.address)


@pytest.fixture
def visit(browser: Any, page: Served) -> Iterator[Any]:
    """Open the page; no test may leave a complaint or ask another server.

    That another text is being decoded, 409, is in the console, whatever the page makes of it.
    """
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
    assert [each for each in complaints if "status of 409" not in each] == []


def decoded(tab: Any, prompt: str, tokens: int = 16) -> None:
    tab.get_by_label("prompt").fill(prompt)
    tab.get_by_label("max new tokens").fill(str(tokens))
    tab.get_by_label("prompt").press("Control+Enter")
    tab.locator("#status", has_text="Ended").wait_for()


def begin_long_text(tab: Any) -> None:
    tab.get_by_label("prompt").fill("the cat")
    tab.get_by_label("max new tokens").fill("1500")
    tab.locator("#start").click()
    tab.locator("#text-draft .token").nth(9).wait_for(state="attached")


def write_trace(page: Served, file: Path) -> list[dict[str, Any]]:
    """What `paceline decode --json --trace` writes, by a pair in this process."""
    target, draft = page.pair
    tokenizer = target.tokenizer
    assert tokenizer is not None
    decoding = DecodingConfig(strategy=Speculative())
    trace = Trace(decoding, seed=0)
    texts: list[list[tuple[str, str]]] = []
    prompt = tokenizer("the <i>cat</i>")["input_ids"]
    for block in build_decoder(trace.decoding, target, draft).stream(prompt, 24, 0):
        trace.add(block, tokenizer.decode)
        texts.append([(each.text, each.source) for each in pieces_of([block], tokenizer, prompt)])
    found = {"decoding": decoding.model_dump(mode="json"), "blocks": texts, "trace": trace.rows}
    file.write_text(json.dumps(found))
    return trace.rows


@pytest.mark.parametrize("width", WIDTHS)
def test_a_text_streams_with_sources_and_figures_and_fits_the_width(width: int, visit: Any):
    tab = visit(width)
    decoded(tab, "the cat")
    sources = tab.locator("#text-draft .token").evaluate_all("all => all.map((one) => one.title)")
    assert len(sources) == tab.locator("#text-plain .token").count() == 16
    assert {"prefill", "recovered"} <= set(sources)
    assert tab.locator("#figures tr", has_text="tokens per second").count() == 2
    numbers = tab.locator("#figures tr", has_text="acceptance").inner_text().split("\t")
    accepted, examined = sources.count("accepted"), sources.count("recovered")
    assert numbers[1] == f"{accepted / (accepted + examined):.3f}"
    assert tab.evaluate("document.documentElement.scrollWidth") <= width


def test_stop_ends_a_long_text_and_the_next_one_starts(visit: Any):
    tab = visit()
    begin_long_text(tab)
    tab.keyboard.press("Escape")
    tab.locator("#status", has_text="by you").wait_for()
    assert tab.locator("#text-draft .token").count() < 1500
    decoded(tab, "the cat", 3)


def test_a_second_browser_hears_that_the_server_is_busy_and_decodes_afterwards(visit: Any):
    first, second = visit(), visit()
    begin_long_text(first)
    second.get_by_label("prompt").fill("the dog")
    second.locator("#start").click()
    second.get_by_role("alert").filter(has_text="busy: another text is being decoded").wait_for()
    second.keyboard.press("Escape")  # ends no text of the first one
    count = first.locator("#text-draft .token").count()
    first.locator("#text-draft .token").nth(count).wait_for(state="attached")
    first.keyboard.press("Escape")
    first.locator("#status", has_text="by you").wait_for()
    decoded(second, "the dog", 3)
    assert second.get_by_role("alert").inner_text() == ""


def test_a_model_that_fails_during_a_text_says_so_beside_what_it_wrote(visit: Any, page: Served):
    tab = visit()
    begin_long_text(tab)
    page.fails = True
    tab.get_by_role("alert").filter(has_text="the model failed: RuntimeError: <img").wait_for()
    assert 10 <= tab.locator("#text-draft .token").count() < 1500
    assert tab.locator("#status").inner_text() == ""
    page.fails = False
    decoded(tab, "the cat", 3)
    assert tab.get_by_role("alert").inner_text() == ""


def test_only_the_address_with_its_token_opens_the_models(browser: Any, page: Served):
    page.fails = False
    with served(page.pair, "0.0.0.0") as listening:
        address, token = listening.address.split("#token=")
        tab = browser.new_page()
        for wrong in (address, f"{address}#token={token[:-1]}"):
            tab.goto(wrong)
            tab.reload()  # another fragment alone is the same page
            tab.get_by_role("alert").filter(has_text="the token is wrong").wait_for()
            assert tab.locator("#start").is_disabled()
        tab.goto(listening.address)
        tab.reload()
        tab.locator("#start:enabled").wait_for()
        decoded(tab, "the cat", 3)
        tab.close()


def test_a_failing_model_says_so_as_text(visit: Any, page: Served):
    tab = visit()
    page.fails = True
    tab.get_by_label("prompt").fill("the cat")
    tab.locator("#start").click()
    alert = tab.get_by_role("alert")
    alert.filter(has_text="<img src=x").wait_for()
    assert tab.locator("img").count() == 0
    assert tab.locator("#models").inner_text().startswith("target tiny <b>target</b>")


def test_the_parameters_of_the_chosen_rule_are_sent(visit: Any):
    tab = visit()
    tab.locator("#controls").get_by_label("rule", exact=True).select_option("lenient")
    tab.locator("#controls").get_by_label("epsilon").fill("0.01")
    with tab.expect_request("**/api/decode") as sent:
        decoded(tab, "the cat")
    assert sent.value.post_data_json["rule"] == {
        "rule": "lenient",
        "kind": "square",
        "epsilon": 0.01,
    }
    assert sent.value.post_data_json["draft_sampling"] is None


def test_a_trace_shows_the_recorded_choices_and_those_of_every_rule(
    visit: Any, page: Served, tmp_path: Path
):
    rows = write_trace(page, tmp_path / "trace.json")
    tab = visit(390)
    tab.get_by_role("tab", name="Decode").press("ArrowRight")
    tab.locator("#file").set_input_files(tmp_path / "trace.json")
    tab.locator("#read").wait_for()
    assert tab.locator("#positions .accepts").count() == sum(row["accepted"] for row in rows)
    assert tab.locator("#positions .rejects").count() == sum(not row["accepted"] for row in rows)
    assert tab.locator("#choices tr").count() == 13
    tab.locator("#rule").get_by_label("rule", exact=True).select_option("chow")
    tab.locator("#rule").get_by_label("alpha").fill("1")  # never defers
    assert tab.locator("#positions .accepts").count() == len(rows)
    assert tab.evaluate("document.documentElement.scrollWidth") <= 390
    (tmp_path / "other.json").write_text('{"kind": "measure"}')
    tab.locator("#file").set_input_files(tmp_path / "other.json")
    tab.locator("#said", has_text="other.json is not a trace").wait_for()


@pytest.mark.parametrize("theme", THEMES)
def test_all_text_can_be_read_and_the_keyboard_reaches_all_controls(
    theme: str, visit: Any, page: Served, tmp_path: Path
):
    tab = visit(theme=theme)
    decoded(tab, "the cat")
    assert tab.evaluate(LOW_CONTRAST) == []
    reached: list[str] = []
    for _ in range(40):
        tab.keyboard.press("Tab")
        reached.append(tab.evaluate("document.activeElement.id || document.activeElement.tagName"))
    controls = tab.evaluate(
        "[...document.querySelectorAll('#decode button, #decode input, #decode select')]"
        ".filter((one) => one.checkVisibility() && !one.disabled).map((one) => one.id)"
    )
    assert set(controls) <= set(reached)
    named = (
        "[...document.querySelectorAll('input, select, textarea')].map((one) => one.labels.length)"
    )
    assert 0 not in tab.evaluate(named)
    write_trace(page, tmp_path / "trace.json")
    tab.get_by_role("tab", name="Replay").click()
    tab.locator("#file").set_input_files(tmp_path / "trace.json")
    tab.locator("#read").wait_for()
    assert tab.evaluate(LOW_CONTRAST) == []
