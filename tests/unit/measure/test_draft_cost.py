"""What a draft costs, against break-even points worked out by hand."""

import math
from typing import Any
from unittest.mock import patch

import pytest

from paceline.measure import latency
from paceline.measure.latency import DraftCost, PassCosts, time_draft
from support.models import tiny_pair


class TenthOfTheTarget:
    """Times nothing: a drafted token costs a tenth of a target pass, a block one and a fifth."""

    def __init__(self, *_: Any) -> None:
        pass

    def run(self, repeats: int) -> PassCosts:
        assert repeats > 0
        gammas = range(1, 9)
        drafting_s = {gamma: 0.1 * gamma for gamma in gammas}
        return PassCosts(1.0, 0.1, drafting_s, dict.fromkeys(gammas, 1.2))


def test_a_draft_pays_where_its_block_s_tokens_make_up_for_what_the_block_costs():
    target, draft = tiny_pair()
    with patch.object(latency, "PassTimer", TenthOfTheTarget):
        found = time_draft(target, draft)
    sizes = [sum({id(w): w.numel() for w in m.hf.parameters()}.values()) for m in (draft, target)]
    assert found.parameter_ratio == pytest.approx(sizes[0] / sizes[1])
    assert found.cost_ratio == 0.1
    assert found.break_even[1] == pytest.approx(0.3, abs=1e-6)  # 1 + a = 0.1 + 1.2
    for gamma, acceptance in found.break_even.items():
        tokens = sum(acceptance**number for number in range(gamma + 1))
        assert tokens == pytest.approx(0.1 * gamma + 1.2, abs=1e-5)
    gamma, acceptance = found.easiest
    assert acceptance == min(found.break_even.values())
    assert str(found) == (
        "in Paceline's decoder a pass costs 0.10 of the target's; "
        f"it breaks even at an acceptance of {acceptance:.2f} (gamma {gamma})"
    )


def test_a_draft_as_dear_as_its_target_never_pays():
    found = DraftCost(0.9, 1.4, {1: math.inf, 2: math.inf})
    assert (
        str(found)
        == "in Paceline's decoder a pass costs 1.40 of the target's; it never breaks even"
    )
