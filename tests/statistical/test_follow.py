"""Days of rounds whose drafts are all alike: hardly any is swapped, whatever the traffic does.

200 days of 24 rounds with 64 texts. By the stated error rate of 5%, more than 22 days with a swap
have a probability below 1e-3. The numbers of calls of a text are those of its length, of the hour,
and of each draft by itself; every third hour all drafts are worse.
"""

from typing import Any

import numpy as np
import pytest

from paceline.follow import rounds
from paceline.follow.config import FollowConfig
from paceline.follow.judge import Trial
from paceline.follow.rounds import Follower, Round
from paceline.results import Row
from paceline.results.row import Source

DAYS, ROUNDS, TEXTS, NEW, MOST = 200, 24, 64, 48, 22


class Simulated(Follower):
    """Rounds without models: the calls of each draft are drawn."""

    def __init__(self, rng: np.random.Generator, gain: float = 0.0) -> None:
        values = {"target": "t", "draft": "d", "log": "l", "output": "o", "max_new_tokens": NEW}
        self.config = FollowConfig.model_validate(values | {"align": {"num_steps": 1}})
        self.last, self.rng, self.gain = None, rng, gain

    def day(self) -> list[Round]:
        """Its rounds; each trains a draft if none is on trial."""
        found: list[Round] = []
        for number in range(1, ROUNDS + 1):
            carried: dict[str, Any] = {}
            if self.last is not None:
                names = ("serving", "trial", "watch", "num_tests", "start")
                carried = {name: getattr(self.last, name) for name in names}
            counts = {"num_requests": TEXTS, "num_unreadable": 0, "num_answered": TEXTS}
            taken = Round(number=number, positions={}, fault="", **counts, **carried)
            self.lengths = self.rng.integers(8, NEW + 1, TEXTS) * (0.6 if number % 3 else 0.9)
            self.last = self._decided(taken, None)  # pyright: ignore
            if self.last.trial is None:
                self.last = rounds._next_test(self.last, "trial", f"{number:06d}")  # pyright: ignore
            found.append(self.last)
        return found

    def _row(self, judge: Any, name: str, at: int, count: int) -> Row:
        del judge, at, count
        better = self.gain if name != "initial" else 0.0
        own = self.rng.normal(1 - better, 0.15, TEXTS).clip(0.3, 1.1)
        sums = {"emitted": (1.0,) * TEXTS, "calls": tuple(map(float, self.lengths * own))}
        sums |= {"accepted": (1.0,) * TEXTS, "drafted": (1.0,) * TEXTS}
        values = {"population": "texts", "units": tuple(range(TEXTS)), "setting": {"draft": name}}
        return Row(**values, sums=sums, source=Source(command="a test"))


def days_with_a_swap(count: int, gain: float = 0.0) -> int:
    rng = np.random.default_rng(3)
    days = (Simulated(rng, gain).day() for _ in range(count))
    return sum(any(one.decision in ("swapped", "brought back") for one in day) for day in days)


def test_days_of_equal_drafts_have_hardly_any_swap():
    assert days_with_a_swap(DAYS) <= MOST


def test_a_z_test_of_each_round_would_swap_on_most_days(monkeypatch: pytest.MonkeyPatch):
    """The mutant: evidence of a round alone, with 5% for each."""

    def with_texts(self: Trial, own: Row, other: Row, most: int) -> Trial:
        saved = (np.array(other.sums["calls"]) - np.array(own.sums["calls"])) / most
        z = float(saved.mean() / saved.std() * len(saved) ** 0.5)
        return self.model_copy(update={"rounds": self.rounds + 1, "log_capitals": (z,)})

    monkeypatch.setattr(Trial, "with_texts", with_texts)
    monkeypatch.setattr(Trial, "evidence", lambda self, _: (self.log_capitals[0], 1.64))
    assert days_with_a_swap(20) > 10


def test_a_gain_of_ten_percent_is_found_within_a_day():
    assert days_with_a_swap(20, 0.1) >= 18
