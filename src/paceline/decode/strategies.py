"""Configuration of decoding strategies, and the decoder for each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Field, ValidationInfo, field_validator, model_validator

from paceline.config import Options, StrictModel
from paceline.core.rule_base import Bonus, Rule
from paceline.core.rules import Diff, Lossless, Share
from paceline.core.sampling import SamplingParams, proposal_params
from paceline.decode.autoregressive import AutoregressiveDecoder
from paceline.decode.cascade import (
    MOST_DRAFTED,
    BigLittleDecoder,
    OracleCascade,
    SequenceCascade,
    TokenCascade,
)
from paceline.decode.draft_policies import FixedLength, PolicyChoice
from paceline.decode.speculative import SpeculativeDecoder
from paceline.extensions import RuleChoice

if TYPE_CHECKING:
    from paceline.decode.decoder import Decoder
    from paceline.models.contract import Model

Count = Annotated[int, Field(ge=1)]


class Strategy(StrictModel):
    """Base class of strategies: the options of a decoder."""

    decoder: ClassVar[Any]

    def build(self, target: Model, draft: Model, sampling: SamplingParams) -> Decoder:
        """The decoder; raises UsageError if the models or the rule do not fit it."""
        options = {name: value for name, value in self if name != "strategy"}
        return self.decoder(target, draft, sampling=sampling, **options)


class Autoregressive(Strategy):
    """The target generates alone."""

    strategy: Literal["autoregressive"] = "autoregressive"

    def build(self, target: Model, draft: Model, sampling: SamplingParams) -> Decoder:
        return AutoregressiveDecoder(target, sampling)


class Speculative(Strategy):
    """The draft proposes tokens, the target verifies them with the rule.

    Attributes:
        draft_sampling: Sampling of the draft; None uses the target's. `{temperature: 0}` is greedy
            drafting, as in most engines. Omitted keys have their defaults, not the target's values.
        bonus: What the bonus tokens and the first token of a text follow: the rule, or the target,
            as vLLM serves the rule. Under a lossless rule they are the same, so it is `rule`, which
            is not written.
    """

    strategy: Literal["speculative"] = "speculative"
    rule: RuleChoice = Lossless()
    num_speculative_tokens: Count = 4
    policy: PolicyChoice = FixedLength()
    draft_sampling: SamplingParams | None = None
    bonus: Bonus = Field(default="rule", exclude_if=lambda value: value == "rule")

    @field_validator("bonus")
    @classmethod
    def _one_of_equals(cls, value: Bonus, info: ValidationInfo) -> Bonus:
        rule = info.data.get("rule")
        return "rule" if isinstance(rule, Rule) and rule.exact else value

    def build(self, target: Model, draft: Model, sampling: SamplingParams) -> Decoder:
        chosen = self.rule, self.num_speculative_tokens, sampling, self.policy, self.draft_sampling
        return SpeculativeDecoder(target, draft, *chosen, bonus=self.bonus)


class TokenByToken(Strategy):
    """The draft generates while it is confident; else the target generates one token.

    See `TokenCascade`.
    """

    decoder = TokenCascade
    strategy: Literal["token_cascade"] = "token_cascade"
    alpha: Share
    most_drafted: Count = MOST_DRAFTED


class ResponseByResponse(Strategy):
    """The draft answers; the target answers instead if the draft's response is improbable.

    See `SequenceCascade`.
    """

    decoder = SequenceCascade
    strategy: Literal["sequence_cascade"] = "sequence_cascade"
    alpha: Share
    normalise: bool = False


class BigLittle(Strategy):
    """The draft generates while it is confident; the target rolls back where the two diverge.

    See `BigLittleDecoder`.
    """

    decoder = BigLittleDecoder
    strategy: Literal["big_little"] = "big_little"
    fallback: Share
    rollback: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    most_drafted: Count = MOST_DRAFTED


class Oracle(Strategy):
    """Both models process every token, and the rule chooses between them: see `OracleCascade`."""

    decoder = OracleCascade
    strategy: Literal["oracle_cascade"] = "oracle_cascade"
    rule: RuleChoice = Diff(0.0)


AnyStrategy: TypeAlias = (
    Autoregressive | Speculative | TokenByToken | ResponseByResponse | BigLittle | Oracle
)


class DecodingConfig(StrictModel):
    """Decoding strategy and sampling parameters."""

    strategy: Annotated[
        AnyStrategy,
        Field(discriminator="strategy"),
        Options(
            "rule", gamma="num_speculative_tokens", draft_temperature="draft_sampling.temperature"
        ),
    ] = Speculative()
    sampling: Annotated[
        SamplingParams, Options("temperature", "top_p", "top_k", "repetition_penalty")
    ] = SamplingParams()

    @model_validator(mode="after")
    def _one_penalty(self) -> DecodingConfig:
        if isinstance(self.strategy, Speculative):
            proposal_params(self.sampling, self.strategy.draft_sampling)
        return self


def build_decoder(config: DecodingConfig, target: Model, draft: Model) -> Decoder:
    """Build the decoder of a configuration.

    Raises:
        UsageError: the models are not compatible, or the strategy cannot use the rule.
    """
    return config.strategy.build(target, draft, config.sampling)
