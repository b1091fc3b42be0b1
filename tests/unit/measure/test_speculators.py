"""Methods in an engine whose seconds and counts are known, so that every figure is."""

import json
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.main import main
from paceline.config import validate
from paceline.engines.commands import EngineChoice
from paceline.engines.contract import BlockCounts, Request, Served, Setup
from paceline.errors import PacelineError, UsageError
from paceline.measure.speculators import SpeculatorsConfig, SpeculatorTable, measure_speculators
from paceline.progress import Progress
from paceline.results import FIGURES
from paceline.view.measure_pages import speculators_page
from paceline.view.read import read_page

NGRAM = '{"method": "ngram", "num_speculative_tokens": 4}'
EAGLE = '{"method": "eagle3", "model": "a/b/head", "num_speculative_tokens": 2}'
DRAFT = "draft_model draft"
# seconds per token of a group, and accepted tokens per answer of 9 tokens, by method and load
SPEED = {
    "none": ({1: 0.1, 4: 0.04}, 0),
    "ngram": ({1: 0.08, 4: 0.05}, 2),
    "eagle3 head": ({1: 0.05, 4: 0.03}, 5),
    DRAFT: ({1: 0.1, 4: 0.045}, 4),
}


class Timed:
    """Groups take 5% more or less than their mean, the first of a size five times as long.

    Answers have 9 tokens.
    """

    version = "0.32.0"

    def __init__(self, method: str, asked: list[tuple[str, int]]) -> None:
        self.method, self.asked = method, asked
        self.rng, self.warm = random.Random(method), set[int]()

    def serve_together(self, requests: Sequence[Request], batch_size: int) -> Served:
        seconds, accepted = SPEED[self.method]
        count = len(requests)
        if count not in self.warm:
            self.warm.add(count)
            return Served([5] * 9 * count, 99.0, None, seconds[count] * 45 * count)
        self.asked += [(self.method, request.seed) for request in requests]
        wall_s = seconds[count] * 9 * count * self.rng.uniform(0.95, 1.05)
        drafted = 2 * accepted * count
        blocks = BlockCounts(num_blocks=7, num_drafted=drafted, num_accepted=accepted * count)
        return Served([5] * 9 * count, 99.0, blocks if accepted else None, wall_s)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The requests that each method answered, while this stands for vLLM."""
    found: list[tuple[str, int]] = []

    @contextmanager
    def started(choice: EngineChoice, setup: Setup, progress: Progress) -> Iterator[Any]:
        assert setup.drafting is None
        assert setup.batch_size == 4
        flag, *given = choice.options
        assert flag == "--no-enable-prefix-caching", "each load asks the same prompts"
        text = given[-1] if given else "{}"
        method = json.loads(text).get("method", "none")
        names = {"draft_model": DRAFT, "eagle3": "eagle3 head"}
        assert given[:-1] == (["--speculative-config"] if given else [])
        yield Timed(names.get(method, method), found)

    monkeypatch.setattr("paceline.measure.speculators.started", started)
    monkeypatch.setattr("paceline.data.input_checks.check_choice", lambda _: None)
    return found


def config(folder: Path, **changes: Any) -> SpeculatorsConfig:
    settings = {
        "engine": "vllm",
        "target": str(folder / "target"),
        "draft": str(folder / "draft"),
        "prompts": str(folder / "corpus.jsonl"),
        "speculative_config": [NGRAM, EAGLE],
        "loads": [4, 1],
        "num_prompts": 32,
        "max_new_tokens": 9,
        "max_prompt_tokens": 4,
    }
    return validate(SpeculatorsConfig, settings | changes)


@pytest.fixture
def many(folder: Path) -> Path:
    rows = "".join(json.dumps({"text": f"the {n} other animals"}) + "\n" for n in range(32))
    (folder / "corpus.jsonl").write_text(rows)
    return folder


def test_figures_verdicts_and_what_to_serve(many: Path, asked: list[tuple[str, int]]):
    found = measure_speculators(config(many))
    assert [row.setting["concurrency"] for row in found.rows] == [1] * 4 + [4] * 4
    for cell in found.cells():
        method, load = str(cell.row.setting["method"]), int(cell.row.setting["concurrency"])
        seconds, accepted = SPEED[method]
        assert len(cell.row.units) == 32 // load
        assert FIGURES["tokens_per_s"].value(cell.row) == pytest.approx(1 / seconds[load], rel=0.04)
        assert FIGURES["block_efficiency"].value(cell.row) == 8 / (8 - accepted)
        if method == "none":
            assert (cell.speedup, cell.verdict) == (None, None)
            continue
        assert cell.speedup is not None
        assert cell.verdict is not None
        wanted = SPEED["none"][0][load] / seconds[load]
        assert cell.speedup.value == pytest.approx(wanted, rel=0.04)
        word = "UNDECIDED" if wanted == 1 else "GO" if wanted > 1 else "NO-GO"
        assert cell.verdict.word == word, (method, load)
    assert found.best() == {1: "eagle3 head", 4: "eagle3 head"}
    ranges = "num_speculative_tokens_per_batch_size"
    assert found.served("eagle3 head")[ranges] == [[1, 1, 2], [2, 4, 2], [5, 1000000, 0]]
    assert found.served("ngram") == json.loads(NGRAM) | {ranges: [[1, 1, 4], [2, 4, 0]]}
    assert found.exit_code == 0
    for method in SPEED:
        own = sorted(seed for name, seed in asked if name == method)
        assert own == sorted([*range(32)] * 2), "each request once at each load, in two starts"
    shown = json.loads(found.model_dump_json())
    assert SpeculatorTable.model_validate(shown).cells() == found.cells()
    (many / "found.json").write_text(found.model_dump_json())
    page = read_page(many / "found.json").page
    assert page.title == speculators_page(found).title
    assert page.source is not None
    assert "measure --speculative-config '{" in page.source.command
    assert shown["best"] == {"1": "eagle3 head", "4": "eagle3 head"}


def test_a_method_that_drafts_nothing_has_one_token_per_call_and_loses_nothing(
    many: Path, asked: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(SPEED, "ngram", ({1: 0.1, 4: 0.05}, 0))
    found = measure_speculators(config(many))
    rows = [row for row in found.rows if row.has(method="ngram")]
    assert [FIGURES["block_efficiency"].value(row) for row in rows] == [1, 1]
    assert found.best()[1] == "eagle3 head"


def test_tokens_accepted_behind_the_end_do_not_make_more_than_whole_blocks(
    many: Path, asked: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(SPEED, "ngram", ({1: 0.05, 4: 0.02}, 8))  # of the 8 behind the first
    found = measure_speculators(config(many))
    rows = [row for row in found.rows if row.has(method="ngram")]
    assert [FIGURES["block_efficiency"].value(row) for row in rows] == [5, 5]


def test_a_file_with_too_few_prompts_is_refused_before_the_engine_starts(
    many: Path, asked: list[tuple[str, int]]
):
    lines = (many / "corpus.jsonl").read_text().splitlines(keepends=True)
    (many / "corpus.jsonl").write_text("".join(lines[:9]))
    with pytest.raises(UsageError, match="9 prompts are 2 groups of 4 requests, but a verdict"):
        measure_speculators(config(many))
    assert asked == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_prompts": 31},
            "31 prompts are 7 groups of 4 requests, but a verdict needs 8; give 32",
        ),
        ({"speculative_config": ['{"method": null, "model": "a.B"}']}, "keys method, a text"),
        ({"engine": "llamacpp"}, "is of a vLLM that is started here: --engine vllm"),
        ({"speculative_config": ["{"]}, "speculative_config is not JSON"),
        (
            {"speculative_config": ['{"method": "ngram"}']},
            "needs the keys method, a text, and num_sp",
        ),
        ({"speculative_config": []}, "speculative_config"),
        ({"draft_sampling": {"temperature": 0}}, "do not apply to engines; leave them out"),
        ({"draft_weights": "int8"}, "do not apply to engines; leave them out"),
    ],
)
def test_settings_that_cannot_be_measured_are_one_line(
    many: Path, changes: dict[str, Any], message: str
):
    with pytest.raises(PacelineError, match=message):
        config(many, **changes)


def test_a_parallel_draft_is_served_as_one(many: Path, asked: list[tuple[str, int]]):
    del asked
    settings = many / "draft" / "config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"pard_token": 7}))
    found = measure_speculators(config(many))
    assert found.served("draft_model draft")["parallel_drafting"] is True


def test_equal_methods_are_numbered(many: Path):
    found = config(many, speculative_config=[NGRAM, NGRAM], draft="").methods
    assert list(found) == ["none", "ngram", "ngram #2"]


def test_a_file_may_not_name_code_of_a_method(many: Path):
    code = '{"method": "custom_cl\\u0061ss", "model": "a.B", "num_speculative_tokens": 1}'
    with pytest.raises(UsageError, match=r"may not set the speculative_config .*--allow-program"):
        config(many, speculative_config=[code])


def test_the_command_prints_what_to_serve(
    many: Path,
    asked: list[tuple[str, int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    given = config(many)
    words = ["--engine", "vllm", "--target", given.target, "--prompts", given.prompts.path]
    words += ["--speculative-config", NGRAM, "--speculative-config", EAGLE, "--num-prompts", "32"]
    words += ["--max-new-tokens", "9"]
    words += ["--loads", "1,4", "--html", str(tmp_path / "page.html")]
    monkeypatch.setattr("sys.argv", ["paceline", "measure", *words])
    with pytest.raises(SystemExit) as stop:
        main()
    out, err = capsys.readouterr()
    assert stop.value.code == 0, err
    assert "at 1 request at once: eagle3 head" in out
    line = next(line for line in out.splitlines() if line.startswith("eagle3 head: vllm serve"))
    assert '_per_batch_size": [[1, 1, 2], [2, 4, 2], [5, 1000000, 0]]' in line
    assert "Which speculator, at which load?" in (tmp_path / "page.html").read_text()
