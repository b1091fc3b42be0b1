"""Faults of servers that are measured become one line; keys stay out of the record."""

from pathlib import Path
from typing import Any

import pytest

from paceline.errors import EngineError, PacelineError, UsageError
from paceline.measure.served import measure_served
from paceline.models import CausalModel
from support.engines import GAMMA, Route, serving, vllm_routes, write_near_pair
from support.engines import served_config as config

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pair(folder: Path) -> tuple[CausalModel, CausalModel]:
    return write_near_pair(folder)


ENDED = {"text": "...", "finish_reason": "length"}


def broken(folder: Path, routes: dict[str, Route], **changes: Any) -> str:
    """The one line that a server's fault becomes."""
    with (
        serving(routes, key=changes.pop("key", None)) as url,
        pytest.raises(PacelineError) as caught,
    ):
        measure_served(config(folder, {"engine": "vllm", "url": url, **changes}))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_every_fault_of_a_server_is_one_line(
    folder: Path,
    pair: tuple[CausalModel, CausalModel],
    monkeypatch: pytest.MonkeyPatch,
):
    right = vllm_routes(*pair, GAMMA)
    for status, said in ((429, "answered 429"), (500, "check the server log")):
        faulty = right | {"/v1/completions": lambda _, s=status: (s, {"error": {"message": "no"}})}
        assert said in broken(folder, faulty)
    shapeless = right | {"/v1/completions": lambda _: (200, {"choices": None})}
    assert "with invalid choices" in broken(folder, shapeless)
    half = right | {"/v1/completions": lambda _: (200, '{"choices": [{"token_i')}
    assert "is not JSON" in broken(folder, half)
    assert "the API key is wrong or missing" in broken(folder, right, key="secret")
    monkeypatch.setenv("MY_KEY", "wrong")
    assert "the API key is wrong or missing" in broken(
        folder, right, key="secret", api_key_env="MY_KEY"
    )
    short = right | {
        "/v1/completions": lambda _: (200, {"choices": [{**ENDED, "token_ids": [5, 6]}]})
    }
    assert "generated 2 tokens where 24 were requested" in broken(folder, short)
    assert "answered 404" in broken(folder, {})


def test_a_key_is_in_no_record(
    folder: Path, pair: tuple[CausalModel, CausalModel], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MY_KEY", "sesame-open")
    engine = {"engine": "vllm", "api_key_env": "MY_KEY"}
    with serving(vllm_routes(*pair, GAMMA), key="sesame-open") as url:
        found = measure_served(config(folder, engine | {"url": url}, num_prompts=2))
    assert "sesame-open" not in found.model_dump_json()


def test_nobody_at_the_url_and_no_url_at_all(folder: Path, pair: tuple[CausalModel, CausalModel]):
    del pair
    with pytest.raises(EngineError, match="cannot be reached"):
        measure_served(config(folder, {"engine": "vllm", "url": "http://127.0.0.1:9"}))
    for url, said in (
        ("ftp://x", "is not the URL of a server"),
        ("http://x:abc", "is not the URL of a server"),
        ("http://[::1", "is not the URL of a server"),
    ):
        with pytest.raises(UsageError, match=said):
            measure_served(config(folder, {"engine": "vllm", "url": url}))
    with pytest.raises(UsageError, match="is not installed here"):
        measure_served(config(folder, {"engine": "vllm", "program": "no-such-program"}))
