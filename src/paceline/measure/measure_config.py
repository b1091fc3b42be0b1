"""Configuration of `measure`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from paceline.measure.engine_costs import WithCosts
from paceline.measure.pair import PairConfig

Gamma = Annotated[int, Field(ge=1)]


class MeasureConfig(WithCosts, PairConfig):
    """Configuration of `measure`.

    Attributes:
        timed_prompts: Number of timed requests, including those that choose gamma; 0: no timing.
    """

    num_prompts: int = Field(default=32, ge=1)
    gammas: tuple[Gamma, ...] = Field(default=(1, 2, 3, 4, 5, 6, 8), min_length=1)
    pass_repeats: int = Field(default=31, ge=1)
    timed_prompts: int = Field(default=16, ge=0)
    timed_repeats: int = Field(default=1, ge=1)
