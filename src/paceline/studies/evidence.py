"""Effects with intervals for claims, from the sums of rows.

A figure is R = sum a / sum b over the units. Its influence values (a_i - R b_i) / mean(b) have mean
0, and their standard error is that of R to first order (the infinitesimal jackknife). Effects are
smooth functions of such ratios on the same units, so their influence values are sums of these. The
interval is that of their mean by `core.bounded_means.mean_bounds`, which holds its error rate far
in the tail, where rare units decide. A difference of two scores is between -1 and 1. Of other
figures, the sample shows how far a unit can be; if all N units show one effect, up to a fraction
1 - tail^(1 / N) of all units may differ, each by a whole unit.

Error rates in simulations are in tests/statistical/test_error_rate_of_claims.py and
test_far_tails.py.
"""

# N units
from __future__ import annotations

import functools
import math
from functools import partial
from statistics import NormalDist
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch

from paceline.core.bootstrap import LEAST_UNITS, Interval
from paceline.core.bounded_means import mean_bounds
from paceline.errors import UsageError
from paceline.results.comparison import Estimate, estimate
from paceline.results.figures import FIGURES
from paceline.results.row import pooled
from paceline.rng import named_generator
from paceline.studies.seeds import SEED, Design, Run, seed_spread, with_seeds

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from torch import Tensor

    from paceline.results.row import Row
    from paceline.studies.claim_file import Condition, Paired, Side
    from paceline.studies.study_file import Label

T = TypeVar("T")
_ROUNDING = 1e-12  # a spread that can be rounding
_FARTHEST = 3e-4  # the smallest tail that is resampled: about that of a claim


class Stratum(NamedTuple):
    """The effect at one value of the settings that are averaged over.

    Attributes:
        name: Those settings.
        population: Of the units.
        units: Numbers of the units.
        effect: On the scale that is averaged: the logarithm of a ratio, or a difference.
        first, second: Figures of the sides.
        runs: The runs of training behind the sides, each with its sign in the effect.
    """

    name: str
    population: str
    units: tuple[int, ...]
    effect: Estimate
    first: float
    second: float
    runs: tuple[Run, ...] = ()


class Part(NamedTuple):
    """One effect that a claim is about.

    Attributes:
        name: Which one; empty if it is the only one.
        at: Its interval, given the probability on either side.
        first, second: Figures of the sides.
        num_units: Number of examples; of the smallest population if there are several.
        strata: Effect of each stratum that it averages, by name.
        note: What else readers should see, such as the spread between runs of training.
    """

    name: str
    at: Callable[[float], Interval]
    first: float
    second: float
    num_units: int
    strata: Mapping[str, float] = MappingProxyType({})
    note: str = ""


class Evidence(NamedTuple):
    """All effects that a claim is about.

    Attributes:
        parts: The effects.
        rank: The claim is on the effect of this rank, 1 the largest; on all of them if it is their
            number.
        missing: Why effects are missing, if any are.
    """

    parts: tuple[Part, ...]
    rank: int
    missing: str = ""

    def part(self, tail: float) -> Part:
        """The effect of the rank, as a part of its own."""
        return ranked(self.parts, self.rank, tail)


def ranked(parts: Sequence[Part], rank: int, tail: float) -> Part:
    """The rank-th largest effect: `at` of the result gives its interval, its name who has it.

    That `rank` of n effects are above a number, is a partial conjunction: with L_i the lower bounds
    at tail / (n - rank + 1), the bound is the rank-th largest L_i. Likewise, the upper bound is the
    rank-th largest of the upper bounds at tail / rank. So a claim on all effects holds if each does
    by its own interval, and one effect alone refutes it only by an interval for any of n.

    Paper: ours. Differs: Benjamini and Heller 2008 (partial conjunction hypotheses), by bounds.
    """
    if len(parts) == 1:
        return parts[0]

    def at(tail: float) -> Interval:
        lows = sorted(part.at(tail / (len(parts) - rank + 1)).low for part in parts)
        highs = sorted(part.at(tail / rank).high for part in parts)
        values = sorted(part.at(tail).value for part in parts)
        return Interval(values[-rank], lows[-rank], highs[-rank])

    chosen = sorted(parts, key=lambda part: part.at(tail).value)[-rank]
    return chosen._replace(at=at, num_units=min(part.num_units for part in parts))


