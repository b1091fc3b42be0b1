"""Claims, and the verdict on each: Student's t over draws, fixed before the rows.

A draw is one repetition with everything drawn anew: training texts, the draft's start, the order of
training, test examples. A claim's statistic gives one number of each draw. Its interval has the
level 0.05 / number of claims, divided by their tasks and statistics, two-sided, so that the
probability of any wrong sign is at most 5%.

    no gain that matters   the interval is below the margin, and not below 0
    does not hold          it is below 0 (of `not_less`: below -margin)
    holds                  it is above 0 (of `not_less`: above -margin), and reaches the margin
    undecided              anything else
"""

from __future__ import annotations

import functools
import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import yaml
from scipy import stats

if TYPE_CHECKING:
    from collections.abc import Sequence

Verdict = Literal["holds", "does not hold", "no gain that matters", "undecided"]
PAPERS = Path(__file__).parent
NAMES = ("distillspec", "faster_cascades", "direct_alignment")
ERROR = 0.05
WORSE: tuple[Verdict, ...] = ("does not hold", "no gain that matters", "undecided")


@dataclass(frozen=True)
class Claim:
    """A sentence of a paper, and the test of it.

    Attributes:
        id: Such as D1.
        says: The paper's sentence.
        place: Section, figure or table of the paper.
        words: The statistic in words.
        statistics: The same as the paper's `figures.py` takes it; of several, each must hold.
        margin: The smallest effect that matters, in the statistic's unit.
        spread: Standard deviation over draws, for the power.
        size: The effect that the paper reports, in the same unit; None: it reports none.
        not_less: True for "performs on par": the statistic must be above -margin.
        tasks: The tasks in each of which it must hold; empty: those of the paper's study.
    """

    id: str
    says: str
    place: str
    words: str
    statistics: tuple[dict[str, Any], ...]
    margin: float
    spread: float
    size: float | None = None
    not_less: bool = False
    tasks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Interval:
    """A mean over draws."""

    mean: float
    low: float
    high: float
    num_draws: int


def read_claims(name: str) -> list[Claim]:
    """The claims of one paper; the key `statistic` has one or a list."""
    return _claims((PAPERS / name / "claims.yaml").read_text("utf-8"))


@functools.cache
def _claims(text: str) -> list[Claim]:
    claims: list[Claim] = []
    for one in yaml.safe_load(text):
        found = one.pop("statistic")
        claims.append(Claim(**one, statistics=tuple(found if isinstance(found, list) else [found])))
    return claims


def digest_of_claims() -> str:
    """Of the claims of all papers, which share the error; every row has it."""
    texts = [(PAPERS / name / "claims.yaml").read_bytes() for name in NAMES]
    return hashlib.sha256(b"".join(texts)).hexdigest()[:12]


def error_of_a_claim() -> float:
    """Probability that a claim gets the wrong sign."""
    return ERROR / sum(len(read_claims(name)) for name in NAMES)


def interval(values: Sequence[float], error: float) -> Interval:
    """Student's t interval of the mean over draws."""
    values_N = np.asarray(values, dtype=float)
    mean, count = float(values_N.mean()), len(values_N)
    if count < 2:
        return Interval(mean, -math.inf, math.inf, count)
    half = stats.t.ppf(1 - error / 2, count - 1) * values_N.std(ddof=1) / math.sqrt(count)
    return Interval(mean, mean - half, mean + half, count)


def percent(found: Interval) -> str:
    """An interval of the logarithm of a ratio in percent, such as `+5.1% (+3.9 to +6.3)`."""
    mean, low, high = (100 * math.expm1(value) for value in (found.mean, found.low, found.high))
    return f"{mean:+.1f}% ({low:+.1f} to {high:+.1f})"


def verdict(claim: Claim, found: Interval) -> Verdict:
    """What the interval says of the claim."""
    least = -claim.margin if claim.not_less else 0.0
    if found.high < least:
        return "does not hold"
    if found.high < claim.margin and not claim.not_less:
        return "no gain that matters"
    return "holds" if found.low > least else "undecided"


def verdict_in_each(claim: Claim, found: Sequence[Interval]) -> Verdict:
    """Of several statistics or tasks: the worst verdict, so it holds if it does in each."""
    verdicts = {verdict(claim, one) for one in found}
    return next(one for one in (*WORSE, "holds") if one in verdicts)


def power(claim: Claim, num_draws: int, error: float) -> float | None:
    """Probability that the claim holds if the effect is the paper's; None: it reports none."""
    if claim.size is None:
        return None
    effect = claim.size + (claim.margin if claim.not_less else 0.0)
    shift = effect / claim.spread * math.sqrt(num_draws)
    quantile = stats.t.ppf(1 - error / 2, num_draws - 1)
    return float(stats.nct.sf(quantile, num_draws - 1, shift))
