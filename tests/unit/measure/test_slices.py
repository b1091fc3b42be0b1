"""Slices of the prompts, against measurements of these prompts alone."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.errors import PromptError
from paceline.measure.analysis import AnalyzeConfig, analyze_models
from paceline.measure.measurement import MeasureConfig, Measurement, measure_models
from paceline.measure.slices import slices_of
from paceline.results import FIGURES
from paceline.view.tables import frontier_table
from support.fakes import TableModel

TARGET, DRAFT = TableModel.random(6, 1, seed=1), TableModel.random(6, 1, seed=2)
BLOCKS = "emitted", "calls"
PROMPTS = [[1, 2], [3] * 17, [4, 5, 1], [0, 0]] * 5
TASKS = ["code", "chat", "code", "maths"] * 5
RNG = torch.Generator().manual_seed(0)
TEXTS = [torch.randint(6, (10 + 2 * row,), generator=RNG).tolist() for row in range(20)]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "p.jsonl"
    rows = [{"prompt": "x", "task": task, "by": {"n": n}} for n, task in enumerate(TASKS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def measured(corpus: Path, chosen: list[int], **changes: Any) -> Measurement:
    settings = {"gammas": (1, 2), "timed_prompts": 0, "pass_repeats": 3, "max_new_tokens": 48}
    config = MeasureConfig.model_validate(
        {"target": "t", "draft": "d", "prompts": str(corpus), **settings, **changes}
    )
    prompts, texts = [PROMPTS[row] for row in chosen], [TEXTS[row] for row in chosen]
    return measure_models(TARGET, DRAFT, prompts, config, completions=texts)


def test_a_slice_has_the_figures_of_its_prompts_alone(corpus: Path):
    found = measured(corpus, list(range(20)), slices=("task", "prompt_tokens"))
    assert [(one.slice.name, one.slice.value, len(one.slice.units)) for one in found.sliced] == [
        *(("task", "code", 10), ("task", "chat", 5), ("task", "maths", 5)),
        *(("prompt_tokens", "1 to 16", 15), ("prompt_tokens", "17 to 64", 5)),
    ]
    for one in found.sliced:
        alone = measured(corpus, list(one.slice.units))
        (blocks,) = (row for row in alone.blocks if row.has(gamma=one.verdict.gamma))
        for name in ("expected_acceptance", "block_efficiency"):
            assert FIGURES[name].measure(one.row) == FIGURES[name].measure(blocks)
    few = [one.verdict.word for one in found.sliced if len(one.slice.units) < 8]
    assert few == ["TOO FEW"] * 3
    shown = json.loads(found.model_dump_json())
    assert [one["num_prompts"] for one in shown["sliced"]] == [10, 5, 5, 15, 5]
    assert Measurement.model_validate_json(json.dumps(shown)).sliced == found.sliced


def test_rules_are_predicted_for_each_slice(corpus: Path):
    """By the sums of the slice's own texts, in a table of its own."""
    values = {"target": "t", "draft": "d", "prompts": str(corpus), "slices": ("task",)}
    values |= {"num_prompts": 20, "pass_repeats": 3, "max_new_tokens": 12, "gammas": (2,)}
    config = AnalyzeConfig.model_validate(
        values | {"rules": ("lossless", {"rule": "chow", "alpha": 0.3})}
    )
    found = analyze_models(TARGET, DRAFT, PROMPTS, config)
    blocks = {row.setting["label"]: row for row in found.rows if "gamma" in row.setting}
    assert [one.value for one in found.slices] == ["code", "chat", "maths"]
    for one in found.slices:
        for row, line in zip(found.fastest(one), frontier_table(found, one).rows, strict=True):
            sums = blocks[row.setting["label"]].sums
            emitted, calls = (sum(sums[name][u] or 0 for u in one.units) for name in BLOCKS)
            assert FIGURES["block_efficiency"].value(row) == pytest.approx(emitted / calls)
            assert line["rule"] == row.setting["label"]


def test_columns_that_make_no_slices_are_refused_in_one_line(corpus: Path):
    config: Any = MeasureConfig.model_validate(
        {"target": "t", "draft": "d", "prompts": str(corpus)}
    )
    prompts = [[1]] * 20
    with pytest.raises(PromptError, match="colour"):
        slices_of(["colour"], config.prompts, prompts)
    nested = slices_of(["by.n"], config.prompts, prompts)
    assert [one.units for one in nested] == [(n,) for n in range(20)]
    with corpus.open("a") as file:
        file.write(json.dumps({"prompt": "x", "task": "code", "by": {"n": 20}}) + "\n")
    with pytest.raises(
        PromptError, match=r"by\.n of .*p\.jsonl has 21 values in 21 prompts; wanted"
    ):
        slices_of(["by.n"], config.prompts, [[1]] * 21)


def test_texts_behind_the_shorter_context_are_named(corpus: Path):
    short = TableModel.random(6, 1, seed=2, max_length=30)
    config = MeasureConfig.model_validate(
        {"target": "t", "draft": "d", "prompts": str(corpus), "gammas": (1,), "timed_prompts": 0}
        | {"pass_repeats": 1}
    )
    longer = sum(len(prompt) + len(text) > 30 for prompt, text in zip(PROMPTS, TEXTS, strict=True))
    assert 0 < longer < 20
    with pytest.warns(UserWarning, match=rf"^{longer} of 20 texts are longer .* of 30 tokens"):
        measure_models(TARGET, short, PROMPTS, config, completions=TEXTS)
