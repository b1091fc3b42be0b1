"""A bench in vLLM: small servers that stream as vLLM does, each with the rule of its cell."""

import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from paceline.bench import BenchConfig, bench, served_cells
from paceline.bench.answers import context_of, key_of, read_texts
from paceline.bench.workbench import bench_context
from paceline.core.rules import Chow, Lossless
from paceline.core.sampling import SamplingParams
from paceline.decode import AutoregressiveDecoder, SpeculativeDecoder
from paceline.engines.client import Client
from paceline.engines.commands import EngineChoice, server_command
from paceline.engines.contract import Drafting, Request, Setup
from paceline.engines.process import started
from paceline.engines.vllm import VllmServer, examined
from paceline.engines.vllm_plugin import read_rule
from paceline.errors import ConfigError, EngineError
from paceline.models import load_model
from paceline.results.row import Row
from support.data import write_lines
from support.engines import Answer, sampling_of, serving
from support.runs import bench_config

pytestmark = pytest.mark.slow


GRID = {
    "temperatures": [1.0],
    "num_speculative_tokens": [2],
    "rules": [{"rule": "lossless"}, {"rule": "chow", "alpha": 1.0}],
}


def settings(folder: Path, output: Path, **changes: Any) -> BenchConfig:
    return bench_config(folder, output, **{"grid": GRID, "num_timed": None} | changes)


IN_VLLM = {"engine": {"engine": "vllm", "program": "true"}}


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[Setup]:
    """Replaces server processes by servers in this process; the setups that were started."""
    setups: list[Setup] = []

    @contextmanager
    def start(choice: EngineChoice, setup: Setup, _progress: Any) -> Iterator[VllmServer]:
        setups.append(setup)
        counts = "--per-request-spec-decode-metrics" in server_command(choice, setup, 0)
        assert counts == (setup.drafting is not None), "vLLM refuses it without a draft"
        with serving(routes(choice, setup)) as url:
            yield VllmServer(Client(url))

    monkeypatch.setattr(served_cells, "started", start)
    return setups


def routes(choice: EngineChoice, setup: Setup) -> dict[str, Any]:
    target = load_model(setup.target, dtype="float32", device="cpu")
    drafting = setup.drafting
    draft = drafting and load_model(drafting.draft, dtype="float32", device="cpu")
    given = choice.server.environment((drafting and drafting.rule) or "")["PACELINE_RULE"]

    def complete(body: dict[str, Any]) -> Answer:
        assert "ignore_eos" not in body, "answers of a task end"
        prompt, count, sampling = body["prompt"], body["max_tokens"], sampling_of(body)
        tokens = (
            AutoregressiveDecoder(target, sampling).generate([prompt], 1, body["seed"])[0].tokens
        )
        decoder: Any = AutoregressiveDecoder(target, sampling)
        if draft is not None and drafting is not None:
            rule = read_rule(given) if given else None
            decoder = SpeculativeDecoder(target, draft, rule, drafting.gamma, sampling)
        chunks, blocks = [list(tokens)], []
        if tokens[0] not in target.eos_token_ids:
            behind = 0 if draft is None else drafting.gamma
            for block in decoder.stream([*prompt, *tokens], count + behind, body["seed"]):
                kept = block.sources.count("accepted") + block.num_accepted_behind_stop
                blocks.append((block.num_drafted, kept))
                chunks.append(list(block.tokens)[: count - len(tokens)])
                tokens = [*tokens, *chunks[-1]]
                if len(tokens) == count:
                    break
        if draft is None:  # vLLM sends what its steps have given since the last event
            chunks[:2] = [[token for chunk in chunks[:2] for token in chunk]]
        events: list[Any] = [{"choices": [{"token_ids": chunk}]} for chunk in chunks]
        found = {
            "per_step_drafted": [one for one, _ in blocks],
            "per_step_accepted": [one for _, one in blocks],
        }
        metrics = {"speculative_decoding": found} if draft is not None else None
        events.append({"choices": [], "metrics": metrics})
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        return 200, "".join([*lines, "data: [DONE]\n\n"])

    return {
        "/version": lambda _: (200, {"version": "0.32.0"}),
        "/v1/models": lambda _: (200, {"data": [{"id": "served"}]}),
        "/v1/completions": complete,
    }


