import io
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
    assert learning_rate(Adafactor(), step / 300_000) == pytest.approx(table_b1(step))


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
    found = [learning_rate(config, quarter / 4) for quarter in (1, 2, 3, 4)]
    assert found == pytest.approx(levels, abs=1e-6)


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


def by_algorithm_4(
    start: list[list[float]], grads: list[list[list[float]]], rate: float
) -> list[list[float]]:
    """Shazeer and Stern 2018, algorithm 4 with sums as printed, entry by entry in float64."""
    x = [row[:] for row in start]
    height, width = len(x), len(x[0])
    entries = [(i, j) for i in range(height) for j in range(width)]
    r, c = [0.0] * height, [0.0] * width
    for t, g in enumerate(grads, start=1):
        beta = 1 - t**-0.8
        for i in range(height):
            r[i] = beta * r[i] + (1 - beta) * sum(g[i][j] ** 2 + 1e-30 for j in range(width))
        for j in range(width):
            c[j] = beta * c[j] + (1 - beta) * sum(g[i][j] ** 2 + 1e-30 for i in range(height))
        u = {(i, j): g[i][j] / math.sqrt(r[i] * c[j] / sum(r)) for i, j in entries}
        rms_u = math.sqrt(sum(value**2 for value in u.values()) / len(entries))
        rms_x = math.sqrt(sum(x[i][j] ** 2 for i, j in entries) / len(entries))
        for i, j in entries:
            x[i][j] -= max(1e-3, rms_x) * rate * u[i, j] / max(1.0, rms_u)
    return x


@pytest.mark.parametrize("size", [1e-12, 1e-6, 1e-2, 1.0])
@pytest.mark.parametrize("start", [[[0.5, -0.25, 1.0], [0.1, 0.7, -0.4]], [[0.0] * 3] * 2])
def test_ten_steps_of_adafactor_with_the_floor_of_its_paper_are_algorithm_4(
    size: float, start: list[list[float]]
):
    """Gradients that shrink: later updates are smaller than those of a normalised gradient."""
    pattern = [[[1.0, -2.0, 0.5], [0.3, 0.0, 4.0]], [[0.2, 0.1, -0.1], [0.05, 0.3, 0.2]]]
    grads = [
        [[size * 0.8**step * value for value in row] for row in pattern[step % 2]]
        for step in range(10)
    ]
    weight = nn.Parameter(torch.tensor(start))
    optimizer = build_optimizer(Adafactor(learning_rate=0.1), [weight])
    for grad in grads:
        weight.grad = torch.tensor(grad)
        optimizer.step()
    wanted = torch.tensor(by_algorithm_4(start, grads, 0.1))
    torch.testing.assert_close(weight.detach(), wanted, rtol=1e-5, atol=1e-6)


def test_adafactor_with_the_floor_of_its_paper_takes_vectors_whole_and_gradients_of_zero():
    # V = (g^2 + (t^0.8 - 1) g'^2) / t^0.8; t = 2: beta = 1 - 2^-0.8
    vector, still = nn.Parameter(torch.tensor([2.0, 2.0])), nn.Parameter(torch.ones(2, 3))
    optimizer = build_optimizer(Adafactor(learning_rate=0.1), [vector, still])
    for grad in ([1e-6, 1e-6], [5e-7, -2e-7]):
        vector.grad, still.grad = torch.tensor(grad), torch.zeros(2, 3)
        optimizer.step()
    share = 2**-0.8
    second = [g / math.sqrt(share * g**2 + (1 - share) * 1e-12) for g in (5e-7, -2e-7)]
    wanted = [1.8 - 0.1 * 1.8 * update for update in second]
    assert vector.tolist() == pytest.approx(wanted, rel=1e-5)
    assert still.tolist() == torch.ones(2, 3).tolist()


def test_the_state_of_adafactor_is_restored():
    def make() -> tuple[nn.Parameter, torch.optim.Optimizer]:
        weight = nn.Parameter(torch.full((2, 3), 5.0))
        return weight, build_optimizer(Adafactor(learning_rate=0.01), [weight])

    (whole, one), (first, two), (second, three) = make(), make(), make()
    grads = [torch.arange(1.0, 7).view(2, 3) * size for size in (1.0, 0.1, 0.01)]
    for grad in grads:
        whole.grad = grad.clone()
        one.step()
    for grad in grads[:2]:
        first.grad = grad.clone()
        two.step()
    with torch.no_grad():
        second.copy_(first)
    stored = io.BytesIO()
    torch.save(two.state_dict(), stored)
    stored.seek(0)
    three.load_state_dict(torch.load(stored, weights_only=True))
    second.grad = grads[2].clone()
    three.step()
    assert torch.equal(second, whole)
