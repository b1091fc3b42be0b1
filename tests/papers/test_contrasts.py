"""Contrasts and cascade points of the papers' figures, by loops and by linear programming."""

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
from papers.contrasts import by_arm, statistic
from papers.faster_cascades.figures import Point, accuracy_at, best_accuracy, calls_at
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
        {"contrast": "log_tau", "first": {"mean": ["a", "b"]}, "second": {"mean": ["none"]}},
    )
    expected = [math.log(a * b / 4) / 2 for a, b in zip(ARMS["a"], ARMS["b"], strict=True)]
    assert list(found) == pytest.approx(expected)


@pytest.mark.parametrize(("word", "chosen"), [("best", max), ("worst", min)])
def test_the_best_arm_is_chosen_by_the_other_draws(word: str, chosen: Any):
    how = {"contrast": "log_tau", "first": {word: ["a", "b"]}, "second": {"mean": ["none"]}}
    found = statistic(rows_of(ARMS, SCORES), how)
    for draw in range(3):
        others = [one for one in range(3) if one != draw]
        best = chosen("ab", key=lambda arm: sum(math.log(ARMS[arm][one]) for one in others))
        assert found[draw] == pytest.approx(math.log(ARMS[best][draw] / 2))


def test_the_best_arm_may_be_chosen_by_another_figure():
    how = {
        "contrast": "log_tau",
        "first": {"best": ["a", "b"]},
        "second": {"best": ["a", "b"], "by": "accuracy"},
    }
    found = statistic(rows_of(ARMS, SCORES), how)
    for draw in range(3):
        others = [one for one in range(3) if one != draw]
        tau = max("ab", key=lambda arm: sum(math.log(ARMS[arm][one]) for one in others))
        score = max("ab", key=lambda arm: sum(SCORES[arm][one] for one in others))
        assert found[draw] == pytest.approx(math.log(ARMS[tau][draw] / ARMS[score][draw]))


def test_one_side_less_its_first_checkpoint_is_its_gain():
    rows = rows_of({"a": [2.0, 3.0]}, {"a": [0.1, 0.2]})
    early = rows.assign(label="step 25", acceptance=[8.0, 10.0])
    how = {"contrast": "acceptance", "first": {"mean": ["a"]}, "less": "first checkpoint"}
    assert list(statistic(pd.concat([rows, early]), how)) == pytest.approx([0.04, 0.1])


def test_the_start_is_an_arm_of_its_own():
    assert set(by_arm(rows_of(ARMS, SCORES), "accuracy").columns) == {"a", "b", "none"}


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


def test_the_best_setting_is_chosen_by_the_other_draws():
    accuracies = np.array([[0.5, 0.9], [0.8, 0.2], [0.9, 0.8]])
    draws = {
        draw: pd.DataFrame(
            [
                {"family": "autoregressive", "score": 90, "n": 100, "calls": 1, "emitted": 1},
                *(
                    {"family": "opt", "score": 100 * one, "n": 100, "calls": 1, "emitted": 2}
                    for one in own
                ),
            ]
        )
        for draw, own in enumerate(accuracies)
    }
    assert best_accuracy(draws, ["opt"]) == pytest.approx({0: 0.5, 1: 0.2, 2: 0.9})
