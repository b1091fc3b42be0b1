"""What a draft costs, against break-even points worked out by hand."""

import re
from typing import Any
from unittest.mock import patch

import pytest

from paceline.measure import latency
from paceline.measure.latency import PassCosts, time_draft
from paceline.measure.results import disturbance
from support.models import tiny_pair


class TenthOfTheTarget:
    """Times nothing: a drafted token costs a tenth of a target pass, a block one and a fifth."""

    block_s = 1.2

    def __init__(self, *_: Any) -> None:
        pass

    def run(self, repeats: int) -> PassCosts:
        assert repeats > 0
        gammas = range(1, 9)
        drafting_s = {gamma: 0.1 * gamma for gamma in gammas}
        return PassCosts(1.0, 0.1, drafting_s, dict.fromkeys(gammas, self.block_s))


def described(block_s: float) -> str:
    timer = type("Timer", (TenthOfTheTarget,), {"block_s": block_s})
    with patch.object(latency, "PassTimer", timer):
        return time_draft(*tiny_pair())


def test_a_draft_pays_where_its_block_s_tokens_make_up_for_what_the_block_costs():
    words = described(1.2)
    pattern = r".* a pass costs 0\.10 of the target's; .* acceptance of (.*) \(gamma (.*)\)"
    found = re.fullmatch(pattern, words)
    assert found is not None, words
    needed = {
        gamma: min(a / 1000 for a in range(1000) if tokens(a / 1000, gamma) >= 0.1 * gamma + 1.2)
        for gamma in range(1, 6)
    }
    gamma, acceptance = int(found[2]), float(found[1])
    assert needed[gamma] == min(needed.values())
    assert acceptance == pytest.approx(needed[gamma], abs=0.006)


def tokens(acceptance: float, gamma: int) -> float:
    return sum(acceptance**number for number in range(gamma + 1))


def test_a_draft_as_dear_as_its_target_never_pays():
    assert described(9.0).endswith("a pass costs 0.10 of the target's; it never breaks even")


# target passes per block of gamma 1 to 6 and 8, as `measure` recorded them: on an idle machine with
# a sampling and a greedy target, and beside other programs
IDLE = (
    (1.143, 1.283, 1.366, 1.559, 1.719, 1.939, 2.367),
    (1.120, 1.270, 1.502, 1.743, 1.975, 2.202, 2.756),
)
BUSY = (0.92, 1.09, 1.43, 1.44, 6.39, 1.61, 9.80)


def by_gamma(costs: tuple[float, ...]) -> dict[int, float]:
    return dict(zip((1, 2, 3, 4, 5, 6, 8), costs, strict=True))


def test_recorded_costs_of_an_idle_machine_are_not_called_disturbed():
    assert [disturbance(by_gamma(costs)) for costs in IDLE] == ["", ""]
    # the thresholds: 0.9 target passes, and 1.5 times a longer block
    assert not disturbance({1: 0.91, 2: 1.49, 3: 1.0})
    assert disturbance({1: 0.89, 2: 1.0})
    assert disturbance({1: 1.0, 2: 1.51, 3: 1.0})


def test_recorded_costs_of_a_busy_machine_are_called_disturbed():
    words = disturbance(by_gamma(BUSY))
    assert "a block of gamma 5 takes 4.0 times as long as one of gamma 6" in words  # 6.39 / 1.61
    assert words.endswith("stop other programs and run again")
    (first, *others) = IDLE[0]
    assert "gamma 1 takes 0.14 of the time" in disturbance(by_gamma((0.136, *others)))
    assert first > 1


def test_a_draft_timed_beside_other_programs_gets_no_break_even():
    assert "timings were disturbed" in described(0.5)
