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
ADAMW = {"kind": "adamw"}


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"objective": {"kind": "jsd", "beta": 0}}, "use forward_kl or reverse_kl"),
        ({"objective": {"kind": "jsd", "beta": 1}}, "use forward_kl or reverse_kl"),
        ({"objective": []}, "objective is empty"),
        ({"objective": "kl"}, "forward_kl"),
        ({"recipe": ["gkd"]}, "recipe"),
        ({"recipe": {"gkd": 1}}, "recipe"),
        ({"num_steps": None}, "set num_steps or max_seconds"),
        (
            {"batch_size": 6, "gradient_accumulation_steps": 4},
            "is not a multiple of gradient_accumulation_steps 4",
        ),
        ({"optimizer": {"kind": "adamw", "warmup_steps": 101}}, "more than num_steps"),
        ({"recipe": "seq_kd", "draft_fraction": 0.5}, "that the draft generated"),
        ({"recipe": "gkd", "finish": {"objective": "cross_entropy"}}, "that the draft generated"),
        ({"evaluation": {"sampling": {"repetition_penalty": 1.2}}}, "repetition_penalty must be 1"),
        ({"finish": {"objective": []}}, r"finish\.objective"),
        ({"finish": {"objective": "tvd", "begin": 0.25, "end": 0.2}}, r"end 0\.2 must be above"),
        ({"objective": RULE | {"rule": LENIENT}}, "lenient has no target distribution"),
        ({"objective": UNIFORM, **FEW}, "uniform weights all tokens equally"),
        ({"objective": RULE, **FEW}, "a rule objective needs the full vocabulary"),
        ({"finish": {"objective": RULE}, **FEW}, "a rule objective needs the full vocabulary"),
        ({"shard": ["draft"]}, r"needs optimizer\.kind adamw"),
        (
            {"shard": ["draft"], "optimizer": ADAMW, "fixed_fraction": 0.5, "draft_fraction": 1.0},
            "a sharded draft cannot generate text",
        ),
        ({"shard": ["target"], "fixed_fraction": 0.5}, "a sharded target cannot generate text"),
        (
            {"shard": ["target"], "data": {"train": "x.jsonl", "held_out": "y.jsonl"}},
            "cannot be evaluated during training",
        ),
        (
            {"shard": ["target"], "data": {"train": "x.jsonl", "keep_states_gb": 1}},
            r"data\.keep_states_gb cannot skip its passes",
        ),
    ],
)
def test_a_wrong_setting_is_one_line_that_says_what_to_do(changes: dict[str, Any], complaint: str):
    with pytest.raises(ConfigError, match=complaint):
        config(**changes)


def test_a_finish_may_come_at_once_or_in_a_straight_line():
    objective = {"finish": {"objective": "tvd", "begin": 0.25}}
    at_once = config(**objective).finish
    assert at_once is not None
    assert [at_once.share(x) for x in (0.0, 0.25, 0.26, 1.0)] == [0, 0, 1, 1]
    objective["finish"]["end"] = 0.75
    line = config(**objective).finish
    assert line is not None
    assert [line.share(x) for x in (0.0, 0.25, 0.5, 0.75, 1.0)] == [0, 0, 0.5, 1, 1]


def test_a_rule_can_be_an_objective_and_weights_of_both_models_be_shared_out():
    assert config(objective=RULE).objective == (UnderRule(rule=Opt(0.2), loss="forward_kl"),)
    shared = config(shard=["draft", "target"], optimizer=ADAMW)
    assert shared.shard == ("draft", "target")
