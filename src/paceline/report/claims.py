"""What "Faster Cascades via Speculative Decoding" claims, and whether it held in these rows.

Two groups of cells are compared by one statistic, in the data and in each resample, the best cell
chosen anew every time. The ladder speed S of a group is the mean, over floors of quality relative to
the target's, of the largest speedup with at least that quality (1 where the group has none above the
target's speed). The claim on low latency also compares the best quality at a high speed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

from paceline.bench.frontier import interval
from paceline.bench.schema import family
from paceline.report.markdown import NOTHING, figure, number, table
from paceline.report.tables import HEAD_ROOM, TARGET_ALONE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from paceline.bench.frontier import Frontier
    from paceline.bench.schema import ResultRow
    from paceline.core.bootstrap import Interval

FLOORS = (1.0, 0.98, 0.95, 0.9)
HIGH_SPEED = 0.75
MARGIN = 0.02
# A resample of fewer timed examples says too little of how others would come out.
LEAST = 20

HELD, BROKEN, UNDECIDED = "held", "did not hold", "not decided here"
UNMEASURED = "not measured"


class Group(NamedTuple):
    """Families that are compared as one; a name stands for all families that begin with that word."""

    name: str
    families: tuple[str, ...]

    def cells(self, frontier: Frontier) -> list[ResultRow]:
        """The group's finished cells."""
        return [row for row in frontier.rows if self.has(family(row.decoding))]

    def has(self, name: str) -> bool:
        """Whether a family is of the group: `sequence_cascade normalised` is of sequence_cascade."""
        return any(f"{name} ".startswith(f"{one} ") for one in self.families)


_PLUG_IN = ("chow", "chow_log", "diff", "diff_log", "bild")
_OPT = ("opt", "opt_log")
_TOKEN = ("token_v1", "token_v2", "token_v3")
_LOSSY = ("lossy", "lenient")

TOKEN = Group("token-specific", _TOKEN)
OTHERS = Group("all other rules", (*_PLUG_IN, *_OPT, *_LOSSY, "lossless"))
OPT = Group("OPT", _OPT)
REMAINING = Group("remaining plug-in and lossy rules", (*_PLUG_IN, *_LOSSY))
CASCADES = Group("speculative cascades", (*_PLUG_IN, *_OPT, *_TOKEN))
LOSSY = Group("lossy speculative decoding", _LOSSY)
SEQUENTIAL = Group("sequential cascades", ("token_cascade", "sequence_cascade", "big_little"))
V1, V2, V3 = (Group(name, (name,)) for name in _TOKEN)
BETA_ONE = Group("beta 1", ("lossy beta 1.0",))
BETA_TUNED = Group("beta tuned", ("lossy beta tuned",))


class Claim(NamedTuple):
    """One comparison: `first` is claimed to be better than `second`, or worse by less than `margin`."""

    label: str
    sentence: str
    first: Group
    second: Group
    statistic: Literal["ladder", "quality at high speed"] = "ladder"
    margin: float = 0.0


CLAIMS = (
    Claim("a", "token-specific rules are best (claimed at temperature 1)", TOKEN, OTHERS),
    Claim("b", "OPT is second", OPT, REMAINING),
    Claim("c", "speculative cascades beat lossy speculative decoding", CASCADES, LOSSY),
    Claim(
        "d1",
        "sequential cascades are not competitive near the target's quality",
        CASCADES,
        SEQUENTIAL,
    ),
    Claim(
        "d2",
        "sequential cascades are better at low latency",
        SEQUENTIAL,
        CASCADES,
        "quality at high speed",
    ),
    Claim("e1", "token-specific V3 is better than V1", V3, V1),
    Claim("e2", "token-specific V3 is better than V2", V3, V2),
    Claim("f", "lossy beta 1 is no worse than tuned", BETA_ONE, BETA_TUNED, margin=MARGIN),
)


class Side(NamedTuple):
    """What one group reached: of the ladder, a figure for each floor as well."""

    num_cells: int
    value: Interval
    by_floor: tuple[Interval, ...]


class Finding(NamedTuple):
    """A claim with its verdict; None where a group has no finished cell."""

    claim: Claim
    verdict: str
    num_cells: tuple[int, int]
    difference: Interval | None = None
    sides: tuple[Side, Side] | None = None


def judge(frontier: Frontier) -> list[Finding]:
    """Every claim, on the finished cells of one temperature."""
    return [_judge(claim, frontier) for claim in CLAIMS]


