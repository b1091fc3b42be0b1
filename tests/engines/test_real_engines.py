"""The demo's draft in the engines themselves: `make engines` sets them up and runs this.

It takes about half an hour. Every result is kept in runs/engines. `make test` leaves these out;
there, small servers that answer as the engines do meet the same code
(`tests/unit/measure/test_served.py`).
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import BaseModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from paceline.cli.main import main
from paceline.engines.client import Client
from paceline.engines.process import free_port
from paceline.models import load_model
from paceline.models.gguf.vocabulary import RULES
from support.gguf_files import TEXTS, TOKENS, write_gguf, written
from support.models import tiny_hf
from support.texts import Run

pytestmark = pytest.mark.engines

FOLDER = Path(os.environ.get("PACELINE_ENGINES", ".engines"))
DEMO = Path(os.environ.get("PACELINE_DEMO", "runs/demo"))
RESULTS = Path(os.environ.get("PACELINE_ENGINE_RESULTS", "runs/engines"))
TARGET = Path(".cache/SmolLM2-135M-Instruct.Q4_1.gguf")
DRAFT = DEMO / "align" / "draft"
PROMPTS = ("--prompts", DEMO / "data" / "prompts.jsonl", "--set", "max_prompt_tokens=32")
PROGRAMS = {"vllm": FOLDER / "vllm/bin/vllm", "llamacpp": FOLDER / "llama-server"}
OPTIONS = {
    "vllm": ["--enforce-eager", "--no-enable-prefix-caching"],
    "llamacpp": ["-t", "2"],
}
GAMMA = 3


def needs(*engines: str) -> pytest.MarkDecorator:
    missing = [name for name in engines if not PROGRAMS[name].exists()]
    missing += [] if DRAFT.exists() and TARGET.exists() else ["the demo's models"]
    return pytest.mark.skipif(
        bool(missing), reason=f"{', '.join(missing)} not here; make engines sets it up"
    )


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: Any) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["paceline", *map(str, arguments)])
        monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "2")
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        with pytest.raises(SystemExit) as stop:
            main()
        captured = capsys.readouterr()
        assert isinstance(stop.value.code, int)
        return stop.value.code, captured.out, captured.err

    return call


@pytest.fixture
def export(run: Run) -> Callable[..., str]:
    """Makes an export, once, and gives the path that the engine is given."""

    def make(name: str, model: Path | str, to: str, *more: str) -> str:
        out = RESULTS / "exports" / name
        code, text, err = run(
            *("export", model, "--to", to, "--out", out, "--overwrite", "--json", *more)
        )
        assert code == 0, err
        return json.loads(text)["path"]

    return make


def served(
    run: Run, name: str, engine: str, target: str, draft: str, count: int, *more: str
) -> dict[str, Any]:
    """A measurement in an engine that is started, kept in RESULTS under its name."""
    given = {
        "engine.program": PROGRAMS[engine],
        "engine.target": target,
        "engine.draft": draft,
        "engine.options": json.dumps(OPTIONS[engine]),
        "num_prompts": count,
        "num_speculative_tokens": GAMMA,
    }
    sets = [part for key, value in given.items() for part in ("--set", f"{key}={value}")]
    pair = ("--target", TARGET, "--draft", DRAFT, "--allow-program", PROGRAMS[engine])
    code, out, err = run(
        *("measure", "--engine", engine, *pair, *PROMPTS, *sets, "--temperature", "0", "--json"),
        *more,
    )
    assert code in (0, 1, 3), err  # also UNDECIDED
    keep(name, out)
    return json.loads(out)


def keep(name: str, text: str) -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{name}.json").write_text(text)


FLOAT32, BFLOAT16 = ("--set", "dtype=float32"), ("--set", "dtype=bfloat16")


@needs("vllm")
def test_vllm_writes_the_same_with_the_draft_and_accepts_what_was_predicted(run: Run, export):
    """float32, greedy, 64 prompts."""
    target = export("vllm-target", TARGET, "vllm")
    draft = export("vllm-draft", DRAFT, "vllm", "--target", str(TARGET))
    found = served(run, "vllm-float32", "vllm", target, draft, 64, *FLOAT32)
    assert found["speed"]["num_equal"] == found["num_requests"] == 64
    assert found["agreement"]["agrees"], found["agreement"]["reason"]


@needs("vllm")
def test_in_bfloat16_vllm_accepts_what_was_predicted(run: Run, export):
    """20 prompts; also the costs of its steps, and the verdict that they give.

    How many texts are equal is a matter of vLLM's rounding: 10 of them with AVX-512.
    """
    target = export("vllm-target", TARGET, "vllm")
    draft = export("vllm-draft", DRAFT, "vllm", "--target", str(TARGET))
    costs = RESULTS / "vllm-costs.json"
    timed = ("--write-costs", str(costs), "--set", "write_costs.gammas=[1, 3]")
    found = served(run, "vllm-bfloat16", "vllm", target, draft, 20, *BFLOAT16, *timed)
    assert found["agreement"]["agrees"], found["agreement"]["reason"]
    assert_costs_give_a_verdict(run, costs)


def assert_costs_give_a_verdict(run: Run, costs: Path) -> None:
    code, out, err = run(
        *("measure", "--target", TARGET, "--draft", DRAFT, *PROMPTS, "--temperature", "0"),
        *("--costs", costs, "--json"),
    )
    assert code in (0, 1, 3), err
    keep(f"{costs.stem}-verdict", out)
    found = json.loads(out)
    assert found["rows"][0]["setting"]["engine"].startswith(costs.stem.split("-")[0])
    assert found["verdict"]["decided"] or found["verdict"]["includes_one"]


@needs("llamacpp")
def test_llama_server_accepts_what_was_predicted(run: Run, export):
    """64 prompts; both models as float32 GGUF files."""
    target = export("gguf-target-f32", TARGET, "llamacpp", "--dtype", "float32")
    more = ("--target", str(TARGET), "--dtype", "float32")
    draft = export("gguf-draft-f32", DRAFT, "llamacpp", *more)
    found = served(run, "llamacpp-float32", "llamacpp", target, draft, 64, *FLOAT32)
    assert found["agreement"]["agrees"], found["agreement"]["reason"]
    assert found["speed"]["num_equal"] > 0.9 * 64


@needs("llamacpp")
def test_costs_of_llama_server_give_a_verdict_for_it(run: Run, export):
    """bfloat16 files, one request and four at a time."""
    target = export("gguf-target-bf16", TARGET, "llamacpp", "--dtype", "bfloat16")
    more = ("--target", str(TARGET), "--dtype", "bfloat16")
    draft = export("gguf-draft-bf16", DRAFT, "llamacpp", *more)
    costs = RESULTS / "llamacpp-costs.json"
    timed = ("--write-costs", str(costs), "--set", "write_costs.gammas=[1, 3]")
    served(run, "llamacpp-bfloat16", "llamacpp", target, draft, 20, *BFLOAT16, *timed)
    assert_costs_give_a_verdict(run, costs)


@needs("llamacpp")
def test_a_draft_of_some_tokens_with_its_list_baked_in_and_without(run: Run, export):
    """The draft proposes 12,288 tokens; llama.cpp drafts from all unless these are baked in."""
    target = export("gguf-target-f32", TARGET, "llamacpp", "--dtype", "float32")
    more = ("--target", str(TARGET), "--dtype", "float32", "--set", "draft_vocabulary=bake")
    baked = export("gguf-baked-f32", DRAFT, "llamacpp", *more)
    found = served(run, "llamacpp-baked", "llamacpp", target, baked, 64, *FLOAT32)
    assert found["agreement"]["agrees"], found["agreement"]["reason"]


@needs("llamacpp")
def test_a_draft_made_elsewhere_goes_the_same_way(run: Run, export, tmp_path: Path):
    """Saved by transformers alone with other padding rows, converted by llama.cpp's own script."""
    hf = AutoModelForCausalLM.from_pretrained(DRAFT, dtype=torch.float32)
    hf.resize_token_embeddings(49280)
    hf.save_pretrained(tmp_path / "theirs")
    AutoTokenizer.from_pretrained(DRAFT).save_pretrained(tmp_path / "theirs")
    target = export("gguf-target-f32", TARGET, "llamacpp", "--dtype", "float32")
    more = ("--target", str(TARGET), "--dtype", "float32")
    ours = export("gguf-theirs-f32", tmp_path / "theirs", "llamacpp", *more)
    plain = ("--set", f"draft={tmp_path / 'theirs'}")
    found = served(run, "llamacpp-theirs", "llamacpp", target, ours, 16, *FLOAT32, *plain)
    assert found["agreement"]["agrees"], found["agreement"]["reason"]
    converted = tmp_path / "theirs.gguf"
    script = FOLDER / "llama.cpp" / "convert_hf_to_gguf.py"
    exported = export("theirs", tmp_path / "theirs", "transformers", *more)
    command = [sys.executable, script, exported, "--outfile", converted, "--outtype", "f32"]
    # the command line has set PYTHONSAFEPATH, and the script imports from its own directory
    environment = {name: value for name, value in os.environ.items() if "SAFEPATH" not in name}
    subprocess.run(command, check=True, capture_output=True, env=environment)
    plain = ("--set", f"draft={converted}")
    found = served(run, "llamacpp-gguf", "llamacpp", target, str(converted), 16, *FLOAT32, *plain)
    assert found["agreement"]["agrees"], found["agreement"]["reason"]


