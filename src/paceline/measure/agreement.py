"""Decides whether an engine's counts agree with the prediction: a test of equivalence.

Let R be tokens per target call, served / predicted, paired by request.

- agrees: the 90% interval of R lies within 0.95 to 1.05 (two one-sided tests at 5%);
- differs: the 95% interval of R lies outside 0.98 to 1.02, or the interval of a position's
  acceptance, served - predicted, lies outside -0.02 to 0.02. The intervals of G positions have
  95% confidence together (Bonferroni: 1 - 0.05 / G each);
- undecided: otherwise, and with fewer than 8 requests. What agrees and differs, such as R of 0.97
  with a narrow interval, differs.

Requests of a few blocks may all accept, or all reject, and show no spread. Where fewer than 10
blocks do one of the two, intervals are at least as wide as independent blocks make them.

In simulations of 8 to 256 requests with 63 drafted positions each
(`tests/statistical/test_agreement.py`), an exact engine is said to differ in at most 2% of the
runs (5% with a few blocks per request), and an engine with R = 0.95 to agree in at most 5%.

Greedy counts are a function of the text. So at temperature 0 each request is also compared by
itself, and the counts agree if every request has the predicted ones. Rounding can swap two tokens
with nearly equal logits, in float32 rarely: there, the counts differ if more than a tenth of the
requests are shown to have others (binomial test at 5%: 3 of 8, 12 of 64).
"""

# B requests, T positions, G drafted tokens of a block
from __future__ import annotations

import math
from statistics import NormalDist
from typing import TYPE_CHECKING, NamedTuple

import torch

from paceline.config import StrictModel
from paceline.core.bootstrap import (
    LEAST_UNITS,
    Interval,
    mean_interval,
    ratio_of_ratios_intervals,
)
from paceline.core.speed import accepted_by_position, drafted_tokens
from paceline.engines.kinds import KINDS
from paceline.rng import named_generator

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from paceline.core.text_scores import TextScores
    from paceline.engines.contract import Conventions, Served
    from paceline.results.row import Row

_AGREES, _DIFFERS = (0.95, 1.05), (0.98, 1.02)
_TOLERANCE = 0.02  # of the acceptance at a position
_SWAPPED = 0.1  # largest part of requests with other greedy counts, in float32
_ERROR = 0.05
_SHOWN = 3
_FEW = 10  # blocks that accept, or that reject


class Counts(NamedTuple):
    """Blocks, drafted and accepted tokens of each request, [B]; accepted by position, [B, G]."""

    blocks_B: Tensor
    drafted_B: Tensor
    accepted_B: Tensor
    by_position_BG: Tensor | None

    @property
    def tokens_and_blocks(self) -> tuple[Tensor, Tensor]:
        """Tokens per target call, as numerators and denominators."""
        return self.accepted_B + self.blocks_B, self.blocks_B

    def rows(self, base: Row, name: str) -> list[Row]:
        """A row of all positions, then one per position in the block, from 0.

        They are `base` with more sums, and the setting `counts` with this name.
        """
        emitted_B, calls_B = self.tokens_and_blocks
        sums = {"emitted": emitted_B, "calls": calls_B}
        sums |= {"drafted": self.drafted_B, "accepted": self.accepted_B}
        positions = () if self.by_position_BG is None else self.by_position_BG.unbind(-1)
        of_positions = [
            base.extended({"position_accepted": part_B, "calls": calls_B}, position=place)
            for place, part_B in enumerate(positions)
        ]
        return [row.extended(counts=name) for row in (base.extended(sums), *of_positions)]

    def shares(self) -> list[float]:
        """Expected part of the blocks that accept the first, second, ... drafted token."""
        assert self.by_position_BG is not None, "predictions have it"
        shares_G = self.by_position_BG.sum(0) / self.blocks_B.sum()
        return [min(max(float(share), 0.0), 1.0) for share in shares_G]

    def few(self, accepting: float, rejecting: float) -> bool:
        """If so few blocks accept, or reject, that requests may not show the spread."""
        return float(self.blocks_B.sum()) * min(accepting, 1 - rejecting) < _FEW

    def error_of_blocks(self, variance: float) -> float:
        """Standard error of a mean over independent blocks."""
        return (max(variance, 0.0) / float(self.blocks_B.sum())) ** 0.5


