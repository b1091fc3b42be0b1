"""generate-data with servers as writers: every answer once, whatever servers and client do."""

import math
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.core.sampling import SamplingParams
from paceline.data.distillation_data import generate_data
from paceline.data.requests import GenerateDataConfig
from paceline.decode import AutoregressiveDecoder
from paceline.engines import text_servers
from paceline.engines.contract import Request
from paceline.engines.text_servers import TextServers
from paceline.engines.texts import OpenAIWriter
from paceline.errors import ConfigError, EngineError, PacelineError, SlowerWarning, UsageError
from support.data import answers, generation
from support.engines import Answer, Served, serving, top_of
from support.texts import CHAT_FAMILIES, tokenizer_of

KEY = "a-secret-key-1234"
TOP = 3


def config(folder: Path, output: Path, url: Any, **changes: Any) -> GenerateDataConfig:
    writer = {"kind": "openai", "url": url, "concurrency": 3, "patience_s": 0.3}
    return generation(folder, output, **changes | {"writer": writer | changes.get("writer", {})})


@pytest.fixture
def served(folder: Path) -> Served:
    return Served(folder)


@pytest.fixture
def url(served: Served) -> Iterator[str]:
    with serving(served.routes) as found:
        yield found


@pytest.mark.parametrize("kind", ["vllm", "llama.cpp", "other"])
def test_records_are_what_the_server_writes(folder: Path, tmp_path: Path, kind: str):
    served = Served(folder, kind=kind)
    with serving(served.routes) as url:
        run = generate_data(config(folder, tmp_path / "run", url))
    found = answers(run)
    assert {answer.id for answer in found} == {f"{i}/{j}" for i in range(11) for j in range(2)}
    greedy = AutoregressiveDecoder(served.model, SamplingParams(temperature=0))
    tokenizer = served.tokens_of
    for answer in found:
        if answer.temperature > 0:
            continue
        (wanted,) = greedy.generate([answer.prompt_tokens], 12)
        if kind == "other":  # its text, tokenized here
            texts = [
                tokenizer.decode(tokens, skip_special_tokens=True)
                for tokens in (answer.completion_tokens, wanted.tokens)
            ]
            assert texts[0] == texts[1]
        else:
            assert answer.completion_tokens == wanted.tokens
        assert answer.stop_reason == wanted.stop_reason
    assert all(answer.top_tokens is None for answer in found)
    assert len(served.bodies) == 22
    assert {body["temperature"] for body in served.bodies} == {0, 1}
    assert {body["top_p"] for body in served.bodies} == {0.95}


@pytest.mark.parametrize("kind", ["vllm", "llama.cpp"])
def test_top_log_probs_are_those_of_the_model(folder: Path, tmp_path: Path, kind: str):
    served = Served(folder, kind=kind)
    with serving(served.routes) as url:
        made = config(folder, tmp_path / "run", url, writer={"top_logprobs": TOP})
        found = answers(generate_data(made))
    for answer in found:
        assert answer.top_tokens is not None
        assert answer.top_log_probs is not None
        assert {len(each) for each in answer.top_tokens} == {TOP}
        assert len(answer.top_tokens) == len(answer.completion_tokens)
        values, ids = top_of(served.model, answer.prompt_tokens, answer.completion_tokens, TOP)
        assert answer.top_tokens == ids.tolist()
        torch.testing.assert_close(torch.tensor(answer.top_log_probs), values)


def test_a_target_that_is_loaded_records_the_same(folder: Path, tmp_path: Path):
    served = Served(folder)
    loaded = {"kind": "model", "top_logprobs": TOP}
    exact = {"dtype": "float32", "activations": "float32"}
    found = answers(generate_data(generation(folder, tmp_path / "run", writer=loaded, **exact)))
    assert len(found) == 22
    for answer in found:
        values, ids = top_of(served.model, answer.prompt_tokens, answer.completion_tokens, TOP)
        assert answer.top_tokens == ids.tolist()
        torch.testing.assert_close(torch.tensor(answer.top_log_probs), values, rtol=1e-4, atol=1e-4)


def test_a_token_that_ends_within_a_character_has_no_candidates(folder: Path, tmp_path: Path):
    """llama-server gives its id, and no entry in completion_probabilities."""
    served = Served(folder, kind="llama.cpp")
    served.omitted = 1
    with serving(served.routes) as url:
        made = config(folder, tmp_path / "run", url, writer={"top_logprobs": TOP})
        found = answers(generate_data(made))
    different = [answer for answer in found if len(set(answer.completion_tokens[:2])) == 2]
    assert len(different) >= 5
    for answer in different:
        top = answer.top_tokens or []
        assert [len(each) for each in top] == [0] + [TOP] * (len(answer.completion_tokens) - 1)