@needs()
def test_transformers_accepts_what_was_predicted(run: Run):
    """64 prompts."""
    given = ("--set", f"num_speculative_tokens={GAMMA}", *FLOAT32, "--temperature", "0", "--json")
    pair = ("--target", TARGET, "--draft", DRAFT)
    code, out, err = run("measure", "--engine", "transformers", *pair, *PROMPTS, *given)
    assert code in (0, 1, 3), err
    keep("transformers-float32", out)
    found = json.loads(out)
    assert found["agreement"]["agrees"], found["agreement"]["reason"]
    assert found["speed"]["num_equal"] == found["num_requests"] == 64


class _Tokens(BaseModel):
    tokens: list[int]


class _Content(BaseModel):
    content: str


@contextmanager
def llama_server(*arguments: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    port = free_port()
    command = [PROGRAMS["llamacpp"], "--port", str(port), "-c", "512", "-t", "2", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    client = Client(url)
    try:
        for _ in range(240):
            try:
                client.ask("GET", "/health")
                break
            except Exception:
                time.sleep(0.25)
        yield url, process
    finally:
        client.close()
        process.terminate()
        process.wait()


@needs("llamacpp")
def test_llama_cpp_tokenizes_an_export_as_we_do(run: Run, export):
    """Texts of the demo, and strings of random tokens; both ways."""
    draft = export(
        "gguf-draft-f32", DRAFT, "llamacpp", "--target", str(TARGET), "--dtype", "float32"
    )
    tokenizer: Any = load_model(DRAFT).tokenizer
    rng = torch.Generator().manual_seed(0)
    drawn = torch.randint(20, 49000, (200, 12), generator=rng)
    texts = [tokenizer.decode(row) for row in drawn]
    lines = (DEMO / "data/prompts.jsonl").read_text("utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    texts += [str(next(iter(row.values())))[:400] for row in rows[:50]]
    with llama_server("-m", draft) as (url, _):
        client = Client(url)
        for text in texts:
            ours = tokenizer(text, add_special_tokens=False)["input_ids"]
            asked = {"content": text, "add_special": False, "parse_special": True}
            theirs = client.post("/tokenize", asked, _Tokens).tokens
            assert theirs == ours, text
            back = client.post("/detokenize", {"tokens": theirs}, _Content).content
            assert back == text
        client.close()


class _Likely(BaseModel):
    id: int
    logprob: float


class _Position(BaseModel):
    top_logprobs: list[_Likely]


class _Completion(BaseModel):
    completion_probabilities: list[_Position]


without_server = pytest.mark.skipif(
    not PROGRAMS["llamacpp"].exists(), reason="llamacpp not here; make engines sets it up"
)


@without_server
@pytest.mark.parametrize("pre", RULES)
def test_llama_cpp_tokenizes_a_gguf_file_as_we_do(pre: str, tmp_path: Path):
    """Every rule of llama.cpp for which there is one here, and special tokens."""
    special = {"<|endoftext|>": 3, "<\uff5cUser\uff5c>": 3, "[плюс]": 4, "<|im_end|>": 1}
    path = written(tmp_path / "a.gguf", pre=pre, special=special, bos_token_id=len(TOKENS))
    tokenizer: Any = load_model(path).tokenizer
    with llama_server("-m", str(path)) as (url, _):
        client = Client(url)
        for text in (*TEXTS, "e".join(special), *special):
            asked = {"content": text, "add_special": True, "parse_special": True}
            assert client.post("/tokenize", asked, _Tokens).tokens == tokenizer(text)["input_ids"]
        client.close()


FACTORS = np.array([1.0, 1 / ((1 - 0.00619779) / 8 + 0.00619779), 8.0, 8.0], np.float32)
BIAS = np.linspace(-1, 1, 32, dtype=np.float32)
COMPUTED: dict[str, dict[str, Any]] = {
    "plain": {},
    "factors": {"tensors": {"rope_freqs.weight": FACTORS}},
    "linear": {"rope__scaling__type": "linear", "rope__scaling__factor": 4.0},
    "yarn": {
        "rope__scaling__type": "yarn",
        "rope__scaling__factor": 4.0,
        "rope__scaling__original_context_length": 16,
        "rope__scaling__attn_factor": 1.2,
    },
    "biases": {"tensors": {"blk.0.attn_output.bias": BIAS, "blk.1.ffn_down.bias": BIAS}},
}


@without_server
@pytest.mark.parametrize("case", COMPUTED)
def test_llama_cpp_computes_a_gguf_file_as_we_do(case: str, tmp_path: Path):
    """Log-probabilities of all tokens behind 60 others, in float32."""
    hf = tiny_hf("llama", vocab_size=266, intermediate_size=64)
    path = write_gguf(tmp_path / "a.gguf", hf, **COMPUTED[case])
    prompt = [number * 37 % 260 for number in range(60)]
    exact = ("-ctk", "f32", "-ctv", "f32", "-fa", "off")
    with llama_server("-m", str(path), *exact) as (url, _):
        client = Client(url)
        # a bias for a token that is whole UTF-8; the log-probabilities are those before it
        asked = {"prompt": prompt, "n_predict": 1, "n_probs": 266, "logit_bias": [[40, 1000.0]]}
        found = client.post("/completion", asked, _Completion).completion_probabilities[0]
        client.close()
    theirs = torch.tensor([each.logprob for each in sorted(found.top_logprobs, key=_id)])
    read: Any = load_model(path, dtype="float32").hf
    with torch.inference_mode():
        ours = read(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-3)


def _id(each: _Likely) -> int:
    return each.id


@needs("llamacpp")
def test_a_server_without_the_draft_or_with_a_key_or_that_dies_is_one_line(run: Run, export):
    target = export("gguf-target-f32", TARGET, "llamacpp", "--dtype", "float32")
    draft = export(
        "gguf-draft-f32", DRAFT, "llamacpp", "--target", str(TARGET), "--dtype", "float32"
    )

    def refused(url: str, *more: str) -> str:
        code, out, err = run(
            *("measure", "--engine", "llamacpp", "--url", url, "--target", TARGET),
            *("--draft", DRAFT, *PROMPTS, "--temperature", "0", *FLOAT32, *more),
        )
        assert (code, out) == (3, "")
        return err.strip().splitlines()[-1]

    # the draft is loaded, and not used: --spec-type is missing
    with llama_server("-m", target, "-md", draft, "--metrics") as (url, _):
        assert "served without the draft" in refused(url)
    speculating = ("-m", target, "-md", draft, "--metrics", "--spec-type", "draft-simple")
    with llama_server(*speculating, "--api-key", "secret") as (url, _):
        assert "API key is wrong or missing" in refused(url)
        assert "secret" not in refused(url)
    with llama_server("-m", target) as (url, _):
        assert "--metrics" in refused(url)
    with llama_server(*speculating) as (url, process):
        killer = threading.Timer(15, process.send_signal, [signal.SIGKILL])
        killer.start()
        assert "cannot be reached or closed the connection" in refused(url)
