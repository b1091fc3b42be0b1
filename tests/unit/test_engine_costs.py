"""An engine's costs: timed as differences, read back, and in the place of our own decoder's."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from aligning import write_pair
from engine_costs import costs_of, step, write_costs
from paceline.bench.priced import price
from paceline.bench.schema import Baseline, ExampleRow, ResultRow
from paceline.config import validate
from paceline.core.sampling import SamplingParams
from paceline.decode.strategies import Autoregressive, DecodingConfig, Speculative
from paceline.engines.contract import BlockCounts, Engine, Request, Served, Together
from paceline.errors import EngineError, PacelineError
from paceline.measure import MeasureConfig, measure
from paceline.measure.engine_costs import StepCost, read_costs
from paceline.measure.served_costs import CostsConfig, StepTimer
from paceline.progress import silent

PREFILL_S, STEP_S, BLOCK_S, PER_BLOCK = 0.5, 0.01, 0.016, 2


class Clock(Engine):
    """An engine whose seconds are known: reading the prompt, then steps or blocks of two tokens."""

    name = "vllm"

    def __init__(self, gamma: int, *, drafts: bool = True) -> None:
        self._gamma, self._drafts = gamma, drafts

    def serve(self, request: Request) -> Served:
        raise NotImplementedError

    def serve_together(self, requests: Sequence[Request]) -> Together:
        count = len(requests)
        texts = [[1] * request.max_new_tokens for request in requests]
        steps = [(len(text) - 1) // (PER_BLOCK if self._gamma else 1) for text in texts]
        step_s = (BLOCK_S if self._gamma else STEP_S) * (1 + 0.1 * (count - 1))
        seconds = [PREFILL_S + step_s * number for number in steps]
        blocks = None
        if self._gamma:
            drafted = self._gamma * sum(steps) if self._drafts else 0
            blocks = BlockCounts(num_blocks=sum(steps), num_drafted=drafted)
        return Together(texts, seconds, blocks)


def requests(count: int = 6, tokens: int = 65) -> list[Request]:
    return [Request([1, 2, 3], tokens, SamplingParams(temperature=0), n) for n in range(count)]


@pytest.mark.parametrize(("gamma", "step_s"), [(0, STEP_S), (3, BLOCK_S)])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_the_prompt_is_not_in_a_steps_cost(gamma: int, step_s: float, batch_size: int):
    config = CostsConfig(file=Path("unused"), batch_sizes=(batch_size,), num_rounds=3)
    timer = StepTimer(config, requests(), silent)
    timer.time(Clock(gamma), gamma)
    (found,) = timer.steps
    assert found.seconds.value == pytest.approx(step_s * (1 + 0.1 * (batch_size - 1)))
    assert (found.gamma, found.batch_size) == (gamma, batch_size)


def test_an_engine_that_stops_drafting_has_no_costs():
    timer = StepTimer(CostsConfig(file=Path("unused")), requests(), silent)
    with pytest.raises(EngineError, match="stopped drafting"):
        timer.time(Clock(3, drafts=False), 3)


def test_texts_without_a_step_have_no_costs():
    timer = StepTimer(CostsConfig(file=Path("unused")), requests(tokens=2), silent)
    with pytest.raises(EngineError, match="raise max_new_tokens"):
        timer.time(Clock(0), 0)


COSTS = costs_of(
    step(0, 0.010),
    step(1, 0.015),
    step(3, 0.019),
    step(0, 0.02, 4),
    step(1, 0.05, 4),
    step(3, 0.06, 4),
)


def test_costs_give_the_engines_own_speedup():
    """By hand: a block of 3 takes 19 ms and a step 10, so 1.8 tokens per block are 18 / 19 of the speed."""
    passes = COSTS.pass_costs([1, 2, 3], 1)
    assert passes.expected_speedup(1.8, 3) == pytest.approx(18 / 19)
    assert passes.expected_speedup(1.8, 2) == pytest.approx(18 / 17), (
        "between the two that were timed"
    )
    assert passes.expected_speedup(1.5, 1) == pytest.approx(1)
    assert passes.cost_ratio == pytest.approx(0.5)
    assert COSTS.pass_costs([3], 4).expected_speedup(1.8, 3) == pytest.approx(1.8 * 20 / 60)


def test_a_block_that_was_timed_faster_than_a_step_costs_what_it_was():
    passes = costs_of(step(0, 0.010), step(2, 0.009)).pass_costs([2], 1)
    assert passes.expected_speedup(1.5, 2) == pytest.approx(15 / 9)


@pytest.mark.parametrize(
    ("gammas", "concurrency", "said"),
    [([8], 1, "none of .8. is among"), ([1], 2, "of 1 or 4 requests at a time, not 2")],
)
def test_costs_that_were_not_measured_are_refused(gammas: list[int], concurrency: int, said: str):
    assert COSTS.usable([1, 2, 3, 8], 1) == (1, 2, 3)
    with pytest.raises(PacelineError, match=said):
        COSTS.usable(gammas, concurrency)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pair(tmp_path_factory.mktemp("pair"))


STEPS = (step(0, 0.010), step(1, 0.012), step(3, 0.015))
"""An engine where a block of three costs one step and a half."""


def config(folder: Path, **changes: Any) -> MeasureConfig:
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"Say {n}"}) + "\n" for n in range(12)))
    values = {
        "target": str(folder / "target"),
        "draft": str(folder / "draft"),
        "prompts": str(prompts),
        "num_prompts": 10,
        "max_new_tokens": 24,
        "dtype": "float32",
        "device": "cpu",
        "costs": str(write_costs(folder, *STEPS)),
    }
    return validate(MeasureConfig, values | changes)


def test_measure_takes_an_engines_costs_and_its_way_of_drafting(folder: Path):
    found = measure(config(folder))
    assert found.cost.engine == "vllm 0.32.0"
    assert found.speed is None
    assert [row.gamma for row in found.gammas] == [1, 2, 3], "4 to 8 were not timed in the engine"
    for row, ratio in zip(found.gammas, (1.2, 1.35, 1.5), strict=True):
        whole = 1 + (ratio - 1) * row.drafted_per_block / row.gamma
        assert row.expected_speedup == pytest.approx(row.block_efficiency / whole)
    drafts = found.config.draft_sampling
    assert drafts is not None
    assert drafts.greedy
    acceptance = found.acceptance
    assert acceptance.expected_acceptance.value == pytest.approx(
        acceptance.greedy_draft_acceptance.value, abs=1e-6
    )
    assert found.expected is not None
    best = next(row for row in found.gammas if row.expected_speedup == found.expected.value)
    # costs that are known to a tenth each leave at least a fifth of doubt, whatever the texts say
    assert found.expected.low < best.expected_speedup * 0.9 / 1.1 * 1.01
    assert "in vllm 0.32.0" in found.verdict.reason


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((STEPS, 5), "was measured with 5 and"),
        ((STEPS[:1], None), "lacks the costs"),
        ((STEPS[1:], None), "lacks the costs"),
    ],
)
def test_costs_of_something_else_are_refused(
    folder: Path, given: tuple[tuple[StepCost, ...], int | None], said: str
):
    wanted, (steps, size) = config(folder), given
    write_costs(folder, *steps, **({} if size is None else {"target_parameters": size}))
    with pytest.raises(PacelineError, match=said):
        measure(wanted)


@pytest.mark.parametrize("text", ["{}", "no JSON", '{"schema_version": 2}'])
def test_a_file_that_holds_no_costs_is_one_line(tmp_path: Path, text: str):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(PacelineError, match=r"--write-costs FILE. writes") as raised:
        read_costs(path)
    assert "\n" not in str(raised.value)


def test_concurrency_without_an_engine_is_refused(folder: Path):
    with pytest.raises(PacelineError, match="concurrency is of an engine"):
        config(folder, costs=None, concurrency=4)


def test_rows_of_a_bench_take_the_engines_seconds():
    """By hand: 6 tokens are 1 of the prompt and 5 steps of 10 ms; 3 blocks of 19 ms."""
    example = ExampleRow(
        tokens=(1,) * 6,
        score=1.0,
        seconds=9.0,
        first_seconds=8.0,
        baseline=Baseline(seconds=7.0, first_seconds=6.0, num_tokens=6),
        num_target_calls=3,
        num_drafted=9,
        num_examined=5,
        num_rejected=3,
        num_first_tokens=1,
        num_prefill_tokens=1,
    )
    rows = [
        ResultRow(
            key="k",
            context="c",
            decoding=DecodingConfig(strategy=strategy),
            metric="m",
            status="done",
            examples=(one,),
        )
        for strategy, one in (
            (Speculative(num_speculative_tokens=3), example),
            (Autoregressive(), example.model_copy(update={"num_target_calls": 5})),
        )
    ]
    drafted, alone = (row.examples[0] for row in price(rows, COSTS, 1))
    assert drafted.seconds == pytest.approx(0.057)
    assert alone.seconds == pytest.approx(0.05)
    for one in (drafted, alone):
        assert one.baseline is not None
        assert one.baseline.seconds == pytest.approx(0.05)
        assert one.first_seconds == one.baseline.first_seconds == 0
