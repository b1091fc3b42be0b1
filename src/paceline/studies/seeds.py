"""Runs of training as a source of error: how far a figure differs between seeds of one recipe.

A figure of a trained draft is Y = mu(recipe) + C(seed) + I(recipe, seed) + e(examples). A claim on
recipes is about mu, so its interval needs the spread of C + I, which is estimated from recipes
that were trained with several seeds, at the temperature of the claim
and with drafts of its size: those of its study and task,
or, if these have fewer than 8 degrees of freedom, of all tasks of the study, or of all studies.

With weights w of the runs in an effect and their sums n over the runs of one seed, the variance by
seeds is

    sigma^2 sum w^2 + sigma_C^2 (sum n^2 - sum w^2),    sigma^2 = sigma_C^2 + sigma_I^2.

If both sides are trained, n is 0 and C cancels; then sigma^2 is too large rather than too small.
sigma_C has as few degrees of freedom as there are seeds less 1, so it is an estimate without error.

The half width of an interval is that of examples and that of seeds, each at its own quantile and
its own degrees of freedom, added as squares. This is not below the interval of Cochran and Cox
1950, whose error is at most the nominal one. sigma^2 as estimated contains an error of examples,
which is in the interval over examples, too; it is subtracted at the quantile of the examples.

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
_MEASURED = ("task", "temperature", "top_p", "label", "step", "parameter_ratio", "gamma")
"""Settings of a measurement; the others name the recipe."""
_ALIKE = ("temperature", "top_p", "parameter_ratio", "gamma")
"""Settings that must be equal for one spread; the last is the pair of models."""
_ENOUGH = 8  # degrees of freedom of one task


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
        net: Sum of squares of the weights of each seed, added over its runs.
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
        by_seed: dict[Label, float] = {}
        for run in runs:
            key, seed = str(sorted(run.setting.items())), run.setting[SEED]
            by_run[key] = by_run.get(key, 0.0) + run.sign / num_strata
            by_seed[seed] = by_seed.get(seed, 0.0) + run.sign / num_strata
        squares, net = (sum(w * w for w in part.values()) for part in (by_run, by_seed))
        return cls(tuple(runs), squares, net, len(by_seed))


class Spread(NamedTuple):
    """The variance of a figure between seeds of a recipe.

    Attributes:
        variance: sigma^2 as estimated, with the error of examples in it.
        examples: That error.
        common: sigma_C^2, 0 or more.
        freedom: Degrees of freedom of `variance`.
    """

    variance: float
    examples: float
    common: float
    freedom: int

    @property
    def deviation(self) -> float:
        """sigma, without the error of examples; 0 if nothing is left."""
        return math.sqrt(max(0.0, self.variance - self.examples))

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
    far = student_quantile(1 - 2 * tail, spread.freedom)
    near = student_quantile(1 - 2 * tail, num_units - 1)
    variance = spread.variance * design.squares
    variance += spread.common * max(0.0, design.net - design.squares)
    more = max(0.0, far**2 * variance - near**2 * spread.examples * design.squares)
    return -math.sqrt(low**2 + more), math.sqrt(high**2 + more)


def seed_spread(
    rows: Sequence[Row],
    run: Run,
    measure: Measure,
) -> Spread | None:
    """The spread between seeds of the recipes like that of a run; None without two seeds.

    Args:
        rows: Rows of all studies.
        run: Any run of the claim: its study, task and temperature count.
        measure: Value and influence of the units, [N], on the scale of the effect; None if the row
            does not have the figure.
    """
    alike = [
        row
        for row in rows
        if SEED in row.setting
        and all(row.setting.get(key) == run.setting.get(key) for key in _ALIKE)
    ]
    of_study = [row for row in alike if row.study == run.study]
    of_task = [row for row in of_study if row.setting.get("task") == run.setting.get("task")]
    found: Spread | None = None
    for pool in (of_task, of_study, alike):
        wider = _of_rows(pool, run, measure)
        if found is None or (wider is not None and wider.freedom > found.freedom):
            found = wider
        if found is not None and found.freedom >= _ENOUGH:
            break
    return found


class _Place(NamedTuple):
    """All recipes that are measured in one way, with the same seeds."""

    recipes: frozenset[str]
    values_KM: Tensor
    influence_KMN: Tensor


def _of_rows(
    rows: Sequence[Row],
    run: Run,
    measure: Measure,
) -> Spread | None:
    places = list(_places(rows, run, measure))
    blocks = {place.recipes: place.values_KM.shape for place in places}
    freedom = sum(recipes * (seeds - 1) for recipes, seeds in blocks.values())
    if not freedom:
        return None
    found = torch.tensor([_components(place) for place in places], dtype=torch.float64)
    counts = torch.tensor([len(place.recipes) for place in places], dtype=torch.float64)
    variance, examples, common = (found * counts[:, None]).sum(0).div(counts.sum()).tolist()
    return Spread(variance, examples, max(0.0, common), freedom)


def _places(
    rows: Sequence[Row],
    run: Run,
    measure: Measure,
) -> list[_Place]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(f"{row.study} {sorted(row.setting.items())}", []).append(row)
    found: dict[str, dict[str, dict[Label, tuple[float, Tensor]]]] = {}
    for group in groups.values():
        row = pooled(group)
        setting, given = row.setting, measure(row, run)
        if given is None:
            continue
        way = [setting.get(key) for key in (*_MEASURED, "part")]
        way += [row.study, row.population, *sorted(row.units)]
        recipe = {k: v for k, v in setting.items() if k not in _MEASURED and k != SEED}
        recipe["study"] = row.study
        recipes = found.setdefault(str(way), {})
        seeds = recipes.setdefault(str(sorted(recipe.items())), {})
        order = torch.tensor(row.units).argsort()
        seeds[setting[SEED]] = given[0], given[1][order]
    places: list[_Place] = []
    for recipes in found.values():
        seeds = sorted({seed for own in recipes.values() for seed in own}, key=str)
        whole = {name: own for name, own in recipes.items() if len(own) == len(seeds)}
        if len(seeds) < 2 or not whole:
            continue
        values = [[own[seed][0] for seed in seeds] for own in whole.values()]
        influence = [torch.stack([own[seed][1] for seed in seeds]) for own in whole.values()]
        places.append(
            _Place(
                frozenset(whole),
                torch.tensor(values, dtype=torch.float64),
                torch.stack(influence),
            )
        )
    return places


def _components(place: _Place) -> tuple[float, float, float]:
    """Variance within recipes, the examples' part of it, and the variance of seeds in common.

    The last is (MS of seeds - MS of recipe x seed) / K, by a two-way analysis of variance.
    """
    values_KM, influence_KMN = place.values_KM, place.influence_KMN
    recipes, seeds = values_KM.shape
    freedom = recipes * (seeds - 1)
    within_KM = values_KM - values_KM.mean(1, keepdim=True)
    errors_KMN = influence_KMN - influence_KMN.mean(1, keepdim=True)
    size = influence_KMN.shape[-1]
    variance = float(within_KM.square().sum()) / freedom
    examples = float(errors_KMN.square().sum()) / freedom / size**2
    if recipes == 1:
        return variance, examples, 0.0
    shared_M = within_KM.mean(0)
    of_seeds = recipes * float(shared_M.square().sum()) / (seeds - 1)
    own = float((within_KM - shared_M).square().sum()) / ((recipes - 1) * (seeds - 1))
    return variance, examples, (of_seeds - own) / recipes
