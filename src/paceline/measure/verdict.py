"""Verdicts on a draft (GO, NO-GO, UNDECIDED, TOO FEW), with a reason in one sentence.

Without timed requests, a verdict is on the expected speedups of all gammas. GO needs one gamma
above 1, so the error rate of a lower bound, 2.5%, is divided by the number of gammas (Bonferroni).
NO-GO needs all below 1, so an upper bound keeps its 2.5%. Either verdict is wrong in at most 2.5%
of measurements.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from paceline.config import StrictModel
from paceline.core.bootstrap import LEAST_UNITS, Interval, least_values
from paceline.measure.results import gamma_of
from paceline.results.figures import FIGURES
from paceline.results.row import select

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.results.row import Row

_ERROR_RATE = 0.05
_MOST_SPREAD = 3  # of an interval's ends; about 1.5 with 8 requests on an idle machine
_DOUBTFUL_SPREAD = 2  # where the interval of timed requests includes 1
_UNLIKE = "the timings differ too much from each other"


class Verdict(StrictModel):
    """Whether to serve the draft, and why.

    Attributes:
        go: True if serving with the draft is faster.
        decided: False without a verdict: the interval includes 1, or too few requests were
            measured. Then `go` is false.
        includes_one: True if there is no verdict because the interval of the speedup includes 1, or
            because it is from disturbed timings.
        gamma: Drafted tokens per block of the speedup.
        reason: One sentence.
        next: What to do next, in one sentence; empty if the reason says it.
    """

    go: bool
    decided: bool = True
    includes_one: bool = False
    gamma: int = 0
    reason: str
    next: str = ""

    def __str__(self) -> str:
        return f"{self.word}: {self.reason}"

    @property
    def word(self) -> str:
        """`GO`, `NO-GO`, `UNDECIDED` or `TOO FEW`."""
        if self.decided:
            return "GO" if self.go else "NO-GO"
        return "UNDECIDED" if self.includes_one else "TOO FEW"

    @property
    def exit_code(self) -> int:
        """Of the command line: 0 GO, 1 NO-GO, 3 no verdict."""
        if not self.decided:
            return 3
        return 0 if self.go else 1


def best_code(codes: Sequence[int]) -> int:
    """Of several verdicts: 0 if any is GO, 1 if all are NO-GO, else 3."""
    return 0 if 0 in codes else max(codes)


def decide(acceptance: Interval, best: Row, requests: Row, *, disturbed: bool = False) -> Verdict:
    """GO if the whole interval of the measured speedup is above 1, NO-GO if it is below.

    UNDECIDED if it includes 1, TOO FEW with fewer than 8 requests (`core.bootstrap.LEAST_UNITS`).
    `best`: the row of the scored texts, with blocks of the gamma of the timed `requests`.
    `disturbed`: the costs of blocks are wrong, so the reason does not name a break-even; the
    requests are interleaved.
    """
    where = f"at gamma {gamma_of(best)}"
    speedup = FIGURES["speedup"].measure(requests)
    standing = f"acceptance {acceptance.value:.3f}"
    if not disturbed:
        standing = _standing(acceptance, best, faster=speedup.low > 1)
    return _by_requests(speedup, requests, where, standing, "timed_prompts")


def decide_served(speedup: Interval, counted: Row, engine: str) -> Verdict:
    """As `decide`, of whole requests in an engine; `counted`: the row of its counters."""
    where = f"in {engine} at gamma {gamma_of(counted)}"
    standing = f"{FIGURES['block_efficiency'].value(counted):.2f} tokens per target call"
    return _by_requests(speedup, counted, where, standing, "num_prompts", "raise num_prompts")


def _by_requests(
    speedup: Interval, counted: Row, where: str, standing: str, setting: str, advice: str = ""
) -> Verdict:
    gamma, count = gamma_of(counted), len(counted.units)
    if count < LEAST_UNITS:
        measured = f"measured {speedup.value:.2f}x {where}"
        return _too_few(measured, gamma, count, "request", setting)
    figure = f"measured {speedup.text('.2f', 'x')} {where}"
    return _by_interval(figure, gamma, speedup, standing, advice)


def decide_by_expected(
    acceptance: Interval, rows: Sequence[Row], remark: str = "", disturbed: str = ""
) -> Verdict:
    """As `decide`, by the expected speedups of all gammas; the gamma is the fastest that decides.

    GO if some gamma's lower limit, with an allowance for their number, is above 1, NO-GO if every
    gamma's whole interval is below. TOO FEW with fewer than 8 texts.

    Args:
        acceptance: On the scored texts.
        rows: Of the scored texts, with the blocks of each gamma and their costs.
        remark: What the intervals leave out.
        disturbed: Why the costs are wrong; then there is no verdict.
    """
    figure, confidence = FIGURES["expected_speedup"], 1 - _ERROR_RATE / len(rows)  # Bonferroni

    def limit(row: Row) -> float:
        return figure.measure(row, confidence=confidence).low

    def support(row: Row) -> tuple[bool, bool, float]:
        value = figure.value(row)  # which its intervals hold
        above = value > 1 and limit(row) > 1
        return above, value >= 1 or figure.measure(row).high >= 1, value

    best = max(rows, key=support)
    count, speedup, gamma = len(best.units), figure.measure(best), gamma_of(best)
    engine = best.setting.get("engine")
    where = f"{f' in {engine}' if engine else ''} at gamma {gamma}"
    if count < LEAST_UNITS:
        expected = f"expected {speedup.value:.2f}x{where}"
        return _too_few(expected, gamma, count, "text", "num_prompts")
    if disturbed:
        reason = f"expected {speedup.text('.2f', 'x')}{where}, but {disturbed}"
        return Verdict(go=False, decided=False, includes_one=True, gamma=gamma, reason=reason)
    standing = _standing(acceptance, best)
    if engine:
        tau, needed = FIGURES["block_efficiency"].value(best), best.totals["block_cost"]
        side = _side(Interval(1.0, 1.0, 1.0), speedup)
        standing = f"{tau:.2f} tokens per target call are {side} the break-even {needed:.2f}"
        standing = f"{standing}; {remark}" if remark else standing
    advice = ""
    if "block_cost" not in best.bounds:
        speedup = Interval(speedup.value, 0.0, math.inf)
        advice = f"the costs have no interval; set pass_repeats={least_values(0.95)} or more"
    figure_words = f"expected {speedup.text('.2f', 'x')}{where}"
    if speedup.low > 1 >= limit(best):
        chosen = f"with an allowance for the best of {len(rows)} gammas"
        reason = f"{figure_words}: {chosen} its lower limit is {limit(best):.2f}; {standing}"
        return Verdict(go=False, decided=False, includes_one=True, gamma=gamma, reason=reason)
    return _by_interval(figure_words, gamma, speedup, standing, advice)


def _by_interval(figure: str, gamma: int, speedup: Interval, standing: str, advice: str) -> Verdict:
    if _MOST_SPREAD * speedup.low < speedup.high < math.inf:
        reason = f"{figure}: {_UNLIKE}"
        return Verdict(go=False, decided=False, includes_one=True, gamma=gamma, reason=reason)
    if speedup.low > 1:
        return Verdict(go=True, gamma=gamma, reason=f"{figure}; {standing}")
    if speedup.high < 1:
        reason = f"{figure}, slower than no draft; {standing}"
        return Verdict(go=False, gamma=gamma, reason=reason)
    parts = filter(None, (f"{figure}: the interval includes 1", standing, advice))
    reason = "; ".join(parts)
    return Verdict(go=False, decided=False, includes_one=True, gamma=gamma, reason=reason)


def _standing(acceptance: Interval, best: Row, *, faster: bool = True) -> str:
    """Acceptance and break-even; `faster`: whether requests were faster with the draft."""
    if "break_even_acceptance" not in best.totals:
        return f"no acceptance breaks even at gamma {gamma_of(best)}"
    needed = needed_acceptance(best)
    side = _side(needed, acceptance)
    words = f"acceptance {acceptance.value:.3f} is {side} the break-even {needed.value:.3f}"
    if side == "above" and not faster:
        return f"{words}, which leaves out prompts and the work between passes"
    return words


def needed_acceptance(row: Row) -> Interval:
    """The break-even acceptance with the interval of the costs; exact if they have none."""
    value = row.totals["break_even_acceptance"]
    return Interval(value, *row.bounds.get("break_even_acceptance", (value, value)))


def _side(border: Interval, figure: Interval) -> str:
    """Where the whole interval of a figure lies."""
    if figure.low > border.high:
        return "above"
    return "below" if figure.high < border.low else "near"


_MOST_FACTOR = 20  # of units to measure, beyond which a verdict is not worth its time


def next_step(
    verdict: Verdict,
    acceptance: Interval,
    rows: Sequence[Row],
    speedup: Interval,
    trained: float,
    options: str,
    *,
    most_drafted: int,
    timed: int,
    may_sample: bool = False,
) -> str:
    """What to do after a verdict.

    Args:
        verdict: The verdict, on costs that were not disturbed.
        acceptance: On the scored texts.
        rows: Of the scored texts, with the blocks of each gamma and their costs.
        speedup: That of the verdict.
        trained: Acceptance on the held-out text of the draft's training; NaN if it is not known.
        options: Models and prompts as options of a command.
        most_drafted: Largest gamma that fits the texts.
        timed: Number of timed prompts, if the speedup is that of timed requests; else 0.
        may_sample: True if drafts are greedy while the target samples.
    """
    if not verdict.decided and not verdict.includes_one:
        return ""
    spread = _DOUBTFUL_SPREAD if timed and not verdict.decided else _MOST_SPREAD
    if speedup.high > spread * speedup.low:
        return f"stop other programs and run again: {_UNLIKE}"
    if verdict.go:
        most = max(map(gamma_of, rows))
        longer = most > 1 and verdict.gamma == most and 2 * most <= most_drafted
        if longer and "engine" not in rows[0].setting:
            return f"try longer blocks: --gammas {most},{most + most // 2},{2 * most}"
        return f"paceline verify {options} --self-test"
    needed = {
        gamma_of(row): row.totals["break_even_acceptance"]
        for row in rows
        if "break_even_acceptance" in row.totals
    }
    or_else = "; or let the engine sample its drafts: measure without --draft-temperature"
    or_else = or_else if may_sample else ""
    if not verdict.decided and acceptance.high >= min(needed.values(), default=0.0):
        return _more_data(verdict.gamma, rows, speedup, timed=timed) + or_else
    return _better_draft(verdict.gamma, acceptance, needed, trained) + or_else


def _more_data(gamma: int, rows: Sequence[Row], speedup: Interval, *, timed: int) -> str:
    """The next step where an interval includes 1."""
    (judged,) = select(rows, gamma=gamma)
    if not timed and "block_cost" not in judged.bounds and "engine" not in judged.setting:
        return f"give the costs an interval: --pass-repeats {least_values(0.95)}"
    factor = ((speedup.high - speedup.low) / 2 / max(abs(speedup.value - 1), 1e-9)) ** 2
    if factor > _MOST_FACTOR:
        return (
            f"align the draft longer (paceline align), or serve without it: a speedup this near 1 "
            f"is decided by more than {_MOST_FACTOR * (timed or len(judged.units)):,} prompts"
        )
    times = max(2, math.ceil(1.2 * factor))
    count, also = times * len(judged.units), ""
    if timed:
        count, also = max(times * timed, len(judged.units)), f" --timed-prompts {times * timed}"
    more = f"measure more prompts: --num-prompts {count}{also}"
    if speedup.low > 1:
        return f"the best of {len(rows)} gammas may gain by chance; {more}"
    return f"{more}; if the speedup stays near 1, align the draft longer (paceline align)"


def _better_draft(
    judged: int, acceptance: Interval, needed: Mapping[int, float], trained: float
) -> str:
    """The next step where more data do not help; `needed`: break-even acceptance by gamma."""
    smaller = "make a smaller draft (fewer --layers, a smaller --vocabulary)"
    if not needed:
        return f"{smaller}: no acceptance pays its cost"
    gamma = min(needed, key=needed.__getitem__)
    if acceptance.value < needed[gamma]:
        why = ""
        if trained > acceptance.high:
            why = f"; on the text of its training it was {trained:.3f}, so the prompts differ"
        return (
            f"align the draft on text like these prompts (paceline align): at gamma {gamma} it "
            f"needs an acceptance above {needed[gamma]:.3f}{why}"
        )
    if gamma == judged:
        return f"{smaller}: its blocks cost more than they gain"
    if gamma > judged:
        return f"try longer blocks, such as --gammas {gamma}"
    return f"try shorter blocks, such as --gammas {gamma}: longer ones cost more than they gain"


def _too_few(figure: str, gamma: int, count: int, unit: str, setting: str) -> Verdict:
    units = f"{count} {unit}{'s' if count != 1 else ''}"
    reason = (
        f"{figure} on {units}, but a verdict needs {LEAST_UNITS}; set {setting}={LEAST_UNITS} "
        "or more and give as many prompts"
    )
    return Verdict(go=False, decided=False, gamma=gamma, reason=reason)
