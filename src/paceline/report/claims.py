"""What "Faster Cascades via Speculative Decoding" claims, and whether it held in these rows.

Each claim compares families of cells in pairs. It is judged by the statistic that the paper uses for
it, and beside it by measured latency. `comparison.py` defines the statistics.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

from paceline.core.bootstrap import percentile_interval
from paceline.report.comparison import (
    ACCEPTED,
    CALLS_SAVED,
    SPEEDUP,
    AtQuality,
    Comparison,
    Group,
    QualityAt,
    Statistic,
    compare,
)
from paceline.report.markdown import NOTHING, figure, number, table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.bench.measured_frontier import Frontier
    from paceline.core.bootstrap import Interval

FLOORS = (1.0, 0.98, 0.95, 0.9)
MARGIN = 0.02
# A resample of fewer examples says too little of how others would come out.
LEAST = 20

HELD, BROKEN, UNDECIDED = "held", "did not hold", "not decided"
UNMEASURED = "not measured"

_PAPER, _OURS = "the paper's", "ours"
SPEED_AT_QUALITY = AtQuality(
    "speedup at the target's quality", f"{_PAPER}: Table 2", SPEEDUP, (1.0,)
)
QUALITY_IN_TIME = QualityAt(
    "quality within the target's latency", f"{_PAPER}: Table 2", SPEEDUP, 1.0
)
REJECTION = AtQuality(
    "accepted part of the judged draft tokens",
    f"{_PAPER}: rejection rate, Figures 3, 10 and 11",
    ACCEPTED,
    FLOORS,
)
TUNED_CALLS = AtQuality(
    "target calls saved a token", f"{_PAPER}: fraction of target calls, E.6", CALLS_SAVED, FLOORS
)
CASCADE_CALLS = AtQuality(
    "target calls saved a token",
    f"{_PAPER}: fraction of target calls, Figure 1",
    CALLS_SAVED,
    FLOORS,
)
QUALITY_AT_FEW_CALLS = QualityAt(
    "quality at few target calls",
    f"{_PAPER}: fraction of target calls, Figure 1",
    CALLS_SAVED,
    None,
)
SPEED = AtQuality("measured speedup", f"{_OURS}: latency", SPEEDUP, FLOORS)
QUALITY_AT_SPEED = QualityAt("quality at a high speed", f"{_OURS}: latency", SPEEDUP, None)

CHOW, DIFF, OPT, BILD = Group("chow"), Group("diff"), Group("opt"), Group("bild")
V1, V2, V3 = Group("token_v1"), Group("token_v2"), Group("token_v3")
BETA_ONE, BETA_TUNED = Group("lossy beta 1.0"), Group("lossy beta tuned")
TOKEN_CASCADE = Group("token_cascade")


class Claim(NamedTuple):
    """Every one of `firsts` is claimed to be better than every one of `seconds`.

    Attributes:
        margin: What the first may be worse by.
    """

    label: str
    sentence: str
    firsts: tuple[Group, ...]
    seconds: tuple[Group, ...]
    statistics: tuple[Statistic, ...]
    margin: float = 0.0

    @property
    def pairs(self) -> list[tuple[Group, Group]]:
        """What is compared."""
        return list(itertools.product(self.firsts, self.seconds))


_TABLE_2 = (SPEED_AT_QUALITY, QUALITY_IN_TIME)
CLAIMS = (
    Claim(
        "a",
        "token-specific V3 is better than every other rule (claimed at temperature 1)",
        (V3,),
        (OPT, DIFF, CHOW, BILD, BETA_ONE),
        (*_TABLE_2, REJECTION, SPEED),
    ),
    Claim(
        "b",
        "OPT is second: better than every rule but token-specific V3",
        (OPT,),
        (DIFF, CHOW, BILD, BETA_ONE),
        (*_TABLE_2, SPEED),
    ),
    Claim(
        "c",
        "the speculative cascades Diff, OPT and token-specific V3 are better than lossy speculative "
        "decoding",
        (DIFF, OPT, V3),
        (BETA_ONE,),
        (*_TABLE_2, SPEED),
    ),
    Claim(
        "d1",
        "speculative cascades cost less than the token cascade near the target's quality",
        (CHOW, DIFF, OPT, V3),
        (TOKEN_CASCADE,),
        (CASCADE_CALLS, SPEED),
    ),
    Claim(
        "d2",
        "the token cascade answers better at low cost than speculative cascades",
        (TOKEN_CASCADE,),
        (CHOW, DIFF, OPT, V3),
        (QUALITY_AT_FEW_CALLS, QUALITY_AT_SPEED),
    ),
    Claim("e1", "token-specific V3 is better than V1", (V3,), (V1,), (REJECTION, SPEED)),
    Claim("e2", "token-specific V3 is better than V2", (V3,), (V2,), (REJECTION, SPEED)),
    Claim(
        "f",
        "lossy speculative decoding with beta 1 is no worse than with a tuned beta",
        (BETA_ONE,),
        (BETA_TUNED,),
        (TUNED_CALLS, SPEED),
        margin=MARGIN,
    ),
)


class Finding(NamedTuple):
    """A claim by one statistic, with its verdict and, where it is not decided, the reason."""

    claim: Claim
    statistic: Statistic
    verdict: str
    reason: str
    comparisons: tuple[Comparison, ...]

    @property
    def decisive(self) -> Comparison | None:
        """The comparison that speaks most against the claim; of a broken one, that which broke it."""
        if self.verdict == BROKEN:
            return min(self.comparisons, key=lambda one: one.strict.high)
        return min(self.comparisons, key=lambda one: one.difference.low, default=None)


def judge(frontier: Frontier) -> list[Finding]:
    """Every claim by each of its statistics, on the finished cells of one temperature."""
    return [
        _judge(claim, statistic, frontier) for claim in CLAIMS for statistic in claim.statistics
    ]


def _judge(claim: Claim, statistic: Statistic, frontier: Frontier) -> Finding:
    measured = [pair for pair in claim.pairs if all(group.cells(frontier) for group in pair)]
    found = [
        compare(frontier, first, second, statistic, len(measured)) for first, second in measured
    ]
    comparisons = tuple(one for one in found if one is not None)
    verdict, reason = _verdict(claim, statistic, frontier, comparisons)
    return Finding(claim, statistic, verdict, reason, comparisons)


def _verdict(
    claim: Claim, statistic: Statistic, frontier: Frontier, comparisons: Sequence[Comparison]
) -> tuple[str, str]:
    if not comparisons:
        return UNMEASURED, "a side has no finished cell"
    count = statistic.cost.num_examples(frontier)
    if count < LEAST:
        return UNDECIDED, f"{count} examples, fewer than {LEAST}"
    tried = [one for one in comparisons if not one.is_untried]
    if any(verdict_of(one.strict, claim.margin) == BROKEN for one in tried):
        return BROKEN, ""
    if len(tried) < len(comparisons):
        return UNDECIDED, "neither side of a pair reaches the quality"
    if any(verdict_of(one.difference, claim.margin) != HELD for one in tried):
        return UNDECIDED, "an interval contains the line"
    missing = len(claim.pairs) - len(comparisons)
    if missing:
        return UNDECIDED, f"{missing} of {len(claim.pairs)} pairs not measured"
    return HELD, ""


def verdict_of(difference: Interval, margin: float = 0.0) -> str:
    """Whether the whole interval lies above -margin, or below it."""
    if difference.low > -margin:
        return HELD
    return BROKEN if difference.high < -margin else UNDECIDED


def claims_text(frontier: Frontier) -> str:
    """The verdicts, and what each family reached."""
    findings = judge(frontier)
    parts = [_verdicts(findings)]
    if any(found.comparisons for found in findings):
        levels = [
            f"{statistic.name}: {figure(percentile_interval(statistic.least_gain(frontier)))}"
            for statistic in (QUALITY_AT_FEW_CALLS, QUALITY_AT_SPEED)
        ]
        parts += [_sides(findings), f"The levels of claim d2. {'; '.join(levels)}."]
    return "\n\n".join(parts)


def _verdicts(findings: Sequence[Finding]) -> str:
    header = ["", "claim", "judged by", "statistic", "pair", "cells", "first - second", "here"]
    lines: list[list[str]] = []
    for found in findings:
        one = found.decisive
        cells = NOTHING
        if one is not None:
            cells = f"{one.num_compared} of {one.first.num_cells} : {one.second.num_cells}"
        lines.append(
            [
                found.claim.label,
                found.claim.sentence,
                found.statistic.source,
                found.statistic.name,
                NOTHING if one is None else f"{one.first.name} : {one.second.name}",
                cells,
                NOTHING if one is None else figure(one.difference),
                f"{found.verdict} ({found.reason})" if found.reason else found.verdict,
            ]
        )
    return table(header, lines)


def _sides(findings: Sequence[Finding]) -> str:
    lines: list[list[str]] = []
    for found in findings:
        for one in found.comparisons:
            for side in (one.first, one.second):
                floors = [figure(value) for value in side.by_floor] or [NOTHING] * len(FLOORS)
                pair = f"{one.first.name} : {one.second.name}"
                lines.append(
                    [
                        found.claim.label,
                        found.statistic.name,
                        pair,
                        side.name,
                        f"{one.num_compared} of {side.num_cells}",
                        figure(side.value),
                        *floors,
                    ]
                )
    at = [f"at quality {floor:g}" for floor in FLOORS]
    return table(["", "statistic", "pair", "family", "cells", "value", *at], lines)


def explanation() -> str:
    """How the claims were judged, in words."""
    floors = ", ".join(f"{floor:g}" for floor in FLOORS)
    return (
        "Each claim is judged by the statistic that the paper uses for it, and beside it by measured "
        "latency. A claim compares families of cells in pairs; the table shows the pair that speaks "
        "most against it.\n\n"
        "- **speedup at the target's quality**: the largest speedup among the cells with at least the "
        "target's quality, 1 where a family has none (Table 2).\n"
        "- **quality within the target's latency**: the best quality / target's among the cells that "
        "are no slower than the target, 0 where a family has none (Table 2).\n"
        "- **accepted part of the judged draft tokens**: 1 - rejection rate, the mean over the floors "
        f"{floors} of the largest value among the cells with at least that part of the target's "
        "quality, 0 where a family has none. The paper plots quality against the rejection rate "
        "(Figures 3, 10, 11).\n"
        "- **target calls saved a token**: the same with 1 - target calls / tokens. The paper plots "
        "quality against the fraction of target calls where latency would be unfair: a tuned beta "
        "costs a solver and one more draft pass (E.6), and cascades that do not speculate are another "
        "program (Figure 1). Here the token cascade pays the target's pass over the prompt even where "
        "the draft answers alone, and judges outside of the compiled code; the paper's Figure 2 "
        "compares it by latency, so mind that the measured latency of claims d1 and d2 speaks against "
        "it.\n"
        "- **measured speedup**: the same with the speedup, 1 where a family has no cell with the "
        "quality that is faster than the target.\n"
        "- **quality at few target calls**, **quality at a high speed**: the best quality / target's "
        "among the cells that save more than three quarters of all cells do (without the target and "
        "oracles), 0 where a family has none.\n\n"
        "First - second is computed in the data and in each resample of the examples, the best cells "
        f"chosen anew in each. A claim **{HELD}** if the 95% interval of every pair lies above the "
        f"line, and **{BROKEN}** if that of some pair lies below it, at 95% for all pairs together; "
        f"otherwise it is **{UNDECIDED}**. The line is 0; for claim f, which says no worse, it is "
        f"-{number(MARGIN)}. With fewer than {LEAST} examples, nothing is decided.\n\n"
        "The best of many cells looks better by luck (the winner's curse), so both families of a pair "
        "count with as many cells: the larger one with the expected best of as many of its cells as "
        "the smaller one has, over all choices of them. Lossless decoding has the target's quality "
        "by proof, whatever its samples scored. Each interval is that of one comparison: one of twenty "
        "without any difference is decided all the same."
    )
