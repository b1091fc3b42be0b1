"""`--html` of commands on tiny models: the page belongs to the result that is printed."""

import json
from pathlib import Path
from typing import Any

import pytest

from support.texts import succeeded

pytestmark = pytest.mark.slow

FEW = ("--set", "num_prompts=4", "--set", "max_prompt_tokens=6", "--set", "max_new_tokens=8")
QUICK = ("--set", "gammas=[1,2]", "--set", "pass_repeats=1", "--set", "timed_prompts=2")


@pytest.fixture
def pair(pair_folder: Path) -> tuple[Any, ...]:
    return ("--target", pair_folder / "target", "--draft", pair_folder / "draft")


def written(file: Path) -> str:
    text = file.read_text(encoding="utf-8")
    assert text.startswith("<!DOCTYPE html>")
    return text


def test_measure_writes_the_page_that_report_makes_of_its_output(
    run: Any, pair: tuple[Any, ...], pair_folder: Path, tmp_path: Path
):
    page, result = tmp_path / "page.html", tmp_path / "measured.json"
    prompts = ("--prompts", pair_folder / "corpus.jsonl")
    given = (*pair, *prompts, *FEW, *QUICK, "--json", "--html", page)
    code, out, err = run("measure", *given)
    assert code == 3  # too few requests for a verdict
    assert f"HTML report: {page}" in err
    result.write_text(out, encoding="utf-8")
    out = succeeded(run, "report", result)
    assert out.startswith("TOO FEW: ")
    assert written(tmp_path / "measured.html") == written(page)


def test_verify_writes_the_page_that_report_makes_of_its_output(
    run: Any, pair: tuple[Any, ...], pair_folder: Path, tmp_path: Path
):
    page, result = tmp_path / "page.html", tmp_path / "verified.json"
    prompts = ("--prompts", pair_folder / "corpus.jsonl")
    out = succeeded(run, "verify", *pair, *prompts, "--json", "--html", page)
    assert json.loads(out)["passed"]
    result.write_text(out, encoding="utf-8")
    run("report", result)
    assert written(tmp_path / "verified.html") == written(page)