def _judge(claim: Claim, frontier: Frontier) -> Finding:
    groups = [group.cells(frontier) for group in (claim.first, claim.second)]
    counts = (len(groups[0]), len(groups[1]))
    if 0 in counts:
        return Finding(claim, UNMEASURED, counts)
    if claim.statistic == "ladder":
        floors_GFR = torch.stack([ladder(frontier, cells) for cells in groups])
        values_GR = floors_GFR.mean(1)
        by_floor = [tuple(interval(speed_R) for speed_R in floors_FR) for floors_FR in floors_GFR]
    else:
        speed_R = high_speed(frontier)
        values_GR = torch.stack([quality_at(frontier, cells, speed_R) for cells in groups])
        by_floor = [(), ()]
    difference_R = values_GR[0] - values_GR[1]
    found = interval(difference_R)
    sides = [
        Side(count, interval(value_R), floors)
        for count, value_R, floors in zip(counts, values_GR, by_floor, strict=True)
    ]
    # with hardly a resample in which they differ, neither has been tried
    untried = found.low == found.high == 0 or frontier.num_timed < LEAST
    verdict = UNDECIDED if untried else verdict_of(found, claim.margin)
    return Finding(claim, verdict, counts, found, (sides[0], sides[1]))


def verdict_of(difference: Interval, margin: float = 0.0) -> str:
    """Whether the whole interval lies above -margin, or below it."""
    if difference.low > -margin:
        return HELD
    return BROKEN if difference.high < -margin else UNDECIDED


def ladder(frontier: Frontier, cells: Sequence[ResultRow]) -> Tensor:
    """The largest speedup at each of FLOORS, [F, 1 + R]; S is its mean over the floors."""
    return torch.stack([frontier.speed_at(cells, floor) for floor in FLOORS])


def high_speed(frontier: Frontier) -> Tensor:
    """The 75th percentile of the speeds of all cells but the target and the oracle."""
    left_out = Group("", (TARGET_ALONE, HEAD_ROOM))
    at = [n for n, row in enumerate(frontier.rows) if not left_out.has(family(row.decoding))]
    return frontier.speed_CR[at].quantile(HIGH_SPEED, dim=0)


def quality_at(frontier: Frontier, cells: Sequence[ResultRow], speed_R: Tensor) -> Tensor:
    """The best quality / target's at no less than this speed; 0 where no cell is so fast."""
    at = [frontier.rows.index(row) for row in cells]
    fast_CR = frontier.speed_CR[at] >= speed_R
    return frontier.relative_CR[at].where(fast_CR, 0.0).amax(0)


def claims_text(frontier: Frontier) -> str:
    """The verdicts, and what each group reached."""
    findings = judge(frontier)
    parts = [_verdicts(findings)]
    if any(found.sides for found in findings):
        speed = figure(interval(high_speed(frontier)))
        parts += [_sides(findings), f"The high speed of claim d2: {speed}."]
    return "\n\n".join(parts)


def _verdicts(findings: Sequence[Finding]) -> str:
    header = ["", "claim", "first", "second", "cells", "first - second", "here"]
    lines = [
        [
            found.claim.label,
            found.claim.sentence,
            found.claim.first.name,
            found.claim.second.name,
            f"{found.num_cells[0]} : {found.num_cells[1]}",
            NOTHING if found.difference is None else figure(found.difference),
            found.verdict,
        ]
        for found in findings
    ]
    return table(header, lines)


def _sides(findings: Sequence[Finding]) -> str:
    speeds = [f"speedup at {floor:g}" for floor in FLOORS]
    lines: list[list[str]] = []
    for found in findings:
        claim = found.claim
        if found.sides is None:
            continue
        for group, side in zip((claim.first, claim.second), found.sides, strict=True):
            name = "S" if claim.statistic == "ladder" else claim.statistic
            floors = [figure(one) for one in side.by_floor] or [NOTHING] * len(FLOORS)
            count = str(side.num_cells)
            lines.append([claim.label, group.name, count, name, figure(side.value), *floors])
    return table(["", "group", "cells", "statistic", "value", *speeds], lines)


def explanation() -> str:
    """How the claims were judged, in words."""
    floors = ", ".join(f"{floor:g}" for floor in FLOORS)
    return (
        f"The ladder speed S of a group is the mean, over the floors {floors}, of its largest "
        "speedup with at least that part of the target's quality; it counts as 1 where no cell of "
        "the group has the quality and is faster than the target alone. S of the first group minus "
        "S of the second is computed in the data and in each of the resamples of the examples, the "
        f"best cells chosen anew in each; a claim **{HELD}** if the 95% interval of the difference "
        f"lies above 0, **{BROKEN}** if it lies below, and is **{UNDECIDED}** else, also where both "
        f"groups are the same in at least 95% of the resamples. Claim f asks for no worse, so there "
        f"the line is -{number(MARGIN)} instead of 0. Claim d2 compares instead the best quality / target's among "
        "the cells that are at least as fast as the 75th percentile of all cells (without the target "
        "and the oracle, which is in no group); it counts as 0 where a group has no cell so fast. "
        "Lossless decoding has the target's quality by proof, whatever its samples scored. With fewer "
        f"than {LEAST} timed examples nothing is decided.\n\n"
        "A group with more cells has more chances that one of them looks good by luck (the winner's "
        "curse); choosing anew in each resample shows how unsure the choice is but does not take the "
        "advantage away, so mind the numbers of cells. Each interval is that of one comparison: where "
        "the numbers are alike, one of twenty without any difference is decided all the same."
    )
