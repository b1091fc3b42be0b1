"""Click and type at random on the playground in two browsers, and watch memory and complaints.

    python tools/click_at_random.py TARGET DRAFT --minutes 4 --host 0.0.0.0

Needs the extras `play` and `browser`, and Chromium. Exit code 1: the page or the server complained.
"""

from __future__ import annotations

import argparse
import random
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from playwright.sync_api import Error as PlaywrightError
from playwright.sync_api import sync_playwright

TEXTS = (
    "the cat",
    "a list is",
    "",
    "<script>alert(1)</script>",
    "a" * 4000,
    "\u202e\U0001f600 \u0627",
    " \n ",
)
KEYS = ("Escape", "Tab", "Enter", "ArrowRight", "Control+Enter")
NUMBERS = ("1", "2", "0.5", "64", "200", "4096", "0", "1e9")


def resident_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+)", status)
    return int(found[1]) / 1024 if found else 0.0


def act(tab: Any, draws: random.Random) -> None:
    """One action of a user."""
    kind = draws.choices(
        ("decode", "button", "number", "text", "select", "key", "wait", "reload"),
        (3, 5, 2, 2, 2, 3, 3, 0.1),
    )[0]
    if kind == "key":
        tab.keyboard.press(draws.choice(KEYS))
    elif kind == "wait":
        tab.wait_for_timeout(draws.randrange(1500))
    elif kind == "reload":
        tab.reload()
    elif kind == "decode":
        tab.locator("#prompt").fill("a list is", timeout=500)
        tab.locator("#start").click(timeout=500)
    else:
        selectors = {"number": "input[type=number]", "text": "textarea"}
        found = tab.locator(f"{selectors.get(kind, kind)}:visible:enabled").all()
        if not found:
            return
        chosen = draws.choice(found)
        if kind == "button":
            chosen.click(timeout=500)
        elif kind == "select":
            options = chosen.locator("option").all_inner_texts()
            chosen.select_option(draws.choice(options), timeout=500)
        else:
            chosen.fill(draws.choice(NUMBERS if kind == "number" else TEXTS), timeout=500)


def watched(tab: Any, complaints: list[str], answers: list[int]) -> Any:
    """The tab, whose complaints and answers are added to the lists."""
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    tab.on("console", lambda said: complaints.append(said.text))
    tab.on("dialog", lambda dialog: complaints.append(dialog.message))
    tab.on("response", lambda one: "decode" in one.url and answers.append(one.status))
    return tab


def memory_of(pid: int, tabs: list[Any]) -> str:
    """Memory of the server, and of what is left of each page after a collection of garbage."""
    pages: list[str] = []
    for tab in tabs:
        devtools = tab.context.new_cdp_session(tab)
        devtools.send("HeapProfiler.collectGarbage")
        devtools.detach()
        heap = tab.evaluate("performance.memory.usedJSHeapSize") / 1e6
        nodes = tab.evaluate("document.querySelectorAll('*').length")
        pages.append(f"page {heap:.1f} MB with {nodes} nodes")
    return f"server {resident_mb(pid):.0f} MB, {', '.join(pages)}"


def main() -> int:
    """Click, then say what was seen."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("draft")
    parser.add_argument("--minutes", type=float, default=4)
    parser.add_argument("--browsers", type=int, default=2)
    parser.add_argument("--host", default="127.0.0.1", help="another one asks for the token")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    draws, complaints, actions, missed = random.Random(given.seed), list[str](), 0, 0
    answers: list[int] = []
    paceline = [sys.executable, "-m", "paceline", "play", "--port", "0", "--host", given.host]
    pair = ["--target", given.target, "--draft", given.draft]
    server = subprocess.Popen([*paceline, *pair], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    with server, sync_playwright() as playwright:
        address = server.stdout.readline().strip()
        browsers = [
            playwright.chromium.launch(
                executable_path=shutil.which("chromium"),
                args=["--no-sandbox", "--enable-precise-memory-info"],
            )
            for _ in range(given.browsers)
        ]
        tabs = [watched(one.new_page(), complaints, answers) for one in browsers]
        for tab in tabs:
            tab.goto(address)
        end, next_report = time.monotonic() + 60 * given.minutes, 0.0
        while time.monotonic() < end:
            try:
                act(draws.choice(tabs), draws)
            except PlaywrightError:  # hidden or disabled by now
                missed += 1
            actions += 1
            if time.monotonic() > next_report:
                next_report = time.monotonic() + 30
                print(f"{actions} actions, {memory_of(server.pid, tabs)}", flush=True)
        for browser in browsers:
            browser.close()
        alive = server.poll() is None
        server.terminate()
    # answers that refuse a request are in the console, too
    refused = [line for line in complaints if re.search("status of (409|422)", line)]
    others = [line for line in complaints if line not in refused]
    counts = {status: answers.count(status) for status in sorted(set(answers))}
    print(f"{actions} actions, {missed} missed; answers of decode by status: {counts}")
    print(f"complaints: {others or 'none'}; server alive: {alive}")
    return int(bool(others) or not alive)


if __name__ == "__main__":
    sys.exit(main())