def by_name(rows: list[Row]) -> dict[str, Row]:
    return {str(row.setting.get("rule", row.setting["strategy"])): row for row in rows}


def numbers(row: Row, *names: str) -> list[list[float]]:
    """These sums of each answer."""
    answers = zip(*(row.sums[name] for name in names), strict=True)
    return [[-1.0 if value is None else value for value in values] for values in answers]


def test_cells_are_answered_by_servers_with_their_rule_beside_the_target_alone(
    folder: Path, tmp_path: Path, starts: list[Setup]
):
    config = settings(folder, tmp_path / "run", **IN_VLLM)
    found = bench(config)
    alone, *drafting = (one.drafting for one in starts)
    assert alone is None, "the target alone answers first"
    assert [one and read_rule(one.rule or "") for one in drafting] == [
        Lossless(),
        Chow(1.0),
    ]
    assert {one and one.sampling for one in drafting} == {"probabilistic"}
    rows = by_name(found.rows)
    assert {row.error for row in found.rows} == {""}
    # Chow at alpha 1 keeps every draft, and lossless does not
    assert not any(count for (count,) in numbers(rows["chow"], "rejected"))
    assert any(count for (count,) in numbers(rows["lossless"], "rejected"))
    for row in found.rows:
        counts = ("prefill_tokens", "calls", "examined", "rejected", "tokens")
        for prefilled, calls, examined_, rejected, tokens in numbers(row, *counts):
            assert prefilled + calls + examined_ - rejected >= tokens
        times = ("first_seconds", "seconds", "target_tokens")
        for first, whole, target_tokens in numbers(row, *times):
            assert 0 < first <= whole
            assert target_tokens > 0
        for tokens, first in numbers(row, "target_tokens", "target_first_tokens"):
            assert first == min(2, tokens), "the first event of the target alone has two"
    for calls, tokens in numbers(rows["autoregressive"], "calls", "tokens"):
        assert calls == tokens - 1
    starts.clear()
    assert bench(config).rows == found.rows
    assert not starts, "a finished bench starts no server"


def test_greedy_answers_are_those_of_the_bench_without_an_engine(
    folder: Path, tmp_path: Path, starts: list[Setup]
):
    greedy = {"grid": {"temperatures": [0.0], "rules": [{"rule": "lossless"}]}}
    here = bench(settings(folder, tmp_path / "here", **greedy))
    there = bench(settings(folder, tmp_path / "there", **greedy, **IN_VLLM))
    assert starts
    texts = read_texts(tmp_path / "here") | read_texts(tmp_path / "there")
    assert len(here.rows) == 2
    for one, other in zip(here.rows, there.rows, strict=True):
        assert texts[key_of(one)] == texts[key_of(other)]
        assert one.sums["score"] == other.sums["score"]
    assert set(map(context_of, here.rows)).isdisjoint(map(context_of, there.rows))


def test_a_server_that_does_not_start_fails_its_cell_alone(
    folder: Path, tmp_path: Path, starts: list[Setup], monkeypatch: pytest.MonkeyPatch
):
    start = served_cells.started

    @contextmanager
    def sometimes(choice: EngineChoice, setup: Setup, progress: Any) -> Iterator[Any]:
        if setup.drafting is not None and "lossless" in (setup.drafting.rule or ""):
            raise EngineError("vllm ended while it was starting")
        with start(choice, setup, progress) as engine:
            yield engine

    monkeypatch.setattr(served_cells, "started", sometimes)
    config = settings(folder, tmp_path / "run", **IN_VLLM)
    rows = by_name(bench(config).rows)
    assert rows["lossless"].error == "vllm ended while it was starting"
    assert rows["chow"].error == rows["autoregressive"].error == ""
    baseline = rows["chow"].sums["target_seconds"]
    monkeypatch.setattr(served_cells, "started", start)
    starts.clear()
    again = by_name(bench(config).rows)
    assert len(starts) == 1, "the baseline is known from before"
    assert again["lossless"].error == ""
    assert again["lossless"].sums["target_seconds"] == baseline


