"""What a draft costs, against break-even points worked out by hand."""

import re
from typing import Any
from unittest.mock import patch

import pytest

from paceline.measure import latency
from paceline.measure.latency import PassCosts, time_draft
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
