import math

import pytest
import torch
from torch import nn

from paceline.train.optim import (
    Adafactor,
    AdamW,
    Constant,
    CoolDown,
    Cosine,
    Linear,
    Schedule,
    build_optimizer,
    learning_rate,
)


def table_b1(step: int) -> float:
    """Table B.1 as printed: steps, not parts of a run."""
    if step <= 5_000:
        return 3e-4 * step / 5_000
    if step <= 150_000:
        return 3e-4
    cooled = (step - 150_000) / 150_000
    return 3e-5 + (3e-4 - 3e-5) * 0.5 * (1 + math.cos(math.pi * cooled))


@pytest.mark.parametrize("step", [1, 2_500, 5_000, 5_001, 150_000, 150_001, 225_000, 300_000])
def test_adafactor_by_default_follows_table_b1_at_300000_steps(step: int):
    assert learning_rate(Adafactor(), step, step / 300_000) == pytest.approx(table_b1(step))


@pytest.mark.parametrize(
    ("schedule", "levels"),
    [
        (Constant(), [1, 1, 1, 1]),
        (Linear(), [0.75, 0.5, 0.25, 0]),
        (Linear(final_fraction=0.2), [0.8, 0.6, 0.4, 0.2]),
        (Cosine(), [0.853553, 0.5, 0.146447, 0]),
        (Cosine(final_fraction=0.5), [0.926777, 0.75, 0.573223, 0.5]),
        (CoolDown(begin=0.5, final_fraction=0.0), [1, 1, 0.5, 0]),
    ],
)
def test_schedules_pass_through_known_points(schedule: Schedule, levels: list[float]):
    config = AdamW(learning_rate=1.0, warmup_fraction=0, schedule=schedule)
    found = [learning_rate(config, quarter, quarter / 4) for quarter in (1, 2, 3, 4)]
    assert found == pytest.approx(levels, abs=1e-6)


def test_warmup_steps_win_over_the_fraction():
    config = AdamW(learning_rate=1.0, warmup_steps=4, schedule=Constant())
    assert [learning_rate(config, step, step / 100) for step in (1, 2, 4, 5)] == [0.25, 0.5, 1, 1]
    config = AdamW(learning_rate=1.0, warmup_steps=0, schedule=Constant())
    assert learning_rate(config, 1, 0.001) == 1.0


def layer() -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    module[1].weight.requires_grad_(False)
    return module


@pytest.mark.parametrize("config", [Adafactor(weight_decay=0.5), AdamW(weight_decay=0.5)])
def test_weight_decay_falls_on_matrices_only_and_frozen_weights_are_left_out(
    config: Adafactor | AdamW,
):
    groups = build_optimizer(config, layer().parameters()).param_groups
    decay = {tuple(p.shape): group["weight_decay"] for group in groups for p in group["params"]}
    assert decay == {(4, 3): 0.5, (4,): 0.0}
    assert sum(len(group["params"]) for group in groups) == 3


def test_a_model_of_matrices_alone_has_one_group():
    optimizer = build_optimizer(AdamW(), nn.Linear(3, 4, bias=False).parameters())
    assert len(optimizer.param_groups) == 1


def test_the_step_of_adafactor_is_relative_to_the_size_of_the_weight():
    # Shazeer and Stern 2018, section 8: alpha = max(1e-3, RMS(weight)) * rate. The first update of
    # a constant gradient has RMS 1: weights of 5 move by 5 * rate, weights of 0 by 1e-3 * rate.
    weights = [nn.Parameter(torch.full((2, 3), 5.0)), nn.Parameter(torch.zeros(2, 3))]
    optimizer = build_optimizer(Adafactor(learning_rate=0.01), weights)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert weights[0].detach() == pytest.approx(torch.full((2, 3), 5.0 - 0.05), rel=1e-5)
    assert weights[1].detach() == pytest.approx(torch.full((2, 3), -1e-5), rel=1e-4)