class OtherCounts(StrictModel):
    """A greedy request with other counts than predicted.

    Attributes:
        request: Its number, from 0.
        blocks: Served - predicted number of blocks; 0 within the range of the prediction.
        accepted: Served - predicted number of accepted tokens, likewise.
    """

    request: int
    blocks: int
    accepted: int

    def __str__(self) -> str:
        return f"request {self.request} ({self.blocks:+d} blocks, {self.accepted:+d} accepted)"


class GreedyCounts(NamedTuple):
    """Predicted counts at temperature 0.

    Attributes:
        least: What an engine counts at least; both are equal where the text decides all counts.
        most: What it counts at most.
        float32: The models compute in float32.
    """

    least: Counts
    most: Counts
    float32: bool

    @classmethod
    def of(
        cls,
        scores: TextScores,
        gamma: int,
        max_new_tokens: int,
        conventions: Conventions,
        *,
        float32: bool,
    ) -> GreedyCounts:
        """Known counts, but for tokens after the end of a text.

        A draft beyond the end is accepted or not, with a range of one block's tokens. Of a text
        that ended by itself, it is unknown whether the engine returns the end, and counts its
        block.
        """
        settings = scores, gamma, max_new_tokens, conventions
        ended_B = (scores.mask_BT.sum(-1) < max_new_tokens).int()
        bounds: list[Counts] = []
        for behind_end, sign in ((0.0, -1), (1.0, 1)):
            side = predicted_counts(*settings, behind_end=behind_end)
            blocks_B, accepted_B = (
                part_B + sign * ended_B for part_B in (side.blocks_B, side.accepted_B)
            )
            bounds.append(side._replace(blocks_B=blocks_B, accepted_B=accepted_B))
        return cls(bounds[0], bounds[1], float32)

    def different(self, served: Counts) -> list[OtherCounts]:
        """The requests with counts outside of the range."""
        excess = [
            (ours - most).clamp(min=0) - (least - ours).clamp(min=0)
            for ours, least, most in (
                (served.blocks_B, self.least.blocks_B, self.most.blocks_B),
                (served.accepted_B, self.least.accepted_B, self.most.accepted_B),
            )
        ]
        blocks_B, accepted_B = (part_B.round() for part_B in excess)
        return [
            OtherCounts(request=row, blocks=int(blocks_B[row]), accepted=int(accepted_B[row]))
            for row in range(len(blocks_B))
            if blocks_B[row] or accepted_B[row]
        ]


def predicted_counts(
    scores: TextScores,
    gamma: int,
    max_new_tokens: int,
    conventions: Conventions,
    behind_end: float | None = None,
) -> Counts:
    """Expected counts of an engine with these conventions over these texts.

    Positions after the end of a text, where the draft is unknown, count with `behind_end`; None:
    with the text's mean.
    """
    whole = scores.acceptance_BT, scores.survival_BT, scores.mask_BT
    acceptance_BT, survival_BT, mask_BT = (
        whole if conventions.drafts_first_token else scores.drafted
    )
    budget = max_new_tokens - (not conventions.drafts_first_token)
    length_B = mask_BT.sum(-1)
    budget_B, starts_before = torch.full_like(length_B, budget), None
    if conventions.counts_behind_end:
        budget_B, starts_before = length_B + gamma + 1, length_B
        acceptance_BT, survival_BT, extended_BT = (
            _extended(part, mask_BT, gamma, value)
            for part, value in (
                (acceptance_BT, behind_end),
                (survival_BT, behind_end),
                (mask_BT, None),
            )
        )
        mask_BT = extended_BT.bool()
    elif not conventions.counts_empty_blocks:
        starts_before = budget_B - 1
    by_position_BG, blocks_B = accepted_by_position(
        *(acceptance_BT, survival_BT, mask_BT, gamma), budget=budget_B, starts_before=starts_before
    )
    if conventions.counts_behind_end:
        drafted_B = gamma * blocks_B
    else:
        drafted_B = drafted_tokens(survival_BT, mask_BT, gamma, budget=budget_B)
    return Counts(blocks_B, drafted_B, by_position_BG.sum(-1), by_position_BG)