def test_a_failed_run_keeps_its_files_and_asks_for_the_others_only(
    folder: Path, tmp_path: Path, served: Served, url: str
):
    whole = answers(generate_data(config(folder, tmp_path / "whole", url)))
    served.bodies.clear()
    one = {"concurrency": 1}

    def complete(body: dict[str, Any]) -> Answer:
        refused = len(served.bodies) == 6
        return (400, {"error": {"message": "no more today"}}) if refused else served.complete(body)

    stopping = served.routes | {"/v1/completions": complete}
    with serving(stopping) as other, pytest.raises(UsageError, match="no more today"):
        generate_data(config(folder, tmp_path / "run", other, writer=one))
    assert len(served.bodies) == 6
    # at another address
    generate_data(config(folder, tmp_path / "run", url, writer=one), resume=True)
    assert len(served.bodies) == 6 + 22 - 4, "the first file has four"
    assert [a.model_dump() for a in answers(tmp_path / "run")] == [a.model_dump() for a in whole]


def in_turns(own: Served, other: Served) -> dict[str, Any]:
    """Routes of a server that answers only four requests before the other one has had as many."""

    def complete(body: dict[str, Any]) -> Answer:
        end = time.monotonic() + 60
        while len(own.bodies) >= 4 > len(other.bodies) and time.monotonic() < end:
            time.sleep(0.01)
        return own.complete(body)

    return own.routes | {"/v1/completions": complete}


def test_requests_go_to_all_servers_and_on_when_one_dies(folder: Path, tmp_path: Path):
    first, second = Served(folder), Served(folder)
    with serving(in_turns(first, second)) as one, serving(in_turns(second, first)) as two:
        alone = {"writer": {"concurrency": 1}, "shard_size": 50}  # one request waits at a time
        run = generate_data(config(folder, tmp_path / "both", [one, two], **alone))
    assert Counter(a.id for a in answers(run)).most_common(1)[0][1] == 1
    assert len(first.bodies) + len(second.bodies) == 22
    assert min(len(first.bodies), len(second.bodies)) >= 4

    first.bodies.clear()
    with serving(first.routes) as one:
        dead = two  # nothing listens there now
        found = answers(generate_data(config(folder, tmp_path / "one", [dead, one])))
    assert len(found) == len(first.bodies) == 22
    assert sorted(a.completion_tokens for a in found) == sorted(
        a.completion_tokens for a in answers(run)
    )


