"""Engines: small servers that answer as they do, costs without an engine, and where real ones are.

Servers that are measured really speculate; `Served` writes texts with a target alone. What they say
is what the engines' own sources and recorded answers say.
"""

import functools
import itertools
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from pyarrow import parquet

from paceline.cli.main import main
from paceline.core.bootstrap import Interval
from paceline.core.sampling import SamplingParams
from paceline.core.stats import DecodeStats
from paceline.decode import AutoregressiveDecoder, SpeculativeDecoder
from paceline.decode.text import Block, count_blocks
from paceline.engines.contract import BlockCounts, Request
from paceline.engines.contract import Served as Answered
from paceline.measure.engine_costs import EngineCosts, StepCost
from paceline.measure.served import ServedConfig
from paceline.models import CausalModel, HfModel, load_model, prepare_for_decoding
from paceline.models.contract import Texts
from paceline.models.loading import load_tokenizer
from support.data import answers, write_lines
from support.runs import write_pair

Answer = tuple[int, dict[str, Any] | str]
Route = Callable[[dict[str, Any]], Answer]
Process = Callable[[torch.Tensor, dict[str, Any]], torch.Tensor]
"""What a server makes of log probabilities, for a request's body."""


class Speculating:
    """A target that writes with greedy drafts, or alone, and counts blocks as an engine does.

    `behind_end`: its last block drafts in full, beyond the end of the text, and counts all it
    accepts, as vLLM and SGLang do. `empty_blocks`: a last block without room for a draft counts;
    for llama-server it does not.
    """

    def __init__(
        self,
        target: CausalModel,
        draft: CausalModel | None,
        gamma: int,
        *,
        behind_end: bool = False,
        empty_blocks: bool = True,
    ) -> None:
        prepared = prepare_for_decoding(target), draft and prepare_for_decoding(draft)
        self._models, self._gamma = prepared, gamma
        self._behind_end, self._empty_blocks = behind_end, empty_blocks
        self._lock = threading.Lock()
        self.stats = DecodeStats()
        self.last = DecodeStats()

    def write(
        self,
        prompt: list[int],
        count: int,
        sampling: SamplingParams,
        seed: int,
        *,
        ends: bool = False,
    ) -> list[int]:
        target, draft = self._models
        if draft is None:
            decoder: Any = AutoregressiveDecoder(target, sampling)
        else:
            greedy = SamplingParams(temperature=0.0)
            decoder = SpeculativeDecoder(
                target, draft, None, self._gamma, sampling, draft_sampling=greedy
            )
        tokens: list[int] = []
        blocks: list[Block] = []
        budget = count + (self._gamma + 1 if self._behind_end else 0)
        for block in decoder.stream(prompt, budget, seed, None if ends else []):
            tokens += block.tokens
            if block.num_drafted or self._empty_blocks or block.sources[-1] == "prefill":
                blocks.append(block)
            if len(tokens) >= count:
                break
        found = count_blocks(blocks) if draft is not None else DecodeStats()
        with self._lock:  # requests come at the same time
            self.last = found
            self.stats += found
        return tokens[:count]

    def answer(self, request: Request) -> Answered:
        """As `write`, with the counts of its blocks; every token takes 10 ms."""
        prompt, count, sampling, seed = request
        tokens, blocks = self.write(list(prompt), count, sampling, seed), None
        if self._models[1] is not None:
            blocks = BlockCounts(
                num_blocks=self.last.num_blocks,
                num_drafted=self.last.num_drafted,
                num_accepted=self.last.num_accepted,
                accepted_by_position=tuple(accepted_at_least(self.last)),
            )
        return Answered(tokens, 0.01 * len(tokens), blocks)

    def counters(self, prefix: str, stats: DecodeStats | None = None) -> str:
        """In the Prometheus format; of these counts, or of all."""
        stats = stats or self.stats
        lines = [f"# TYPE {prefix}requests counter", f"{prefix}requests_total 3.0"]
        for name, value in (
            ("drafts", stats.num_blocks),
            ("draft_tokens", stats.num_drafted),
            ("accepted_tokens", stats.num_accepted),
        ):
            lines.append(f"# TYPE {prefix}spec_decode_num_{name} counter")
            lines.append(f'{prefix}spec_decode_num_{name}_total{{engine="0"}} {float(value)}')
        lines.append(f"# TYPE {prefix}spec_decode_num_accepted_tokens_per_pos counter")
        positions = [*accepted_at_least(stats), *[0] * self._gamma]
        for place in range(self._gamma):
            lines.append(
                f"{prefix}spec_decode_num_accepted_tokens_per_pos_total"
                f'{{engine="0",position="{place}"}} {float(positions[place])}'
            )
        return "\n".join(lines) + "\n"


