"""Texts of parallel drafts follow their law, at the borders of their decisions (`test_borders.py`).

What the draft has read behind the text of a block are masks, whatever it has drafted there.
"""

from dataclasses import replace
from itertools import cycle, product
from typing import Any
from unittest.mock import patch

import pytest
import torch

from paceline.core.block import Drafted, DrawPlan
from paceline.core.rule_base import Bonus
from paceline.core.rules import Lossless
from paceline.decode import block
from paceline.decode.draft_policies import DraftPolicy
from support.laws import (
    AIMED,
    AT_0,
    AT_TEMPERATURE_0,
    CAUGHT,
    LOOSE,
    MORE,
    POLICIES,
    SETTINGS,
    WAYS,
    law,
    wrong,
)
from support.rules import PYTORCH, Pair, using

MASK = 4


def parallel(
    name: str,
    setting: str,
    gamma: int,
    way: tuple[int, Bonus, Any, int | None] = WAYS[0],
    policy: DraftPolicy | None = None,
) -> int:
    order, bonus, backend, batch_size = way
    pair = Pair(order, *(SETTINGS | MORE | AT_TEMPERATURE_0)[setting])
    pair.draft.mask_token = MASK
    rule, stated = law(pair, name, gamma, bonus)
    stated = replace(stated, mask=MASK, policy=policy or stated.policy)
    with using(backend):
        return wrong(pair, rule, stated, bonus, batch_size)


@pytest.mark.parametrize(
    ("name", "setting", "gamma", "way"),
    [
        (*case, gamma, way)
        for case, gamma, way in zip(
            [
                # by turns, two of the settings for each rule
                *zip(
                    [*LOOSE, *AIMED] * 2,
                    cycle(["plain", "cool", "greedy drafts", "nucleus"]),
                    strict=False,
                ),
                *product(AT_0, ["greedy"]),
            ],
            cycle((1, 2, 3, 2, 4)),
            cycle(WAYS),
            strict=False,
        )
    ],
)
def test_a_block_of_one_pass_follows_the_rule_too(
    name: str, setting: str, gamma: int, way: tuple[int, Bonus, Any, int | None]
):
    assert parallel(name, setting, gamma, way) == 0


@pytest.mark.parametrize("name", [str(Lossless()), "chow", "token_v3"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_cuts_a_block_of_one_pass(name: str, policy: str):
    assert parallel(name, "cool", 4, policy=POLICIES[policy]) == 0


def _places_before(drafted: Drafted) -> Drafted:
    """Judges each token by the distribution of the place before."""
    assert drafted.probs_BPV is not None
    probs_BPV = torch.cat([drafted.probs_BPV[:, :1], drafted.probs_BPV[:, :-1]], 1)
    return drafted._replace(probs_BPV=probs_BPV)


def _mask_for_the_newest(read: Any, drawn: Drafted, plan: DrawPlan) -> Drafted:
    """Leaves a mask in the draft's cache in the place of the newest token."""
    session, batch = read.__self__, len(drawn.tokens_BG)
    session.rollback([plan.num_passes] * batch)
    session.extend(torch.full((batch, plan.num_passes), MASK))
    return drawn


def test_a_place_judged_by_another_and_masks_that_stay_are_caught():
    drawn = block.draw_at_once
    assert parallel(str(Lossless()), "plain", 3) == 0
    with patch.object(block, "draw_at_once", lambda *given: _places_before(drawn(*given))):
        assert parallel(str(Lossless()), "plain", 3) >= CAUGHT
    stays = lambda *given: _mask_for_the_newest(given[0], drawn(*given), given[2])  # noqa: E731
    with patch.object(block, "draw_at_once", stays):
        # in a batch, rows read their last tokens again beside one that accepted more
        assert parallel(str(Lossless()), "plain", 3, (2, "rule", PYTORCH, 1)) >= CAUGHT
