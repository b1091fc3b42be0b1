"""Tables of parallel drafts from rows whose figures are known."""

import itertools

import pandas as pd
import pytest
from papers.parallel_drafts import figures
from papers.parallel_drafts.run import WEIGHTS, parallel_arms

ONE = {"garden": 5, "layers": 4, "minutes": 12, "calls": 10.0, "n": 64}
TIMED = {"target_pass_s": 0.010, "draft_pass_s": 0.002}


def rows_of(taus: dict[tuple[str, bool], tuple[float, ...]]) -> pd.DataFrame:
    """Rows of two draws, whose tau differs by 0.2, at gamma 1, 2, ...

    With those that timing adds: of a gamma that was tried, and of the decoded requests.
    """
    lines = [
        ONE
        | {"timed": None}
        | {"draw": draw, "arm": arm, "parallel": parallel, "temperature": 1.0, "gamma": gamma}
        | {"emitted": 10 * (tau + 0.2 * draw), "block_cost": 1 + 0.2 * (1 if parallel else gamma)}
        | {"speedup": None}
        for (arm, parallel), own in taus.items()
        for draw in range(2)
        for gamma, tau in enumerate(own, 1)
    ]
    first = [line for line in lines if line["gamma"] == 1]
    lines += [line | {"timed": "choosing", "speedup": 9.0} for line in first]
    decoded = {"timed": "requests", "emitted": 99.0, "block_cost": None, "speedup": 1.5}
    lines += [line | TIMED | decoded for line in first]
    return pd.DataFrame(lines)


ROWS = rows_of(
    {
        ("ordinary", False): (1.5, 1.8),
        ("parallel 4", True): (1.5, 1.7),
        ("parallel 4", False): (1.5, 1.75),
        ("constant weights", True): (1.4, 1.65),
    }
)


def test_tables_have_each_way_of_drafting_by_gamma():
    tables = figures.tables(ROWS)
    tau = tables["tau"].set_index("drafts")
    assert list(tau.index) == ["ordinary", "parallel 4", "parallel 4, one by one"]
    assert tau["gamma 2"].to_dict() == {
        "ordinary": "1.90 ± 1.27",  # t of one degree of freedom, 12.706, times 0.2 / 2
        "parallel 4": "1.80 ± 1.27",
        "parallel 4, one by one": "1.85 ± 1.27",
    }
    expected = tables["expected"].set_index("drafts")
    assert expected.loc["parallel 4", "gamma 2"].startswith("1.50 ±")  # 1.8 / 1.2
    assert expected.loc["ordinary", "gamma 2"].startswith("1.36 ±")  # 1.9 / 1.4
    timed = tables["timed"].set_index("drafts")
    assert timed.loc["ordinary", "draft pass / target pass"] == "0.20 ± 0.00"
    assert timed.loc["ordinary", ["gamma", "n"]].to_list() == ["1", 2]
    assert tables["weights"].to_dict("records") == [
        {"arm": "constant weights", "gamma 1": "-0.10 ± 0.00", "gamma 2": "-0.05 ± 0.00"}
    ]


@pytest.mark.parametrize("cost", [0.05, 0.4])
def test_the_predicted_speedup_is_the_best_gamma_of_each_draw(cost: float):
    found = figures.predicted(ROWS, [cost]).set_index(["drafts", "draw"])["speedup"]
    for arm, draw in itertools.product(("ordinary", "parallel 4"), range(2)):
        first, second = (1.5, 1.8) if arm == "ordinary" else (1.5, 1.7)
        passes = 2 if arm == "ordinary" else 1
        best = max((first + 0.2 * draw) / (1 + cost), (second + 0.2 * draw) / (1 + passes * cost))
        assert found[arm, draw] == pytest.approx(best)
    assert len(found) == 4  # the same weights one by one, and other weights, are not compared


def test_arms_of_a_draw():
    assert list(parallel_arms(4, 12)) == ["parallel 4", *(f"{name} weights" for name in WEIGHTS)]
    assert list(parallel_arms(4, 6)) == ["parallel 4"]
    assert list(parallel_arms(12, 12)) == ["parallel 4", "parallel 8"]
