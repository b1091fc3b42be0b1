"""Contrasts and cascade points of the papers' figures, by loops and by linear programming."""

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
from papers.contrasts import shuffled, statistic
from papers.faster_cascades import figures as cascades
from papers.faster_cascades.figures import Point, accuracy_at, calls_at
from scipy.optimize import linprog


def rows_of(taus: dict[str, list[float]], scores: dict[str, list[float]]) -> pd.DataFrame:
    lines = [
        {"draft": arm if arm != "none" else None, "draw": draw, "calls": 10.0, "n": 100}
        | {"label": "start" if arm == "none" else "end", "emitted": 10 * tau, "tokens": 50}
        | {"acceptance": 5 * tau, "score": 100 * score}
        for arm in taus
        for draw, (tau, score) in enumerate(zip(taus[arm], scores[arm], strict=True))
    ]
    return pd.DataFrame(lines)


ARMS = {"a": [2.0, 3.0, 2.5], "b": [2.2, 2.1, 2.6], "none": [2.0, 2.0, 2.0]}
SCORES = {"a": [0.1, 0.2, 0.3], "b": [0.5, 0.1, 0.9], "none": [0.0, 0.0, 0.0]}


def test_a_contrast_is_worked_out_by_hand():
    found = statistic(
        rows_of(ARMS, SCORES),
        {"contrast": "log_tau", "first": ["a", "b"], "second": ["none"]},
    )
    expected = [math.log(a * b / 4) / 2 for a, b in zip(ARMS["a"], ARMS["b"], strict=True)]
    assert list(found) == pytest.approx(expected)


def test_one_side_less_its_first_checkpoint_is_its_gain():
    rows = rows_of({"a": [2.0, 3.0]}, {"a": [0.1, 0.2]})
    early = rows.assign(label="step 25", acceptance=[8.0, 10.0])
    how = {"contrast": "acceptance", "first": ["a"], "less": "first checkpoint"}
    assert list(statistic(pd.concat([rows, early]), how)) == pytest.approx([0.04, 0.1])


HOW = {"contrast": "log_tau", "first": ["a"], "second": ["b"]}


def test_shuffled_names_keep_the_numbers_of_each_draw():
    rows = rows_of(ARMS, SCORES)
    found = shuffled(rows, HOW, np.random.default_rng(0))
    assert not found["draft"].equals(rows["draft"])
    for key in ("draft", "emitted"):
        for draw, own in found.groupby("draw"):
            expected = rows[rows["draw"] == draw].fillna("none")
            assert sorted(own[key]) == sorted(expected[key])


def test_shuffled_names_have_no_effect_where_names_have_one():
    """200 shuffles of 12 draws; the mutant shuffles all draws alike and keeps the effect."""
    gain = np.random.default_rng(1).normal(0, 0.01, (2, 12))
    taus = {"a": list(3 * np.exp(gain[0])), "b": list(2 * np.exp(gain[1]))}
    rows = rows_of(taus, dict.fromkeys(taus, [0.0] * 12))
    drawn = np.random.default_rng(2)
    means = [statistic(rows, HOW, drawn).mean() for _ in range(200)]
    spread = math.log(1.5) / 12**0.5
    assert np.std(means) == pytest.approx(spread, rel=0.2)
    assert abs(np.mean(means)) < 4 * spread / 200**0.5
    mutant = drawn.choice([-1, 1], 200) * statistic(rows, HOW).mean()
    assert np.std(mutant) > 3 * spread


def test_shuffled_checkpoints_have_no_gain():
    rows = rows_of({"a": [2.0] * 12}, {"a": [0.1] * 12})
    early = rows.assign(label="step 25", acceptance=5.0)
    how = {"contrast": "acceptance", "first": ["a"], "less": "first checkpoint"}
    both = pd.concat([rows, early])
    assert set(statistic(both, how).round(9)) == {0.1}
    assert set(statistic(both, how, np.random.default_rng(0)).round(9)) == {0.1, -0.1}


@pytest.mark.parametrize("how", [{"calls": 0.95}, {"accuracy": 0.1}])
def test_shuffled_settings_of_cascades_have_no_effect(how: dict[str, Any]):
    rows = pd.DataFrame(
        {"draw": draw, "temperature": 1.0, "n": 100, "emitted": 10.0} | one
        for draw in range(12)
        for one in (
            {"family": "autoregressive", "score": 80, "calls": 10.0},
            {"family": "lossless", "score": 80, "calls": 5.0},
            {"family": "opt", "alpha": 0.1, "score": 90, "calls": 2.0},
            {"family": "chow", "alpha": 0.1, "score": 70, "calls": 3.0},
        )
    )
    how = how | {"first": ["chow", "lossless"], "second": ["opt", "lossless"]}
    plain = cascades.statistic(rows, how, "sums")
    assert plain.nunique() == 1
    drawn = np.random.default_rng(0)
    found = np.array([cascades.statistic(rows, how, "sums", drawn) for _ in range(100)])
    means = found.mean(axis=1)
    assert abs(means.mean()) < 4 * means.std() / 10
    assert means.std() < 1.3 * abs(found).max() / 12**0.5


@pytest.mark.parametrize("seed", range(20))
def test_mixtures_of_settings_are_those_of_linear_programming(seed: int):
    drawn = np.random.default_rng(seed)
    settings = [Point(*one) for one in drawn.uniform(0, 1, (6, 2))]
    calls, accuracy = np.array(settings).T
    one = {"A_eq": np.ones((1, 6)), "b_eq": [1.0]}
    level = float(drawn.uniform(0.2, accuracy.max()))
    least = linprog(calls, A_ub=-accuracy[None], b_ub=[-level], **one)
    assert calls_at(settings, level) == pytest.approx(least.fun)
    budget = float(drawn.uniform(calls.min(), 1))
    most = linprog(-accuracy, A_ub=calls[None], b_ub=[budget], **one)
    assert accuracy_at(settings, budget) == pytest.approx(-most.fun)


def test_what_no_setting_reaches_is_unknown():
    assert math.isnan(calls_at([Point(0.5, 0.4)], 0.5))
    assert math.isnan(accuracy_at([Point(0.5, 0.4)], 0.3))


def test_the_accuracy_is_that_of_the_setting_with_this_alpha():
    rows = pd.DataFrame(
        [
            {"draw": 0, "temperature": 1.0, "family": family, "alpha": alpha, "score": score}
            | {"n": 100, "calls": 1.0, "emitted": 2.0}
            for family, alpha, score in (
                ("autoregressive", math.nan, 90),
                ("opt", 0.1, 80),
                ("opt", 0.2, 85),
            )
        ]
    )
    how = {"accuracy": 0.2, "first": ["opt"], "second": ["autoregressive"]}
    assert list(cascades.statistic(rows, how, "sums")) == pytest.approx([-0.05])
