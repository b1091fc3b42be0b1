"""The registry of figures: each is defined here once, by the sums of a row that it is made from.

A figure is a product of ratios of sums over the units of a row, a formula of another figure, or a
total of the row:

    block efficiency = sum(emitted) / sum(calls)
    speedup          = sum(target_seconds) / sum(target_tokens) * sum(tokens) / sum(seconds)
    MBSU             = block efficiency / (parameter ratio * gamma + 1)
    cost ratio       = totals["cost_ratio"]

Units in which a part is not measured do not count. Tables, charts, pages and JSON take names, units
and definitions from here. The figures of Paceline are in `built_in`. To add one of your own,
`register` it; rows that have its sums then show it.
"""

# N units
from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, Literal

import torch

from paceline.core.bootstrap import Interval, log_distance, product_interval, ratio_interval
from paceline.core.bounded_means import bounded_mean_interval, bounded_ratio_interval
from paceline.errors import UsageError
from paceline.results.row import read_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import pandas as pd
    from torch import Tensor

    from paceline.results.row import Row

    Formula = Callable[[float, Mapping[str, float]], float]
    Part = str | tuple[str, str]
    """A sum of a row, or two, the first less the second; or the number 1 for every unit."""

ONE = "1"
"""In a ratio: the number 1 for every unit."""


@dataclass(frozen=True)
class Figure:
    """Definition of a figure; without `ratios` and `of`: the total of a row with the same name.

    Attributes:
        name: Key in JSON and data frames.
        definition: What it is, in a clause; for tables, tooltips and margins of pages.
        ratios: Numerator and denominator of each ratio of totals; each is a sum of a row, the
            number 1 for every unit, or a pair of sums, the first less the second.
        of: Name of the figure that `formula` is applied to, instead of `ratios`.
        formula: Monotone function of that figure, and of what is in `needs`.
        needs: Names of settings, totals or other figures of the row.
        label: Name in tables and on axes; by default `name` with spaces.
        symbol: Symbol in the papers.
        unit: Such as seconds; empty: a pure number.
        better: Direction.
        interval: `ratio`: bootstrap-t; `score`: of values in [0, 1]; `count`: of events that equal
            units may have by chance.
        most: The largest possible value, of all rows or of each.
        format: Of the value, as in d3 and Vega.
    """

    name: str
    definition: str
    ratios: tuple[tuple[Part, Part], ...] = ()
    of: str = ""
    formula: Formula | None = None
    needs: tuple[str, ...] = ()
    label: str = ""
    symbol: str = ""
    unit: str = ""
    better: Literal["more", "less"] = "more"
    interval: Literal["ratio", "score", "count"] = "ratio"
    most: float | Callable[[Row], float] = math.inf
    format: str = ".3f"

    @property
    def words(self) -> str:
        """Name in tables and on axes."""
        return self.label or self.name.replace("_", " ")

    @property
    def axis(self) -> str:
        """Title of an axis."""
        symbol = f" ({self.symbol})" if self.symbol else ""
        return f"{self.words}{symbol}{f' [{self.unit}]' if self.unit else ''}"

    def is_in(self, row: Row) -> bool:
        """Whether the row has what the figure is made from, in at least one unit."""
        if self.formula is not None:
            return FIGURES[self.of].is_in(row) and all(_has(row, name) for name in self.needs)
        if not self.ratios:
            return self.name in row.totals
        return self._names <= row.sums.keys() and bool(self.units(row))

    def value(self, row: Row) -> float:
        """The figure of a row; NaN if a denominator is 0."""
        if self.formula is not None:
            return self.formula(FIGURES[self.of].value(row), self._facts(row))
        if not self.ratios:
            return self._total(row)
        value = 1.0
        for over_N, under_N in self.columns(row):
            under = float(under_N.sum())
            value = value * float(over_N.sum()) / under if under else math.nan
        return value

    def measure(self, row: Row, *, confidence: float = 0.95) -> Interval:
        """The figure with its interval over units; NaN if it is unknown.

        A formula has the errors of its figure, and of the totals that it needs whose 95% bounds
        the row has.
        """
        if self.formula is not None:
            return self._of_formula(row, confidence)
        if not self.ratios:
            return Interval(self._total(row), *row.bounds.get(self.name, (math.nan, math.nan)))
        ratios = self.columns(row.only(self.units(row)))
        if not all(float(under_N.sum()) for _, under_N in ratios):
            return Interval(math.nan, math.nan, math.nan)
        over_N, under_N = ratios[0]
        if self.interval == "score" and self.ratios[0][1] == ONE:
            return bounded_mean_interval(over_N, confidence)
        if self.interval == "score":
            return bounded_ratio_interval(over_N, under_N, confidence)
        return ratio_interval(
            *ratios,
            confidence=confidence,
            most=self.most(row) if callable(self.most) else self.most,
            counted=self.interval == "count",
        )

    def _of_formula(self, row: Row, confidence: float) -> Interval:
        assert self.formula is not None, f"{self.name} is no formula"
        facts, base = self._facts(row), FIGURES[self.of].measure(row, confidence=confidence)
        value, *ends = (self.formula(bound, facts) for bound in base)
        factors = [Interval(value, *sorted(ends))]
        for name in self.needs:
            if name in row.bounds:
                ends = (
                    self.formula(base.value, facts | {name: bound}) / value
                    for bound in row.bounds[name]
                )
                factors.append(at_confidence(Interval(1.0, *sorted(ends)), confidence))
        return factors[0] if len(factors) == 1 else product_interval(*factors)

    def gain(self, row: Row, base: Row) -> Interval:
        """This figure, one ratio, of `row` / that of `base`, on the same units."""
        if row.population != base.population or row.units != base.units:
            raise UsageError(f"two rows of {row.population} have other units; compare equal ones")
        (own,), ((over_N, under_N),) = self.columns(row), self.columns(base)
        return ratio_interval(own, (under_N, over_N))

    def columns(self, row: Row) -> list[tuple[Tensor, Tensor]]:
        """Numerators and denominators of each ratio, [N] each; 0 where a part is not measured."""
        units = set(self.units(row))
        known_N = torch.tensor([unit in units for unit in row.units], dtype=torch.bool)

        def column(part: Part) -> Tensor:
            if part == ONE:
                return known_N.double()
            first_N, *others = (
                torch.tensor([value or 0.0 for value in row.sums[name]], dtype=torch.float64)
                for name in _sums_of(part)
            )
            return (first_N - sum(others)).where(known_N, 0)

        return [(column(over), column(under)) for over, under in self.ratios]

    @property
    def _names(self) -> set[str]:
        return {name for ratio in self.ratios for part in ratio for name in _sums_of(part)}

    def units(self, row: Row) -> list[int]:
        """The units of a row that have all sums of the figure."""
        if self.of:
            return FIGURES[self.of].units(row)
        if missing := self._names - row.sums.keys():
            raise UsageError(
                f"{self.words} needs {min(missing)}, which a row of {row.source.command} lacks"
            )
        wanted = [row.sums[name] for name in self._names]
        return [u for n, u in enumerate(row.units) if all(part[n] is not None for part in wanted)]

    def _facts(self, row: Row) -> dict[str, float]:
        known = row.setting | row.totals
        if missing := [name for name in self.needs if not _has(row, name)]:
            raise UsageError(f"{self.words} needs {missing[0]}, which the row lacks")
        return {
            name: float(known[name] if name in known else FIGURES[name].value(row))
            for name in self.needs
        }

    def _total(self, row: Row) -> float:
        if self.name not in row.totals:
            raise UsageError(f"{self.words} is a total, which a row of {row.source.command} lacks")
        return row.totals[self.name]