def accepted_at_least(stats: DecodeStats) -> list[int]:
    """Blocks that kept 1, 2, ... tokens or more."""
    histogram = stats.accepted_histogram
    return [sum(histogram[count:]) for count in range(1, len(histogram))]


def vllm_routes(target: CausalModel, draft: CausalModel | None, gamma: int) -> dict[str, Route]:
    engine = Speculating(target, draft, gamma, behind_end=True)
    published = [DecodeStats(), DecodeStats()]  # counters follow the answer, a reading later

    def complete(body: dict[str, Any]) -> Answer:
        if body["model"] != "served":
            return 404, {"error": {"message": f"The model `{body['model']}` does not exist."}}
        assert body["ignore_eos"]
        tokens = engine.write(body["prompt"], body["max_tokens"], sampling_of(body), body["seed"])
        choice = {"text": "...", "finish_reason": "length", "token_ids": tokens}
        return 200, {"choices": [choice]}

    def metrics(_: dict[str, Any]) -> Answer:
        if draft is None:
            return 200, "# TYPE vllm:requests counter\nvllm:requests_total 3.0\n"
        published.append(engine.stats)
        return 200, engine.counters("vllm:", published[-2])

    return {
        "/health": lambda _: (200, ""),
        "/version": lambda _: (200, {"version": "0.32.0"}),
        "/v1/models": lambda _: (200, {"data": [{"id": "served"}]}),
        "/metrics": metrics,
        "/v1/completions": complete,
    }


def llamacpp_routes(
    target: CausalModel, draft: CausalModel | None, gamma: int, *, metrics: bool = True
) -> dict[str, Route]:
    engine = Speculating(target, draft, gamma, empty_blocks=False)

    def complete(body: dict[str, Any]) -> Answer:
        assert "ignore_eos" not in body  # it forbids the tokens to the target alone
        assert body["samplers"] == ["temperature", "top_k", "top_p"]
        tokens = engine.write(
            *(body["prompt"], body["n_predict"], sampling_of(body), body["seed"]), ends=True
        )
        ended = "limit" if len(tokens) == body["n_predict"] else "eos"
        return 200, {"content": "...", "tokens": tokens, "stop_type": ended}

    off = (501, {"error": {"message": "This server does not support metrics endpoint."}})
    return {
        "/health": lambda _: (200, {"status": "ok"}),
        "/props": lambda _: (200, {"build_info": "b7000-0c1e570"}),
        "/metrics": lambda _: (200, engine.counters("llamacpp:")) if metrics else off,
        "/completion": complete,
    }


def sglang_routes(target: CausalModel, draft: CausalModel | None, gamma: int) -> dict[str, Route]:
    engine = Speculating(target, draft, gamma, behind_end=True)

    def generate(body: dict[str, Any]) -> Answer:
        settings = body["sampling_params"]
        assert settings["ignore_eos"]
        tokens = engine.write(
            body["input_ids"],
            settings["max_new_tokens"],
            sampling_of(settings),
            settings["sampling_seed"],
        )
        last = engine.last
        meta: dict[str, Any] = {"completion_tokens": len(tokens)}
        if last.num_drafted:
            meta |= {
                "spec_verify_ct": last.num_blocks,
                "spec_num_correct_drafts": last.num_accepted,
                "spec_num_proposed_drafts": last.num_drafted,
                "spec_correct_drafts_histogram": list(last.accepted_histogram),
            }
        return 200, {"output_ids": tokens, "meta_info": meta}

    return {
        "/health": lambda _: (200, ""),
        "/get_server_info": lambda _: (200, {"version": "0.5.4"}),
        "/generate": generate,
    }


def sampling_of(body: dict[str, Any]) -> SamplingParams:
    top_k = max(0, body["top_k"])  # -1 keeps all
    return SamplingParams(temperature=body["temperature"], top_p=body["top_p"], top_k=top_k)


