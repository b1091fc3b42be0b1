"""`paceline measure --engine`: an engine that Paceline starts itself, and one that runs."""

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.models import load_model
from support.engines import Answer, llamacpp_routes, serving
from support.runs import write_pair

SERVER = Path(__file__).parents[1] / "support/fake_llama_server.py"
SMALL = [
    *("--set", "num_prompts=8", "--set", "max_new_tokens=24"),
    *("--set", "num_speculative_tokens=2", "--set", "dtype=float32", "--temperature", "0"),
]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.engines.process._POLL_S", 0.02)


def given(folder: Path, *more: str) -> list[str]:
    pair = ["--target", str(folder / "target"), "--draft", str(folder / "target")]
    prompts = ["--prompts", str(Path(__file__).with_name("prompts.txt"))]
    return ["measure", *pair, *prompts, *SMALL, *more]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Options that start the small server in the place of llama-server."""
    with ExitStack() as servers:

        def load(body: dict[str, Any]) -> Answer:
            names = (body["target"], body["draft"])
            models = [name and load_model(name, dtype="float32", device="cpu") for name in names]
            routes = llamacpp_routes(*models, body["gamma"])
            return 200, {"url": servers.enter_context(serving(routes))}

        models = servers.enter_context(serving({"/load": load}))
        program = tmp_path_factory.mktemp("bin") / "llama-server"
        # -S: without packages, which it does not need
        command = f'"{sys.executable}" -S "{SERVER}" "{models}"'
        program.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        program.chmod(0o755)
        named = ["--set", f"engine.program={program}", "--allow-program", str(program)]
        yield ["--engine", "llamacpp", *named]


def test_an_engine_is_started_without_and_with_the_draft_and_its_costs_give_a_verdict(
    run, started, tmp_path
):
    pair_folder = write_pair(tmp_path / "pair", rounded_to=torch.float32)  # longer than noise
    costs = tmp_path / "costs.json"
    timed = ["--set", "write_costs.gammas=[2]", "--set", "write_costs.batch_sizes=[1, 2]"]
    timed += ["--set", "write_costs.num_rounds=12"]  # a busy machine spoils some
    code, out, err = run(
        *given(pair_folder, *started, *timed, "--write-costs", str(costs), "--json")
    )
    found = json.loads(out)
    speedup = found["speed"]["speedup"]
    assert code == (0 if speedup["low"] > 1 else 1 if speedup["high"] < 1 else 3), err
    assert f"measured {speedup['value']:.2f}x" in found["verdict"]["reason"]
    # the draft is the target itself: every block keeps both tokens, but for the last one of a text
    served = [row["sums"] for row in found["rows"] if row["setting"].get("counts") == "served"]
    assert served[1]["position_accepted"] == served[1]["calls"]
    assert found["speed"]["num_equal"] == found["num_requests"] == 8
    assert found["engine"] == "llamacpp"
    assert found["agreement"]["agrees"]
    written = json.loads(costs.read_text())
    assert written == found["costs"]
    steps = [(one["gamma"], one["batch_size"]) for one in written["steps"]]
    assert steps == [(0, 1), (0, 2), (2, 1), (2, 2)]
    assert all(one["seconds"]["value"] > 0 for one in written["steps"])
    pair = ["--target", str(pair_folder / "target"), "--draft", str(pair_folder / "target")]
    prompts = ["--prompts", str(Path(__file__).with_name("prompts.txt"))]
    few = ["--set", "num_prompts=8", "--set", "max_new_tokens=12", "--set", "concurrency=2"]
    code, out, err = run("measure", *pair, *prompts, *few, "--costs", str(costs))
    assert code in (0, 1, 3), err
    word = {0: "GO", 1: "NO-GO", 3: "UNDECIDED"}[code]
    assert any(line.startswith(f"{word}: expected ") for line in out.splitlines())
    assert "one step of 2 requests in llamacpp" in out
    assert "expected speedup in llamacpp" in out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ('"--die-after", "3"', "closed the connection ... ggml_abort: no memory left"),
        ('"--crash"', "ended while it was starting (killed by SIGSEGV)"),
        ('"--no-such-option"', "ended while it was starting ... --no-such-option"),
    ],
)
def test_a_server_that_ends_is_one_line_with_its_last_words(
    run, pair_folder, started, options, said
):
    code, out, err = run(*given(pair_folder, *started, "--set", f"engine.options=[{options}]"))
    assert (code, out) == (3, "")
    line = err.strip().splitlines()[-1]
    assert all(part in line for part in said.split(" ... ")), line
