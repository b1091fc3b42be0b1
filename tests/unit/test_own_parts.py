"""Mistakes in a user's own rule, policy, task or divergence are one line that names it."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from paceline.bench import Grid
from paceline.config import validate
from paceline.core.rule_base import Position, Rule
from paceline.data.prompts import Record
from paceline.decode import SpeculativeDecoder
from paceline.decode.draft_policies import DraftPolicy
from paceline.errors import ConfigError, UsageError
from paceline.tasks import OwnTask, Split, TaskExample
from paceline.tasks.base import examples_of, score_of
from paceline.train.objectives import Compared, DivergenceTerm
from support.fakes import TableModel


@dataclass(frozen=True)
class DividesByNothing(Rule):
    """Recovers from 0 / 0 where the draft has no mass."""

    def accept_at(self, at: Position) -> Tensor:
        return torch.zeros_like(at.target)

    def residual_at(self, at: Position) -> Tensor:
        return at.target / at.target.new_zeros(())


@dataclass(frozen=True)
class Asks(DraftPolicy):
    count: int

    def length(self, num_accepted: int, num_examined: int, most: int) -> int:
        return self.count


@dataclass(frozen=True)
class SureEnough(DraftPolicy):
    floor: float

    def goes_on(self, confidence: float) -> bool:
        return confidence >= self.floor


@dataclass(frozen=True)
class TooProud(SureEnough):
    stops_early = False


class Six(OwnTask):
    def examples(self, split: Split, count: int, seed: int = 0) -> list[TaskExample]:
        return [TaskExample(Record("here", "prompt", text="a", completion="b"), "b")] * 6

    def score(self, example: TaskExample, answer: str) -> float:
        return 2.0


class Averages(DivergenceTerm):
    def divergence(self, target_log_probs: Tensor, draft_log_probs: Tensor) -> Tensor:
        return (target_log_probs - draft_log_probs).mean()


def models() -> tuple[TableModel, TableModel]:
    return TableModel.random(5, seed=1), TableModel.random(5, seed=2)


def test_a_rule_that_recovers_from_no_distribution_is_named():
    with pytest.raises(UsageError, match=r"rule DividesByNothing.*`residual_at` that sums to 0"):
        SpeculativeDecoder(*models(), DividesByNothing()).generate([[1]], 8)


@pytest.mark.parametrize("count", [-1, 5])
def test_a_policy_that_asks_for_too_many_tokens_is_named(count: int):
    decoder = SpeculativeDecoder(*models(), gamma=4, policy=Asks(count))
    with pytest.raises(UsageError, match=f"policy Asks.count={count}. returned {count} tokens"):
        decoder.generate([[1]], 20)


def test_a_policy_may_draft_nothing():
    decoder = SpeculativeDecoder(*models(), gamma=4, policy=Asks(0))
    (text,) = decoder.generate([[1]], 9)
    assert (len(text.tokens), text.stats.num_drafted) == (9, 0)


def test_a_policy_that_says_when_to_stop_is_asked_unless_it_says_otherwise():
    """No probability of the table is 1, so a floor of 1 drafts nothing."""
    for policy, drafts in ((SureEnough(1), False), (SureEnough(0), True), (TooProud(1), True)):
        decoder = SpeculativeDecoder(*models(), gamma=4, policy=policy)
        (text,) = decoder.generate([[1]], 9)
        assert bool(text.stats.num_drafted) == drafts, policy


def test_a_policy_in_a_bench_without_rules_is_refused():
    with pytest.raises(ConfigError, match="policy is set, but rules is empty"):
        validate(Grid, {"policy": {"policy": "confident", "threshold": 0.5}})


def test_a_task_keeps_to_its_numbers():
    with pytest.raises(UsageError, match="task Six returned 6 examples of its test split, 8 were"):
        examples_of(Six(), "test", 8)
    (example, *_) = examples_of(Six(), "test", 6)
    with pytest.raises(UsageError, match=r"Six scored an answer with 2\.0; wanted"):
        score_of(Six(), example, "b")


def test_a_divergence_that_averages_over_tokens_is_refused():
    logs_CV = torch.zeros(3, 5).log_softmax(-1)
    given = Compared(logs_CV, logs_CV, torch.zeros(3, dtype=torch.int64))
    with pytest.raises(UsageError, match=r"Averages.divergence returned shape \[\] for"):
        Averages().per_token(given)