@contextmanager
def serving(routes: dict[str, Route], *, key: str | None = None, port: int = 0) -> Iterator[str]:
    """The URL of a server with these pages; a JSON answer or text each."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer({})

        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            self._answer(json.loads(self.rfile.read(length)))

        def _answer(self, body: dict[str, Any]) -> None:
            if key is not None and self.headers.get("Authorization") != f"Bearer {key}":
                status, found = 401, {"error": {"message": "wrong key"}}
            elif self.path not in routes:
                status, found = 404, {"error": {"message": "no such page"}}
            else:
                status, found = routes[self.path](body)
            data = (found if isinstance(found, str) else json.dumps(found)).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            del format, args

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Served:
    """A server with the target; `faults` are its next answers instead of texts."""

    def __init__(self, folder: Path, *, kind: str = "vllm") -> None:
        self.model: HfModel = prepare_for_decoding(load_model(folder / "target", dtype="float32"))
        self.kind = kind
        self.bodies: list[dict[str, Any]] = []
        self.faults: list[Answer] = []
        self.tokens_of: Any = load_tokenizer(folder / "target")
        self.lock = threading.Lock()
        self.omitted = 0  # first tokens of an answer without candidates, of llama-server
        self.process: Process = lambda log_probs, _: log_probs

    @property
    def routes(self) -> dict[str, Any]:
        about: dict[str, Any] = {
            "vllm": {"/version": lambda _: (200, {"version": "0.32.0"})},
            "llama.cpp": {"/props": lambda _: (200, {"build_info": "b1-abc"})},
            "other": {},
        }[self.kind]
        return {
            **about,
            "/v1/models": lambda _: (200, {"data": [{"id": "served"}]}),
            "/tokenize": self.tokenize,
            "/completion" if self.kind == "llama.cpp" else "/v1/completions": self.complete,
        }

    def tokenize(self, body: dict[str, Any]) -> Answer:
        text = body["prompt"] if self.kind == "vllm" else body["content"]
        return 200, {"tokens": self.tokens_of(text, add_special_tokens=False)["input_ids"]}

    def complete(self, body: dict[str, Any]) -> Answer:
        with self.lock:
            self.bodies.append(body)
            if self.faults:
                return self.faults.pop(0)
            sampling = SamplingParams(temperature=body["temperature"], top_p=body["top_p"])
            decoder = AutoregressiveDecoder(self.model, sampling)
            count = body["n_predict" if self.kind == "llama.cpp" else "max_tokens"]
            (found,) = decoder.generate([body["prompt"]], count, body["seed"])
            text = self.tokens_of.decode(found.tokens, skip_special_tokens=True)
            ended = found.stop_reason == "eos"
            top = body.get("n_probs" if self.kind == "llama.cpp" else "logprobs")
            candidates = self.logprobs(body, found.tokens, top) if top else []
            if self.kind == "llama.cpp":
                assert body["return_tokens"]
                return 200, {
                    "content": text,
                    "tokens": found.tokens,
                    "stop_type": "eos" if ended else "limit",
                    "completion_probabilities": [
                        {"id": token, "top_logprobs": [{"id": i, "logprob": v} for i, v in row]}
                        for token, row in zip(found.tokens, candidates, strict=bool(top))
                    ][self.omitted :],
                }
            assert body["model"] == "served"
            choice: dict[str, Any] = {"text": text, "finish_reason": "stop" if ended else "length"}
            if self.kind == "vllm":
                choice["token_ids"] = found.tokens
            if top:
                rows = [{f"token_id:{i}": value for i, value in row} for row in candidates]
                choice["logprobs"] = {"top_logprobs": rows}
            return 200, {"choices": [choice]}

    def logprobs(
        self, body: dict[str, Any], tokens: list[int], top: int
    ) -> list[list[tuple[int, float]]]:
        log_probs = log_probs_of(self.model, body["prompt"], tokens)
        values, ids = self.process(log_probs, body).topk(top)
        return [
            list(zip(i, v, strict=True)) for i, v in zip(ids.tolist(), values.tolist(), strict=True)
        ]


def top_of(
    model: HfModel, prompt: list[int], tokens: list[int], top: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The highest log probabilities before each token, and their ids."""
    values, ids = log_probs_of(model, prompt, tokens).topk(top)
    return values, ids