def _extended(part_BT: Tensor, mask_BT: Tensor, gamma: int, value: float | None) -> Tensor:
    """Append `gamma` positions with this value, or the row's mean. [B, T] -> [B, T + gamma]."""
    length_B1 = mask_BT.sum(-1, keepdim=True)
    mean_B1 = (part_BT.double() * mask_BT).sum(-1, keepdim=True) / length_B1.clamp(min=1)
    wide_BT = torch.nn.functional.pad(part_BT.double() * mask_BT, (0, gamma))
    positions_T = torch.arange(wide_BT.shape[1])
    appended_BT = (positions_T >= length_B1) & (positions_T < length_B1 + gamma)
    return torch.where(appended_BT, mean_B1 if value is None else value, wide_BT)


def served_counts(served: Sequence[Served], gamma: int) -> Counts:
    """The engine's counts of requests with counted blocks."""
    counts = [answer.blocks for answer in served if answer.blocks is not None]
    known = [
        count.accepted_by_position for count in counts if count.accepted_by_position is not None
    ]
    by_position = None
    if len(known) == len(counts):
        by_position = torch.tensor([[*row, *[0] * gamma][:gamma] for row in known])
    return Counts(
        torch.tensor([count.num_blocks for count in counts]),
        torch.tensor([count.num_drafted for count in counts]),
        torch.tensor([count.num_accepted for count in counts]),
        by_position,
    )


class Agreement(StrictModel):
    """Whether the engine's counters agree with the prediction.

    Attributes:
        agrees: True if they agree.
        decided: False if there is no verdict; then `agrees` is false.
        reason: The figures that differ, with possible causes.
        ratio: Tokens per target call, served / predicted, paired by request.
        more_requests: Estimated number of further requests for a verdict; 0 if decided.
        different: At temperature 0, the requests with other counts than predicted; else None.
    """

    agrees: bool
    decided: bool = True
    reason: str
    ratio: Interval
    more_requests: int = 0
    different: list[OtherCounts] | None = None

    def __str__(self) -> str:
        return f"{self.word}: {self.reason}"

    @property
    def word(self) -> str:
        """`agrees`, `differs` or `undecided`."""
        if not self.decided:
            return "undecided"
        return "agrees" if self.agrees else "differs"

    @property
    def exit_code(self) -> int:
        """Of the command line: 0 agrees, 1 differs, 3 undecided."""
        return {"agrees": 0, "differs": 1, "undecided": 3}[self.word]


def decide_agreement(
    served: Counts,
    predicted: Counts,
    *,
    engine: str,
    seed: int,
    greedy: GreedyCounts | None = None,
) -> Agreement:
    """Decide by the rules above.

    `predicted`: expected counts. `greedy`: the counts at temperature 0, where they are known.
    """
    count = len(served.blocks_B)
    drawn = greedy is None
    ratio, inner = _ratios(served, predicted, seed, drawn)
    other = None if greedy is None else greedy.different(served)

    def verdict(reason: str, *, agrees: bool = False, more: int = 0) -> Agreement:
        return Agreement(
            agrees=agrees,
            decided=not more,
            reason=reason,
            ratio=ratio,
            more_requests=more,
            different=other,
        )

    if count < LEAST_UNITS:
        reason = (
            f"{count} requests, but a verdict needs {LEAST_UNITS}; set "
            f"num_prompts={LEAST_UNITS} or more and give as many prompts"
        )
        return verdict(reason, more=LEAST_UNITS - count)
    words = "" if other is None else f"; {_of_requests(other, count)}"
    off = list(_shown_to_differ(served, predicted, ratio, drawn))
    if greedy is not None and greedy.float32 and _too_many(other or [], count):
        off.append(f"counts of more than {_SWAPPED:.0%} of the requests, in float32")
    if off:
        return verdict(f"{'; '.join(off)}{words}; known reasons: {KINDS[engine].reasons}")
    figure = f"tokens per target call are {ratio} times the prediction"
    if other == [] or (_AGREES[0] <= inner.low and inner.high <= _AGREES[1]):
        return verdict(f"{figure}{words}", agrees=True)
    more = _more_requests(ratio, inner, count)
    reason = (
        f"{figure}, neither shown to be within 5% of it nor to be off by 2%{words}; about {more} "
        f"more requests would decide: set num_prompts={count + more} and give as many prompts"
    )
    return verdict(reason, more=more)


