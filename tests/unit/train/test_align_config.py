from pathlib import Path
from typing import Any

import pytest

from paceline.config import load_config, to_yaml, validate
from paceline.core.rules import Opt
from paceline.errors import ConfigError
from paceline.train import AlignConfig
from paceline.train.objectives import (
    JSD,
    TVD,
    CrossEntropy,
    ForwardKL,
    ReverseKL,
    UnderRule,
)

BASE: dict[str, Any] = {
    "target": "t",
    "draft": "d",
    "output": "runs/o",
    "data": {"train": "x.jsonl"},
    "num_steps": 100,
}


def config(**changes: Any) -> AlignConfig:
    return validate(AlignConfig, BASE | changes)


# Table 1 of the paper, by hand: who writes the text, and what is compared.
@pytest.mark.parametrize(
    ("recipe", "objective", "fixed", "draft", "target"),
    [
        ("supervised_kd", ForwardKL(), 1.0, 0.0, 0.0),
        ("seq_kd", CrossEntropy(), 0.0, 0.0, 1.0),
        ("imit_kd", ForwardKL(), 0.5, 0.5, 0.0),
        ("f_distill", TVD(), 0.0, 0.5, 0.5),
        ("gkd", ForwardKL(), 0.0, 1.0, 0.0),
    ],
)
def test_each_recipe_is_its_row_of_table_1(
    recipe: str, objective: object, fixed: float, draft: float, target: float
):
    made = config(recipe=recipe)
    assert made.objective == (objective,)
    lambda_1, lambda_2 = made.fixed_fraction, made.draft_fraction
    shares = lambda_1, (1 - lambda_1) * lambda_2, (1 - lambda_1) * (1 - lambda_2)
    assert shares == (fixed, draft, target)


def test_what_is_written_out_wins_over_the_recipe():
    made = config(recipe="gkd", objective={"kind": "jsd", "beta": 0.1}, fixed_fraction=0.25)
    assert made.objective == (JSD(beta=0.1),)
    assert (made.fixed_fraction, made.draft_fraction) == (0.25, 1.0)


@pytest.mark.parametrize(
    "value", ["reverse_kl", {"kind": "reverse_kl"}, ["reverse_kl"], [{"kind": "reverse_kl"}]]
)
def test_an_objective_can_be_written_short(value: object):
    assert config(objective=value).objective == (ReverseKL(),)


def test_a_configuration_survives_yaml_with_overrides(tmp_path: Path):
    made = config(recipe="imit_kd", objective=["tvd", {"kind": "jsd", "beta": 0.3, "weight": 2}])
    path = tmp_path / "c.yaml"
    path.write_text(to_yaml(made))
    assert load_config(AlignConfig, path) == made
    changed = load_config(AlignConfig, path, ["optimizer.learning_rate=0.5", "data.train=y.txt"])
    assert changed.optimizer.learning_rate == 0.5
    assert changed.data.train.path == "y.txt"


RULE: dict[str, Any] = {"rule": {"rule": "opt", "alpha": 0.2}, "loss": "forward_kl"}
LENIENT = {"rule": "lenient", "epsilon": 0.5}
UNIFORM = {"kind": "tvd_plus_plus", "estimator": "uniform"}
FEW = {"loss_vocabulary": {"frequent": 8}}


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"objective": {"kind": "jsd", "beta": 0}}, "use forward_kl or reverse_kl"),
        ({"objective": {"kind": "jsd", "beta": 1}}, "use forward_kl or reverse_kl"),
        ({"objective": []}, "objective"),
        ({"objective": "kl"}, "forward_kl"),
        ({"recipe": ["gkd"]}, "recipe"),
        ({"recipe": {"gkd": 1}}, "recipe"),
        ({"num_steps": None}, "set num_steps or max_seconds"),
        (
            {"batch_size": 6, "gradient_accumulation_steps": 4},
            "is not a multiple of gradient_accumulation_steps 4",
        ),
        ({"evaluation": {"sampling": {"repetition_penalty": 1.2}}}, "repetition_penalty must be 1"),
        ({"finish": {"objective": []}}, r"finish\.objective"),
        ({"objective": RULE | {"rule": LENIENT}}, "lenient has no target distribution"),
        ({"objective": UNIFORM, **FEW}, "needs all tokens"),
        ({"objective": RULE, **FEW}, "needs all tokens"),
        ({"finish": {"objective": RULE}, **FEW}, "needs all tokens"),
        ({"shard": ["target"], "fixed_fraction": 0.5}, "a sharded target cannot generate text"),
        (
            {"shard": ["target"], "data": {"train": "x.jsonl", "held_out": "y.jsonl"}},
            "run trajectory on the checkpoints",
        ),
    ],
)
def test_a_wrong_setting_is_one_line_that_says_what_to_do(changes: dict[str, Any], complaint: str):
    with pytest.raises(ConfigError, match=complaint):
        config(**changes)


def test_a_rule_can_be_an_objective():
    assert config(objective=RULE).objective == (UnderRule(rule=Opt(0.2), loss="forward_kl"),)