def log_probs_of(model: HfModel, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Log probabilities of all tokens before each of these."""
    text = torch.tensor([[*prompt, *tokens]])
    with torch.no_grad():
        logits = model.plain_logits(Texts(text))[0, len(prompt) - 1 : -1]
    return logits.float().log_softmax(-1)


GAMMA = 3


def write_near_pair(folder: Path) -> tuple[CausalModel, CausalModel]:
    """Both models, in `folder/target` and `folder/near`."""
    write_pair(folder)
    target = load_model(folder / "target", dtype="float32")
    # the target itself with one layer scaled
    draft = load_model(folder / "target", dtype="float32")
    draft.hf.model.layers[2].mlp.down_proj.weight.data.mul_(0.25)
    draft.hf.save_pretrained(folder / "near")
    assert draft.tokenizer is not None
    draft.tokenizer.save_pretrained(folder / "near")
    return target, draft


def served_config(folder: Path, engine: dict[str, Any], **changes: Any) -> ServedConfig:
    values = {
        "target": str(folder / "target"),
        "draft": str(folder / "near"),
        "prompts": str(many_prompts(folder)),
        "num_prompts": 10,
        "max_new_tokens": 24,
        "num_speculative_tokens": GAMMA,
        "dtype": "float32",
        "device": "cpu",
        "engine": engine,
    }
    return ServedConfig(**(values | changes))


def many_prompts(folder: Path) -> Path:
    """64 different short prompts."""
    path = folder / "many.jsonl"
    words = ["the", "a", "in", "and"]
    rows = [{"prompt": " ".join((*three, "cat"))} for three in itertools.product(words, repeat=3)]
    return write_lines(path, *rows)


def step(gamma: int, seconds: float, batch_size: int = 1) -> StepCost:
    return StepCost(
        gamma=gamma,
        batch_size=batch_size,
        seconds=Interval(seconds, seconds * 0.9, seconds * 1.1),
        seconds_by_start=[seconds],
    )


def costs_of(*steps: StepCost, **changes: Any) -> EngineCosts:
    values: dict[str, Any] = {
        "engine": "vllm",
        "engine_version": "0.32.0",
        "drafting": "greedy",
        "drafts_in_full": False,
        "full_vocabulary": True,
        "target_parameters": 1,
        "draft_parameters": 1,
        "steps": list(steps),
        "served": {},
        "environment": {},
    }
    return EngineCosts(**(values | changes))


def write_costs(folder: Path, *steps: StepCost, **changes: Any) -> Path:
    """Of the pair in a folder."""
    sizes = [load_model(folder / name).num_parameters for name in ("target", "draft")]
    known = {"target_parameters": sizes[0], "draft_parameters": sizes[1]}
    path = folder / "costs.json"
    path.write_text(costs_of(*steps, **(known | changes)).model_dump_json())
    return path


FOLDER = Path(os.environ.get("PACELINE_ENGINES", ".engines")).absolute()
RESULTS = Path(os.environ.get("PACELINE_ENGINE_RESULTS", "runs/engines")).absolute()
TARGET = Path(".cache/SmolLM2-135M-Instruct.Q4_1.gguf").absolute()
PROGRAMS = {"vllm": FOLDER / "vllm/bin/vllm", "llamacpp": FOLDER / "llama-server"}
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
SAMPLED = {"completion", "completion_tokens", "stop_reason", "top_tokens", "top_log_probs"}
SAMPLED |= {"hidden_states"}
MAX_NEW_TOKENS = 24


def skip_without(engine: str) -> None:
    if not PROGRAMS[engine].exists() or not TARGET.exists():
        pytest.skip(f"{engine} or the demo's model is not here; make engines sets them up")


@functools.cache
def target_of_vllm() -> Path:
    """The demo's target as vLLM loads it; made anew, as an old one may have another tokenizer."""
    model = RESULTS / "exports" / "vllm-target"
    sys.argv = ["paceline", "export", str(TARGET), "--to", "vllm", "--out", str(model)]
    sys.argv += ["--overwrite"]
    with pytest.raises(SystemExit, match="0"):
        main()
    return model


def write_prompts(path: Path, count: int) -> None:
    write_lines(path, *[{"prompt": f"Item {number} of the list is"} for number in range(count)])


def held(run: Path) -> int:
    """Records of a run that is not finished."""
    return sum(parquet.read_metadata(path).num_rows for path in (run / "data").glob("*.parquet"))


def provenance(run: Path) -> list[dict[str, Any]]:
    """All that does not depend on what the server sampled; each record is also checked alone."""
    found = answers(run)
    for answer in found:
        assert 0 < len(answer.completion_tokens) <= MAX_NEW_TOKENS
        assert answer.top_tokens is not None
        assert len(answer.top_tokens) == len(answer.completion_tokens)
    return [answer.model_dump(exclude=SAMPLED) for answer in found]
