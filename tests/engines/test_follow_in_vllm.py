"""Rounds of `follow` with a real vLLM: states, counters, and new weights while it serves."""

import json
import os
import shutil
import subprocess
import textwrap
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.core.sampling import SamplingParams
from paceline.engines.contract import Request
from paceline.engines.text_servers import TextServers
from paceline.engines.texts import OpenAIWriter
from paceline.follow import FollowConfig, Round, follow
from paceline.models.loading import load_tokenizer
from paceline.models.token_text import tokens_of
from paceline.results import FIGURES
from support.engines import ENVIRONMENT, FOLDER, skip_without, target_of_vllm
from support.real_servers import AT_ONCE, servers, states_command, vllm_command

pytestmark = pytest.mark.engines

EXTENSION = ("--worker-extension-cls", "paceline.engines.vllm_reload.DraftReload")
GAMMA, NEW, REQUESTS = 3, 24, 96
NOISE = 0.1
GREEDY = SamplingParams(temperature=0)  # on a processor (docs/guides/vllm.md)
DEMO = Path(os.environ.get("PACELINE_DEMO", "runs/demo"))
CONNECTOR = Path(__file__).parent / "connector"

_RELOADING = textwrap.dedent("""
    import json, sys
    from vllm import LLM, SamplingParams
    settings = json.loads(sys.argv[1])
    llm = LLM(
        model=settings["target"], skip_tokenizer_init=True, dtype="float32", enforce_eager=True,
        max_model_len=64, disable_log_stats=False, enable_prefix_caching=False,
        worker_extension_cls="paceline.engines.vllm_reload.DraftReload",
        speculative_config={
            "method": "draft_model", "model": settings["draft"], "num_speculative_tokens": 3,
        },
    )
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False)
    found = []
    def counted():
        named = {one.name: getattr(one, "value", None) for one in llm.get_metrics()}
        return [named[f"vllm:spec_decode_num_{kind}_tokens"] for kind in ("draft", "accepted")]
    for directory in (None, settings["target"]):
        if directory:
            llm.collective_rpc("reload_draft", args=(directory,))
        before = counted()
        prompts = [{"prompt_token_ids": [3, token]} for token in range(2, 8)]
        texts = llm.generate(prompts, params, use_tqdm=False)
        drafted, accepted = (now - then for now, then in zip(counted(), before))
        found.append([accepted / drafted, [list(one.outputs[0].token_ids) for one in texts]])
    json.dump(found, open(settings["out"], "w"))
""")


def test_a_draft_with_the_targets_weights_is_always_right(tmp_path: Path):
    """They are loaded into a running vLLM, whose texts stay the same."""
    skip_without("vllm")
    for seed, name in enumerate(("target", "draft")):
        torch.manual_seed(seed)
        sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
        sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 8}
        config = LlamaConfig(**sizes, max_position_embeddings=128, initializer_range=0.5)
        LlamaForCausalLM(config).save_pretrained(tmp_path / name)
    settings = {name: str(tmp_path / name) for name in ("target", "draft", "out")}
    command = [str(FOLDER / "vllm/bin/python"), "-c", _RELOADING, json.dumps(settings)]
    done = subprocess.run(command, env=os.environ | ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    (before, texts), (after, same) = json.loads((tmp_path / "out").read_text())
    print(f"accepted share {before:.3f}, then {after:.3f}")  # noqa: T201
    assert before < 0.8
    # a last block drafts behind the end of a text
    assert after > 0.95
    assert same == texts


def disturbed_draft(path: Path) -> None:
    """The demo's draft with noise in its weights, which a few steps take out again."""
    ignored = shutil.ignore_patterns("draft_vocabulary.json")
    shutil.copytree(DEMO / "align/draft", path, ignore=ignored)
    weights = load_file(path / "model.safetensors")
    torch.manual_seed(0)
    for name, weight in weights.items():
        if "layers" in name and weight.dim() > 1:
            weights[name] = weight + NOISE * weight.std() * torch.randn_like(weight)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


def drafting_command(draft: Path, port: int) -> list[str]:
    drafting = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": GAMMA}
    drafting["draft_sample_method"] = "greedy"  # as rounds are judged
    return vllm_command(port, "--speculative-config", json.dumps(drafting), *EXTENSION)


def test_rounds_swap_the_draft_of_a_running_server(tmp_path: Path, monkeypatch: Any):
    """The engine's counters agree with what is expected on the same kind of requests."""
    skip_without("vllm")
    monkeypatch.setenv("PYTHONPATH", str(CONNECTOR))
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    (tmp_path / "states").mkdir()
    disturbed_draft(tmp_path / "raw")
    tokenizer = load_tokenizer(target_of_vllm())
    log, asked = tmp_path / "log.jsonl", 0

    def ask(url: str | None) -> None:
        """The next requests, which are logged, and asked if there is a server."""
        nonlocal asked
        texts = [f"Item {number} of the list is" for number in range(asked, asked + REQUESTS)]
        asked += REQUESTS
        with log.open("a") as stream:
            stream.write("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
        if url is not None:
            writer = OpenAIWriter(url=url, concurrency=AT_ONCE)
            requests = [
                Request(tokenizer(text)["input_ids"], NEW, GREEDY, seed)
                for seed, text in enumerate(texts)
            ]
            asking = TextServers(writer, partial(tokens_of, tokenizer=tokenizer))
            asking.write(requests, lambda *_: None)

    def one_round(url: str, **serving: Any) -> Round:
        writer = {"kind": "openai", "url": url, "concurrency": AT_ONCE, "hidden_states": True}
        align = {"num_steps": 40, "batch_size": 8, "freeze_embeddings": True}
        align |= {"optimizer": {"kind": "adamw", "learning_rate": 2e-3}, "mean": "token"}
        (found,) = follow(
            FollowConfig.model_validate(
                {
                    "target": str(target_of_vllm()),
                    "draft": str(tmp_path / "raw"),
                    "log": str(log),
                    "output": str(tmp_path / "out"),
                    "align": align,
                    "writer": writer | {"states_directory": str(tmp_path / "states")},
                    "judging": {
                        "num_speculative_tokens": GAMMA,
                        "error_rate": 0.9,
                        "sampling": GREEDY.model_dump(),
                    },
                    "serving": {"to": "vllm", **serving},
                    "num_answers": REQUESTS,
                    "max_new_tokens": NEW,
                    "max_prompt_tokens": 32,
                }
            )
        )
        print(found.model_dump_json(exclude={"positions"}))  # noqa: T201
        return found

    draft = tmp_path / "out" / "draft"
    with servers(partial(states_command, tmp_path / "states")) as (states, _):
        states.start()
        states.wait()
        ask(None)
        assert one_round(states.url).decision == "first"
        with servers(partial(drafting_command, draft)) as (served, _):
            served.start()
            served.wait()
            ask(served.url)
            urls = {"metrics_url": served.url, "reload_url": served.url}
            assert one_round(states.url, **urls).decision == "swapped"
            ask(served.url)
            last = one_round(states.url, **urls)
    assert last.acceptance_rate is not None
    expected = FIGURES["draft_acceptance_rate"].value(last.compared[0])
    assert expected > 0.5
    # its last block of seven drafts, and accepts, tokens beyond the end of a text
    assert last.acceptance_rate == pytest.approx(expected, abs=0.05)
    assert last.serving == "000001"