def _has(row: Row, name: str) -> bool:
    """Whether the row has a setting, a total or a figure of this name."""
    known = name in row.setting or name in row.totals
    return known or (name in FIGURES and FIGURES[name].is_in(row))


def _sums_of(part: Part) -> tuple[str, ...]:
    """Names of sums; none for the number 1."""
    if part == ONE:
        return ()
    return (part,) if isinstance(part, str) else part


def at_confidence(interval: Interval, confidence: float) -> Interval:
    """A 95% interval at another confidence, as that of a normal distribution of the logarithm."""
    quantile = NormalDist().inv_cdf
    wider = quantile((1 + confidence) / 2) / quantile(0.975)
    value, (below, above) = (
        interval.value,
        (wider * log_distance(interval.value, end) for end in (interval.low, interval.high)),
    )
    high = value * math.exp(above) if above < 700 else math.inf
    return Interval(value, value * math.exp(-below), high)


FIGURES: dict[str, Figure] = {}
"""All figures by name."""


def register(figure: Figure) -> Figure:
    """Add a figure of your own.

    Raises:
        ValueError: another figure has the name.
    """
    if FIGURES.get(figure.name, figure) != figure:
        raise ValueError(f"there is a figure {figure.name} already; give yours another name")
    return FIGURES.setdefault(figure.name, figure)


def as_values(row: Row) -> dict[str, Interval]:
    """The figures that a row has, with intervals, by name, in the order of the registry."""
    return {name: figure.measure(row) for name, figure in FIGURES.items() if figure.is_in(row)}


def load(path: str | Path) -> pd.DataFrame:
    """Rows of a file, or of all runs in a directory, as a DataFrame with a line per row.

    A line has the settings, the number of units, totals, and each figure with the bounds of its 95%
    interval, such as `speedup`, `speedup_low`, `speedup_high`.

    Raises:
        UsageError: there are no rows, or one has another version or is malformed.
    """
    return frame_of(read_rows(Path(path)))


def frame_of(rows: Iterable[Row]) -> pd.DataFrame:
    """As `load`, for rows in memory."""
    import pandas as pd  # takes half a second

    return pd.DataFrame([_line(row) for row in rows])


def _line(row: Row) -> dict[str, Any]:
    line: dict[str, Any] = {"command": row.source.command, "population": row.population}
    line |= row.setting | {"num_units": len(row.units)}
    for name, value in row.totals.items():
        line[name] = value
        if name in row.bounds:
            line[f"{name}_low"], line[f"{name}_high"] = row.bounds[name]
    for name, figure in as_values(row).items():
        line[name], line[f"{name}_low"], line[f"{name}_high"] = figure
    return line
