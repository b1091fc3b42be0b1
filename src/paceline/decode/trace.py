"""Traces: what a rule reads at each examined token, enough to apply the other rules there.

The rule of a decoder is wrapped, so that it notes the distributions it is given. A trace has no
distributions over the vocabulary: it has the sums that rules compare, and the likeliest tokens.

Shape suffixes: G drafted, P positions, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.core.divergences import total_variation
from paceline.core.rule_base import Position, Rule, as_read
from paceline.core.sampling import as_list
from paceline.decode.strategies import DecodingConfig, Speculative
from paceline.decode.text import Text
from paceline.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.core.sampling import SamplingParams
    from paceline.decode.text import Block

_LIKELIEST = 16  # of each model, whose probabilities are written


class _NotingRule(Rule):
    """Decides as the rule that it wraps, and notes the distributions of the newest block."""

    uses_confidence = True  # asks for the untempered distributions
    entrywise = True  # else a block of a cascade would be verified without asking for tokens

    def __init__(self, rule: Rule, sampling: SamplingParams) -> None:
        self._rule = rule
        self._sampling = sampling
        self.needs_draft_at_bonus = rule.needs_draft_at_bonus
        self.newest: tuple[Position, Tensor] | None = None

    @property
    def num_undrafted(self) -> int:
        return self._rule.num_undrafted

    def accept_at(self, at: Position) -> Tensor:
        return self._rule.accept_at(self._read(at))

    def residual_at(self, at: Position) -> Tensor:
        return self._rule.residual_at(self._read(at))

    def pi_at(self, at: Position) -> Tensor | None:
        return self._rule.pi_at(self._read(at))

    def accept_tokens_at(self, at: Position, tokens: Tensor) -> Tensor:
        self.newest = at, tokens
        return self._rule.accept_tokens_at(self._read(at), tokens)

    def _read(self, at: Position) -> Position:
        return as_read(self._rule, at, self._sampling)


class Trace:
    """Notes of one text.

    Attributes:
        decoding: The configuration to decode with: it generates the same text, but slower.
        rows: A row of numbers for each examined token so far; docs/guides/playground.md lists them.

    Raises:
        UsageError: the configuration is not of speculative decoding.
    """

    def __init__(self, decoding: DecodingConfig, seed: int) -> None:
        strategy = decoding.strategy
        if not isinstance(strategy, Speculative):
            raise UsageError(
                f"--trace needs the strategy speculative, got {strategy.strategy}; leave it out"
            )
        self._rule = _NotingRule(strategy.rule, decoding.sampling)
        self._gamma = strategy.num_speculative_tokens
        noted = strategy.model_copy(update={"rule": self._rule})
        self.decoding = decoding.model_copy(update={"strategy": noted})
        # A text's numbers depend on its seed alone, so a second text draws those of the first.
        self._same_numbers = Text([], 1, (), seed, cut=False)
        self._num_blocks = 0
        self.rows: list[dict[str, Any]] = []

    def add(self, block: Block, text_of: Callable[[list[int]], str]) -> None:
        """Add the rows of the newest block, before the next one is decoded."""
        number, self._num_blocks = self._num_blocks, self._num_blocks + 1
        if self._rule.newest is None:  # the target's pass over the prompt
            return
        (at, tokens), self._rule.newest = self._rule.newest, None
        uniforms = self._same_numbers.draw_accept(self._gamma)
        num_accepted = block.sources.count("accepted")
        for index in range(num_accepted + ("recovered" in block.sources)):
            token = int(tokens[0, index, 0])
            row = {"block": number, "index": index, "token": token, "text": text_of([token])}
            row |= {"accepted": index < num_accepted, "uniform": uniforms[index]}
            self.rows.append(row | _numbers(at.each(lambda probs, i=index: probs[0, i]), token))


def _numbers(at: Position, token: int) -> dict[str, Any]:
    """What rules read at one position, [V] each; infinity is None."""
    raws = (at.target_raw, at.draft_raw)
    count = min(_LIKELIEST, at.target.shape[-1])
    rest_V = torch.ones_like(at.target, dtype=torch.bool)
    for raw in raws:
        rest_V[raw.topk(count).indices] = False
    cross_entropy = -_sum_of_logs(at.draft, at.target_raw)
    return {
        "p": float(at.target[token]),
        "q": float(at.draft[token]),
        "raw_p": float(at.target_raw[token]),
        "raw_q": float(at.draft_raw[token]),
        "peak_p": float(at.target_raw.max()),
        "peak_q": float(at.draft_raw.max()),
        "entropy_p": -_sum_of_logs(at.target_raw, at.target_raw),
        "entropy_q": -_sum_of_logs(at.draft_raw, at.draft_raw),
        "tvd": float(total_variation(at.target, at.draft)),
        "cross_entropy": cross_entropy if cross_entropy < torch.inf else None,
        # q, raw p and raw q of the likeliest tokens, and bounds of all others
        "likeliest": as_list(torch.stack([at.draft, *raws], -1)[~rest_V]),
        "rest_q": float(at.draft[rest_V].sum()),
        "most_raw_p": float(at.target_raw[rest_V].max()) if rest_V.any() else 0.0,
        "most_raw_q": float(at.draft_raw[rest_V].max()) if rest_V.any() else 0.0,
    }


def _sum_of_logs(weights: Tensor, probs: Tensor) -> float:
    """Sum of weights times log(probs), with 0 log 0 = 0."""
    return float(torch.xlogy(weights.double(), probs.double()).sum())
