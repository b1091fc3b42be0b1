"""Runs of training as a source of error: how far a figure differs between seeds of one recipe.

A figure of a trained draft is Y = mu(recipe) + C(text, seed) + I(recipe, seed) + e(examples). A
claim on recipes is about mu, so its interval needs the spread of C + I. It is estimated from
recipes that were trained with several seeds, at the temperature of the claim and with drafts of its
size: those of its study, task and text of training, or, if these have fewer than 8 degrees of
freedom, of all texts, of all tasks of the study, or of all studies.

The recipes of one text with the same seeds are a two-way table with the mean squares MS_C of seeds,
(M - 1) degrees of freedom, and MS_I of recipe x seed, (K - 1)(M - 1). With weights w of the runs in
an effect and their sums n over the runs of one text and seed, the variance by seeds is

    sigma_I^2 sum w^2 + sigma_C^2 sum n^2 = (MS_C sum n^2 + MS_I (K sum w^2 - sum n^2)) / K.

If both sides are trained on one text with the same seeds, n is 0 and C cancels; that of two texts
does not. The degrees of freedom are those of Satterthwaite.

The half width of an interval is that of examples and that of seeds, each at its own quantile and
its own degrees of freedom, added as squares. This is not below the interval of Cochran and Cox
1950, whose error is at most the nominal one. The mean squares contain an error of examples, which
is in the interval over examples, too; it is subtracted at the quantile of the examples.

Error rates in simulations, far in the tail too: tests/statistical/test_claims_of_recipes.py.
"""

# K recipes, M seeds, N units
from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from paceline.core.bootstrap import student_quantile
from paceline.results.row import pooled

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from paceline.results.row import Row
    from paceline.studies.study_file import Label

    Measure = Callable[[Row, "Run"], tuple[float, Tensor] | None]

SEED = "seed"
_TEXT = "trained_on"
_MEASURED = ("task", "temperature", "top_p", "label", "step", "parameter_ratio", "gamma")
"""Settings of a measurement; the others name the recipe."""
_ALIKE = ("temperature", "top_p", "parameter_ratio", "gamma")
"""Settings that must be equal for one spread; the ratio of parameters names the models."""
_TABLE = (_TEXT, "part", "parameter_ratio")
"""Settings of a recipe that must be equal for runs of one seed to share anything."""
_ENOUGH = 8  # degrees of freedom


class Run(NamedTuple):
    """A run of training that a figure belongs to, and the sign of the figure in an effect."""

    study: str
    setting: Mapping[str, Label]
    sign: int


class Design(NamedTuple):
    """How the runs enter a mean effect.

    Attributes:
        runs: One entry per run and stratum.
        squares: Sum of squared weights of runs.
        net: Sum of squares of the weights of each text and seed, added over its runs.
        num_seeds: Number of different seeds.
    """

    runs: tuple[Run, ...]
    squares: float
    net: float
    num_seeds: int

    @classmethod
    def of(cls, runs: Sequence[Run], num_strata: int) -> Design:
        """The weights of these runs in a mean over `num_strata` strata."""
        by_run: dict[str, float] = {}
        by_seed: dict[str, float] = {}
        for run in runs:
            key = str(sorted(run.setting.items()))
            seed = str([run.setting.get(key) for key in (SEED, *_TABLE)])
            by_run[key] = by_run.get(key, 0.0) + run.sign / num_strata
            by_seed[seed] = by_seed.get(seed, 0.0) + run.sign / num_strata
        squares, net = (sum(w * w for w in part.values()) for part in (by_run, by_seed))
        return cls(tuple(runs), squares, net, len({run.setting[SEED] for run in runs}))


class Table(NamedTuple):
    """Recipes with the same seeds: mean squares of a figure, as (estimate, its error of examples).

    Attributes:
        num_recipes: K.
        num_seeds: M.
        of_seeds: MS_C.
        of_runs: MS_I; with one recipe MS_C stands for it.
    """

    num_recipes: int
    num_seeds: int
    of_seeds: tuple[float, float]
    of_runs: tuple[float, float]


class Spread(NamedTuple):
    """The variance of a figure between seeds of a recipe.

    Attributes:
        tables: What it is estimated from; each counts by its number of recipes.
    """

    tables: tuple[Table, ...]

    @property
    def freedom(self) -> int:
        """Degrees of freedom of the runs of each recipe."""
        return sum(table.num_recipes * (table.num_seeds - 1) for table in self.tables)

    def of(self, squares: float, net: float) -> tuple[float, float, int]:
        """Variance of an effect, the error of examples in it, and its degrees of freedom.

        Args:
            squares: Sum of squared weights of the runs.
            net: The same of their sums by text and seed.
        """
        recipes = sum(table.num_recipes for table in self.tables)
        variance, examples, uncertainty = 0.0, 0.0, 0.0
        for table in self.tables:
            freedom = table.num_seeds - 1
            rest = max(0.0, table.num_recipes * squares - net)
            for factor, (square, error), own in (
                (net / recipes, table.of_seeds, freedom),
                (rest / recipes, table.of_runs, freedom * max(1, table.num_recipes - 1)),
            ):
                variance += factor * square
                examples += factor * error
                uncertainty += (factor * square) ** 2 / own
        # whole numbers by rounding down, which widens
        freedom = int(variance**2 / uncertainty + 1e-6) if uncertainty else self.freedom
        return variance, examples, freedom

    @property
    def deviation(self) -> float:
        """Standard deviation between runs, without the error of examples; 0 if nothing is left."""
        variance, examples, _ = self.of(1, 1)
        return math.sqrt(max(0.0, variance - examples))

    def words(self, num_seeds: int) -> str:
        """The spread for readers."""
        spread = "between runs not above the error of examples"
        if self.deviation:
            spread = f"standard deviation between runs {self.deviation:.2g}"
        return f"{num_seeds} seeds; {spread}, {self.freedom} degrees of freedom"


