"""The spread between runs of training, against an analysis of variance by hand and by numpy."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.core.bootstrap import student_quantile
from paceline.results.row import Row
from paceline.studies.seeds import Design, Run, Spread, Table, seed_spread, with_seeds
from support.results import study_row

UNITS = 20


def measure(row: Row, run: Run) -> tuple[float, Tensor] | None:
    if "score" not in row.sums:
        return None
    scores_N = torch.tensor(row.sums["score"], dtype=torch.float64)
    return float(scores_N.mean()), scores_N - scores_N.mean()


def runs(values: Sequence[Sequence[float]], **setting: str | float) -> list[Row]:
    """A row per recipe and seed whose texts all have this score."""
    return [
        study_row({"score": [value] * UNITS}, draft=f"d{k}", seed=m, **setting)
        for k, seeds in enumerate(values)
        for m, value in enumerate(seeds)
    ]


def run(sign: int = 1, **setting: str | float) -> Run:
    return Run("tiny", {"seed": 0} | setting, sign)


def test_mean_squares_are_those_of_a_two_way_table():
    """Recipes with seeds (1, 3), (2, 6), (0, 1): differences 2, 4, 1, of mean 7/3 and variance 7/3.

    MS_C = 3 (7/3)^2 / 2 and MS_I = (7/3) / 2; one run has (4 + 16 + 1) / 2 / 3 = 3.5.
    """
    found = seed_spread(runs([(1, 3), (2, 6), (0, 1)]), [run()], measure)
    assert found is not None
    (table,) = found.tables
    assert (table.num_recipes, table.num_seeds) == (3, 2)
    assert table.of_seeds == pytest.approx((49 / 6, 0))
    assert table.of_runs == pytest.approx((7 / 6, 0))
    assert found.of(1, 1) == (pytest.approx(3.5), 0, 1)
    assert found.freedom == 3


def test_seeds_cancel_between_recipes_of_one_text_and_not_between_texts():
    """Two recipes of one text keep MS_I, those of two texts MS_C, too; by the formula."""
    scores = np.random.default_rng(4).random((2, 3, 4))  # [text, recipe, seed]
    rows = [row for text in (0, 1) for row in runs(scores[text].tolist(), trained_on=text)]
    found = seed_spread(rows, [run(trained_on=0), run(trained_on=1, sign=-1)], measure)
    assert found is not None
    inner = scores - scores.mean(2, keepdims=True) - scores.mean(1, keepdims=True)
    inner += scores.mean((1, 2), keepdims=True)
    of_runs = (inner**2).sum((1, 2)) / 6
    of_seeds = 3 * scores.mean(1).var(1, ddof=1)
    one_text = Design.of([run(draft=0), run(draft=1, sign=-1)], 1)
    assert found.of(*one_text[1:3])[0] == pytest.approx(2 * of_runs.mean())
    two_texts = Design.of([run(trained_on=0), run(trained_on=1, sign=-1)], 1)
    assert found.of(*two_texts[1:3])[0] == pytest.approx(2 * ((of_seeds + 2 * of_runs) / 3).mean())


def test_errors_of_examples_are_the_part_of_the_variance_that_is_not_of_runs():
    """Both seeds have the same mean but other texts right; by numpy."""
    draws = np.random.default_rng(1)
    scores = draws.random((4, 2, UNITS))
    rows = [
        study_row({"score": scores[k, m].tolist()}, draft=f"d{k}", seed=m)
        for k in range(4)
        for m in range(2)
    ]
    found = seed_spread(rows, [run()], measure)
    assert found is not None
    gaps = scores[:, 0] - scores[:, 1]
    variance, examples, _ = found.of(1, 1)
    assert variance == pytest.approx((gaps.mean(-1) ** 2 / 2).mean())
    assert examples == pytest.approx((gaps.var(-1) / 2 / UNITS).mean())
    assert found.deviation == pytest.approx(max(0, variance - examples) ** 0.5)


def test_other_tasks_and_studies_count_if_degrees_of_freedom_are_few():
    few, more = runs([(0, 2)] * 3, task="a"), runs([(0, 4)] * 3, task="b")
    found = seed_spread([*few, *more], [run(task="a")], measure)
    assert found is not None
    # the same six runs on two tasks are no more degrees of freedom
    assert (found.of(1, 1)[0], found.freedom) == (pytest.approx(2), 3)
    elsewhere = [row.model_copy(update={"study": "other"}) for row in runs([(0, 6)] * 6, task="a")]
    found = seed_spread([*few, *more, *elsewhere], [run(task="a")], measure)
    assert found is not None
    assert found.freedom == 9
    assert found.of(1, 1)[0] == pytest.approx((3 * (2 + 8) / 2 + 6 * 18) / 9)
    enough = seed_spread([*runs([(0, 2)] * 8, task="a"), *more], [run(task="a")], measure)
    assert enough is not None
    assert (enough.of(1, 1)[0], enough.freedom) == (pytest.approx(2), 8)


def test_recipes_of_another_text_count_only_if_degrees_of_freedom_are_few():
    own = runs([(0, 2)] * 8, task="a", trained_on="a")
    rows = [*own, *runs([(0, 8)] * 8, task="a", trained_on="b")]
    spreads = [seed_spread(rows, [run(task="a", trained_on=text)], measure) for text in "ab"]
    assert [spread and spread.of(1, 1)[0] for spread in spreads] == pytest.approx([2, 32])
    few = seed_spread(rows[10:], [run(task="a", trained_on="a")], measure)
    assert few is not None
    assert few.of(1, 1)[0] == pytest.approx((3 * 2 + 8 * 32) / 11)


def test_other_temperatures_and_models_and_single_seeds_do_not_count():
    rows = runs([(0, 2)], temperature=1.0, parameter_ratio=0.2)
    assert seed_spread(rows, [run(temperature=1.0, parameter_ratio=0.2)], measure) is not None
    assert seed_spread(rows, [run(temperature=0.0, parameter_ratio=0.2)], measure) is None
    assert seed_spread(rows, [run(temperature=1.0, parameter_ratio=0.1)], measure) is None
    assert seed_spread(runs([(1,), (2,)]), [run()], measure) is None


def test_runs_that_are_measured_with_several_gammas_count_once():
    """The same runs at another gamma are no other runs: the degrees of freedom stay."""
    of_gamma = [row for gamma in (5, 7) for row in runs([(1, 3), (2, 6)], gamma=gamma)]
    spread = seed_spread(of_gamma, [run(gamma=7)], measure)
    assert spread is not None
    assert (spread.freedom, spread.of(1, 1)[0]) == (2, pytest.approx(5))


def test_checkpoints_that_only_some_recipes_kept_are_no_further_runs():
    """At the end there are three recipes, at the checkpoint two of them: three recipes count."""
    end = runs([(1, 3), (2, 6), (1, 4)], label="end")
    early = runs([(0, 9), (9, 0)], label="step 16")
    alone, both = (seed_spread(rows, [run(label="end")], measure) for rows in (end, end + early))
    assert alone is not None
    assert both == alone
    assert alone.freedom == 3  # 1 of the seeds, and (3 - 1) (2 - 1) of the runs


def test_rows_that_are_all_of_one_study_task_and_text_are_measured_once():
    rows = runs([(1, 3), (2, 6)], task="a", trained_on="a")
    seen: list[str] = []

    def counted(row: Row, run: Run) -> tuple[float, Tensor] | None:
        seen.append(str(row.setting))
        return measure(row, run)

    assert seed_spread(rows, [run(task="a", trained_on="a")], counted) is not None
    assert sorted(seen) == sorted(str(row.setting) for row in rows)


def test_weights_of_runs_are_those_of_the_mean_and_cancel_by_seed():
    """Two recipes against one, two seeds: 1/4 each against 1/2 each; the net of a seed is 0."""
    made = [
        one
        for seed in (0, 1)
        for draft in ("a", "b")
        for one in (
            Run("tiny", {"draft": draft, "seed": seed}, 1),
            Run("tiny", {"draft": "c", "seed": seed}, -1),
        )
    ]
    design = Design.of(made, 4)
    assert design.squares == pytest.approx(4 / 16 + 2 / 4)
    assert (design.net, design.num_seeds) == (pytest.approx(0), 2)
    alone = Design.of(made[::2], 4)
    assert (alone.squares, alone.net) == (pytest.approx(4 / 16), pytest.approx(2 / 4))


def test_the_half_widths_of_examples_and_runs_add_as_squares():
    design = Design.of([run(), run(sign=-1, draft="b")], 1)
    spread = Spread((Table(1, 6, (0.5, 0.0), (0.5, 0.0)),))
    half = student_quantile(1 - 2 * 1e-3, 5)
    low, high = with_seeds(-3.0, 4.0, spread, design, 1e-3, 100)
    assert (low, high) == pytest.approx((-((9 + half**2) ** 0.5), (16 + half**2) ** 0.5))
    # runs that differ no more than by the error of their examples add nothing
    nothing = Spread((Table(1, 6, (0.01, 0.5), (0.01, 0.5)),))
    assert with_seeds(-3.0, 4.0, nothing, design, 1e-3, 100) == (-3.0, 4.0)
