"""Decides whether an engine's counts agree with the prediction: a test of equivalence.

Let R be tokens per target call, served / predicted, paired by request, with its 95% interval.

- differs: the interval of R lies outside 0.98 to 1.02, or the interval of a position's acceptance,
  served - predicted, lies outside -0.02 to 0.02. The intervals of G positions have 95% confidence
  together (Bonferroni: 1 - 0.05 / G each);
- agrees: else, if the interval of R lies within 0.95 to 1.05;
- undecided: otherwise, and with fewer than 8 requests or 50 blocks, which may show no spread.

In simulations of 8 to 256 requests with 63 drafted positions each
(`tests/statistical/test_agreement.py`), an exact engine is said to differ in at most 2% of the
runs, and an engine with R = 0.95 to agree in at most 2.5%.
"""

# B requests, T positions, G drafted tokens of a block
from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from paceline.config import StrictModel
from paceline.core.bootstrap import LEAST_UNITS, Interval, difference_interval, ratio_interval
from paceline.core.speed import accepted_by_position, drafted_tokens

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from paceline.core.text_scores import TextScores
    from paceline.engines.contract import EngineClass, Served
    from paceline.results.row import Row

_AGREES, _DIFFERS = (0.95, 1.05), (0.98, 1.02)
_TOLERANCE = 0.02  # of the acceptance at a position
_LEAST_BLOCKS = 50
_ERROR = 0.05


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


def predicted_counts(
    scores: TextScores,
    gamma: int,
    max_new_tokens: int,
    engine: EngineClass,
) -> Counts:
    """Expected counts of the engine over these texts.

    Positions after the end of a text, where the draft is unknown, count with the text's mean.
    """
    read = scores.whole if engine.drafts_first_token else scores.drafted
    acceptance_BT, survival_BT, mask_BT = read
    budget = max_new_tokens - (not engine.drafts_first_token)
    length_B = mask_BT.sum(-1)
    budget_B, starts_before = torch.full_like(length_B, budget), None
    if engine.counts_behind_end:
        budget_B, starts_before = length_B + gamma + 1, length_B
        acceptance_BT, survival_BT, extended_BT = (
            _extended(part, mask_BT, gamma) for part in (acceptance_BT, survival_BT, mask_BT)
        )
        mask_BT = extended_BT.bool()
    elif not engine.counts_empty_blocks:
        starts_before = budget_B - 1
    by_position_BG, blocks_B = accepted_by_position(
        *(acceptance_BT, survival_BT, mask_BT, gamma), budget=budget_B, starts_before=starts_before
    )
    if engine.counts_behind_end:
        drafted_B = gamma * blocks_B
    else:
        drafted_B = drafted_tokens(survival_BT, mask_BT, gamma, budget=budget_B)
    return Counts(blocks_B, drafted_B, by_position_BG.sum(-1), by_position_BG)


def _extended(part: Tensor, mask_BT: Tensor, gamma: int) -> Tensor:
    """Append `gamma` positions; what lies behind a text has the row's mean, by place of a block.

    [B, T] -> [B, T + gamma], or [B, T, G] -> [B, T + gamma, G].
    """
    part_BTG = part[..., None] if part.ndim == 2 else part
    wide_BTG = torch.nn.functional.pad(part_BTG.double(), (0, 0, 0, gamma))
    starts_T1 = torch.arange(wide_BTG.shape[1])[:, None]
    length_B11 = mask_BT.sum(-1)[:, None, None]
    inside_BTG = starts_T1 + torch.arange(wide_BTG.shape[2]) < length_B11
    sums_B1G, counts_B1G = (x.sum(1, keepdim=True) for x in (wide_BTG * inside_BTG, inside_BTG))
    found_BTG = torch.where(inside_BTG, wide_BTG, sums_B1G / counts_B1G.clamp(min=1))
    found_BTG = found_BTG * (starts_T1 < length_B11 + gamma)
    return found_BTG[..., 0] if part.ndim == 2 else found_BTG


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
        num_different: At temperature 0, requests with another number of blocks than predicted;
            rounding may swap tokens with nearly equal logits. Else None.
    """

    agrees: bool
    decided: bool = True
    reason: str
    ratio: Interval
    num_different: int | None = None

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


def decide_agreement(served: Counts, predicted: Counts, *, greedy: bool = False) -> Agreement:
    """Decide by the rules above.

    `predicted`: expected counts. `greedy`: at temperature 0, where the text decides the counts.
    """
    count, blocks = len(served.blocks_B), int(served.blocks_B.sum())
    tokens, blocks_of = predicted.tokens_and_blocks
    ratio = ratio_interval(served.tokens_and_blocks, (blocks_of, tokens))
    different = None
    if greedy:
        different = int(((served.blocks_B - predicted.blocks_B).abs().round() > 0).sum())

    def verdict(reason: str, *, agrees: bool = False, decided: bool = True) -> Agreement:
        return Agreement(
            agrees=agrees, decided=decided, reason=reason, ratio=ratio, num_different=different
        )

    if count < LEAST_UNITS or blocks < _LEAST_BLOCKS:
        reason = (
            f"{count} requests with {blocks} blocks, but a verdict needs {LEAST_UNITS} and "
            f"{_LEAST_BLOCKS}; raise num_prompts and give as many prompts"
        )
        return verdict(reason, decided=False)
    words = "" if not different else f"; {different} of {count} requests have other counts"
    if off := list(_shown_to_differ(served, predicted, ratio)):
        return verdict(f"{'; '.join(off)}{words}")
    figure = f"tokens per target call are {ratio} times the prediction"
    if _AGREES[0] <= ratio.low and ratio.high <= _AGREES[1]:
        return verdict(f"{figure}{words}", agrees=True)
    reason = (
        f"{figure}, neither shown to be within 5% of it nor to be off by 2%{words}; raise "
        "num_prompts and give as many prompts"
    )
    return verdict(reason, decided=False)


def _shown_to_differ(served: Counts, predicted: Counts, ratio: Interval) -> Iterator[str]:
    if ratio.high < _DIFFERS[0] or ratio.low > _DIFFERS[1]:
        yield f"tokens per target call, served / predicted, {ratio}"
    if served.by_position_BG is None or predicted.by_position_BG is None:
        return
    columns = served.by_position_BG.unbind(-1), predicted.by_position_BG.unbind(-1)
    confidence = 1 - _ERROR / len(columns[0])
    for position, (ours_B, theirs_B) in enumerate(zip(*columns, strict=True)):
        over, under = (ours_B, served.blocks_B), (theirs_B, predicted.blocks_B)
        value = over[0].sum() / over[1].sum() - under[0].sum() / under[1].sum()
        if abs(float(value)) <= _TOLERANCE:  # the interval holds it
            continue
        difference = difference_interval([over], [under], confidence=confidence)
        if difference.low > _TOLERANCE or difference.high < -_TOLERANCE:
            yield f"acceptance at position {position}, served - predicted, {difference}"
