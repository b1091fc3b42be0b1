"""An engine's costs: timed as differences, read back, and in the place of our own decoder's."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.bench.tune import in_engine_seconds
from paceline.core.sampling import SamplingParams
from paceline.decode.strategies import Autoregressive, Speculative
from paceline.engines.contract import BlockCounts, Engine, Request, Served
from paceline.errors import EngineError, PacelineError
from paceline.measure import MeasureConfig, measure
from paceline.measure.engine_costs import StepTimer, WriteCosts, read_costs
from paceline.measure.results import gamma_of
from paceline.models import CausalModel, load_model
from paceline.models.drafts.save import save_draft
from paceline.progress import silent
from paceline.results import FIGURES
from support.configs import small
from support.data import write_lines
from support.engines import costs_of, step, write_costs
from support.results import example
from support.results import row as cell_row

PREFILL_S, STEP_S, BLOCK_S, PER_BLOCK = 0.5, 0.01, 0.016, 2


class Clock(Engine):
    """An engine whose seconds are known: reading the prompt, then steps or blocks of two tokens."""

    name = "vllm"

    def __init__(self, gamma: int, *, keeps_prompts: bool = False) -> None:
        self._gamma = gamma
        self._keeps, self._kept = keeps_prompts, set[tuple[int, ...]]()

    def serve(self, request: Request) -> Served:
        return self.serve_together([request], 1)

    def serve_together(self, requests: Sequence[Request], batch_size: int) -> Served:
        lengths = [request.max_new_tokens for request in requests]
        steps = [(length - 1) // (PER_BLOCK if self._gamma else 1) for length in lengths]
        step_s = (BLOCK_S if self._gamma else STEP_S) * (1 + 0.1 * (batch_size - 1))
        seconds = sum(map(self._read_s, requests)) + step_s * sum(steps)
        blocks = None
        if self._gamma:
            drafted = self._gamma * sum(steps)
            blocks = BlockCounts(num_blocks=sum(steps), num_drafted=drafted)
        return Served([1] * sum(lengths), seconds, blocks)

    def _read_s(self, request: Request) -> float:
        prompt = tuple(request.prompt)
        known = prompt in self._kept
        if self._keeps:
            self._kept.add(prompt)
        return 0.0 if known else PREFILL_S


def requests(count: int = 6, tokens: int = 65) -> list[Request]:
    return [Request([1, 2, n], tokens, SamplingParams(temperature=0), n) for n in range(count)]


@pytest.mark.parametrize(("gamma", "step_s"), [(0, STEP_S), (3, BLOCK_S)])
@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("keeps_prompts", [False, True])
def test_the_prompt_is_not_in_a_steps_cost(
    gamma: int, step_s: float, batch_size: int, keeps_prompts: bool
):
    """Nor where a server keeps the prompts that it has read."""
    config = WriteCosts(file=Path("unused"), batch_sizes=(batch_size,), num_rounds=6)
    timer = StepTimer(config, requests(), silent)
    timer.time({gamma: Clock(gamma, keeps_prompts=keeps_prompts)})
    (found,) = timer.costs()
    assert found.seconds.value == pytest.approx(step_s * (1 + 0.1 * (batch_size - 1)))
    assert (found.gamma, found.batch_size) == (gamma, batch_size)


def test_texts_without_a_step_have_no_costs():
    timer = StepTimer(WriteCosts(file=Path("unused")), requests(tokens=2), silent)
    timer.time({0: Clock(0)})
    with pytest.raises(EngineError, match="raise max_new_tokens"):
        timer.costs()


COSTS = costs_of(
    step(0, 0.010),
    step(1, 0.015),
    step(3, 0.019),
    step(0, 0.02, 4),
    step(1, 0.05, 4),
    step(3, 0.06, 4),
)


def test_blocks_cost_what_they_took_in_the_engine():
    """By hand: a block of 3 takes 19 ms, a step 10."""
    passes = COSTS.step_costs([1, 3], 1)
    assert [passes.block_cost(gamma) for gamma in (1, 3)] == pytest.approx([1.5, 1.9])
    assert passes.cost_ratio == pytest.approx(0.5)
    # by a text's end a block drafted 1.5 of 3 tokens: half of what drafting adds,
    # unless it drafts on
    assert passes.block_cost(3, 1.5) == pytest.approx(1.45)
    in_full = COSTS.model_copy(update={"drafts_in_full": True})
    assert in_full.step_costs([3], 1).block_cost(3, 1.5) == pytest.approx(1.9)
    # a block is known to a tenth, and so is the step that it is divided by
    assert passes.errors[3] == pytest.approx((1, 0.9 / 1.1, 1.1 / 0.9))
    assert COSTS.step_costs([3], 4).block_cost(3) == pytest.approx(3)


def test_a_block_that_was_timed_faster_than_a_step_costs_what_it_was():
    passes = costs_of(step(0, 0.010), step(2, 0.009)).step_costs([2], 1)
    assert passes.block_cost(2) == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("gammas", "concurrency", "said"),
    [([2, 8], 1, "for none of .2, 8."), ([1], 2, "at batch sizes 1, 4, not 2")],
)
def test_costs_that_were_not_measured_are_refused(gammas: list[int], concurrency: int, said: str):
    assert COSTS.usable([1, 2, 3, 8], 1) == (1, 3)
    with pytest.raises(PacelineError, match=said):
        COSTS.usable(gammas, concurrency)


STEPS = (step(0, 0.010), step(1, 0.012), step(3, 0.015))
"""An engine where a block of three costs one step and a half."""


def config(folder: Path, **changes: Any) -> MeasureConfig:
    prompts = write_lines(folder / "prompts.jsonl", *({"prompt": f"Say {n}"} for n in range(12)))
    if "costs" not in changes:
        changes["costs"] = str(write_costs(folder, *STEPS))
    sizes = {"num_prompts": 10, "max_new_tokens": 24, "max_prompt_tokens": None}
    return small("measure", folder, folder, prompts=str(prompts), **sizes | changes)


def test_measure_takes_an_engines_costs_and_its_way_of_drafting(folder: Path):
    found = measure(config(folder))
    assert found.engine == "vllm 0.32.0"
    assert found.requests is None
    expected, tau = FIGURES["expected_speedup"].value, FIGURES["block_efficiency"].value
    assert list(map(gamma_of, found.blocks)) == [1, 3], "others were not timed in the engine"
    for row, ratio in zip(found.blocks, (1.2, 1.5), strict=True):
        whole = 1 + (ratio - 1) * row.totals["drafted_per_block"] / gamma_of(row)
        assert expected(row) == pytest.approx(tau(row) / whole)
    drafts = found.config.draft_sampling
    assert drafts is not None
    assert drafts.greedy
    alpha, greedy = map(found.figure, ("expected_acceptance", "greedy_draft_acceptance"))
    assert alpha.value == pytest.approx(greedy.value, abs=1e-6)
    judged = found.figure("expected_speedup", found.judged)
    assert judged.value in map(expected, found.blocks)
    # costs that are known to a tenth each leave at least a fifth of doubt, whatever the texts say
    assert judged.low < judged.value * 0.9 / 1.1 * 1.01
    assert "in vllm 0.32.0" in found.verdict.reason
    in_full = measure(config(folder, costs=str(write_costs(folder, *STEPS, drafts_in_full=True))))
    for row, ratio in zip(in_full.blocks, (1.2, 1.5), strict=True):
        assert expected(row) == pytest.approx(tau(row) / ratio)


def test_an_engine_that_ignores_a_drafts_list_is_measured_with_all_tokens(folder: Path):
    """The draft is the target with a list of few tokens; only the list keeps it from agreeing."""
    model = load_model(folder / "target", dtype="float32")
    save_draft(
        CausalModel(model.hf, model.tokenizer, draft_vocabulary=torch.arange(3, 9)),
        folder / "target",
        folder / "listed",
    )
    size = {"draft_parameters": model.num_parameters}
    found = {}
    for full in (True, False):
        costs = write_costs(folder, *STEPS, full_vocabulary=full, **size)
        wanted = config(
            folder, draft=str(folder / "listed"), costs=str(costs), sampling={"temperature": 0}
        )
        found[full] = measure(wanted).figure("expected_acceptance").value
    assert found[True] == 1
    assert found[False] < 0.5


@pytest.mark.parametrize(
    ("changes", "written", "said"),
    [
        ({"draft_sampling": {"temperature": 0.7}}, {}, "leave --draft-temperature out"),
        ({}, {"target_parameters": 5}, "was measured with 5 and"),
        ({"costs": None, "concurrency": 4}, {}, "concurrency needs the costs of an engine"),
        ({}, {"parallel": True}, "has costs of a draft that proposes a block in one pass"),
    ],
)
def test_what_does_not_fit_the_costs_is_refused(
    changes: dict[str, Any], written: dict[str, int], said: str, folder: Path
):
    costs = {"costs": str(write_costs(folder, *STEPS, **written))}
    with pytest.raises(PacelineError, match=said):
        measure(config(folder, **costs | changes))


@pytest.mark.parametrize("text", ["{}", "no JSON", '{"schema_version": 2}'])
def test_a_file_that_holds_no_costs_is_one_line(tmp_path: Path, text: str):
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(PacelineError, match=r"--write-costs FILE. (writes|wrote)"):
        read_costs(tmp_path / "other.json")


def test_rows_of_a_bench_take_the_engines_seconds():
    """By hand: 6 tokens are 1 of the prompt and 5 steps of 10 ms; 3 blocks of 19 ms."""
    times = {"baseline_s": 7.0, "baseline_first_s": 6.0, "baseline_tokens": 6, "first_s": 8.0}
    rows = [
        cell_row(strategy, [example(1.0, 9.0, 6, calls=calls, **times) | {"drafted": drafted}])
        for strategy, calls, drafted in (
            (Speculative(num_speculative_tokens=3), 3, 9),
            (Autoregressive(), 5, 0),
        )
    ]
    for timed, seconds in zip(in_engine_seconds(rows, COSTS, 1), (0.057, 0.05), strict=True):
        sums = {name: values[0] for name, values in timed.sums.items()}
        assert sums["seconds"] == pytest.approx(seconds)
        assert sums["target_seconds"] == pytest.approx(0.05)
        assert sums["first_seconds"] == sums["target_first_seconds"] == 0
