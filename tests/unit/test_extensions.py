"""A user's own variants in configurations: made, written, read again, and refused in one line."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.bench.answers import family, setting
from paceline.config import load_config, to_yaml, validate
from paceline.core.rule_base import Position, Rule
from paceline.core.rules import Lossless, Lossy
from paceline.data.prompts import Record
from paceline.decode import SpeculativeDecoder
from paceline.decode.draft_policies import DraftPolicy
from paceline.decode.strategies import DecodingConfig, Speculative
from paceline.errors import ConfigError, UsageError
from paceline.tasks import OwnTask, Split, TaskExample
from paceline.tasks.base import examples_of, score_of
from paceline.train.objectives import Compared, DivergenceTerm
from support.fakes import Cautious, TableModel

OWN = """
from pydantic.dataclasses import dataclass
from paceline.core.rule_base import STRICT, Rule
from paceline.core.rules import Lossless
from paceline.decode.draft_policies import DraftPolicy

@dataclass(frozen=True, config=STRICT)
class Half(Rule):
    share: float = 0.5
    name_of_it: str = "half"

    def accept_at(self, at):
        return at.target * 0 + self.share

    def residual_at(self, at):
        return at.target

class Derived(Lossless):
    pass

class Never(DraftPolicy):
    pass

number = 3
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the working directory, of a name that no other test has imported."""
    name = f"own_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(OWN)
    (tmp_path / f"{name}_broken.py").write_text("Half = 1 / 0")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PACELINE_IMPORTS", f"{name}, {name}_broken, no_such_module")
    return name


def decoding(rule: Any, own: str = "") -> DecodingConfig:
    """With this rule; `{own}` in it is the module."""
    if isinstance(rule, str | dict):
        rule = json.loads(json.dumps(rule).replace("{own}", own))
    return validate(DecodingConfig, {"strategy": {"rule": rule}})


@pytest.mark.parametrize(
    ("named", "written"),
    [
        ("{own}:Half", {"share": 0.5, "name_of_it": "half"}),
        ({"rule": "{own}:Half"}, {"share": 0.5, "name_of_it": "half"}),
        ({"import": "{own}:Half"}, {"share": 0.5, "name_of_it": "half"}),
        ("{own}:Derived", {"rule": "lossless"}),  # is not taken for the rule that it derives from
        ("lossless", {"rule": "lossless"}),
        ({"rule": "lossless"}, {"rule": "lossless"}),
        (Lossy(0.3), {"rule": "lossy", "alpha": 0.3, "beta": 1.0}),
    ],
    ids=str,
)
def test_a_name_alone_stands_for_the_class_with_its_defaults(own: str, named: Any, written: Any):
    kept = decoding(named, own).model_dump()["strategy"]["rule"]
    assert kept.pop("import", own).startswith(own)
    assert kept == written


def test_an_imported_rule_is_an_object_of_the_users_class_and_is_written_as_it_was_named(
    own: str, tmp_path: Path
):
    found = decoding({"import": f"{own}:Half", "share": 0.25})
    assert isinstance(found.strategy, Speculative)
    rule = found.strategy.rule
    assert (type(rule).__name__, rule.share) == ("Half", 0.25)  # pyright: ignore
    written = found.model_dump(mode="json")["strategy"]["rule"]
    assert written == {"import": f"{own}:Half", "share": 0.25, "name_of_it": "half"}
    (tmp_path / "again.yaml").write_text(to_yaml(found))
    assert load_config(DecodingConfig, tmp_path / "again.yaml") == found
    assert DecodingConfig.model_validate_json(found.model_dump_json()) == found


@pytest.mark.parametrize(
    ("named", "says"),
    [
        ("no_such_module:Half", "no_such_module cannot be imported"),
        ("{own}_broken:Half", "cannot be imported (division by zero)"),
        ("{own}:Whole", "has no Whole"),
        ("{own}:number", "is not a class that derives from Rule"),
        ("{own}:Never", "is not a class that derives from Rule"),
        (":Half", "import wants package.module:Name"),
        ({"import": "{own}:Half", "shares": 1}, "shares: unknown key"),
        ({"import": "{own}:Half", "share": "much"}, "share: "),
    ],
)
def test_what_cannot_be_imported_is_one_line(own: str, named: Any, says: str):
    with pytest.raises(ConfigError) as refusal:
        decoding(named, own)
    assert says in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_label_carries_every_parameter_of_the_users_rule(own: str):
    found = decoding({"import": f"{own}:Half", "share": 0.25, "name_of_it": "quarter"})
    assert family(found) == "Half name of it quarter"
    assert setting(found) == "share 0.25, gamma 4"


def test_labels_leave_out_what_is_as_it_is_by_default():
    for policy, numbers in ((Cautious(0.2), ""), (Cautious(0.2, least=2), ", least 2")):
        found = DecodingConfig(strategy=Speculative(rule=Lossless(), policy=policy))
        assert family(found) == "lossless Cautious"
        assert setting(found) == f"gamma 4, share 0.2{numbers}"


# Mistakes in a user's own rule, policy, task or divergence are one line that names it.


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


def test_a_policy_that_says_when_to_stop_is_asked_unless_it_says_otherwise():
    """No probability of the table is 1, so a floor of 1 drafts nothing."""
    asked = ((SureEnough(1), False), (SureEnough(0), True), (TooProud(1), True), (Asks(0), False))
    for policy, drafts in asked:
        decoder = SpeculativeDecoder(*models(), gamma=4, policy=policy)
        (text,) = decoder.generate([[1]], 9)
        assert (len(text.tokens), bool(text.stats.num_drafted)) == (9, drafts), policy


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