def _ratios(served: Counts, predicted: Counts, seed: int, drawn: bool) -> tuple[Interval, Interval]:
    """R with its intervals of 95% and 90%.

    Those of `drawn` counts are at least as wide as independent blocks make them.
    """
    confidences = 0.95, 0.9
    wide, narrow = ratio_of_ratios_intervals(
        *(side.tokens_and_blocks for side in (served, predicted)),
        rng=named_generator(seed, "served / predicted"),
        confidences=confidences,
    )
    shares = predicted.shares()
    if not drawn or not predicted.few(max(shares), min(shares)):
        return wide, narrow
    tau = 1 + sum(shares)
    # variance of a number of tokens that exceeds i with probability shares[i]
    variance = sum((2 * position + 1) * share for position, share in enumerate(shares))
    error = predicted.error_of_blocks(variance - sum(shares) ** 2) / tau

    def widened(ratio: Interval, confidence: float) -> Interval:
        factor = math.exp(NormalDist().inv_cdf((1 + confidence) / 2) * error)
        low, high = min(ratio.low, ratio.value / factor), max(ratio.high, ratio.value * factor)
        return Interval(ratio.value, low, high)

    return widened(wide, confidences[0]), widened(narrow, confidences[1])


def _shown_to_differ(
    served: Counts, predicted: Counts, ratio: Interval, drawn: bool
) -> Iterator[str]:
    if ratio.high < _DIFFERS[0] or ratio.low > _DIFFERS[1]:
        yield f"tokens per target call, served / predicted, {ratio}"
    if served.by_position_BG is None or predicted.by_position_BG is None:
        return
    columns = served.by_position_BG.unbind(-1), predicted.by_position_BG.unbind(-1)
    confidence = 1 - _ERROR / len(columns[0])
    shares = predicted.shares()
    for position, (ours_B, theirs_B) in enumerate(zip(*columns, strict=True)):
        over, under = (ours_B, served.blocks_B), (theirs_B, predicted.blocks_B)
        difference = _difference(over, under, confidence)
        share = shares[position]
        variance = share * (1 - share) if drawn and predicted.few(share, share) else 0.0
        half = NormalDist().inv_cdf((1 + confidence) / 2) * predicted.error_of_blocks(variance)
        low = min(difference.low, difference.value - half)
        high = max(difference.high, difference.value + half)
        if low > _TOLERANCE or high < -_TOLERANCE:
            shown = Interval(difference.value, low, high)
            yield f"acceptance at position {position}, served - predicted, {shown}"


def _difference(
    over: tuple[Tensor, Tensor], under: tuple[Tensor, Tensor], confidence: float
) -> Interval:
    """Difference of two ratios of sums over the same requests, linearised, by Student's t.

    sum a / sum b - sum c / sum d, whose part of request i is
    (a_i - r b_i) / mean b - (c_i - s d_i) / mean d, with the ratios r and s.
    """
    parts: list[Tensor] = []
    for tops_B, bottoms_B in (over, under):
        tops_B, bottoms_B = tops_B.double(), bottoms_B.double()
        ratio = tops_B.sum() / bottoms_B.sum()
        parts.append(ratio + (tops_B - ratio * bottoms_B) / bottoms_B.mean())
    return mean_interval(parts[0] - parts[1], confidence)


def _too_many(other: list[OtherCounts], count: int) -> bool:
    """If as many or more are rare where each request has other counts with chance `_SWAPPED`."""
    terms = (
        math.comb(count, number) * _SWAPPED**number * (1 - _SWAPPED) ** (count - number)
        for number in range(len(other), count + 1)
    )
    return sum(terms) <= _ERROR


def _of_requests(other: list[OtherCounts], count: int) -> str:
    if not other:
        return f"all {count} requests have the predicted counts"
    shown = [*map(str, other[:_SHOWN]), *["..."] * (len(other) > _SHOWN)]
    return f"{len(other)} of {count} requests have other counts: {', '.join(shown)}"


def _more_requests(ratio: Interval, inner: Interval, count: int) -> int:
    """Further requests for a verdict, if R stays and widths shrink with the root of the number."""
    value, low, high = (math.log(max(bound, 1e-9)) for bound in ratio)
    _, inner_low, inner_high = (math.log(max(bound, 1e-9)) for bound in inner)
    least, most, below, above = map(math.log, (*_AGREES, *_DIFFERS))
    roots: list[float] = []
    if least < value < most:
        roots.append(
            max((value - inner_low) / (value - least), (inner_high - value) / (most - value))
        )
    if value < below:
        roots.append((high - value) / (below - value))
    if value > above:
        roots.append((value - low) / (value - above))
    needed = count * min(roots) ** 2
    return max(1, math.ceil(needed) - count) if math.isfinite(needed) else count
