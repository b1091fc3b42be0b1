"""GO or NO-GO, in one sentence that names the number it hangs on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.config import StrictModel

if TYPE_CHECKING:
    from paceline.measure.results import AcceptanceRow, GammaRow, SpeedRow


class Verdict(StrictModel):
    """Whether to serve the draft, and why."""

    go: bool
    reason: str

    def __str__(self) -> str:
        return f"{'GO' if self.go else 'NO-GO'}: {self.reason}"


def judge(acceptance: AcceptanceRow, best: GammaRow, speed: SpeedRow | None) -> Verdict:
    """GO when speculation is sure to be faster: the whole interval of the speedup is above 1.

    Without timing, when the expected speedup at the best gamma is above 1.
    """
    alpha = acceptance.expected_acceptance.value
    needed = best.break_even_acceptance
    if needed is None:
        standing = f"no acceptance pays at gamma {best.gamma}"
    else:
        word = "above" if alpha > needed else "below"
        standing = f"acceptance {alpha:.3f} is {word} the break-even {needed:.3f}"
    if speed is None:
        go = best.expected_speedup > 1
        return Verdict(
            go=go, reason=f"expected {best.expected_speedup:.2f}x at gamma {best.gamma}; {standing}"
        )
    low, high = speed.speedup.low, speed.speedup.high
    measured = (
        f"measured {speed.speedup.value:.2f}x ({low:.2f} to {high:.2f}) at gamma {speed.gamma}"
    )
    if speed.num_requests == 1:
        return Verdict(
            go=False, reason=f"{measured}, on one request, which says little of others; {standing}"
        )
    if low > 1:
        return Verdict(go=True, reason=f"{measured}; {standing}")
    if high < 1:
        return Verdict(go=False, reason=f"{measured}, slower than no draft; {standing}")
    return Verdict(go=False, reason=f"{measured}, which may be no gain at all; {standing}")
