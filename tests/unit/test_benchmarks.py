"""The scripts in benchmarks, which `make test` does not run: what they import, and gpu.py."""

import ast
import importlib
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from paceline.engines.client import Client
from paceline.engines.commands import EngineChoice
from paceline.engines.contract import Setup
from paceline.engines.process import connect
from paceline.models import load_model, prepare_for_decoding
from support.engines import serving, vllm_routes
from support.runs import write_pair

FOLDER = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = sorted(FOLDER.glob("*.py"))


@pytest.fixture(autouse=True)
def _beside_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))


@pytest.fixture
def gpu() -> Any:
    return importlib.import_module("gpu")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_every_name_that_a_script_imports_from_this_repository_exists(script):
    scripts = {path.stem for path in SCRIPTS}
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            if node.module.partition(".")[0] not in {"paceline", *scripts}:
                continue
            module = importlib.import_module(node.module)
            for name in (alias.name for alias in node.names):
                if not hasattr(module, name):
                    importlib.import_module(f"{node.module}.{name}")


def test_without_trl_and_vllm_their_parts_are_one_line_each(gpu, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "trl", None)
    options = ["--device", "cpu", "--shapes", "tiny", "--part", "trl", "vllm", "--vllm", "nowhere"]
    monkeypatch.setattr(sys, "argv", ["gpu.py", *options])
    with pytest.raises(SystemExit, match="0"):
        gpu.main()
    lines = capsys.readouterr().out.splitlines()
    (trl,) = (line for line in lines if line.startswith("trl: "))
    (vllm,) = (line for line in lines if line.startswith("vllm: "))
    assert trl.endswith("pip install trl==1.16.0")
    assert vllm == "vllm: no program nowhere; give --vllm PROGRAM, or make vllm"
    assert not any(line.startswith("tiny ") for line in lines)


def test_vllm_gets_the_weights_of_the_pair_and_its_counters_are_ours(gpu, monkeypatch, tmp_path):
    folder = write_pair(tmp_path, max_position_embeddings=128)
    plain = [load_model(folder / "target", dtype="bfloat16") for _ in range(2)]
    # the draft: the target with one layer scaled, so that some of its tokens are accepted
    plain[1].hf.model.layers[2].mlp.down_proj.weight.data.mul_(0.25)
    ready = [prepare_for_decoding(model) for model in plain]
    pair = gpu.Pair("small", tuple(plain), tuple(ready))
    # our decoders behind vLLM's pages; the servers start in threads of their own
    routes = {0: vllm_routes(plain[0], None, 0), 2: vllm_routes(*plain, 2)}
    setups: list[Setup] = []

    @contextmanager
    def started(choice: EngineChoice, setup: Setup, _: Any) -> Iterator[Any]:
        setups.append(setup)
        paths = [setup.target, *([setup.drafting.draft] if setup.drafting else [])]
        for path, model in zip(paths, plain, strict=False):
            written = load_file(Path(path) / "model.safetensors")
            for name, weight in model.hf.named_parameters():
                assert torch.equal(written[name], weight)
        gamma = setup.drafting.gamma if setup.drafting else 0
        with ExitStack() as stack:
            client = Client(stack.enter_context(serving(routes[gamma])))
            stack.callback(client.close)
            yield connect(choice, client)

    module = importlib.import_module("gpu_vllm")
    monkeypatch.setattr(module, "started", started)
    in_turns = module.interleaved
    monkeypatch.setattr(module, "interleaved", lambda *given: in_turns(*given[:3], pause=0))
    results = gpu.Results()
    options = Namespace(device="cpu", vllm=sys.executable, num_prompts=2, new_tokens=12, gamma=2)
    module.report_vllm(pair, options, results)
    assert sorted(setup.drafting is not None for setup in setups) == [False, True]
    assert {setup.dtype for setup in setups} == {"bfloat16"}
    found = {key: value for row in results.rows for key, value in row.totals.items()}
    for quantity in ("engine alone", "engine with draft", "ours alone", "ours with draft"):
        assert found[f"{quantity}, tokens/s"] > 0
    assert found["ours, 1 + accepted / blocks"] > 1
    # it also counts what its last block accepts behind the end of a text
    theirs = found["engine, 1 + accepted / blocks"]
    assert theirs == pytest.approx(found["ours, 1 + accepted / blocks"], rel=0.2)


def test_a_failing_part_ends_alone(gpu, monkeypatch, capsys):
    def failing(*_: Any) -> None:
        raise RuntimeError("no kernel")

    model = Namespace()
    pair = gpu.Pair("tiny", (model, model), (model, model))
    seen: list[str] = []
    monkeypatch.setattr(gpu, "made_pair", lambda *_: pair)
    reports = {"trl": failing, "static": lambda *_: seen.append("static")}
    monkeypatch.setattr(gpu, "REPORTS", reports)
    options = Namespace(part=["trl", "static"], rows=None)
    assert not gpu.report_shape("tiny", ["trl", "static"], options, gpu.Results())
    assert seen == ["static"]
    assert "tiny  trl: RuntimeError: no kernel" in capsys.readouterr().out
    monkeypatch.setattr(gpu, "REPORTS", {"static": failing})
    assert not gpu.report_shape("tiny", ["static"], options, gpu.Results())
    assert "in failing" in capsys.readouterr().err, "the traceback of a part of ours"


def test_peak_memory_is_counted_for_each_of_two_that_take_turns(gpu, monkeypatch):
    """A device of numbers: ours holds 30 and needs 5 more in a step, TRL 50 and 20."""
    module = importlib.import_module("gpu_training")
    now = peak = 100  # what was there before

    def allocate(size: int) -> None:
        nonlocal now, peak
        now += size
        peak = max(peak, now)

    def reset() -> None:
        nonlocal peak
        peak = now

    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: now)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: peak)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    memory = module.PeakMemory()
    allocate(20)  # our draft

    def our_step() -> tuple[float, int]:
        grown = 10 if now < 180 else 0  # moments, in the first step
        allocate(grown + 5)
        allocate(-5)
        return 1.0, 1

    step = memory.watching(our_step)
    allocate(50)
    for _ in range(2):
        allocate(20)
        allocate(-20)
        step()
    assert memory.peaks == {"TRL": 70, "ours": 35}
