"""Figures of an engine beside the prediction, against servers that speculate with the same two models."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aligning import write_pair
from engine_servers import (
    Route,
    Speculating,
    accepted_at_least,
    llamacpp_routes,
    serving,
    sglang_routes,
    vllm_routes,
)
from paceline.config import validate
from paceline.errors import EngineError, PacelineError, UsageError
from paceline.measure.served import measure_served
from paceline.measure.served_figures import ServedConfig
from paceline.models import CausalModel, load_model

ROUTES: dict[str, Callable[[Speculating], dict[str, Route]]] = {
    "vllm": vllm_routes,
    "llamacpp": llamacpp_routes,
    "sglang": sglang_routes,
}
GAMMA = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def pair(folder: Path) -> tuple[CausalModel, CausalModel]:
    target = load_model(folder / "target", dtype="float32")
    # a draft that agrees now and then: the target itself with one layer scaled
    draft = load_model(folder / "target", dtype="float32")
    draft.hf.model.layers[2].mlp.down_proj.weight.data.mul_(0.3)
    draft.hf.save_pretrained(folder / "near")
    assert draft.tokenizer is not None
    draft.tokenizer.save_pretrained(folder / "near")
    return target, draft


def config(folder: Path, engine: dict[str, Any], **changes: Any) -> ServedConfig:
    values = {
        "target": str(folder / "target"),
        "draft": str(folder / "near"),
        "prompts": str(folder / "corpus.jsonl"),
        "max_prompt_tokens": 6,
        "max_new_tokens": 24,
        "num_speculative_tokens": GAMMA,
        "dtype": "float32",
        "device": "cpu",
        "engine": engine,
    }
    return validate(ServedConfig, values | changes)


@pytest.mark.parametrize("temperature", [0.0, 0.3])
@pytest.mark.parametrize("engine", ["vllm", "llamacpp", "sglang"])
def test_a_server_that_drafts_greedily_gives_what_was_predicted(
    engine: str, temperature: float, folder: Path, pair: tuple[CausalModel, CausalModel]
):
    written = Speculating(*pair, GAMMA)
    with serving(ROUTES[engine](written)) as url:
        found = measure_served(
            config(folder, {"engine": engine, "url": url}, sampling={"temperature": temperature})
        )
    assert found.agreement.agrees, found.agreement.reason
    # the server's counts are those of its own decoder, the warm-up left out
    assert found.num_tokens == 24 * found.num_requests
    served = found.served
    assert served.acceptance_by_position is not None
    assert 0.1 < served.draft_acceptance_rate.value < 0.9, "blocks have to go either way"
    if temperature == 0 and engine == "llamacpp":  # which ends texts as this decoder does
        # greedy text: every block is known, so the prediction is the count itself
        predicted = found.predicted
        assert served.block_efficiency.value == pytest.approx(predicted.block_efficiency.value)
        for ours, theirs in zip(
            served.acceptance_by_position, predicted.acceptance_by_position or [], strict=True
        ):
            assert ours.value == pytest.approx(theirs.value)


def test_counts_by_position_add_up_to_the_accepted_tokens(
    folder: Path, pair: tuple[CausalModel, CausalModel]
):
    written = Speculating(*pair, GAMMA)
    with serving(sglang_routes(written)) as url:
        found = measure_served(config(folder, {"engine": "sglang", "url": url})).served
    assert found.acceptance_by_position is not None
    total = sum(row.value for row in found.acceptance_by_position)
    assert total == pytest.approx(found.block_efficiency.value - 1)
    assert sum(accepted_at_least(written.stats)) == written.stats.num_accepted


def test_without_metrics_a_llama_server_is_counted_by_its_timings(
    folder: Path, pair: tuple[CausalModel, CausalModel]
):
    with serving(llamacpp_routes(Speculating(*pair, GAMMA), metrics=False)) as url:
        found = measure_served(config(folder, {"engine": "llamacpp", "url": url}))
    assert found.served.acceptance_by_position is None
    assert found.agreement.agrees


def test_an_engine_that_accepts_what_it_should_not_is_caught(
    folder: Path, pair: tuple[CausalModel, CausalModel]
):
    """The mutant: its draft is the target itself, so that everything is accepted."""
    target, _ = pair
    with serving(vllm_routes(Speculating(target, target, GAMMA))) as url:
        found = measure_served(
            config(folder, {"engine": "vllm", "url": url}, sampling={"temperature": 0.0})
        )
    assert not found.agreement.agrees
    assert "tokens per target call 3.8" in found.agreement.reason
    assert "known reasons" in found.agreement.reason


@pytest.mark.parametrize("engine", ["vllm", "llamacpp", "sglang"])
def test_a_server_that_does_not_draft_is_told_apart_by_its_counters(
    engine: str, folder: Path, pair: tuple[CausalModel, CausalModel]
):
    with (
        serving(ROUTES[engine](Speculating(pair[0], None, GAMMA))) as url,
        pytest.raises(EngineError, match="nothing was drafted"),
    ):
        measure_served(config(folder, {"engine": engine, "url": url}))


def test_transformers_serves_in_this_process(folder: Path, pair: tuple[CausalModel, CausalModel]):
    del pair  # writes the near draft
    found = measure_served(
        config(folder, {"engine": "transformers"}, sampling={"temperature": 0.0}, num_prompts=3)
    )
    assert found.engine == "transformers"
    assert found.speed is not None
    assert found.speed.num_equal == found.num_requests
    assert found.agreement.agrees, found.agreement.reason


def broken(folder: Path, routes: dict[str, Route], **changes: Any) -> str:
    """The one line that a server's fault becomes."""
    with (
        serving(routes, key=changes.pop("key", None)) as url,
        pytest.raises(PacelineError) as caught,
    ):
        measure_served(config(folder, {"engine": "vllm", "url": url, **changes}))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries wait half a second and more."""
    monkeypatch.setattr("openai._base_client.time.sleep", lambda _: None)


def test_every_fault_of_a_server_is_one_line(
    folder: Path,
    pair: tuple[CausalModel, CausalModel],
    monkeypatch: pytest.MonkeyPatch,
):
    right = vllm_routes(Speculating(*pair, GAMMA))
    for status, said in ((429, "refuses more requests"), (500, "look into the server's log")):
        faulty = right | {"/v1/completions": lambda _, s=status: (s, {"error": {"message": "no"}})}
        assert said in broken(folder, faulty)
    half = right | {"/v1/completions": lambda _: (200, '{"choices": [{"token_i')}
    assert "no JSON object" in broken(folder, half)
    assert "serves served, not mine" in broken(folder, right, model="mine")
    assert "the key is wrong or missing" in broken(folder, right, key="secret")
    monkeypatch.setenv("MY_KEY", "wrong")
    assert "the key is wrong or missing" in broken(
        folder, right, key="secret", api_key_env="MY_KEY"
    )
    short = right | {"/v1/completions": lambda _: (200, {"choices": [{"token_ids": [5, 6]}]})}
    assert "wrote 2 tokens where 24 were asked for" in broken(folder, short)
    assert "answered 404" in broken(folder, {})


def test_a_key_is_in_no_record(
    folder: Path, pair: tuple[CausalModel, CausalModel], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MY_KEY", "sesame-open")
    engine = {"engine": "vllm", "api_key_env": "MY_KEY"}
    with serving(vllm_routes(Speculating(*pair, GAMMA)), key="sesame-open") as url:
        found = measure_served(config(folder, engine | {"url": url}, num_prompts=2))
    assert "sesame-open" not in found.model_dump_json()


def test_nobody_at_the_url_and_no_url_at_all(folder: Path, pair: tuple[CausalModel, CausalModel]):
    del pair
    with pytest.raises(EngineError, match="cannot be reached"):
        measure_served(config(folder, {"engine": "vllm", "url": "http://127.0.0.1:9"}))
    with pytest.raises(UsageError, match="is no URL of a server"):
        measure_served(config(folder, {"engine": "vllm", "url": "ftp://x"}))
    with pytest.raises(UsageError, match="is not installed here"):
        measure_served(config(folder, {"engine": "vllm", "program": "no-such-program"}))
