"""Figures of an engine beside the prediction, against servers speculating with the same models."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

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
from paceline.core.sampling import SamplingParams
from paceline.engines.assisted import Transformers
from paceline.engines.contract import BlockCounts, Conventions, Request, Served
from paceline.errors import EngineError, PacelineError, UsageError
from paceline.export import ExportConfig, export
from paceline.measure.served import load_scored, measure_served
from paceline.measure.served_figures import ServedConfig, compare_served
from paceline.models import CausalModel, load_model, wrap_model
from paceline.models.drafts.save import save_draft
from paceline.permissions import given

pytestmark = pytest.mark.slow

Routes = Callable[[CausalModel, CausalModel | None, int], dict[str, Route]]
ROUTES: dict[str, Routes] = {
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
    draft.hf.model.layers[2].mlp.down_proj.weight.data.mul_(0.25)
    draft.hf.save_pretrained(folder / "near")
    assert draft.tokenizer is not None
    draft.tokenizer.save_pretrained(folder / "near")
    return target, draft


def config(folder: Path, engine: dict[str, Any], **changes: Any) -> ServedConfig:
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
    return validate(ServedConfig, given(values | changes))


@pytest.mark.parametrize("temperature", [0.0, 0.3])
@pytest.mark.parametrize("engine", ["vllm", "llamacpp", "sglang"])
def test_a_server_that_drafts_greedily_gives_what_was_predicted(
    engine: str, temperature: float, folder: Path, pair: tuple[CausalModel, CausalModel]
):
    with serving(ROUTES[engine](*pair, GAMMA)) as url:
        found = measure_served(
            config(folder, {"engine": engine, "url": url}, sampling={"temperature": temperature})
        )
    assert found.agreement.agrees, found.agreement.reason
    assert found.speed is None, "a server that runs was not asked without its draft"
    served, predicted = found.served, found.predicted
    assert served.acceptance_by_position is not None
    assert predicted.acceptance_by_position is not None
    assert 0.1 < served.draft_acceptance_rate.value < 0.9, "blocks have to go either way"
    if engine == "llamacpp" and temperature == 0:
        # greedy text within its budget: every block is known, so the prediction is the count itself
        for ours, theirs in (
            (served.block_efficiency, predicted.block_efficiency),
            (served.draft_acceptance_rate, predicted.draft_acceptance_rate),
            *zip(served.acceptance_by_position, predicted.acceptance_by_position, strict=True),
        ):
            assert ours.value == pytest.approx(theirs.value)


def test_texts_that_end_by_themselves_are_predicted_with_their_ends(
    folder: Path, pair: tuple[CausalModel, CausalModel]
):
    """llama-server is not told to ignore the end of text; here every fifth token or so ends one."""
    target, draft = (load_model(folder / name, dtype="float32") for name in ("target", "near"))
    with serving(llamacpp_routes(target, draft, GAMMA)) as url:
        engine = {"engine": "llamacpp", "url": url}
        hot = config(folder, engine, sampling={"temperature": 1.5}, max_new_tokens=40)
        found = measure_served(hot)
    assert found.num_tokens < 40 * found.num_requests, "some text has to end"
    assert found.agreement.agrees, found.agreement.reason


def test_counts_by_position_add_up_to_the_accepted_tokens(
    folder: Path, pair: tuple[CausalModel, CausalModel]
):
    with serving(sglang_routes(*pair, GAMMA)) as url:
        found = measure_served(config(folder, {"engine": "sglang", "url": url})).served
    assert found.acceptance_by_position is not None
    total = sum(row.value for row in found.acceptance_by_position)
    assert total == pytest.approx(found.block_efficiency.value - 1)


@pytest.mark.parametrize(("scale", "said"), [(1.0, "differs"), (0.97, "differs")])
def test_an_engine_with_another_draft_is_caught(
    scale: float, said: str, folder: Path, pair: tuple[CausalModel, CausalModel]
):
    """The mutants: its draft is the target itself, or nearly so."""
    target, _ = pair
    other = load_model(folder / "target", dtype="float32")
    other.hf.model.layers[2].mlp.down_proj.weight.data.mul_(scale)
    with serving(vllm_routes(target, other, GAMMA)) as url:
        found = measure_served(
            config(folder, {"engine": "vllm", "url": url}, sampling={"temperature": 0.0})
        )
    assert str(found.agreement).startswith(said)
    assert "known reasons" in found.agreement.reason


def test_counts_that_are_biased_by_a_twentieth_are_caught(
    folder: Path, pair: tuple[CausalModel, CausalModel]
):
    """The mutant: in each text one accepted token is counted as a block of its own."""
    requests = [Request([5 + n, 9, 7], 40, SamplingParams(temperature=0), n) for n in range(24)]
    engine = Speculating(*pair, GAMMA)
    served: list[Served] = []
    for request in requests:
        tokens = engine.write(list(request.prompt), 40, request.sampling, request.seed)
        last = engine.last
        blocks = BlockCounts(
            num_blocks=last.num_blocks,
            num_drafted=last.num_drafted,
            num_accepted=last.num_accepted,
            accepted_by_position=tuple(accepted_at_least(last)),
        )
        served.append(Served(tokens, 1.0, blocks))
    wanted = config(folder, {"engine": "vllm"}, sampling={"temperature": 0.0}, max_new_tokens=40)
    loaded = load_scored(wanted)
    plain = Conventions(ignores_end=True)
    assert compare_served(loaded, requests, served, plain, wanted).agreement.agrees
    biased = [
        one._replace(
            blocks=one.blocks.model_copy(
                update={
                    "num_blocks": one.blocks.num_blocks + 1,
                    "num_accepted": one.blocks.num_accepted - 1,
                }
            )
        )
        for one in served
        if one.blocks is not None
    ]
    found = compare_served(loaded, requests, biased, plain, wanted).agreement
    assert not found.agrees
    assert "served / predicted" in found.reason


def test_other_requests_in_the_counters_are_noticed(
    folder: Path, pair: tuple[CausalModel, CausalModel]
):
    routes = llamacpp_routes(*pair, GAMMA)
    complete = routes["/completion"]

    def twice(body: dict[str, Any]) -> tuple[int, Any]:
        complete({**body, "prompt": [7, 7]})
        return complete(body)

    with (
        serving(routes | {"/completion": twice}) as url,
        pytest.raises(EngineError, match="served other requests at the same time"),
    ):
        measure_served(config(folder, {"engine": "llamacpp", "url": url}))


def test_few_requests_give_no_verdict(folder: Path, pair: tuple[CausalModel, CausalModel]):
    with serving(sglang_routes(*pair, GAMMA)) as url:
        found = measure_served(
            config(folder, {"engine": "sglang", "url": url}, num_prompts=7)
        ).agreement
    assert (found.agrees, found.decided, found.exit_code) == (False, False, 3)


def test_a_draft_vocabulary_counts_only_where_it_is_baked_in(
    folder: Path, pair: tuple[CausalModel, CausalModel], tmp_path: Path
):
    del pair
    near = load_model(folder / "near", dtype="float32")
    listed = wrap_model(near.hf, near.tokenizer, torch.arange(3, 60))
    save_draft(listed, folder / "target", tmp_path / "listed")
    for place, baked in (("keep", False), ("bake", True)):
        export(
            validate(
                ExportConfig,
                {
                    "model": str(tmp_path / "listed"),
                    "target": str(folder / "target"),
                    "to": "vllm",
                    "out": str(tmp_path / place),
                    "draft_vocabulary": place,
                },
            )
        )
        wanted = config(
            folder,
            {"engine": "vllm", "draft": str(tmp_path / place)},
            draft=str(tmp_path / "listed"),
        )
        assert (load_scored(wanted).draft.draft_vocabulary is not None) == baked


def test_without_metrics_a_llama_server_is_refused_with_the_option(
    folder: Path, pair: tuple[CausalModel, CausalModel]
):
    with (
        serving(llamacpp_routes(*pair, GAMMA, metrics=False)) as url,
        pytest.raises(EngineError, match="start llama-server with --metrics"),
    ):
        measure_served(config(folder, {"engine": "llamacpp", "url": url}))


@pytest.mark.parametrize("engine", ["vllm", "llamacpp", "sglang"])
def test_a_server_that_does_not_draft_is_told_apart_by_its_counters(
    engine: str, folder: Path, pair: tuple[CausalModel, CausalModel]
):
    with (
        serving(ROUTES[engine](pair[0], None, GAMMA)) as url,
        pytest.raises(EngineError, match="nothing was drafted"),
    ):
        measure_served(config(folder, {"engine": engine, "url": url}))


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_transformers_serves_in_this_process(
    temperature: float, folder: Path, pair: tuple[CausalModel, CausalModel]
):
    del pair  # writes the near draft
    wanted = config(
        folder,
        {"engine": "transformers"},
        sampling={"temperature": temperature},
        max_new_tokens=40,
        num_prompts=16,
    )
    found = measure_served(wanted)
    assert found.engine == "transformers"
    assert found.speed is not None
    assert found.agreement.agrees, found.agreement.reason
    if temperature == 0:
        assert found.speed.num_equal == found.num_requests


def test_transformers_divides_a_drafts_logits_by_the_temperature_twice(
    folder: Path, pair: tuple[CausalModel, CausalModel], monkeypatch: pytest.MonkeyPatch
):
    """The mutant: predicted with one division, its acceptance is a fifth too low."""
    del pair
    monkeypatch.setattr(ServedConfig, "proposals", property(lambda self: self.sampling))
    found = measure_served(
        config(
            folder,
            {"engine": "transformers"},
            sampling={"temperature": 0.5},
            max_new_tokens=40,
            num_prompts=16,
            plain=False,
        )
    )
    assert not found.agreement.agrees
    assert found.agreement.ratio.high < 0.95


def test_in_this_process_the_models_that_are_named_for_the_engine_are_served(
    folder: Path, pair: tuple[CausalModel, CausalModel]
):
    del pair
    engine = {"engine": "transformers", "draft": str(folder / "target")}
    loaded = load_scored(config(folder, engine))
    for ours, theirs in zip(
        loaded.target.hf.parameters(), loaded.draft.hf.parameters(), strict=True
    ):
        assert torch.equal(ours, theirs)


def test_generation_settings_of_a_model_do_not_reach_the_requests(
    folder: Path, pair: tuple[CausalModel, CausalModel]
):
    target, draft = pair
    settings = target.hf.generation_config
    engine = Transformers(target, draft, GAMMA)
    request = Request([5, 6, 7], 12, SamplingParams(temperature=0), 0)
    plain = engine.serve(request).tokens
    odd = copy.deepcopy(settings)
    odd.no_repeat_ngram_size = 1
    target.hf.generation_config = odd
    try:
        assert engine.serve(request).tokens == plain
        assert target.hf.generation_config is odd
    finally:
        target.hf.generation_config = settings


def many_prompts(folder: Path) -> Path:
    """Sixteen different short prompts."""
    path = folder / "many.jsonl"
    words = ["the", "a", "in", "and"]
    rows = [{"prompt": f"{first} {second} cat"} for first in words for second in words]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


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
    for status, said in ((429, "refuses more requests"), (500, "check the server log")):
        faulty = right | {"/v1/completions": lambda _, s=status: (s, {"error": {"message": "no"}})}
        assert said in broken(folder, faulty)
    shapeless = right | {"/v1/completions": lambda _: (200, {"choices": None})}
    assert "with invalid choices" in broken(folder, shapeless)
    half = right | {"/v1/completions": lambda _: (200, '{"choices": [{"token_i')}
    assert "is not JSON" in broken(folder, half)
    assert "serves served, not mine" in broken(folder, right, model="mine")
    assert "the API key is wrong or missing" in broken(folder, right, key="secret")
    monkeypatch.setenv("MY_KEY", "wrong")
    assert "the API key is wrong or missing" in broken(
        folder, right, key="secret", api_key_env="MY_KEY"
    )
    short = right | {"/v1/completions": lambda _: (200, {"choices": [{"token_ids": [5, 6]}]})}
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
        ("http://me:secret@x", "holds a user name or a password"),
    ):
        with pytest.raises(UsageError, match=said) as caught:
            measure_served(config(folder, {"engine": "vllm", "url": url}))
        assert "secret" not in str(caught.value)
    with pytest.raises(UsageError, match="may not hold an API key"):
        measure_served(config(folder, {"engine": "vllm", "options": ["--api-key=abc"]}))
    with pytest.raises(UsageError, match="is not installed here"):
        measure_served(config(folder, {"engine": "vllm", "program": "no-such-program"}))
