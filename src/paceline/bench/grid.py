"""Which ways of decoding are compared: rules and strategies, thresholds, block lengths, temperatures."""

from __future__ import annotations

import itertools
from typing import Annotated, Any, cast

from pydantic import Field, field_validator

from paceline.config import StrictModel
from paceline.core.rules import RuleChoice
from paceline.core.sampling import SamplingParams
from paceline.decode.draft_policies import FixedLength, PolicyChoice
from paceline.decode.strategies import (
    AnyStrategy,
    Autoregressive,
    DecodingConfig,
    Speculative,
)

StrategyChoice = Annotated[AnyStrategy, Field(discriminator="strategy")]


class Grid(StrictModel):
    """Every rule with every block length, and every other strategy, at every temperature.

    A rule or a strategy whose setting is a list stands for one of each: `{rule: chow, alpha: [0.2,
    0.5]}` is two rules. The target alone is always among the cells.

    Attributes:
        temperatures: 0 is greedy.
        num_speculative_tokens: gamma, of the rules.
        rules: How the target judges drafted tokens.
        strategies: Ways of decoding that are no rules, such as `token_cascade`.
        policy: How long the rules' blocks are.
        draft_sampling: How the rules' drafts draw; None: as the target.
        sampling: top-p and the like; its temperature is not used.
    """

    temperatures: tuple[Annotated[float, Field(ge=0)], ...] = Field(
        default=(0.0, 1.0), min_length=1
    )
    num_speculative_tokens: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        default=(4,), min_length=1
    )
    rules: tuple[RuleChoice, ...] = ()
    strategies: tuple[StrategyChoice, ...] = ()
    policy: PolicyChoice = FixedLength()
    draft_sampling: SamplingParams | None = None
    sampling: SamplingParams = SamplingParams()

    @field_validator("rules", "strategies", mode="before")
    @classmethod
    def _one_of_each(cls, value: Any) -> Any:
        return expand_all(value)

    def cells(self) -> list[DecodingConfig]:
        """What is to be measured, once each, the target alone first at each temperature."""
        found: dict[str, DecodingConfig] = {}
        for temperature in self.temperatures:
            sampling = self.sampling.model_copy(update={"temperature": temperature})
            for strategy in (Autoregressive(), *self._speculative(), *self.strategies):
                cell = DecodingConfig(strategy=strategy, sampling=sampling)
                found.setdefault(cell.model_dump_json(), cell)
        return list(found.values())

    def _speculative(self) -> list[Speculative]:
        return [
            Speculative(
                rule=rule,
                num_speculative_tokens=gamma,
                policy=self.policy,
                draft_sampling=self.draft_sampling,
            )
            for rule, gamma in itertools.product(self.rules, self.num_speculative_tokens)
        ]


def expand_all(choices: Any) -> Any:
    """Each choice of a list expanded; anything else is left to be refused."""
    if not isinstance(choices, list | tuple):
        return choices
    return [one for choice in cast("list[Any]", choices) for one in expand(choice)]


def expand(choice: Any) -> list[Any]:
    """A mapping with lists among its values stands for all combinations of their entries."""
    if not isinstance(choice, dict):
        return [choice]
    known = cast("dict[str, Any]", choice)
    swept = {key: value for key, value in known.items() if isinstance(value, list)}
    return [
        known | dict(zip(swept, values, strict=True))
        for values in itertools.product(*swept.values())
    ]
