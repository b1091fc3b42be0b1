"""Claims of "Faster Cascades via Speculative Decoding", evaluated on the rows of a bench.

Each claim compares pairs of families of cells by the paper's statistic and by measured latency.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

from paceline.bench.comparison import (
    ACCEPTED_AT_QUALITY,
    CALLS_AT_QUALITY,
    FLOORS,
    QUALITY_AT_FEW_CALLS,
    SPEEDUP,
    AtQuality,
    Comparison,
    Group,
    QualityAt,
    Statistic,
    compare,
)
from paceline.core.bootstrap import percentile_interval
from paceline.report.markdown import NOTHING, figure, number, table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.bench.measured_frontier import Frontier
    from paceline.core.bootstrap import Interval

MARGIN = 0.02
LEAST = 40  # examples; half of them choose cells, and fewer than 20 do not show rare differences

HELD, BROKEN, UNDECIDED = "held", "did not hold", "not decided"
UNMEASURED = "not measured"

_PAPER, _OURS = "the paper's", "ours"
SPEED_AT_QUALITY = AtQuality(
    "speedup at the target's quality", f"{_PAPER}: Table 2", SPEEDUP, (1.0,)
)
QUALITY_IN_TIME = QualityAt(
    "quality within the target's latency", f"{_PAPER}: Table 2", SPEEDUP, 1.0
)
REJECTION = ACCEPTED_AT_QUALITY._replace(source=f"{_PAPER}: rejection rate, Figures 3, 10 and 11")
TUNED_CALLS = CALLS_AT_QUALITY._replace(source=f"{_PAPER}: fraction of target calls, E.6")
CASCADE_CALLS = CALLS_AT_QUALITY._replace(source=f"{_PAPER}: fraction of target calls, Figure 1")
CASCADE_QUALITY = QUALITY_AT_FEW_CALLS._replace(source=CASCADE_CALLS.source)
SPEED = AtQuality("measured speedup", f"{_OURS}: latency", SPEEDUP, FLOORS)
QUALITY_AT_SPEED = QualityAt("quality at a high speed", f"{_OURS}: latency", SPEEDUP, None)

CHOW, DIFF, OPT, BILD = Group("chow"), Group("diff"), Group("opt"), Group("bild")
V1, V2, V3 = Group("token_v1"), Group("token_v2"), Group("token_v3")
BETA_ONE, BETA_TUNED = Group("lossy beta 1.0"), Group("lossy beta tuned")
TOKEN_CASCADE = Group("token_cascade")


class Claim(NamedTuple):
    """Each of `firsts` is better than each of `seconds`, or worse by at most `margin`."""

    label: str
    sentence: str
    firsts: tuple[Group, ...]
    seconds: tuple[Group, ...]
    statistics: tuple[Statistic, ...]
    margin: float = 0.0

    @property
    def pairs(self) -> list[tuple[Group, Group]]:
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
        "the speculative cascades Diff, OPT and token-specific V3 are better than lossy "
        "speculative decoding",
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
        (CASCADE_QUALITY, QUALITY_AT_SPEED),
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
    """Verdict on a claim by one statistic; `reason`: why it is not decided."""

    claim: Claim
    statistic: Statistic
    verdict: str
    reason: str
    comparisons: tuple[Comparison, ...]

    @property
    def decisive(self) -> Comparison | None:
        """The comparison with the strongest evidence against the claim."""
        if self.verdict == BROKEN:
            return min(self.comparisons, key=lambda one: one.strict.high)
        return min(self.comparisons, key=lambda one: one.difference.low, default=None)


def judge(frontier: Frontier) -> list[Finding]:
    """Evaluate every claim with each of its statistics on the cells of one temperature."""
    return [_find(claim, statistic, frontier) for claim in CLAIMS for statistic in claim.statistics]


def _find(claim: Claim, statistic: Statistic, frontier: Frontier) -> Finding:
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
        return UNDECIDED, "an interval contains the threshold"
    missing = len(claim.pairs) - len(comparisons)
    if missing:
        return UNDECIDED, f"{missing} of {len(claim.pairs)} pairs not measured"
    return HELD, ""


def verdict_of(difference: Interval, margin: float = 0.0) -> str:
    """Verdict by whether the interval lies above -margin, below it, or contains it."""
    if difference.low > -margin:
        return HELD
    return BROKEN if difference.high < -margin else UNDECIDED


def claims_text(frontier: Frontier) -> str:
    """Table of the verdicts, and table of the values of each family."""
    findings = judge(frontier)
    parts = [_verdicts(findings)]
    if any(found.comparisons for found in findings):
        levels = [
            f"{statistic.name}: {figure(percentile_interval(statistic.least_gain(frontier)))}"
            for statistic in (CASCADE_QUALITY, QUALITY_AT_SPEED)
        ]
        parts += [_sides(findings), f"The levels of claim d2. {'; '.join(levels)}."]
    return "\n\n".join(parts)


def _verdicts(findings: Sequence[Finding]) -> str:
    header = ["", "claim", "evaluated by", "statistic", "pair", "cells", "first - second", "here"]
    lines: list[list[str]] = []
    for found in findings:
        claim, statistic = found.claim, found.statistic
        compared = [NOTHING] * 3
        if (one := found.decisive) is not None:
            cells = f"{one.num_compared} of {one.first.num_cells} : {one.second.num_cells}"
            compared = [_pair(one), cells, figure(one.difference)]
        verdict = f"{found.verdict} ({found.reason})" if found.reason else found.verdict
        names = [claim.label, claim.sentence, statistic.source, statistic.name]
        lines.append([*names, *compared, verdict])
    return table(header, lines)


def _sides(findings: Sequence[Finding]) -> str:
    lines: list[list[str]] = []
    for found in findings:
        for one in found.comparisons:
            for side in (one.first, one.second):
                floors = [figure(value) for value in side.by_floor] or [NOTHING] * len(FLOORS)
                names = [found.claim.label, found.statistic.name, _pair(one), side.name]
                cells = f"{one.num_compared} of {side.num_cells}"
                lines.append([*names, cells, figure(side.value), *floors])
    at = [f"at quality {floor:g}" for floor in FLOORS]
    return table(["", "statistic", "pair", "family", "cells", "value", *at], lines)


def _pair(one: Comparison) -> str:
    return f"{one.first.name} : {one.second.name}"


def explanation() -> str:
    """Explanation of the statistics and verdicts."""
    floors = ", ".join(f"{floor:g}" for floor in FLOORS)
    return (
        "Each claim is evaluated with the paper's statistic and with measured latency. A claim "
        "compares pairs of families of cells; the table shows the pair with the strongest evidence "
        "against the claim.\n\n"
        "- **speedup at the target's quality**: the largest speedup among the cells with at least "
        "the target's quality; 1 if a family has none (Table 2).\n"
        "- **quality within the target's latency**: the best quality / target's among the cells "
        "that are at least as fast as the target; 0 if a family has none (Table 2).\n"
        "- **acceptance rate**: 1 - rejection rate. For each floor of quality / target's "
        f"({floors}), the largest value among the cells that reach the floor, 0 if a family has "
        "none; the mean over the floors. The paper plots quality against the rejection rate "
        "(Figures 3, 10, 11).\n"
        "- **target calls saved per token**: the same with 1 - target calls / tokens. The paper "
        "plots quality against the fraction of target calls where latency would be unfair: a tuned "
        "beta costs a solver and one more draft pass (E.6), and cascades without speculation are a "
        "different program (Figure 1). Here the token cascade pays the target's pass over the "
        "prompt even if the draft answers alone, and its rule runs outside the compiled code. The "
        "measured latency of claims d1 and d2 is therefore biased against it; the paper's Figure 2 "
        "compares latency.\n"
        "- **measured speedup**: the same with the speedup, and at least 1.\n"
        "- **quality at few target calls**, **quality at a high speed**: the best quality / "
        "target's among the cells whose saving is in the top quarter of all cells (without the "
        "target and oracles); 0 if a family has none.\n\n"
        "The cells are chosen on a random half of the examples, and first - second is measured on "
        "the other half. Both halves are resampled, and the cells are chosen anew each time. "
        f"A claim **{HELD}** if the 95% interval of every pair "
        f"lies above the threshold. It **{BROKEN}** if the interval of a pair lies below it, at "
        f"95% for all pairs together. Otherwise it is **{UNDECIDED}**. The threshold is 0, and "
        f"-{number(MARGIN)} for claim f (no worse). With fewer than {LEAST} examples, no claim is "
        "decided.\n\n"
        "A finer grid is an advantage. Both families of a pair therefore count with the cell "
        "number of the smaller one: the larger family counts with the expected best over all "
        "choices of that many of its cells. Lossless decoding has the target's quality by proof. "
        "Each interval covers one "
        "comparison: without any difference, one comparison in twenty is still decided."
    )
