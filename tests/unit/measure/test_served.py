"""Figures of an engine beside the prediction, against servers speculating with the same models."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.config import validate
from paceline.core.sampling import SamplingParams
from paceline.core.text_scores import TextScores
from paceline.engines.assisted import Transformers
from paceline.engines.contract import Engine, Request, Served
from paceline.engines.llamacpp import LlamaServer
from paceline.errors import EngineError, UsageError
from paceline.export import ExportConfig, export
from paceline.measure.agreement import Agreement, predicted_counts
from paceline.measure.served import (
    ServedConfig,
    ServedMeasurement,
    compare_served,
    load_scored,
    measure_served,
)
from paceline.models import CausalModel, load_model, wrap_model
from paceline.models.drafts.save import save_draft
from paceline.results.row import select
from support.engines import (
    GAMMA,
    Route,
    Speculating,
    llamacpp_routes,
    serving,
    sglang_routes,
    vllm_routes,
    write_near_pair,
)
from support.engines import served_config as config

pytestmark = pytest.mark.slow

Routes = Callable[[CausalModel, CausalModel | None, int], dict[str, Route]]
ROUTES: dict[str, Routes] = {
    "vllm": vllm_routes,
    "llamacpp": llamacpp_routes,
    "sglang": sglang_routes,
}


@pytest.fixture(scope="module")
def pair(folder: Path) -> tuple[CausalModel, CausalModel]:
    return write_near_pair(folder)


@pytest.mark.parametrize("temperature", [0.0, 0.3])
@pytest.mark.parametrize("engine", ["vllm", "llamacpp", "sglang"])
def test_a_server_that_drafts_greedily_gives_what_was_predicted(
    engine: str, temperature: float, folder: Path, pair: tuple[CausalModel, CausalModel]
):
    drawn = {"num_prompts": 64, "max_new_tokens": 48} if temperature else {}
    sampling = {"temperature": temperature}
    with serving(ROUTES[engine](*pair, GAMMA)) as url:
        found = measure_served(
            config(folder, {"engine": engine, "url": url}, sampling=sampling, **drawn)
        )
    assert found.agreement.agrees, found.agreement.reason
    assert found.agreement.num_different == (None if temperature else 0)
    assert found.speed is None, "a server that runs was not asked without its draft"
    assert found.starts == 1
    served, predicted = (select(found.rows, counts=name) for name in ("served", "predicted"))
    assert [row.setting.get("position") for row in served] == [None, *range(GAMMA)]
    whole, *positions = served
    accepted = sum(np.sum(row.sums["position_accepted"]) for row in positions)
    assert accepted == np.sum(whole.sums["accepted"])
    assert np.sum(whole.sums["emitted"]) == accepted + np.sum(whole.sums["calls"])
    rate = accepted / np.sum(whole.sums["drafted"])
    assert 0.1 < rate < 0.9, "blocks have to go either way"
    if engine == "llamacpp" and temperature == 0:
        # greedy text within its budget: every block is known, so the prediction is the count itself
        for ours, theirs in zip(served, predicted, strict=True):
            assert ours.sums.keys() == theirs.sums.keys()
            for name, counts in ours.sums.items():
                assert counts == pytest.approx(theirs.sums[name])


def test_texts_that_end_by_themselves_are_predicted_with_their_ends(
    folder: Path, pair: tuple[CausalModel, CausalModel]
):
    """llama-server is not told to ignore the end of text; here every fifth token or so ends one."""
    with serving(llamacpp_routes(*pair, GAMMA)) as url:
        engine = {"engine": "llamacpp", "url": url}
        hot = config(folder, engine, sampling={"temperature": 1.5}, max_new_tokens=40)
        found = measure_served(hot)
    assert found.num_tokens < 40 * found.num_requests, "some text has to end"
    assert found.agreement.agrees, found.agreement.reason


@pytest.mark.parametrize("place", [0, 3])
def test_a_text_that_ends_at_once_has_no_blocks(
    place: int, folder: Path, pair: tuple[CausalModel, CausalModel]
):
    """Also the one of the first request, with which a server is warmed up."""
    routes, known = llamacpp_routes(*pair, GAMMA), dict[tuple[int, ...], int]()

    def complete(body: dict[str, Any]) -> tuple[int, Any]:
        if known.setdefault(tuple(body["prompt"]), len(known)) == place:
            return 200, {"content": "", "tokens": [1], "stop_type": "eos"}
        return routes["/completion"](body)

    with serving(routes | {"/completion": complete}) as url:
        found = measure_served(config(folder, {"engine": "llamacpp", "url": url}))
    for name in ("served", "predicted"):
        whole, *_ = select(found.rows, counts=name)
        assert whole.sums["tokens"][place] == 1
        for counted in ("calls", "drafted", "accepted", "emitted"):
            assert whole.sums[counted][place] == 0 < sum(whole.sums[counted])


def test_texts_that_all_end_at_once_are_one_line(
    folder: Path, pair: tuple[CausalModel, CausalModel]
):
    routes = llamacpp_routes(*pair, GAMMA) | {
        "/completion": lambda _: (200, {"content": "", "tokens": [1], "stop_type": "eos"})
    }
    with serving(routes) as url, pytest.raises(UsageError, match="every text has 1 token"):
        measure_served(config(folder, {"engine": "llamacpp", "url": url}))


def by_transformers(folder: Path, temperature: float, **changes: Any) -> ServedMeasurement:
    """16 texts of 40 tokens, in this process."""
    more = {"sampling": {"temperature": temperature}, "max_new_tokens": 40, "num_prompts": 16}
    return measure_served(config(folder, {"engine": "transformers"}, **more, **changes))


@pytest.fixture(scope="module")
def sampled(folder: Path, pair: tuple[CausalModel, CausalModel]) -> ServedMeasurement:
    del pair  # writes the near draft
    return by_transformers(folder, 0.5)


@pytest.mark.parametrize("scale", [1.0, 0.97])
def test_an_engine_with_another_draft_is_caught(
    scale: float, folder: Path, pair: tuple[CausalModel, CausalModel]
):
    """The mutants: its draft is the target itself, or nearly so."""
    target, _ = pair
    other = load_model(folder / "target", dtype="float32")
    other.hf.model.layers[2].mlp.down_proj.weight.data.mul_(scale)
    with serving(vllm_routes(target, other, GAMMA)) as url:
        found = measure_served(
            config(folder, {"engine": "vllm", "url": url}, sampling={"temperature": 0.0})
        )
    assert str(found.agreement).startswith("differs")


@pytest.fixture(scope="module")
def greedily_served(pair: tuple[CausalModel, CausalModel]) -> tuple[list[Request], list[Served]]:
    """24 requests with their answers."""
    requests = [Request([5 + n, 9, 7], 40, SamplingParams(temperature=0), n) for n in range(24)]
    engine = Speculating(*pair, GAMMA)
    return requests, list(map(engine.answer, requests))


@pytest.fixture(scope="module")
def judge(
    folder: Path, pair: tuple[CausalModel, CausalModel]
) -> Callable[[list[Request], list[Served]], Agreement]:
    """The verdict on greedy answers."""
    del pair  # writes the near draft
    wanted = config(folder, {"engine": "vllm"}, sampling={"temperature": 0.0}, max_new_tokens=40)
    loaded = load_scored(wanted)
    return lambda asked, served: compare_served(loaded, asked, served, Engine, wanted)[1]


def with_more_blocks(one: Served) -> Served:
    """One accepted token is counted as a block of its own."""
    assert one.blocks is not None
    num_blocks, num_accepted = one.blocks.num_blocks + 1, one.blocks.num_accepted - 1
    changes = {"num_blocks": num_blocks, "num_accepted": num_accepted}
    return one._replace(blocks=one.blocks.model_copy(update=changes))


def test_greedy_requests_with_other_counts_are_counted(
    judge: Any, greedily_served: tuple[list[Request], list[Served]]
):
    requests, served = greedily_served
    changed = [with_more_blocks(one) if at < 2 else one for at, one in enumerate(served)]
    found = judge(requests, changed)
    assert found.num_different == 2
    assert "2 of 24 requests have other counts" in found.reason


def test_counts_that_are_biased_by_a_twentieth_are_caught(
    judge: Any, greedily_served: tuple[list[Request], list[Served]]
):
    """The mutant: in each text one accepted token is counted as a block of its own."""
    requests, served = greedily_served
    assert judge(requests, served).agrees
    found = judge(requests, [with_more_blocks(one) for one in served])
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


def test_few_requests_give_no_verdict(
    judge: Any, greedily_served: tuple[list[Request], list[Served]]
):
    requests, served = greedily_served
    found = judge(requests[:7], served[:7])
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


def test_sampled_texts_of_transformers_are_as_predicted(sampled: ServedMeasurement):
    assert sampled.engine == "transformers"
    timed = {name: np.sum(values) for name, values in sampled.rows[-1].sums.items()}
    per_token = timed["target_seconds"] / timed["target_tokens"]
    assert sampled.speed is not None
    speedup = per_token * timed["tokens"] / timed["seconds"]
    assert sampled.speed.speedup.value == pytest.approx(speedup)
    assert sampled.speed.plain_tokens_per_s == pytest.approx(1 / per_token)
    assert sampled.agreement.agrees, sampled.agreement.reason


def test_greedy_texts_of_transformers_are_as_predicted(
    folder: Path, pair: tuple[CausalModel, CausalModel], monkeypatch: pytest.MonkeyPatch
):
    del pair  # writes the near draft
    written: list[list[int]] = []
    serve = Transformers.serve

    def noted(self: Transformers, request: Request) -> Served:
        written.append((answer := serve(self, request)).tokens)
        return answer

    monkeypatch.setattr(Transformers, "serve", noted)
    found = by_transformers(folder, 0.0)
    assert found.agreement.agrees, found.agreement.reason
    assert found.agreement.num_different == 0, "also where a text has token 0, which may be padding"
    assert any(0 in text for text in written), "some text has it"
    assert found.speed is not None
    assert found.speed.num_equal == found.num_requests


def test_transformers_divides_a_drafts_logits_by_the_temperature_twice(
    folder: Path, pair: tuple[CausalModel, CausalModel], monkeypatch: pytest.MonkeyPatch
):
    """The mutant: predicted with one division, its acceptance is a fifth too low."""
    del pair
    monkeypatch.setattr(ServedConfig, "proposals", property(lambda self: self.sampling))
    found = by_transformers(folder, 0.5)
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


def perfect(lengths: list[int]) -> TextScores:
    """Scores of a draft that agrees with its target everywhere."""
    mask_BT = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    ones_BT = mask_BT.float()
    return TextScores(ones_BT, ones_BT, ones_BT, ones_BT, mask_BT)


@pytest.mark.parametrize(("engine", "blocks"), [(Engine, 2), (LlamaServer, 1)])
def test_a_text_of_one_token_has_no_blocks_beside_others(engine: type[Engine], blocks: int):
    """Six tokens of six: one of the prompt, a block of 3 and 1, and an empty one at the end."""
    found = predicted_counts(perfect([1, 6]), 3, 6, engine)
    assert found.blocks_B.tolist() == [0, blocks]
    assert found.drafted_B.tolist() == [0, 3]
    assert found.accepted_B.tolist() == [0, 3]
