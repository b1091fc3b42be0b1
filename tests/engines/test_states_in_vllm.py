"""Hidden states that a real vLLM writes, against the pass of transformers; and many kills."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from paceline.core.sampling import SamplingParams
from paceline.engines.contract import Request
from paceline.engines.text_servers import TextServers
from paceline.engines.texts import OpenAIWriter
from paceline.models.hf.causal import for_head, last_norm
from paceline.models.loading import load_head, load_tokenizer
from paceline.models.token_text import tokens_of
from support.data import answers
from support.engines import (
    held,
    provenance,
    skip_without,
    target_of_vllm,
    write_prompts,
)
from support.real_servers import (
    AT_ONCE,
    Server,
    client,
    run_to_the_end,
    servers,
    states_command,
    wait_for,
)

pytestmark = pytest.mark.engines

NUM_KILLS = 10
CONNECTOR = Path(__file__).parent / "connector"


@pytest.fixture
def states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    skip_without("vllm")
    monkeypatch.setenv("PYTHONPATH", str(CONNECTOR))
    (tmp_path / "states").mkdir()
    return tmp_path / "states"


@pytest.fixture
def server(states: Path) -> Iterator[Server]:
    with servers(partial(states_command, states)) as (first, _):
        first.start()
        first.wait()
        yield first


def test_logits_of_the_states_are_those_of_transformers(server: Server, states: Path):
    model = target_of_vllm()
    tokenizer = load_tokenizer(model)
    prompts = [tokenizer(f"Item {number} of the list is")["input_ids"] for number in range(104)]
    place = {"hidden_states": True, "states_directory": str(states)}
    writer = OpenAIWriter(url=server.url, concurrency=AT_ONCE, **place)
    texts = TextServers(writer, partial(tokens_of, tokenizer=tokenizer))
    requests = [
        Request(prompt, 36, SamplingParams(temperature=number % 2), number)
        for number, prompt in enumerate(prompts)
    ]
    found: dict[int, Any] = {}
    texts.write(requests, found.__setitem__)
    hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    head, count, worst = load_head(model, dtype="float32"), 0, 0.0
    norm = last_norm(head)
    for index, written in found.items():
        prompt, tokens = prompts[index], written.tokens
        with torch.inference_mode():
            wanted_TV = hf(torch.tensor([[*prompt, *tokens]])).logits[0][len(prompt) - 1 : -1]
            hidden_TD = for_head(norm(written.states[None].float())[0], head.hf)
            got_TV = head.plain_head.logits(hidden_TD)[:, : wanted_TV.shape[1]]
        worst = max(worst, float((got_TV - wanted_TV).abs().max() / wanted_TV.abs().max()))
        assert torch.equal(got_TV.argmax(-1), wanted_TV.argmax(-1))
        count += len(tokens)
    print(f"{count} tokens, largest difference {worst:.1e} of the largest logit")  # noqa: T201
    assert count >= 1900
    assert worst < 1e-3
    assert list(states.iterdir()) == []


def test_kills_of_client_and_server_lose_and_repeat_nothing(states: Path, tmp_path: Path):
    write_prompts(tmp_path / "prompts.jsonl", 60)
    run, width = tmp_path / "killed", load_head(target_of_vllm()).head_weight.shape[1]
    start = partial(client, tmp_path, hidden_states=True, states_directory=str(states))
    with servers(partial(states_command, states)) as (first, _):
        first.start()
        first.wait()
        run_to_the_end(start("whole", first.url))
        for number in range(NUM_KILLS):
            process = start("killed", first.url)
            wait_for(process, run, held(run) + 2)
            if number in (3, 6):
                first.kill()
                first.start()
            process.kill()
            process.communicate()
        run_to_the_end(start("killed", first.url))
    kept, expected = (provenance(tmp_path / name) for name in ("killed", "whole"))
    assert kept == expected
    for answer in answers(run):
        assert len(answer.hidden_states or b"") == 2 * width * len(answer.completion_tokens)
