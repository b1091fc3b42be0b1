"""Positions for which no scores of the target were recorded count in no mean of the loss."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.models import load_model
from paceline.models.contract import Texts
from paceline.records import read_jsonl
from paceline.train import align
from support.data import write_lines
from support.runs import align_config, losses

PROMPT = [5, 6, 7]
# completions, and the recorded probabilities of two tokens before each of their tokens
ROWS: list[tuple[list[int], list[dict[int, float]]]] = [
    ([8, 9, 10], [{8: 0.5, 3: 0.2}, {}, {10: 0.6, 4: 0.3}]),
    ([11, 12], [{}, {}]),
    ([13], [{13: 0.7, 5: 0.1}]),
]


@pytest.fixture(scope="module")
def folder(folder: Path) -> Path:
    write_lines(folder / "rows.jsonl", *[record(*row) for row in ROWS])
    write_lines(folder / "empty.jsonl", record(*ROWS[1]))
    return folder


def record(completion: list[int], scores: list[dict[int, float]]) -> dict[str, Any]:
    logs = [torch.tensor(list(each.values())).log().tolist() for each in scores]
    return {
        "prompt_tokens": PROMPT,
        "completion_tokens": completion,
        "stop_reason": "length",
        "top_tokens": [list(each) for each in scores],
        "top_log_probs": logs,
    }


def settings(folder: Path, output: Path, name: str = "rows", **changes: Any) -> Any:
    common = {
        "data": {"train": str(folder / f"{name}.jsonl")},
        "objective": "top_k_tail",
        "num_steps": 1,
        "batch_size": len(ROWS),
    }
    return align_config(folder, output, **common | changes)


def steps_of(run: Path) -> list[dict[str, Any]]:
    return [row for row in read_jsonl(run / "metrics.jsonl") if "loss" in row]


def values_by_hand(folder: Path) -> tuple[list[list[float]], list[list[float]]]:
    """Of each row: KL and cross-entropy at its positions with scores."""
    draft = load_model(folder / "draft", dtype="float32")
    kl, cross = [], []
    for completion, scores in ROWS:
        with torch.no_grad():
            logits = draft.plain_logits(Texts(torch.tensor([PROMPT + completion])))[0]
        q = logits[len(PROMPT) - 1 : -1, : draft.vocab_size].double().softmax(-1)
        scored = [(t, token) for t, token in enumerate(completion) if scores[t]]
        cross.append([-q[t, token].log().item() for t, token in scored])
        of_row = []
        for t, given in enumerate(scores):
            if given:
                p = torch.tensor([*given.values(), 1 - sum(given.values())], dtype=torch.float64)
                of_q = [q[t, token].item() for token in given]
                both = torch.tensor([*of_q, 1 - sum(of_q)], dtype=torch.float64)
                of_row.append((p * (p / both).log()).sum().item())
        kl.append(of_row)
    return kl, cross


def mean_of(rows: list[list[float]], mean: str) -> float:
    if mean == "token":
        values = [value for row in rows for value in row]
        return sum(values) / len(values)
    means = [sum(row) / len(row) for row in rows if row]
    return sum(means) / len(means)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("mean", ["token", "sequence"])
def test_the_mean_is_over_positions_with_scores(
    folder: Path, tmp_path: Path, mean: str, parts: int
):
    """Three of six positions, two of three rows; a part of the step has no scores at all."""
    kl, cross = values_by_hand(folder)
    config = settings(folder, tmp_path / "run", mean=mean, gradient_accumulation_steps=parts)
    (step,) = steps_of(align(config))
    assert step["loss"] == pytest.approx(mean_of(kl, mean), rel=1e-5)
    assert (step["num_tokens"], step["chunk_tokens"]) == (3, 256)

    both = ["top_k_tail", {"kind": "cross_entropy", "weight": 0.5}]
    mixed = {"mean": mean, "gradient_accumulation_steps": parts, "objective": both}
    (step,) = steps_of(align(settings(folder, tmp_path / "mixed", **mixed)))
    expected = mean_of(kl, mean) + 0.5 * mean_of(cross, mean)
    assert step["loss"] == pytest.approx(expected, rel=1e-5)
    assert step["num_tokens"] == 3


@pytest.mark.parametrize("mean", ["token", "sequence"])
def test_positions_without_scores_change_no_gradient(folder: Path, tmp_path: Path, mean: str):
    """Training on the rows is training on their scored beginnings alone."""
    kept = [ROWS[0], ROWS[2]]
    beginnings = [(row[:1], scores[:1]) for row, scores in kept]
    write_lines(folder / "beginnings.jsonl", *[record(*row) for row in beginnings])
    longer = [(row, scores[:1] + [{}] * (len(row) - 1)) for row, scores in kept]
    write_lines(folder / "longer.jsonl", *[record(*row) for row in [*longer, ROWS[1]]])
    common: dict[str, Any] = {"mean": mean, "num_steps": 6}
    wanted = losses(align(settings(folder, tmp_path / "a", "beginnings", batch_size=2, **common)))
    found = losses(align(settings(folder, tmp_path / "b", "longer", batch_size=3, **common)))
    assert found == pytest.approx(wanted, rel=1e-5)
    assert wanted[-1] < 0.9 * wanted[0]


def test_a_step_without_any_scores_has_no_loss(folder: Path, tmp_path: Path):
    run = align(settings(folder, tmp_path / "run", "empty", batch_size=1))
    (step,) = steps_of(run)
    assert (step["loss"], step["gradient_norm"], step["num_tokens"]) == (0, 0, 0)
    assert json.loads((run / "result.json").read_text())
