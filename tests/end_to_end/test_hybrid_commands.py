"""Commands on a hybrid target and a draft of its layers, which go on from snapshots.

Expected texts and losses come from transformers.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.measure import Measurement
from paceline.models import load_model
from paceline.models.drafts.layers import subset_layers
from paceline.models.drafts.save import save_draft
from support.data import write_lines
from support.models import save_tiny
from support.texts import sets, succeeded

TEXT = "the other thinner animal ran in the theatre"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a draft of two kinds of layers, and texts."""
    folder = tmp_path_factory.mktemp("hybrid")
    save_tiny(folder / "target", "qwen3_5_text")
    words = ["rain", "heat", "cat", "then", "inner", "other", "animal", "dinner", "sand", "thin"]
    rows = [
        {"prompt": f"the {word} in", "completion": f" {TEXT}"[: 8 + 3 * number]}
        for number, word in enumerate(words)
    ]
    write_lines(folder / "pairs.jsonl", *rows)
    write_lines(folder / "prompts.jsonl", *[{"prompt": row["prompt"]} for row in rows])
    return folder


@pytest.fixture(scope="module")
def drafted(pair: Path) -> Path:
    """The draft, made by the library as `paceline draft --layers 0,3` does."""
    draft = subset_layers(load_model(pair / "target"), [0, 3])
    assert draft.hf.config.layer_types == ["linear_attention", "full_attention"]
    save_draft(draft, str(pair / "target"), pair / "draft", torch.float32)
    return pair


def models(folder: Path) -> tuple[Any, ...]:
    return "--target", folder / "target", "--draft", folder / "draft"


SHORT = sets(num_prompts=8, max_new_tokens=8, gammas="[1,2]")


@pytest.mark.parametrize("recipe", ["supervised_kd", "f_distill", "gkd"])
def test_given_target_made_and_draft_made_text_align(
    run, drafted: Path, tmp_path: Path, recipe: str
):
    succeeded(
        run,
        *("align", *models(drafted), "--output", tmp_path / "run", "--recipe", recipe),
        *sets(**{"data.train": drafted / "pairs.jsonl"}),
        *sets(**{"data.held_out": drafted / "prompts.jsonl"}),
        *sets(num_steps=4, batch_size=8, max_prompt_tokens=12, max_completion_tokens=24),
        *sets(**{"evaluation.max_new_tokens": 8, "optimizer.learning_rate": 1e-2}),
        *sets(**{"optimizer.kind": "adamw"}),
    )
    result = json.loads((tmp_path / "run/result.json").read_text())
    before, after = (result[when]["expected_acceptance"] for when in ("before", "after"))
    assert after > before


def test_text_and_recorded_states_of_the_target_train(run, drafted: Path, tmp_path: Path):
    out = tmp_path / "data"
    given = ("--target", drafted / "target", "--prompts", drafted / "prompts.jsonl")
    succeeded(
        run,
        *("generate-data", *given, "--output", out),
        *sets(max_prompt_tokens=12, max_new_tokens=8, writer="{kind: model, hidden_states: true}"),
    )
    succeeded(
        run,
        *("align", *models(drafted), "--output", tmp_path / "run"),
        *sets(**{"data.train": out / "data", "data.recorded_states": "true"}),
        *sets(num_steps=2, batch_size=8, max_prompt_tokens=12, max_completion_tokens=8),
    )


def test_measure_times_blocks_and_requests(run, drafted: Path):
    given = (*models(drafted), "--prompts", drafted / "prompts.jsonl", *SHORT)
    code, out, err = run("measure", *given, "--json")
    assert code in (0, 1, 3), err
    found = Measurement.model_validate_json(out)
    assert 0 < found.figure("expected_acceptance").value < 1
    assert found.requests is not None
    assert len(found.requests.units) == 8
    assert all(row.totals["block_cost_ratio"] > 0 for row in found.blocks)


def test_an_export_is_read_back(run, drafted: Path, tmp_path: Path):
    out = tmp_path / "export"
    given = ("--to", "vllm", "--out", out, "--target", drafted / "target")
    succeeded(run, "export", drafted / "draft", *given)
    assert (out / "config.json").exists()
