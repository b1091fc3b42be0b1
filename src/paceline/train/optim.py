"""Optimizers and learning-rate schedules.

A schedule is a function of progress in [0, 1], the larger of the spent fractions of the step budget
and the time budget.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from pydantic import Field

from paceline.config import StrictModel

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

Fraction = Annotated[float, Field(ge=0, le=1)]


class Constant(StrictModel):
    """Constant learning rate."""

    kind: Literal["constant"] = "constant"


class Linear(StrictModel):
    """Linear decay to `final_fraction` of the learning rate."""

    kind: Literal["linear"] = "linear"
    final_fraction: Fraction = 0.0


class Cosine(StrictModel):
    """Cosine decay to `final_fraction` of the learning rate."""

    kind: Literal["cosine"] = "cosine"
    final_fraction: Fraction = 0.0


class CoolDown(StrictModel):
    """Constant until `begin`, then cosine decay. Paper: Zhou et al. 2023, Table B.1."""

    kind: Literal["cool_down"] = "cool_down"
    begin: float = Field(default=0.5, ge=0, lt=1)
    final_fraction: Fraction = 0.1


Schedule = Annotated[Constant | Linear | Cosine | CoolDown, Field(discriminator="kind")]


class Warmup(StrictModel):
    """Linear warm-up from 0, multiplied with the schedule.

    Attributes:
        warmup_fraction: Length of the warm-up, as a fraction of the run.
    """

    warmup_fraction: Fraction = 5_000 / 300_000


class Adafactor(Warmup):
    """Adafactor (Shazeer and Stern 2018); the learning rate is relative to the weights' RMS.

    Attributes:
        weight_decay: Of matrices; times the learning rate and the weights' RMS.

    Paper: Zhou et al. 2023, Table B.1. Differs: the warm-up is 1/60 of the run instead of 5,000
    steps, which is the same for the paper's 300,000 steps.
    """

    kind: Literal["adafactor"] = "adafactor"
    learning_rate: float = Field(default=3e-4, gt=0, allow_inf_nan=False)
    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    schedule: Schedule = CoolDown()


class AdamW(Warmup):
    """AdamW; weight decay applies to matrices, not to norms and biases."""

    kind: Literal["adamw"] = "adamw"
    learning_rate: float = Field(default=1e-3, gt=0, allow_inf_nan=False)
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    schedule: Schedule = Cosine(final_fraction=0.1)


Optimizer = Annotated[Adafactor | AdamW, Field(discriminator="kind")]


def build_optimizer(config: Optimizer, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The torch optimizer of the parameters that require gradients."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    match config:
        case Adafactor():
            return paper_adafactor(groups, config.learning_rate)
        case AdamW():
            rate, betas = config.learning_rate, config.betas
            return torch.optim.AdamW(groups, lr=rate, betas=betas, fused=True)


def paper_adafactor(groups: list[dict[str, Any]], learning_rate: float) -> torch.optim.Optimizer:
    """The Adafactor of transformers with the settings of Adafactor's paper.

    Update of a matrix X by its gradient G at step t, with beta = 1 - t^-0.8 and mean squares of
    rows R and columns C:

        R = beta R + (1 - beta) mean_columns(G^2 + 1e-30), C likewise over rows
        U = G / sqrt(R C / mean(R));  X -= rate max(1e-3, RMS(X)) U / max(1, RMS(U))

    Vectors have one mean square per entry. That of torch is another function: it clamps mean(R) to
    at least 1.2e-7, and its rate to at most t^-0.5.

    Paper: Shazeer and Stern 2018, algorithms 4 and 5. Differs: the caller sets the step size (rho_t
    is the learning rate).
    """
    from transformers.optimization import Adafactor as OfTransformers

    return OfTransformers(
        groups,
        lr=learning_rate,
        eps=(1e-30, 1e-3),
        clip_threshold=1.0,
        decay_rate=-0.8,
        scale_parameter=True,
        relative_step=False,
    )


def learning_rate(config: Optimizer, progress: float) -> float:
    """The learning rate of the step that ends at `progress` in (0, 1]."""
    warmup = progress / config.warmup_fraction if config.warmup_fraction else 1.0
    return config.learning_rate * min(1.0, warmup) * _factor(config.schedule, progress)


def _factor(schedule: Schedule, progress: float) -> float:
    match schedule:
        case Constant():
            return 1.0
        case Linear(final_fraction=final):
            return 1.0 + progress * (final - 1.0)
        case Cosine(final_fraction=final):
            return _half_cosine(progress, final)
        case CoolDown(begin=begin, final_fraction=final):
            return _half_cosine(max(0.0, (progress - begin) / (1.0 - begin)), final)


def _half_cosine(progress: float, final: float) -> float:
    return final + (1.0 - final) * (1.0 + math.cos(math.pi * progress)) / 2.0
