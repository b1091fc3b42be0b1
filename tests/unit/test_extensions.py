"""A user's own variants in configurations: made, written, read again, and refused in one line."""

import sys
from pathlib import Path

import pytest

from paceline.bench.settings import family, setting
from paceline.config import load_config, to_yaml, validate
from paceline.core.rules import Lossless, Lossy
from paceline.decode.draft_policies import Adaptive
from paceline.decode.strategies import DecodingConfig, Speculative
from paceline.errors import ConfigError

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


def decoding(rule: object) -> DecodingConfig:
    return validate(DecodingConfig, {"strategy": {"rule": rule}})


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


@pytest.mark.parametrize("named", ["{own}:Half", {"rule": "{own}:Half"}, {"import": "{own}:Half"}])
def test_a_name_alone_stands_for_the_class_with_its_defaults(own: str, named: str | dict[str, str]):
    if isinstance(named, str):
        given: object = named.format(own=own)
    else:
        given = {key: value.format(own=own) for key, value in named.items()}
    strategy = decoding(given).strategy
    assert isinstance(strategy, Speculative)
    assert strategy.rule.share == 0.5  # pyright: ignore


def test_what_derives_from_a_rule_of_ours_is_not_taken_for_it(own: str):
    found = decoding(f"{own}:Derived")
    assert found.model_dump()["strategy"]["rule"] == {
        "import": f"{own}:Derived",
        "rule": "lossless",
    }


def test_built_in_variants_are_written_as_before():
    assert decoding("lossless") == decoding({"rule": "lossless"})
    assert decoding("lossless").strategy.model_dump()["rule"] == {"rule": "lossless"}
    assert decoding(Lossy(0.3)).strategy.model_dump()["rule"] == {
        "alpha": 0.3,
        "beta": 1.0,
        "rule": "lossy",
    }


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
def test_what_cannot_be_imported_is_one_line(own: str, named: str | dict[str, object], says: str):
    if isinstance(named, str):
        given: object = named.format(own=own)
    else:
        given = {k: v.format(own=own) if isinstance(v, str) else v for k, v in named.items()}
    with pytest.raises(ConfigError) as refusal:
        decoding(given)
    assert says in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_label_carries_every_parameter_of_the_users_rule(own: str):
    found = decoding({"import": f"{own}:Half", "share": 0.25, "name_of_it": "quarter"})
    assert family(found) == "Half name of it quarter"
    assert setting(found) == "share 0.25, gamma 4"


def test_labels_leave_out_what_is_as_it_is_by_default():
    policy = Adaptive(cost_ratio=0.2, prior=0.5)
    found = DecodingConfig(strategy=Speculative(rule=Lossless(), policy=policy))
    assert family(found) == "lossless adaptive"
    assert setting(found) == "gamma 4, cost ratio 0.2, prior 0.5"