def test_requests_that_wait_for_a_server_that_fails_go_to_the_others(
    served: Served, url: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(text_servers, "_PAUSE_S", 60.0)

    def models(_: dict[str, Any]) -> Answer:
        time.sleep(0.2)  # the others wait meanwhile
        return 503, "stopping"

    with serving({"/v1/models": models}) as failing:
        writer = OpenAIWriter(url=(failing, url), concurrency=6)
        servers = TextServers(
            writer, lambda text: served.tokens_of(text, add_special_tokens=False)["input_ids"]
        )
        requests = [Request((5, 6), 4, SamplingParams(temperature=0), n) for n in range(6)]
        done: list[int] = []
        servers.write(requests, lambda index, _: done.append(index))
    assert sorted(done) == [*range(6)]


def test_a_server_that_refuses_for_now_is_not_taken_for_another(folder: Path, tmp_path: Path):
    """A proxy in front of it, or the server itself while it loads its model."""
    served = Served(folder, kind="llama.cpp")
    refused = {path: [(503, "loading"), (429, "later")] for path in ("/version", "/props")}

    def first_refused(path: str, route: Any) -> Any:
        return lambda body: refused[path].pop() if refused[path] else route(body)

    routes = served.routes | {"/version": lambda _: (404, "none")}
    routes |= {path: first_refused(path, routes[path]) for path in refused}
    with serving(routes) as url:
        made = config(folder, tmp_path / "run", url, writer={"patience_s": 60})
        generate_data(made)
    assert not any(refused.values())
    assert all("n_predict" in body for body in served.bodies), "requests of llama-server"


def test_a_server_that_joins_gets_requests(folder: Path, tmp_path: Path):
    first, late = Served(folder), Served(folder)
    gone = threading.Event()
    complete = first.complete

    def two_only(body: dict[str, Any]) -> Answer:
        if len(first.bodies) < 2:
            return complete(body)
        gone.set()
        return 503, "stopping"

    first.complete = two_only  # pyright: ignore[reportAttributeAccessIssue]
    with serving(late.routes) as probe:
        port = int(probe.rpartition(":")[2])
    made: list[Path] = []
    with serving(first.routes) as one:
        urls = [one, f"http://127.0.0.1:{port}"]
        wanted = config(folder, tmp_path / "run", urls, writer={"patience_s": 60})
        running = threading.Thread(target=lambda: made.append(generate_data(wanted)))
        running.start()
        assert gone.wait(30)
        with serving(late.routes, port=port):
            running.join(60)
    assert len(answers(made[0])) == 22
    assert len(first.bodies) + len(late.bodies) == 22
    assert len(late.bodies) >= 17  # the first had at most three requests when it stopped


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ((429, {"error": {"message": "slow down"}}), "answered 429 .*slow down.*; no server answ"),
        ((500, "oops"), r"answered 500 \(oops\); check the server log; no server answered for"),
        ((200, '{"choices": [{"te'), "answered with text that is not JSON .*may be truncated"),
        ((200, {"choices": []}), "answered with 0 choices; wanted one"),
        ((200, {"choices": [{"text": 3}]}), r"answered with invalid choices.0.text"),
        (
            (200, {"choices": [{"text": "", "finish_reason": "content_filter"}]}),
            "answered with invalid choices.0.finish_reason",
        ),
    ],
)
def test_answers_that_cannot_be_used_are_asked_again_and_then_one_line(
    folder: Path, tmp_path: Path, served: Served, url: str, fault: Answer, message: str
):
    patient = {"concurrency": 1, "patience_s": 60}  # whatever else this machine does
    few = {"path": str(folder / "prompts.jsonl"), "limit": 2}
    served.faults = [fault] * 2
    generate_data(config(folder, tmp_path / "run", url, writer=patient, prompts=few))
    assert len(served.bodies) == 4 + 2
    served.faults = [fault] * 1000
    with pytest.raises(EngineError, match=message):
        generate_data(config(folder, tmp_path / "other", url))


def _with_top(*candidates: dict[str, float]) -> Answer:
    choice = {"text": "a", "finish_reason": "length", "token_ids": [5] * len(candidates)}
    return 200, {"choices": [{**choice, "logprobs": {"top_logprobs": list(candidates)}}]}


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (_with_top({"token_id:5": math.nan}), "gives the log probability nan for token 0"),
        (_with_top({"token_id:5": 0.4}), "gives the log probability 0.4 for token 0"),
        (_with_top({"token_id:5": -1.0}, {}), "gives no log probabilities for token 1; llama-serv"),
        (_with_top({" the": -1.0}), "names tokens by their text .' the'.*set top_logprobs to 0"),
        (_with_top({"token_id:1": -0.1, "token_id:2": -0.1}), "whose sum exceeds 1 for token 0"),
        (
            (200, {"choices": [{"text": "a", "finish_reason": "stop", "token_ids": [5, 6]}]}),
            "answered with 2 tokens and the log probabilities of 0",
        ),
        (
            (200, {"choices": [{"text": "a", "finish_reason": "stop"}]}),
            "answered with text without token ids and the log probabilities of 0",
        ),
    ],
)
def test_log_probs_that_cannot_be_used_are_one_line(
    folder: Path, tmp_path: Path, served: Served, url: str, fault: Answer, message: str
):
    served.faults = [fault] * 1000
    with pytest.raises(EngineError, match=message):
        generate_data(config(folder, tmp_path / "run", url, writer={"top_logprobs": TOP}))


def test_a_key_is_sent_and_written_nowhere(
    folder: Path, tmp_path: Path, served: Served, monkeypatch: pytest.MonkeyPatch
):
    writer = {"api_key_env": "SERVER_KEY"}
    with serving(served.routes, key=KEY) as url:
        made = config(folder, tmp_path / "run", url, writer=writer)
        with pytest.raises(UsageError, match="variable SERVER_KEY is not set"):
            generate_data(made)
        monkeypatch.setenv("SERVER_KEY", "another")
        with pytest.raises(UsageError, match=r"401.*name its variable with --set writer.api_key"):
            generate_data(made, resume=True)
        monkeypatch.setenv("SERVER_KEY", KEY)
        run = generate_data(made, resume=True)
    assert len(answers(run)) == 22
    files = [path for path in run.rglob("*") if path.is_file()]
    assert len(files) > 5
    assert not any(KEY.encode() in path.read_bytes() for path in files)


