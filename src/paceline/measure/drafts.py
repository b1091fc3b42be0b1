"""Measures several drafts of one target on the same texts, and compares them in pairs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, cast

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from paceline.config import Result
from paceline.core.bootstrap import Interval, difference_interval
from paceline.errors import UsageError
from paceline.measure.measurement import MeasureConfig, Measurement, measure_each
from paceline.measure.results import ACCEPTANCE, gamma_of, value_of
from paceline.measure.verdict import best_code
from paceline.progress import Progress, silent
from paceline.results.figures import FIGURES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.results.figures import Figure
    from paceline.results.row import Row

_SPEEDUPS = ("mbsu", "predicted_speedup", "expected_speedup")


class Compared(NamedTuple):
    """A figure of a draft beside that of the first draft.

    Attributes:
        gamma: Drafted tokens per block; None: of the texts without blocks.
        difference: Less the figure of the first draft, paired by prompt; None of the first draft.
    """

    figure: str
    draft: str
    gamma: int | None
    value: Interval
    difference: Interval | None


class DraftComparison(Result):
    """Drafts that were measured on the same texts.

    Attributes:
        measurements: Of each draft, in the order given.
    """

    schema_version: Literal[2] = 2
    kind: Literal["measure drafts"] = "measure drafts"
    computed: ClassVar = ("compared",)
    measurements: list[Measurement] = Field(min_length=2)

    @model_serializer(mode="wrap")
    def _with_comparison(self, fields: SerializerFunctionWrapHandler) -> dict[str, Any]:
        lines = [line._asdict() for line in self.compared()]
        for line in lines:
            for name in ("value", "difference"):
                line[name] = line[name] and line[name].as_object()
        return fields(self) | {"compared": lines}

    @property
    def summary(self) -> str:
        """The verdict on each draft."""
        return ", ".join(f"{one.config.draft} {one.verdict.word}" for one in self.measurements)

    @property
    def drafts(self) -> list[str]:
        """The drafts, in the order given."""
        return [found.config.draft for found in self.measurements]

    @property
    def rows(self) -> list[Row]:
        """The rows of all drafts; the setting `draft` names the draft."""
        return [row for found in self.measurements for row in found.rows]

    @property
    def exit_code(self) -> int:
        """0 if any verdict is GO, 1 if all are NO-GO, else 3."""
        return best_code([found.verdict.exit_code for found in self.measurements])

    def compared(self) -> list[Compared]:
        """Acceptance; tokens per target call; speedups.

        Tokens per target call are those at the gamma of the first draft. Speedups are at each
        draft's own gamma: that of its timed requests, else the one with the largest expectation.
        A figure that a draft lacks is left out.
        """
        own = [fastest(found) for found in self.measurements]
        shared = gamma_of(own[0])
        texts = [found.texts for found in self.measurements]
        alike = [
            next(row for row in found.blocks if gamma_of(row) == shared)
            for found in self.measurements
        ]
        requests = [found.requests for found in self.measurements]
        lines = [line for name in ACCEPTANCE for line in self._compared(name, texts)]
        lines += self._compared("block_efficiency", alike)
        lines += [line for name in _SPEEDUPS for line in self._compared(name, own)]
        if None not in requests:
            lines += self._compared("speedup", cast("list[Row]", requests))
        return lines

    def _compared(self, name: str, rows: list[Row]) -> Iterator[Compared]:
        """A line per draft, with the rows of the drafts in their order."""
        figure, first = FIGURES[name], self.measurements[0]
        if not all(figure.is_in(row) for row in rows):
            return
        for found, row in zip(self.measurements, rows, strict=True):
            less = None if found is first else paired_difference(figure, row, rows[0])
            gamma = gamma_of(row) if "gamma" in row.setting else None
            yield Compared(name, found.config.draft, gamma, figure.measure(row), less)


def paired_difference(figure: Figure, first: Row, second: Row) -> Interval:
    """A figure of `first` - that of `second`, on the units that both measured.

    What makes a unit hard for both cancels. The interval is over units; that of one unit is
    unbounded. A formula is a multiple of its ratio: totals, such as costs of passes, are exact.
    """
    shared = {*figure.units(first)} & {*figure.units(second)}
    sides = [row.only([unit for unit in row.units if unit in shared]) for row in (first, second)]
    base = FIGURES[figure.of or figure.name]
    one, two = (figure.value(row) / base.value(row) if figure.of else 1.0 for row in sides)
    return difference_interval(*map(base.columns, sides), scales=(one, two))


def fastest(found: Measurement) -> Row:
    """The blocks of the gamma that was timed, else of that with the largest expected speedup.

    Without costs: of that with the largest MBSU.
    """
    if found.requests is not None:
        gamma = gamma_of(found.requests)
        return next(row for row in found.blocks if gamma_of(row) == gamma)

    def expected(row: Row) -> float:
        speeds = (value_of(row, name) for name in ("expected_speedup", "mbsu"))
        return next(speed for speed in speeds if speed is not None)

    return max(found.blocks, key=expected)


def measure_drafts(config: MeasureConfig, progress: Progress = silent) -> DraftComparison:
    """Measure `draft` and `other_drafts`. The target is loaded, and writes its texts, once.

    Raises:
        UsageError: There is one draft, or a model, a prompt file or a tokenizer cannot be used.
    """
    if not config.other_drafts:
        raise UsageError(
            f"one draft was given, {config.draft}; name others in other_drafts, or use measure"
        )
    return DraftComparison(measurements=measure_each(config, progress))