def with_seeds(
    low: float, high: float, spread: Spread, design: Design, tail: float, num_units: int
) -> tuple[float, float]:
    """Bounds of an error for other runs of training, from those for other examples.

    Args:
        low: Lower bound of the error over examples, below 0.
        high: Upper bound.
        spread: Between seeds.
        design: How the runs enter the effect.
        tail: Probability beyond either bound.
        num_units: Number of examples.
    """
    variance, examples, freedom = spread.of(design.squares, design.net)
    far = student_quantile(1 - 2 * tail, freedom)
    near = student_quantile(1 - 2 * tail, num_units - 1)
    more = max(0.0, far**2 * variance - near**2 * examples)
    return -math.sqrt(low**2 + more), math.sqrt(high**2 + more)


def seed_spread(
    rows: Sequence[Row],
    runs: Sequence[Run],
    measure: Measure,
) -> Spread | None:
    """The spread between seeds of the recipes like those of an effect; None without two seeds.

    Args:
        rows: Rows of all studies.
        runs: The runs of the effect: their texts and tasks, and study and models of the first.
        measure: Value and influence of the units, [N], on the scale of the effect; None if the row
            does not have the figure.
    """
    run = runs[0]

    def like(pool: Sequence[Row], key: str) -> list[Row]:
        wanted = [one.setting.get(key) for one in runs]
        return [row for row in pool if row.setting.get(key) in wanted]

    alike = [
        row
        for row in rows
        if SEED in row.setting
        and all(row.setting.get(key) == run.setting.get(key) for key in _ALIKE)
    ]
    of_study = [row for row in alike if row.study == run.study]
    of_task = like(of_study, "task")
    found: Spread | None = None
    pools = like(of_task, _TEXT), of_task, of_study, alike
    for pool in {len(pool): pool for pool in pools}.values():  # each contains the one before
        tables = _tables(pool, run, measure)
        if tables and (found is None or Spread(tables).freedom > found.freedom):
            found = Spread(tables)
        if found is not None and found.freedom >= _ENOUGH:
            break
    return found


def _tables(rows: Sequence[Row], run: Run, measure: Measure) -> tuple[Table, ...]:
    """One table per set of recipes with the same seeds, the mean of all ways to measure them.

    The same runs at several tasks, gammas or checkpoints are no further runs: of sets that share a
    recipe, the one with most recipes counts.
    """
    ways: dict[str, dict[str, dict[Label, tuple[float, Tensor]]]] = {}
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(f"{row.study} {sorted(row.setting.items())}", []).append(row)
    for group in groups.values():
        row = pooled(group)
        setting, given = row.setting, measure(row, run)
        if given is None:
            continue
        way = [setting.get(key) for key in (*_MEASURED, *_TABLE)]
        way += [row.study, row.population, *sorted(row.units)]
        recipe = {k: v for k, v in setting.items() if k not in _MEASURED and k != SEED}
        seeds = ways.setdefault(str(way), {}).setdefault(
            str([row.study, *sorted(recipe.items())]), {}
        )
        seeds[setting[SEED]] = given[0], given[1][torch.tensor(row.units).argsort()]
    found: dict[frozenset[str], list[Table]] = {}
    for recipes in ways.values():
        seeds = sorted({seed for own in recipes.values() for seed in own}, key=str)
        whole = {name: own for name, own in recipes.items() if len(own) == len(seeds)}
        if len(seeds) > 1 and whole:
            cells = [[own[seed] for seed in seeds] for own in whole.values()]
            found.setdefault(frozenset(whole), []).append(_table(cells))
    tables: dict[frozenset[str], Table] = {}
    for names in sorted(found, key=lambda names: (-len(names), sorted(names))):
        if all(names.isdisjoint(others) for others in tables):
            seeds, runs = zip(*((one.of_seeds, one.of_runs) for one in found[names]), strict=True)
            tables[names] = found[names][0]._replace(of_seeds=_mean(seeds), of_runs=_mean(runs))
    return tuple(tables.values())


def _mean(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    firsts, seconds = zip(*pairs, strict=True)
    return sum(firsts) / len(firsts), sum(seconds) / len(seconds)


def _table(cells: Sequence[Sequence[tuple[float, Tensor]]]) -> Table:
    """Mean squares by a two-way analysis of variance of [K][M] values and influences."""
    values_KM1 = torch.tensor([[[value] for value, _ in own] for own in cells], dtype=torch.float64)
    influence_KMN = torch.stack([torch.stack([one for _, one in own]) for own in cells])
    num_recipes, num_seeds, num_units = influence_KMN.shape
    freedom = num_seeds - 1

    def mean_squares(each_KMN: Tensor) -> tuple[float, float]:
        within_KMN = each_KMN - each_KMN.mean(1, keepdim=True)
        shared_MN = within_KMN.mean(0)
        of_seeds = num_recipes * float(shared_MN.square().sum()) / freedom
        if num_recipes == 1:
            return of_seeds, of_seeds
        own = float((within_KMN - shared_MN).square().sum())
        return of_seeds, own / ((num_recipes - 1) * freedom)

    both = mean_squares(values_KM1), mean_squares(influence_KMN / num_units)
    of_seeds, of_runs = zip(*both, strict=True)
    return Table(num_recipes, num_seeds, of_seeds, of_runs)
