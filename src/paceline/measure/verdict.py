"""Verdicts on a draft: GO, NO-GO, TOO FEW or NOT TIMED, with the reason in one sentence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.config import StrictModel
from paceline.core.bootstrap import LEAST_UNITS

if TYPE_CHECKING:
    from paceline.measure.results import AcceptanceRow, GammaRow, IntervalRow, SpeedRow


class Verdict(StrictModel):
    """Whether to serve the draft, and why.

    Attributes:
        go: True if serving with the draft is faster.
        decided: False if too few requests were measured for a verdict, or none can be; then `go` is
            false.
        timed: False if blocks of these models cannot be timed.
        reason: One sentence.
    """

    go: bool
    decided: bool = True
    timed: bool = True
    reason: str

    def __str__(self) -> str:
        return f"{self.word}: {self.reason}"

    @property
    def word(self) -> str:
        """`GO`, `NO-GO`, `TOO FEW` or `NOT TIMED`."""
        if not self.decided:
            return "TOO FEW" if self.timed else "NOT TIMED"
        return "GO" if self.go else "NO-GO"

    @property
    def exit_code(self) -> int:
        """Of the command line: 0 GO, 1 NO-GO, 3 no verdict."""
        if not self.decided:
            return 3
        return 0 if self.go else 1


def judge(acceptance: AcceptanceRow, best: GammaRow, speed: SpeedRow | None) -> Verdict:
    """GO if the whole interval of the speedup is above 1.

    Without timing: GO if the expected speedup at the best gamma is above 1. TOO FEW with fewer than
    8 requests (`core.bootstrap.LEAST_UNITS`), or, without timing, texts.
    """
    standing = _standing(acceptance, best)
    if speed is None:
        expected = f"expected {best.expected_speedup:.2f}x at gamma {best.gamma}"
        if acceptance.num_prompts < LEAST_UNITS:
            return _too_few(expected, acceptance.num_prompts, "text", "num_prompts")
        return Verdict(go=best.expected_speedup > 1, reason=f"{expected}; {standing}")
    if speed.num_requests < LEAST_UNITS:
        measured = f"measured {speed.speedup.value:.2f}x at gamma {speed.gamma}"
        return _too_few(measured, speed.num_requests, "request", "timed_prompts")
    return _by_interval(f"measured {{}} at gamma {speed.gamma}", speed.speedup, standing)


def not_timed(acceptance: AcceptanceRow, architecture: str) -> Verdict:
    """The verdict on a pair with a model of this architecture, whose blocks cannot be timed."""
    alpha = acceptance.expected_acceptance.value
    reason = (
        f"acceptance {alpha:.3f}; {architecture} keeps a state that cannot be rolled back, so "
        "blocks cannot be timed here: give the costs of an engine as --costs"
    )
    return Verdict(go=False, decided=False, timed=False, reason=reason)


def judge_expected(
    acceptance: AcceptanceRow, best: GammaRow, expected: IntervalRow, engine: str
) -> Verdict:
    """GO if the whole interval of the expected speedup in this engine is above 1.

    TOO FEW with fewer than 8 texts.
    """
    if acceptance.num_prompts < LEAST_UNITS:
        figure = f"expected {expected.value:.2f}x in {engine} at gamma {best.gamma}"
        return _too_few(figure, acceptance.num_prompts, "text", "num_prompts")
    words = f"expected {{}} in {engine} at gamma {best.gamma}"
    tau, needed = best.block_efficiency, best.block_efficiency / best.expected_speedup
    word = "above" if tau > needed else "below"
    standing = f"{tau:.2f} tokens per target call are {word} the break-even {needed:.2f}"
    return _by_interval(words, expected, standing)


def _by_interval(template: str, speedup: IntervalRow, standing: str) -> Verdict:
    low, high = speedup.low, speedup.high
    figure = template.format(f"{speedup.value:.2f}x ({low:.2f} to {high:.2f})")
    if low > 1:
        return Verdict(go=True, reason=f"{figure}; {standing}")
    if high < 1:
        return Verdict(go=False, reason=f"{figure}, slower than no draft; {standing}")
    reason = f"{figure}, not shown to be faster: the interval includes 1; {standing}"
    return Verdict(go=False, reason=reason)


def _standing(acceptance: AcceptanceRow, best: GammaRow) -> str:
    alpha, needed = acceptance.expected_acceptance.value, best.break_even_acceptance
    if needed is None:
        return f"no acceptance breaks even at gamma {best.gamma}"
    word = "above" if alpha > needed else "below"
    return f"acceptance {alpha:.3f} is {word} the break-even {needed:.3f}"


def _too_few(figure: str, count: int, unit: str, setting: str) -> Verdict:
    units = f"{count} {unit}{'s' if count != 1 else ''}"
    return Verdict(
        go=False,
        decided=False,
        reason=(
            f"{figure} on {units}, but a verdict needs {LEAST_UNITS}; set {setting}={LEAST_UNITS} "
            "or more and give as many prompts"
        ),
    )
