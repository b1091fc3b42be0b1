"""Grids of decoding settings: rules, strategies, thresholds, block lengths, temperatures."""

from __future__ import annotations

import itertools
from typing import Annotated, Any, cast

from pydantic import Field, field_validator, model_validator

from paceline.config import StrictModel
from paceline.core.rule_base import Bonus
from paceline.core.sampling import SamplingParams
from paceline.decode.draft_policies import FixedLength, PolicyChoice
from paceline.decode.strategies import AnyStrategy, Autoregressive, DecodingConfig, Speculative
from paceline.extensions import RuleChoice

StrategyChoice = Annotated[AnyStrategy, Field(discriminator="strategy")]


class Grid(StrictModel):
    """Every rule with every block length, and every other strategy, at every temperature.

    A list as a parameter is expanded: `{rule: chow, alpha: [0.2, 0.5]}` gives two rules. The target
    alone is always included.

    Attributes:
        temperatures: Sampling temperatures; 0: greedy.
        num_speculative_tokens: Draft tokens per block (gamma) of the rules.
        rules: Acceptance rules; lists of parameters are expanded.
        strategies: Decoding strategies without a rule, such as `token_cascade`.
        policy: When drafting stops before the full block length.
        draft_sampling: Sampling parameters of the draft; None: those of the target.
        bonus: What bonus tokens and first tokens follow: the rule, or the target, as in vLLM.
        sampling: Sampling parameters except the temperature, which is ignored.
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
    bonus: Bonus = "rule"
    sampling: SamplingParams = SamplingParams()

    @field_validator("rules", "strategies", mode="before")
    @classmethod
    def _one_of_each(cls, value: Any) -> Any:
        return expand_all(value)

    @model_validator(mode="after")
    def _policy_has_rules(self) -> Grid:
        if self.policy != FixedLength() and not self.rules:
            raise ValueError(
                "policy is set, but rules is empty, so nothing is drafted with it; list rules, "
                "such as rules=[lossless]"
            )
        return self

    def cells(self) -> list[DecodingConfig]:
        """The distinct settings; at each temperature, the target alone comes first."""
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
                bonus=self.bonus,
            )
            for rule, gamma in itertools.product(self.rules, self.num_speculative_tokens)
        ]


def expand_all(choices: Any) -> Any:
    """Expand each choice of a list; validation rejects anything else."""
    if not isinstance(choices, list | tuple):
        return choices
    return [one for choice in cast("list[Any]", choices) for one in expand(choice)]


def expand(choice: Any) -> list[Any]:
    """Expand a mapping with lists as values to all combinations of their entries."""
    if not isinstance(choice, dict):
        return [choice]
    known = cast("dict[str, Any]", choice)
    swept = {key: value for key, value in known.items() if isinstance(value, list)}
    return [
        known | dict(zip(swept, values, strict=True))
        for values in itertools.product(*swept.values())
    ]