def select(rows: Sequence[Row], *conditions: Mapping[str, Condition]) -> list[Row]:
    """The rows that have all of these settings."""
    return [row for row in rows if all(row.has(**each) for each in conditions)]


def paired_evidence(
    test: Paired,
    rows: Sequence[Row],
    tail: float,
    everything: Sequence[Row] | None = None,
) -> Evidence | None:
    """The effects of a paired test; None if a side has no rows or there are too few units.

    Args:
        test: The test.
        rows: Rows of the study.
        tail: Probability on either side of the interval of the claim; with `some`, the value that
            counts at each place is chosen at it.
        everything: Rows of all studies, for the spread between runs of training; None: of the study
            alone. Without rows, intervals are over examples only.

    Raises:
        UsageError: the rows of a side do not have the sum, or differ in a setting that the claim
            does not name.
    """
    strata = _strata(test, rows)
    if not strata or min(len(one.units) for _, one in strata) < LEAST_UNITS:
        return None
    pool = select(rows if everything is None else everything, test.spread)
    outer = test.each or test.most
    places: dict[str, dict[str, list[Stratum]]] = {}
    for at, stratum in strata:
        inner = places.setdefault(_named(at, outer), {})
        inner.setdefault(_named(at, test.some), []).append(stratum)
    sign = -1 if test.expect == "less" else 1
    parts = [
        ranked([_mean(test, own, pool, place, name, sign) for name, own in inner.items()], 1, tail)
        for place, inner in places.items()
    ]
    return Evidence(tuple(parts), len(parts) // 2 + 1 if test.most else len(parts))


def _named(at: Mapping[str, object], keys: Sequence[str]) -> str:
    return ", ".join(f"{key} {at[key]}" for key in keys)


def _mean(
    test: Paired,
    strata: Sequence[Stratum],
    rows: Sequence[Row],
    place: str,
    name: str,
    sign: int,
) -> Part:
    """The mean effect over strata, times the sign."""
    value = sum(stratum.effect.value for stratum in strata) / len(strata)
    populations = dict.fromkeys(one.population for one in strata)
    errors = _Errors([_Group.of(strata, population) for population in populations])
    design = Design.of([run for stratum in strata for run in stratum.runs], len(strata))
    spread = None
    if design.runs:
        spread = seed_spread(rows, design.runs, partial(_on_scale, test))
    to_effect = math.expm1 if test.compare == "ratio" else float

    @functools.cache
    def at(tail: float) -> Interval:
        low, high = errors.bounds(tail)
        if spread is not None:
            low, high = with_seeds(low, high, spread, design, tail, errors.least_units)
        found = [to_effect(part) for part in (value, value + low, value + high)]
        return Interval(*found) if sign > 0 else Interval(-found[0], -found[2], -found[1])

    return Part(
        ", ".join(filter(None, (place, name))),
        at,
        sum(stratum.first for stratum in strata) / len(strata),
        sum(stratum.second for stratum in strata) / len(strata),
        min(len(stratum.units) for stratum in strata),
        {stratum.name: to_effect(stratum.effect.value) for stratum in strata},
        "" if spread is None else spread.words(design.num_seeds),
    )


class _Errors:
    """Bounds of the error of a mean over examples.

    Resamples do not reach far beyond `_FARTHEST`. Farther bounds grow with the square of the normal
    quantile, as do the bounds of a mean of rare values: -log(tail) / N.
    """

    def __init__(self, groups: Sequence[_Group]) -> None:
        self._values = [one.influence_N for one in groups]
        self._extremes = [one.extremes for one in groups]
        self.least_units = min(map(len, self._values))
        self._resampled = functools.cache(self._resample)

    def bounds(self, tail: float) -> tuple[float, float]:
        """Bounds around 0; `tail`: the probability beyond either."""
        reached = max(tail, _FARTHEST)
        low, high = self._resampled(reached)
        normal = NormalDist()
        factor = (normal.inv_cdf(tail) / normal.inv_cdf(reached)) ** 2
        return factor * low, factor * high

    def _resample(self, tail: float) -> tuple[float, float]:
        rng = named_generator(0, "effect", *map(len, self._values))
        return mean_bounds(self._values, tail, rng, self._extremes)


def _on_scale(test: Paired, row: Row, run: Run) -> tuple[float, Tensor] | None:
    """The figure of a run and its influence, on the scale that is averaged; None if not there."""
    figure = FIGURES[test.figure]
    if not figure.is_in(row):
        return None
    found = estimate(figure, figure.measured(row))
    if test.compare == "difference":
        return found.value, found.influence_N
    return math.log(found.value), found.influence_N / found.value


class _Group(NamedTuple):
    """What the units of one population contribute to the mean over all strata, less its mean.

    Strata of one population share units, so their influence values are added by unit.
    """

    influence_N: Tensor
    extremes: tuple[float, float] | None

    @classmethod
    def of(cls, strata: Sequence[Stratum], population: str) -> _Group:
        own = [stratum for stratum in strata if stratum.population == population]
        values: dict[int, float] = {}
        for stratum in own:
            for unit, value in zip(stratum.units, stratum.effect.influence_N.tolist(), strict=True):
                values[unit] = values.get(unit, 0.0) + value / len(strata)
        if {len(stratum.units) for stratum in own} != {len(values)}:
            raise UsageError(
                f"settings of one claim measure different examples of {population}; give their "
                "stages the same examples and run the study again"
            )
        values_N = torch.tensor([values[unit] for unit in sorted(values)], dtype=torch.float64)
        effects = [stratum.effect for stratum in own]
        bounds = [effect.bounds for effect in effects if effect.bounds is not None]
        if len(bounds) == len(effects):
            means = [effect.value for effect in effects]
            sums = (sum(side) - sum(means) for side in zip(*bounds, strict=True))
            least, most = (each / len(strata) for each in sums)
            return cls(values_N, (least, most))
        if float(values_N.std()) < _ROUNDING:
            largest = max(effect.largest for effect in effects) * len(own) / len(strata)
            return cls(values_N, (-largest, largest))
        return cls(values_N, None)


def _strata(test: Paired, rows: Sequence[Row]) -> list[tuple[dict[str, Label | None], Stratum]]:
    """A stratum per combination of values of across, each, most and some; none if a side is empty.

    Raises:
        UsageError: a combination is missing; the mean of the others would be another effect.
    """
    keys = (*test.each, *test.most, *test.some, *test.across)
    firsts = select(rows, test.rows, test.first.where)
    seconds = firsts
    if test.second is not None:
        seconds = select(rows, _without(test.rows, keys), test.second.where)
    if not firsts or not seconds:
        return []
    own = _fixed_by(test.second)
    found: list[tuple[dict[str, Label | None], Stratum]] = []
    for values in _places(test, keys, firsts, seconds):
        at = dict(zip(keys, values, strict=True))
        first, second = _row_at(at, firsts), _row_at(_without(at, own), seconds)
        if first is None or second is None:
            place = ", ".join(f"{key} {value}" for key, value in at.items())
            raise UsageError(
                f"a side of the claim has no rows at {place}; a run that diverged leaves none"
            )
        mean = {key: at[key] for key in test.across}
        found.append((at, _stratum(test, _named(mean, test.across), first, second)))
    return found


def _fixed_by(side: Side | None) -> set[str]:
    """Settings that have one value on a side, such as the divergence that all are compared with."""
    where = {} if side is None else side.where
    return {key for key, value in where.items() if not isinstance(value, tuple)}


def _places(
    test: Paired, keys: Sequence[str], firsts: Sequence[Row], seconds: Sequence[Row]
) -> list[tuple[Label | None, ...]]:
    """The combinations that a side has or should have: named values, and every seed of each."""
    found = {_at(row, keys) for row in firsts}
    # the second side was not selected by what is averaged over, and may lack or fix it
    whole = [row for row in select(seconds, test.rows) if row.setting.keys() >= {*keys}]
    if not _fixed_by(test.second) & {*keys}:
        found |= {_at(row, keys) for row in whole}
    for place, key in enumerate(keys):
        named = (test.rows | test.first.where).get(key)
        there = {values[place] for values in found}
        missing = set(named if isinstance(named, tuple) else ()) - there
        for value in there if key == "seed" else missing:
            found |= {(*values[:place], value, *values[place + 1 :]) for values in found}
    return sorted(found, key=str)


def _at(row: Row, keys: Sequence[str]) -> tuple[Label | None, ...]:
    return tuple(row.setting.get(key) for key in keys)


def _without(conditions: Mapping[str, T], keys: Collection[str]) -> dict[str, T]:
    """Conditions on other settings: the second side may lack those that are averaged over."""
    return {key: value for key, value in conditions.items() if key not in keys}


def _row_at(at: Mapping[str, object], rows: Sequence[Row]) -> Row | None:
    """The row of a stratum, with the units of all rows that have its setting.

    A row without a setting belongs to all strata of it: an unaligned draft has no seed.
    """
    group = [row for row in rows if all(row.setting.get(k, v) == v for k, v in at.items())]
    if not group:
        return None
    settings = [row.setting for row in group]
    keys = sorted({key for setting in settings for key in setting})
    differ = [key for key in keys if len({setting.get(key) for setting in settings}) > 1]
    if differ:
        raise UsageError(
            f"a side of a claim matches rows with different {', '.join(differ)}; name them in "
            "where, or average over them with across"
        )
    return pooled(group)


def _stratum(test: Paired, name: str, first: Row, second: Row) -> Stratum:
    figure = FIGURES[test.figure]
    first = figure.measured(first)
    if test.second is None:
        assert test.than is not None, "the file is checked"
        one = estimate(figure, first)
        zero_N = torch.zeros_like(one.influence_N)
        constant = Estimate(test.than, zero_N, 0.0, (test.than, test.than))
        return _compared(test, name, first, one, constant)._replace(runs=_runs(test, first))
    second = figure.measured(second)
    if set(first.units) != set(second.units) or first.population != second.population:
        raise UsageError(
            f"the sides of a claim measure different examples of {first.population}; give their "
            "stages the same examples and run the study again"
        )
    one, two = estimate(figure, first), estimate(figure, second)
    places = {unit: place for place, unit in enumerate(second.units)}
    order = torch.tensor([places[unit] for unit in first.units])
    two = two._replace(influence_N=two.influence_N[order])
    return _compared(test, name, first, one, two)._replace(runs=_runs(test, first, second))


def _runs(test: Paired, *sides: Row) -> tuple[Run, ...]:
    """The runs of training behind the sides, if the claim is on runs in general."""
    if SEED not in test.across:
        return ()
    signs = zip((1, -1), sides, strict=False)
    return tuple(Run(row.study, row.setting, sign) for sign, row in signs if SEED in row.setting)


def _compared(test: Paired, name: str, row: Row, one: Estimate, two: Estimate) -> Stratum:
    if test.compare == "difference":
        influence_N = one.influence_N - two.influence_N
        largest, bounds = max(one.largest, two.largest), None
        if one.bounds is not None and two.bounds is not None:
            bounds = one.bounds[0] - two.bounds[1], one.bounds[1] - two.bounds[0]
        effect = Estimate(one.value - two.value, influence_N, largest, bounds)
    else:
        least = min(one.value, two.value)
        if least <= 0:
            raise UsageError(
                f"a figure of {row.setting} is {least:g}, so there is no ratio; compare the "
                "difference"
            )
        effect = Estimate(
            math.log(one.value / two.value),
            one.influence_N / one.value - two.influence_N / two.value,
            1.0,
        )
    return Stratum(name, row.population, row.units, effect, one.value, two.value)


def column(row: Row, name: str) -> Tensor:
    """A named sum of each unit, [N]; raises UsageError if the row lacks it or a value."""
    values = row.sums.get(name)
    if values is None or None in values:
        problem = "is missing in some units" if values is not None else "is not in the rows"
        raise UsageError(
            f"{name} {problem} of {row.study}; name one of {', '.join(sorted(row.sums))}"
        )
    return torch.tensor(values, dtype=torch.float64)
