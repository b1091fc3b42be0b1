"""Servers whose log probabilities are after temperature or filters are refused as teachers."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.core.sampling import SamplingParams
from paceline.engines import text_servers
from paceline.engines.contract import Request
from paceline.engines.text_servers import TextServers
from paceline.engines.texts import OpenAIWriter, Written
from paceline.errors import EngineError, UsageError
from support.engines import Answer, Served, serving

Process = Callable[[Tensor, dict[str, Any]], Tensor]
LOWEST = -9999.0  # vLLM's, instead of minus infinity


def tempered(log_probs: Tensor, body: dict[str, Any]) -> Tensor:
    return (log_probs / max(body["temperature"], 0.01)).log_softmax(-1)


def filtered(log_probs: Tensor, body: dict[str, Any]) -> Tensor:
    """Top-p alone: the smallest set of tokens with this mass, renormalised."""
    values, order = log_probs.sort(descending=True)
    before = values.exp().cumsum(-1) - values.exp()
    kept = values.masked_fill(before >= body["top_p"], -torch.inf).log_softmax(-1)
    return torch.empty_like(kept).scatter(-1, order, kept).clamp(min=LOWEST)


def processed(log_probs: Tensor, body: dict[str, Any]) -> Tensor:
    return filtered(tempered(log_probs, body), body)


def busy(log_probs: Tensor, _: dict[str, Any]) -> Tensor:
    """Two steps of bfloat16 logits between 16 and 32, at random."""
    return log_probs - 0.125 * torch.randint(0, 3, log_probs.shape)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_servers, "_RETRIES", 0)
    monkeypatch.setattr(text_servers, "_FIRST_PAUSE_S", 0.02)


def teacher(folder: Path, process: Process | None = None, *, kind: str = "vllm") -> Served:
    served = Served(folder, kind=kind)
    if process is not None:
        served.process = process
    return served


REQUESTS = [
    Request([5 + each, 6, 7, 8], 6, SamplingParams(temperature=0.7), each) for each in range(3)
]


def answers(*teachers: Served, top: int = 3, count: int = 3) -> list[Written]:
    found: dict[int, Written] = {}
    with ExitStack() as stack:
        urls = tuple(stack.enter_context(serving(each.routes)) for each in teachers)
        writer = OpenAIWriter(url=urls, top_logprobs=top, concurrency=1, patience_s=0.3)
        servers = TextServers(writer, tokenizer_of(teachers[0]))
        servers.write(REQUESTS[:count], found.__setitem__)
        servers.write(REQUESTS[:1], found.__setitem__)  # a later round
    return list(found.values())


def tokenizer_of(served: Served) -> Callable[[str], list[int]]:
    return lambda text: served.tokens_of(text, add_special_tokens=False)["input_ids"]


def checks_of(served: Served) -> list[dict[str, Any]]:
    return [body for body in served.bodies if body.get("max_tokens", body.get("n_predict")) == 1]


@pytest.mark.parametrize(("top", "kind"), [(1, "vllm"), (3, "vllm"), (3, "llama.cpp")])
@pytest.mark.parametrize("process", [tempered, filtered, processed])
def test_scores_after_sampling_settings_are_refused_before_the_first_text(
    folder: Path, process: Process, top: int, kind: str
):
    served = teacher(folder, process, kind=kind)
    with pytest.raises(UsageError, match="start vLLM with --logprobs-mode raw_logprobs") as caught:
        answers(served, top=top)
    assert "\n" not in str(caught.value)
    assert "are not the target's" in str(caught.value)
    assert len(served.bodies) == len(checks_of(served))


@pytest.mark.parametrize("kind", ["vllm", "llama.cpp"])
@pytest.mark.parametrize("process", [None, busy])
def test_a_right_server_is_asked_twice_more_and_not_in_later_rounds(
    folder: Path, process: Process | None, kind: str
):
    served = teacher(folder, process, kind=kind)
    assert len(answers(served)) == 3
    assert len(served.bodies) == 4 + 2
    plain, sharp = checks_of(served)
    assert (plain["temperature"], plain["top_p"]) == (1, 1)
    assert sharp["temperature"] < 0.2
    assert plain["prompt"] == sharp["prompt"] == REQUESTS[0].prompt


def test_without_log_probabilities_nothing_is_checked(folder: Path):
    served = teacher(folder, processed)
    assert len(answers(served, top=0)) == 3
    assert len(served.bodies) == 4


def test_each_server_is_checked(folder: Path):
    right, wrong = teacher(folder), teacher(folder, processed)
    with pytest.raises(UsageError, match="are not the target's"):
        answers(right, wrong)


def test_another_server_at_the_same_address_is_checked_again(folder: Path):
    served = teacher(folder)
    with serving(served.routes) as url:
        writer = OpenAIWriter(url=url, top_logprobs=3, concurrency=1, patience_s=60)
        servers = TextServers(writer, tokenizer_of(served))
        servers.write(REQUESTS, lambda *_: None)
        served.faults = [(503, "restarting")]
        served.process = processed
        with pytest.warns(UserWarning, match="503"), pytest.raises(UsageError, match="not the tar"):
            servers.write(REQUESTS, lambda *_: None)


def refusing(served: Served, *names: str) -> None:
    complete = served.complete

    def answer(body: dict[str, Any]) -> Answer:
        plain = {"top_k": -1, "top_p": 1.0}
        if any(body[name] != plain[name] for name in names):
            return 400, {"error": {"message": f"{names} is not supported"}}
        return complete(body)

    served.complete = answer  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("names", [("top_k",), ("top_k", "top_p")])
def test_a_server_that_refuses_filters_is_checked_without_them(folder: Path, names: Any):
    right, wrong = teacher(folder), teacher(folder, tempered)
    refusing(right, *names)
    refusing(wrong, *names)
    assert len(answers(right)) == 3
    with pytest.raises(UsageError, match="are not the target's"):
        answers(wrong)


def test_a_part_of_the_prompt_is_used_where_the_whole_one_tells_nothing(folder: Path):
    """A target that is certain of the next token has the same score at any temperature."""
    certain = torch.tensor([0.0, *[-50.0] * 500])

    def scores(log_probs: Tensor, body: dict[str, Any]) -> Tensor:
        if body["prompt"] == REQUESTS[0].prompt:
            return certain[: log_probs.shape[-1]].expand_as(log_probs)
        return processed(log_probs, body)

    served = teacher(folder)
    served.process = scores
    with pytest.raises(UsageError, match="are not the target's"):
        answers(served, top=1)
    assert [len(body["prompt"]) for body in served.bodies] == [4, 2, 2]


def test_probabilities_after_sampling_of_llama_server_are_refused(folder: Path):
    """With post_sampling_probs, as a proxy may set it, each token has `top_probs`."""
    served = teacher(folder, kind="llama.cpp")
    complete = served.complete

    def answer(body: dict[str, Any]) -> Answer:
        assert body["post_sampling_probs"] is False
        status, found = complete(body)
        assert isinstance(found, dict)
        for entry in found["completion_probabilities"]:
            entry["top_probs"] = [{"id": each["id"], "prob": 1.0} for each in entry["top_logprobs"]]
            del entry["top_logprobs"]
        return status, found

    served.complete = answer  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(UsageError, match="behind nothing that sets post_sampling_probs"):
        answers(served)


def test_a_server_without_scores_is_the_error_that_it_was(folder: Path):
    served = teacher(folder, kind="other")
    with pytest.raises(EngineError, match="text without token ids"):
        answers(served)


def test_mutant_one_temperature_finds_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """The check is of the settings: the same ones twice would accept every server."""
    monkeypatch.setattr(text_servers, "_SHARP_FORMS", (SamplingParams(),) * 3)
    assert len(answers(teacher(folder, processed))) == 3