@pytest.mark.parametrize(("chat", "end"), [(True, "<end_of_turn>"), (False, "<eos>")])
def test_a_text_without_tokens_ends_as_the_template_ends_an_answer(
    folder: Path, tmp_path: Path, chat: bool, end: str
):
    tokenizer = tokenizer_of(next(each for each in CHAT_FAMILIES if each.name == "gemma"))
    tokenizer.save_pretrained(tmp_path / "gemma")
    served = Served(folder, kind="other")
    served.tokens_of = tokenizer
    choice = {"text": "a cat", "finish_reason": "stop"}
    answer = 200, {"choices": [choice]}
    served.complete = lambda _: answer  # pyright: ignore[reportAttributeAccessIssue]
    with serving(served.routes) as url:
        made = config(folder, tmp_path / "run", url, target=str(tmp_path / "gemma"), chat=chat)
        found = answers(generate_data(made.model_copy(update={"max_prompt_tokens": 100})))
    wanted = tokenizer(f"a cat{end}", add_special_tokens=False)["input_ids"]
    assert {tuple(answer.completion_tokens) for answer in found} == {tuple(wanted)}
    assert {answer.completion for answer in found} == {"a cat"}


def test_another_tokenizer_another_model_and_no_server_are_one_line(
    folder: Path, tmp_path: Path, served: Served, url: str
):
    number = iter(range(99))

    def refused(match: str, address: Any, kind: type[PacelineError], **writer: Any) -> None:
        made = config(folder, tmp_path / f"run-{next(number)}", address, writer=writer)
        with pytest.raises(kind, match=match):
            generate_data(made)

    refused("serves served; name one", url, UsageError, model="other")
    with serving(served.routes) as closed:
        pass
    refused("cannot be reached .* no server answered for", closed, EngineError)
    served.tokens_of = lambda text, **_: {"input_ids": [1, 2]}
    refused("has another tokenizer than the prompts: 2 tokens instead of", url, UsageError)
    with pytest.raises(ConfigError, match="names a server twice"):
        config(folder, tmp_path / "run", [url, f"{url}/v1"])
    with pytest.raises(ConfigError, match="draft is for a target that is loaded here"):
        config(folder, tmp_path / "run", url, draft="d")


def test_a_server_that_is_not_there_is_named_once(folder: Path, tmp_path: Path, url: str):
    dead = "http://127.0.0.1:9"
    with pytest.warns(SlowerWarning, match="it gets no requests for now") as found:
        run = generate_data(config(folder, tmp_path / "run", [dead, url]))
    assert len([one for one in found if dead in str(one.message)]) == 1
    assert len(answers(run)) > 0


OPENAI = {
    *("model", "prompt", "max_tokens", "temperature", "top_p", "seed", "logprobs"),
    *("presence_penalty", "frequency_penalty"),
}


class Strict(Served):
    """A server that refuses other keys than these, and values of top_k below `least`."""

    def __init__(self, folder: Path, known: set[str], least: int) -> None:
        super().__init__(folder, kind="other")
        self.known, self.least, self.num_refused = OPENAI | known, least, 0

    def complete(self, body: dict[str, Any]) -> Answer:
        if body.keys() - self.known or body.get("top_k", self.least) < self.least:
            self.num_refused += 1
            return 422, {"detail": "Extra inputs are not permitted"}
        return super().complete(body)


@pytest.mark.parametrize(
    ("known", "least", "wanted"),
    [
        ({"top_k", "min_p", "repetition_penalty"}, -1, {"top_k": -1, "min_p": 0}),
        ({"top_k", "min_p", "repetition_penalty", "repeat_penalty"}, 0, {"repeat_penalty": 1}),
        (set(), 0, {}),
    ],
)
def test_servers_get_neutral_settings_in_a_form_that_they_accept(
    folder: Path, tmp_path: Path, known: set[str], least: int, wanted: dict[str, Any]
):
    served = Strict(folder, known, least)
    with serving(served.routes) as url, warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        run = generate_data(config(folder, tmp_path / "run", url))
    assert len(answers(run)) == len(served.bodies) == 22
    for body in served.bodies:
        assert body["presence_penalty"] == body["frequency_penalty"] == 0
        assert body.keys() - OPENAI == known
        assert wanted.items() <= body.items()
    said = [str(each.message) for each in heard if "refuses top_k" in str(each.message)]
    assert len(said) == (0 if known else 1)
    assert served.num_refused <= 2 * 3  # of the requests in flight at first
