"""Costs of an engine that was never there."""

from pathlib import Path
from typing import Any

from paceline.measure.engine_costs import EngineCosts, StepCost
from paceline.measure.results import IntervalRow
from paceline.measure.starts import Starts
from paceline.models import load_model


def step(gamma: int, seconds: float, batch_size: int = 1) -> StepCost:
    row = IntervalRow(value=seconds, low=seconds * 0.9, high=seconds * 1.1)
    return StepCost(
        gamma=gamma,
        batch_size=batch_size,
        seconds=row,
        seconds_by_start=[seconds],
        num_steps=100,
    )


def costs_of(*steps: StepCost, **changes: Any) -> EngineCosts:
    values: dict[str, Any] = {
        "engine": "vllm",
        "engine_version": "0.32.0",
        "drafting": "greedy",
        "drafts_in_full": False,
        "full_vocabulary": True,
        "target_parameters": 1,
        "draft_parameters": 1,
        "mean_context": 50.0,
        "steps": list(steps),
        "starts": Starts(),
        "served": {},
        "environment": {},
    }
    return EngineCosts(**(values | changes))


def write_costs(folder: Path, *steps: StepCost, **changes: Any) -> Path:
    """Of the pair in a folder."""
    sizes = [load_model(folder / name).num_parameters for name in ("target", "draft")]
    known = {"target_parameters": sizes[0], "draft_parameters": sizes[1]}
    path = folder / "costs.json"
    path.write_text(costs_of(*steps, **(known | changes)).model_dump_json())
    return path