def test_another_served_model_is_another_bench(folder: Path, tmp_path: Path):
    engine = IN_VLLM["engine"] | {"target": str(tmp_path / "served")}
    (tmp_path / "served").mkdir()
    write_lines(tmp_path / "served" / "config.json", {})
    config = settings(folder, tmp_path / "run", engine=engine)
    before = bench_context(config)
    write_lines(tmp_path / "served" / "config.json", {"changed": 1})
    assert bench_context(config) != before


def test_blocks_behind_the_end_of_a_text_are_not_counted():
    def counts(blocks: list[tuple[int, int]], num_tokens: int) -> tuple[int, ...]:
        found = examined(blocks, num_tokens)
        assert found.num_emitted + found.num_prefill_tokens == num_tokens
        return found.num_blocks, found.num_drafted, found.num_examined, found.num_recovered

    whole = [(2, 2), (2, 0), (2, 1)]
    assert counts(whole, 1 + 3 + 1 + 2) == (3, 6, 5, 2)
    assert counts(whole, 1 + 3) == (1, 2, 2, 0)
    # the text ends at the first of two accepted tokens: the second one is not part of it
    assert counts([(2, 2)], 1 + 1) == (1, 2, 1, 0)
    # steps without a draft
    assert counts([(2, 0)], 1 + 1 + 3) == (4, 2, 1, 1)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"engine": {"engine": "llamacpp"}}, "bench sets the rule of a vLLM that it starts itself"),
        ({"engine": {"engine": "vllm", "url": "http://127.0.0.1:1"}}, "a running server does not"),
        ({"grid": {"sampling": {"repetition_penalty": 1.3}}}, "computes another penalty"),
        ({"batch_size": 2}, "leave batch_size at 1"),
        (
            {"grid": {"strategies": [{"strategy": "token_cascade", "alpha": 0.5}]}},
            "leave grid.strategies and",
        ),
    ],
)
def test_what_vllm_cannot_run_is_one_line(
    folder: Path, tmp_path: Path, changes: dict[str, Any], says: str
):
    with pytest.raises(ConfigError, match=re.escape(says)):
        settings(folder, tmp_path, **(IN_VLLM | changes))


@pytest.mark.parametrize(
    ("events", "says"),
    [
        (['{"choices": [{"token_ids": [1]}]}'], "ended its answer early"),
        (["[DONE]"], "ended its answer early"),
        (['{"error": {"message": "no memory left"}}', "[DONE]"], "failed: no memory left"),
        (["half of {", "[DONE]"], "text that is not JSON"),
    ],
)
def test_a_damaged_stream_is_one_line(events: list[str], says: str):
    text = "".join(f"data: {event}\n\n" for event in events)
    routes = {
        "/version": lambda _: (200, {"version": "0.32.0"}),
        "/v1/models": lambda _: (200, {"data": [{"id": "served"}]}),
        "/v1/completions": lambda _: (200, text),
    }
    with serving(routes) as url, pytest.raises(EngineError, match=says):
        VllmServer(Client(url)).timed(Request([1, 2], 4, SamplingParams(), 0))


def test_a_vllm_without_the_plugin_is_refused(tmp_path: Path):
    program = tmp_path / "vllm"
    program.write_text(SERVER)
    program.chmod(0o755)
    choice = EngineChoice(engine="vllm", program=str(program))

    def start(rule: str | None) -> None:
        setup = Setup("target", Drafting("draft", 2, "probabilistic", rule), 64)
        with started(choice, setup, lambda *_: None):
            pass

    start(None)
    start('{"rule": "chow", "alpha": 0.5}, and the plugin says so')
    with pytest.raises(EngineError, match=r"without Paceline's plugin.*pip install"):
        start('{"rule": "chow", "alpha": 0.5}')


SERVER = f'''#!{sys.executable}
"""A vllm that loads no model; it has the plugin if the rule says so."""
import http.server, json, os, sys

if "the plugin" in os.environ["PACELINE_RULE"]:
    print("paceline: drafts are judged by Chow(alpha=0.5)", flush=True)


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        found = {{"version": "0.32.0", "data": [{{"id": "served"}}]}}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(found).encode())


port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
'''
