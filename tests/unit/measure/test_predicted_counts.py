"""Counts that an engine is expected to have, by hand."""

import pytest
import torch

from paceline.core.text_scores import TextScores
from paceline.engines.contract import Engine
from paceline.engines.llamacpp import LlamaServer
from paceline.measure.agreement import predicted_counts


def perfect(lengths: list[int]) -> TextScores:
    """Scores of a draft that agrees with its target everywhere."""
    mask_BT = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    ones_BT = mask_BT.float()
    return TextScores(ones_BT, ones_BT, ones_BT, ones_BT, mask_BT)


@pytest.mark.parametrize(("engine", "blocks"), [(Engine, 2), (LlamaServer, 1)])
def test_a_text_of_one_token_has_no_blocks_beside_others(engine: type[Engine], blocks: int):
    """Six tokens of six: one of the prompt, a block of 3 and 1, and an empty one at the end."""
    found = predicted_counts(perfect([1, 6]), 3, 6, engine)
    assert found.blocks_B.tolist() == [0, blocks]
    assert found.drafted_B.tolist() == [0, 3]
    assert found.accepted_B.tolist() == [0, 3]
