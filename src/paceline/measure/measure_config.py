"""Configuration of `measure`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from paceline.data.input_checks import InputChecks
from paceline.measure.engine_costs import WithCosts
from paceline.measure.pair import PairConfig
from paceline.measure.prompt_checks import check_costs, check_prompts

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

    def check(self) -> InputChecks:
        """Check the inputs; raises UsageError."""
        checks = InputChecks()
        checks.device(self.device)
        check_costs(checks, self, self.gammas)
        models = checks.pair(self.target, self.draft)
        num_timed = 0 if self.costs is not None else min(self.timed_prompts, self.num_prompts)
        # a timed request is decoded in full, and its last block needs up to gamma extra positions
        timed = num_timed, self.max_new_tokens + min(self.gammas)
        check_prompts(checks, self, models, new_tokens=1, timed=timed)
        return checks
