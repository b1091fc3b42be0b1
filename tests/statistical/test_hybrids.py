"""Texts of models that go on from snapshots follow their law, decision by decision (`borders.py`).

Random models of five tokens, in a batch that is refilled; the distributions come from plain passes
of transformers. In a batch of several rows each row is rolled back by another number of tokens.
"""

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest

from paceline.core.rules import Rule
from paceline.decode import SpeculativeDecoder
from paceline.models import HfModel, wrap_model
from paceline.models.hf import row_session
from paceline.models.hf.row_session import RecurrentRow, RowSession
from support import exact
from support.borders import Law, num_wrong, walks
from support.laws import RULES, give_every_token_a_chance, next_token
from support.models import tiny_hf

PROMPTS = ((3, 4, 3, 0, 1), (0,), (2, 2), (1, 4, 0))
COUNT = 40
MARGIN = 2e-4  # states are computed in float32


@cache
def model_of(kind: str, seed: int) -> HfModel:
    hf = tiny_hf(kind, seed=seed, vocab_size=5)
    give_every_token_a_chance(hf)
    return wrap_model(hf)


def wrong(target: str, draft: str, gamma: int, rule: Rule, aim: exact.Aim | None) -> int:
    """Of the target and a draft with other weights."""
    models = model_of(target, 0), model_of(draft, 4)
    p, q = map(next_token, models)
    vectors = exact.aimed_vectors(aim) if aim else exact.near(exact.lossless)
    law = Law(
        exact.Models(p, q, p, q),
        vectors,
        gamma,
        6,
        aim,
        first_from_target=aim is None,
        margin=MARGIN,
    )
    decoder = SpeculativeDecoder(*models, rule, gamma=gamma)
    return num_wrong(decoder, walks(law, PROMPTS, COUNT), 7)


@pytest.mark.parametrize(
    ("target", "draft", "gamma", "place"),
    [
        ("lfm2", "bamba", 2, 0),
        ("qwen3_5_text", "qwen3_5_text", 3, 1),
        ("llama", "bamba", 4, 2),
        ("mamba", "lfm2", 2, 3),
    ],
)
def test_every_decision_of_a_text_is_the_rules(target: str, draft: str, gamma: int, place: int):
    assert wrong(target, draft, gamma, *RULES[place]) == 0


def test_snapshots_that_are_dropped_or_far_away_change_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(row_session, "MOST_SNAPSHOTS", 1)
    monkeypatch.setattr(row_session, "MOST_READ_AGAIN", {"cpu": 1})
    assert wrong("qwen3_5_text", "lfm2", 3, *RULES[0]) == 0


PLAIN = "qwen3_5_text", "lfm2", 3


def test_a_snapshot_of_another_row_is_caught():
    def crossed(self: RowSession, counts: Sequence[int]) -> None:
        for row, count in zip(self._rows, counts, strict=True):
            row.rollback([count])
        rows: list[Any] = sorted(self._rows, key=lambda row: row._state.length)
        for first, second in pairwise(rows):
            if first._state.length == second._state.length:
                first._state, second._state = second._state, first._state

    with patch.object(RowSession, "_rollback", crossed):
        assert wrong(*PLAIN, *RULES[0]) > 4


def test_a_snapshot_that_is_one_token_too_old_is_caught():
    right = RecurrentRow._rollback

    def older(self: RecurrentRow, counts: Sequence[int]) -> None:
        right(self, counts)
        if self._state.length < self.lengths[0] - counts[0]:
            self._state = self._state._replace(length=self._state.length + 1)

    with patch.object(RecurrentRow, "_rollback", older):
        assert wrong(*PLAIN, *RULES[0]) > 4


def test_states_that_are_changed_in_place_are_caught():
    with patch.object(row_session, "_copied", lambda kwargs: dict(kwargs)):
        assert wrong(*PLAIN, *RULES[0]) > 4
