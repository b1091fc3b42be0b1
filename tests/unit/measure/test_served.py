"""Figures of an engine beside the prediction, against servers speculating with the same models."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from scipy import stats

from paceline.config import validate
from paceline.core.bootstrap import Interval
from paceline.core.sampling import SamplingParams
from paceline.core.text_scores import TextScores
from paceline.engines.assisted import Transformers
from paceline.engines.commands import EngineChoice
from paceline.engines.contract import Engine, Request, Served, Setup, together
from paceline.engines.llamacpp import LlamaServer
from paceline.errors import PacelineError
from paceline.export import ExportConfig, export
from paceline.measure.agreement import Agreement, predicted_counts
from paceline.measure.engine_costs import over_starts
from paceline.measure.served import (
    ServedConfig,
    ServedMeasurement,
    compare_served,
    load_scored,
    measure_served,
)
from paceline.models import CausalModel, load_model, wrap_model
from paceline.models.drafts.save import save_draft
from paceline.progress import Progress
from paceline.results.row import select
from support.engines import (
    GAMMA,
    Route,
    Speculating,
    costs_of,
    llamacpp_routes,
    serving,
    sglang_routes,
    step,
    vllm_routes,
    write_near_pair,
)
from support.engines import served_config as config

pytestmark = pytest.mark.slow

ROUTES: dict[str, Callable[[CausalModel, CausalModel | None, int], dict[str, Route]]] = {
    "vllm": vllm_routes,
    "llamacpp": llamacpp_routes,
    "sglang": sglang_routes,
}


@pytest.fixture(scope="module", autouse=True)
def pair(folder: Path) -> tuple[CausalModel, CausalModel]:
    return write_near_pair(folder)


@pytest.mark.parametrize(
    ("engine", "temperature"),
    [("vllm", 0.3), ("llamacpp", 0.0), ("llamacpp", 0.3), ("sglang", 0.0)],
)
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
            return ends_at_once(body)
        return routes["/completion"](body)

    with serving(routes | {"/completion": complete}) as url:
        found = measure_served(config(folder, {"engine": "llamacpp", "url": url}))
    for name in ("served", "predicted"):
        whole, *_ = select(found.rows, counts=name)
        assert whole.sums["tokens"][place] == 1
        for counted in ("calls", "drafted", "accepted", "emitted"):
            assert whole.sums[counted][place] == 0 < sum(whole.sums[counted])


def ends_at_once(_: Any) -> tuple[int, Any]:
    return 200, {"content": "", "tokens": [1], "stop_type": "eos"}


def of_others(routes: dict[str, Route]) -> dict[str, Route]:
    """A server that answers another request at the same time."""

    def complete(body: dict[str, Any]) -> tuple[int, Any]:
        routes["/completion"](body | {"prompt": [7, 7]})
        return routes["/completion"](body)

    return routes | {"/completion": complete}


@pytest.mark.parametrize(
    ("engine", "routes", "said"),
    [
        *(
            (name, lambda t, _, make=make: make(t, None, GAMMA), "nothing was drafted")
            for name, make in ROUTES.items()
        ),
        (
            "llamacpp",
            lambda *pair: llamacpp_routes(*pair, GAMMA, metrics=False),
            "start llama-server with --metrics",
        ),
        (
            "llamacpp",
            lambda *pair: of_others(llamacpp_routes(*pair, GAMMA)),
            "served other requests at the same time",
        ),
        (
            "llamacpp",
            lambda *pair: llamacpp_routes(*pair, GAMMA) | {"/completion": ends_at_once},
            "every text has 1 token",
        ),
    ],
    ids=range(6),
)
def test_a_server_that_cannot_be_measured_is_one_line(
    engine: str, routes: Any, said: str, folder: Path, pair: tuple[CausalModel, CausalModel]
):
    with serving(routes(*pair)) as url, pytest.raises(PacelineError, match=said):
        measure_served(config(folder, {"engine": engine, "url": url}))


def by_transformers(folder: Path, temperature: float) -> tuple[ServedMeasurement, tuple[Any, ...]]:
    """16 texts of 40 tokens, in this process. -> what was found, and what was compared for it."""
    more = {"sampling": {"temperature": temperature}, "max_new_tokens": 40, "num_prompts": 16}
    with patch("paceline.measure.served.compare_served", wraps=compare_served) as compared:
        found = measure_served(config(folder, {"engine": "transformers"}, **more))
    return found, compared.call_args.args


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


def with_more_blocks(one: Served) -> Served:
    """One accepted token is counted as a block of its own."""
    assert one.blocks is not None
    num_blocks, num_accepted = one.blocks.num_blocks + 1, one.blocks.num_accepted - 1
    changes = {"num_blocks": num_blocks, "num_accepted": num_accepted}
    return one._replace(blocks=one.blocks.model_copy(update=changes))


def test_counts_that_are_biased_by_a_twentieth_are_caught(
    folder: Path, pair: tuple[CausalModel, CausalModel]
):
    """The mutant: in each text one accepted token is counted as a block of its own."""
    wanted = config(folder, {"engine": "vllm"}, sampling={"temperature": 0.0}, max_new_tokens=40)
    loaded, engine = load_scored(wanted), Speculating(*pair, GAMMA)
    requests = [Request([5 + n, 9, 7], 40, SamplingParams(temperature=0), n) for n in range(24)]
    served = list(map(engine.answer, requests))

    def judge(answers: list[Served]) -> Agreement:
        return compare_served(loaded, requests[: len(answers)], answers, Engine, wanted)[1]

    assert judge(served).agrees
    biased = judge(list(map(with_more_blocks, served)))
    assert not biased.agrees
    assert "served / predicted" in biased.reason
    found = judge([*map(with_more_blocks, served[:2]), *served[2:]])
    assert found.num_different == 2
    assert "2 of 24 requests have other counts" in found.reason
    few = judge(served[:7])
    assert (few.agrees, few.decided, few.exit_code) == (False, False, 3)


def test_a_draft_vocabulary_counts_only_where_it_is_baked_in(folder: Path, tmp_path: Path):
    near, draft = load_model(folder / "near", dtype="float32"), tmp_path / "listed"
    save_draft(wrap_model(near.hf, near.tokenizer, torch.arange(3, 60)), folder / "target", draft)
    models = {"model": str(draft), "target": str(folder / "target"), "to": "vllm"}
    for place, baked in (("keep", False), ("bake", True)):
        made = {"out": str(tmp_path / place), "draft_vocabulary": place}
        export(validate(ExportConfig, models | made))
        engine = {"engine": "vllm", "draft": made["out"]}
        loaded = load_scored(config(folder, engine, draft=str(draft)))
        assert (loaded.draft.draft_vocabulary is not None) == baked


def test_sampled_texts_of_transformers_are_as_predicted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    """It divides a draft's logits by the temperature twice. The mutant predicts with one division.

    Its acceptance is a fifth too low.
    """
    sampled, compared = by_transformers(folder, 0.5)
    assert sampled.engine == "transformers"
    timed = {name: np.sum(values) for name, values in sampled.rows[-1].sums.items()}
    per_token = timed["target_seconds"] / timed["target_tokens"]
    assert sampled.speed is not None
    speedup = per_token * timed["tokens"] / timed["seconds"]
    assert sampled.speed.speedup.value == pytest.approx(speedup)
    assert sampled.speed.plain_tokens_per_s == pytest.approx(1 / per_token)
    assert sampled.agreement.agrees, sampled.agreement.reason
    monkeypatch.setattr(ServedConfig, "proposals", property(lambda self: self.sampling))
    _, mutant = compare_served(*compared)
    assert not mutant.agrees
    assert mutant.ratio.high < 0.95


def test_greedy_texts_of_transformers_are_as_predicted(folder: Path):
    found, (_, _, answers, *_) = by_transformers(folder, 0.0)
    assert found.agreement.agrees, found.agreement.reason
    assert found.agreement.num_different == 0, "also where a text has token 0, which may be padding"
    assert any(0 in answer.tokens for answer in answers), "some text has it"
    assert found.speed is not None
    assert found.speed.num_equal == found.num_requests


def test_in_this_process_the_models_that_are_named_for_the_engine_are_served(folder: Path):
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


class Counting(Engine):
    """Stands for a server; notes the seed of each request."""

    name, counts_behind_end = "vllm", True

    def __init__(self, engine: Speculating, asked: list[int]) -> None:
        self._engine, self._asked = engine, asked

    def serve(self, request: Request) -> Served:
        self._asked.append(request.seed)
        return self._engine.answer(request)

    def serve_together(self, requests: Sequence[Request], batch_size: int) -> Served:
        del batch_size
        return together([self.serve(request) for request in requests])


Started = list[tuple[int, list[int]]]
"""Of each start, the drafted tokens per block and the seeds of its requests."""


@pytest.fixture
def servers(pair: tuple[CausalModel, CausalModel], monkeypatch: pytest.MonkeyPatch) -> Started:
    """What was started and asked, while this stands for a server."""
    target, draft = pair
    found: Started = []

    @contextmanager
    def started(choice: EngineChoice, setup: Setup, progress: Progress) -> Iterator[Engine]:
        del choice, progress
        gamma = 0 if setup.drafting is None else setup.drafting.gamma
        found.append((gamma, []))
        engine = Speculating(target, draft if gamma else None, gamma, behind_end=True)
        yield Counting(engine, found[-1][1])

    monkeypatch.setattr("paceline.measure.served.started", started)
    monkeypatch.setattr("paceline.data.input_checks.check_choice", lambda _: None)
    return found


def measured(folder: Path, **changes: Any) -> ServedMeasurement:
    settings = {"num_prompts": 12, "max_new_tokens": 12, "sampling": {"temperature": 0.0}}
    return measure_served(config(folder, {"engine": "vllm"}, **settings | changes))


def test_each_side_is_started_twice_in_turn_and_answers_half_of_the_requests_each_time(
    folder: Path, servers: Started
):
    """The default asks for one request more per side than one start does: its warm-up."""
    found = measured(folder)
    assert [gamma for gamma, _ in servers] == [GAMMA, 0, GAMMA, 0]
    even, odd = [0, *range(0, 12, 2)], [1, *range(1, 12, 2)]
    assert [asked for _, asked in servers] == [even, even, odd, odd]
    assert found.starts == 2
    assert found.agreement.num_different == 0, "answers are in the order of the requests"
    assert found.speed is not None
    assert found.speed.num_equal == 12
    assert len(found.speed.speedup_by_start) == 2
    twice = sum(len(asked) for _, asked in servers)
    servers.clear()
    once = measured(folder, starts=1)
    assert [gamma for gamma, _ in servers] == [GAMMA, 0]
    assert twice == sum(len(asked) for _, asked in servers) + 2
    assert once.starts == 1


def test_costs_of_two_starts_take_as_many_requests_as_of_one(
    folder: Path, servers: Started, tmp_path: Path
):
    costs = {"file": str(tmp_path / "costs.json"), "gammas": [1, GAMMA], "num_rounds": 6}
    sizes: list[int] = []
    for starts in (1, 2):
        found = measured(folder, write_costs=costs, starts=starts)
        configurations = [GAMMA, 0, 1]
        assert [gamma for gamma, _ in servers] == configurations * starts
        sizes.append(sum(len(asked) for _, asked in servers))
        servers.clear()
        assert found.costs is not None
        assert [len(one.seconds_by_start) for one in found.costs.steps] == [starts] * 3
        assert found.costs.starts == found.starts
        assert found.starts == starts
    assert sizes[1] == sizes[0] + 2, "a warm-up request more with the draft, and without"


def test_from_three_starts_on_an_interval_is_students_t_of_the_logarithms_over_them(
    folder: Path, servers: Started
):
    found = measured(folder, starts=3)
    assert [gamma for gamma, _ in servers] == [GAMMA, 0] * 3
    assert found.speed is not None
    by_start, speedup = found.speed.speedup_by_start, found.speed.speedup
    half = stats.t.ppf(0.975, 2) * np.log(by_start).std(ddof=1) / 3**0.5
    value = speedup.value
    assert speedup == pytest.approx((value, value * np.exp(-half), value * np.exp(half)))
    assert over_starts(Interval(2.0, 1.9, 2.1), by_start[:2]) == Interval(2.0, 1.9, 2.1)


def test_a_block_over_a_step_has_the_error_of_the_starts_ratios():
    """A start that is slow as a whole slows both."""
    plain, block = [0.010, 0.011, 0.012], [0.015, 0.0165, 0.018]
    steps = [
        step(gamma, seconds[0]).model_copy(update={"seconds_by_start": seconds})
        for gamma, seconds in ((0, plain), (2, block))
    ]
    costs = costs_of(*steps, starts=3)
    assert costs.step_costs([2], 1).errors[2] == pytest.approx((1, 1, 1))
    once = costs_of(step(0, 0.01), step(2, 0.015)).step_costs([2], 1)
    assert once.errors[2] == pytest.approx((1, 0.9 / 1.1, 1.1 / 0.9))


COMPLETIONS = "/v1/completions"
SHORT = {"text": "...", "finish_reason": "length", "token_ids": [5, 6]}


@pytest.mark.parametrize(
    ("answer", "engine", "said"),
    [
        ((429, {"error": {"message": "no"}}), {}, "answered 429"),
        ((200, {"choices": None}), {}, "with invalid choices"),
        ((200, {"choices": [SHORT]}), {}, "generated 2 tokens where 24 were requested"),
        (None, {}, "the API key is wrong or missing"),
        (None, {"api_key_env": "MY_KEY"}, "the API key is wrong or missing"),
        (None, {"url": "http://127.0.0.1:9"}, "cannot be reached"),
        (None, {"url": "http://x:abc"}, "is not the URL of a server"),
        (None, {"url": "http://[::1"}, "is not the URL of a server"),
        (None, {"url": None, "program": "no-such-program"}, "is not installed here"),
    ],
    ids=range(9),
)
def test_every_fault_of_a_server_is_one_line(
    answer: Any,
    engine: dict[str, Any],
    said: str,
    folder: Path,
    pair: tuple[CausalModel, CausalModel],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("MY_KEY", "wrong")
    routes = vllm_routes(*pair, GAMMA) | ({COMPLETIONS: lambda _: answer} if answer else {})
    with (
        serving(routes, key=None if answer else "sesame-open") as url,
        pytest.raises(PacelineError, match=said),
    ):
        measure_served(config(folder, {"engine": "vllm", "url": url} | engine))


def test_a_key_is_in_no_record(
    folder: Path, pair: tuple[CausalModel, CausalModel], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MY_KEY", "sesame-open")
    engine = {"engine": "vllm", "api_key_env": "MY_KEY"}
    with serving(vllm_routes(*pair, GAMMA), key="sesame-open") as url:
        found = measure_served(config(folder, engine | {"url": url}, num_prompts=2))
    assert "sesame-open" not in found.model_dump_json()
