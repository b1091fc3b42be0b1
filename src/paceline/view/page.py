"""The model of a page: a verdict, and sections of charts, tables and text.

A page does not depend on HTML or the plotting library: a chart is a Vega-Lite specification made
by `charts`, and `render` writes the page.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from paceline.config import StrictModel
from paceline.core.bootstrap import Interval
from paceline.results.figures import FIGURES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from paceline.results.row import Row


Line = dict[str, Any]
"""One line of data by column: the name of a figure, or words. Values may be an `Interval`."""

Tone = Literal["good", "bad", "neutral"]
UNKNOWN = "-"
_OTHERS = {
    "gamma": "number of tokens that the draft proposes in a block.",
    "family": ("an acceptance rule or decoding strategy with all its settings; a line of a chart."),
    "setting": "threshold, and gamma, the maximum number of drafted tokens per block.",
}
_INTERVAL = (
    "the range that contains the true value in 95 of 100 repetitions. It comes from the "
    "independent units: prompts, examples or seeds. Of speedups and rates by the studentised "
    "bootstrap; of mean scores by Dirichlet weights with one more example at the worst score."
)


def definitions_of(columns: Iterable[str], *, intervals: bool = False) -> list[tuple[str, ...]]:
    """Term, meaning and symbol of the columns that have one; `intervals`: also of intervals."""
    found = [
        (words_of(name), meaning, FIGURES[name].symbol if name in FIGURES else "")
        for name in columns
        if (meaning := meaning_of(name))
    ]
    return [*found, *([("95% interval", _INTERVAL, "")] if intervals else [])]


def words_of(name: str) -> str:
    """A column in tables and on axes: the words of a figure; another name, with spaces."""
    known = FIGURES.get(name)
    return name.removeprefix("num_").replace("_", " ") if known is None else known.words


def meaning_of(name: str) -> str:
    """The definition of a column; empty if it has none."""
    figure = FIGURES.get(name)
    return _OTHERS.get(name, "") if figure is None else f"{figure.definition}."


def shown(value: Any, format: str = "") -> str:
    """A value as text; by default a number has three decimals, fewer if it is large."""
    if is_unknown(value):
        return UNKNOWN
    if isinstance(value, Interval):
        return interval_text(value, format)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, float):
        return str(value)
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if format:
        return f"{value:{format}}"
    if 0 < abs(value) < 0.0005:
        return f"{value:.1e}"
    return f"{value:,.1f}" if abs(value) >= 100 else f"{value:.3f}"


def interval_text(found: Interval, format: str = "", unit: str = "", between: str = " to ") -> str:
    """A value with its bounds, such as `1.42x (1.38 to 1.47)`."""
    text = f"{shown(found.value, format)}{unit}"
    if is_unknown(found.low) or is_unknown(found.high):
        return text
    between = " to " if found.low < 0 else between
    return f"{text} ({shown(found.low, format)}{between}{shown(found.high, format)})"


def is_unknown(value: Any) -> bool:
    value = value.value if isinstance(value, Interval) else value
    return value is None or (isinstance(value, float) and math.isnan(value))


def number(line: Line, name: str) -> float:
    """The value in a column; NaN if it is no number."""
    value = line.get(name)
    value = value.value if isinstance(value, Interval) else value
    return float(value) if isinstance(value, int | float) else math.nan


def flat(rows: Iterable[Line]) -> list[Line]:
    """The rows with an interval `x` as three columns `x`, `x_low`, `x_high`, for charts and CSV."""
    found: list[Line] = []
    for row in rows:
        line: Line = {}
        for name, value in row.items():
            if not isinstance(value, Interval):
                line[name] = value
            elif math.isnan(value.low) and math.isnan(value.high):
                line[name] = value.value
            else:
                line[name], line[f"{name}_low"], line[f"{name}_high"] = value
        found.append(line)
    return found


@dataclass(frozen=True)
class Source:
    """The command that made some rows, its resolved configuration, and versions and machine.

    The page offers `config` under the name `file`; None: the rows do not record it.
    """

    command: str
    config: Mapping[str, Any] | None = None
    environment: Mapping[str, Any] | None = None
    file: str = "config.yaml"

    @property
    def facts(self) -> list[str]:
        """Versions, machine and git state, one fact a line."""
        lines: list[str] = []
        for name, value in (self.environment or {}).items():
            parts = value.items() if isinstance(value, dict) else ()
            text = ", ".join(f"{key} {part}" for key, part in parts) or str(value)
            lines.append(f"{name.replace('_', ' ')}: {text}")
        return lines


@dataclass(frozen=True)
class Figure:
    """Charts by title, with all plotted values, which the table and the CSV file show.

    The title is empty if the figure has a single chart.
    """

    kind: ClassVar = "chart"
    title: str
    text: str
    panels: Mapping[str, Mapping[str, Any]]
    rows: Sequence[Line]


@dataclass(frozen=True)
class Table:
    """A table of a page or of the terminal; `rows` as in a figure, with texts.

    Columns that are figures have the words and definitions of the registry.

    Attributes:
        columns: Definitions of other columns.
        formats: Of columns that are not figures, or are shown otherwise than the registry says.
        units: What intervals are over, such as prompts.
        once: Columns, of which the first names what a line is about. They are left empty in a line
            about the same as the line before.
    """

    kind: ClassVar = "table"
    title: str
    rows: Sequence[Line]
    text: str = ""
    columns: Mapping[str, str] = field(default_factory=dict)
    formats: Mapping[str, str] = field(default_factory=dict)
    units: str = ""
    once: Sequence[str] = ()

    def cells(self, between: str = " to ") -> list[dict[str, str]]:
        """The rows as text by column."""
        lines = [
            {name: self._cell(row.get(name), name, between) for name in columns_of(self.rows)}
            for row in self.rows
        ]
        for line, before in zip(lines[:0:-1], lines[-2::-1], strict=True):
            if self.once and line[self.once[0]] == before[self.once[0]]:
                line |= dict.fromkeys(set(self.once) & line.keys(), "")
        return lines

    def _cell(self, value: Any, name: str, between: str) -> str:
        figure = FIGURES.get(name)
        form = self.formats.get(name, "" if figure is None else figure.format)
        if isinstance(value, Interval) and not is_unknown(value):
            return interval_text(value, form, between=between)
        return shown(value, form)


def lines_of(
    rows: Iterable[Row],
    settings: Sequence[str] = (),
    figures: Sequence[str] = (),
    *,
    bare: Sequence[str] = (),
) -> list[Line]:
    """A line per result row: some of its settings, and some of its figures with their intervals.

    Settings and figures that no row has are left out. `bare`: figures without intervals.
    """

    def measured(name: str, row: Row) -> Interval | None:
        figure = FIGURES[name]
        if not figure.is_in(row):
            return None
        if name in bare:
            return Interval(figure.value(row), math.nan, math.nan)
        return figure.measure(row)

    lines: list[Line] = []
    for row in rows:
        line: Line = {name: row.setting.get(name) for name in settings}
        lines.append(line | {name: measured(name, row) for name in figures})
    known = {name for line in lines for name, value in line.items() if value is not None}
    return [{name: line[name] for name in line if name in known} for line in lines]


def table_of(
    rows: Sequence[Row],
    settings: Sequence[str] = (),
    figures: Sequence[str] = (),
    *,
    bare: Sequence[str] = (),
    title: str = "",
    text: str = "",
    units: str = "",
    **more: Any,
) -> Table:
    """The lines of result rows as a table: see `lines_of`, and for other arguments `Table`."""
    lines = lines_of(rows, settings, figures, bare=bare)
    return Table(title, lines, text=text, units=units, **more)


def columns_of(rows: Sequence[Line]) -> list[str]:
    """The columns of all rows, in order of appearance."""
    return list(dict.fromkeys(name for row in rows for name in row))


def numeric(rows: Sequence[Line]) -> set[str]:
    """The columns of numbers, which are aligned by their digits."""
    return {
        name
        for name in columns_of(rows)
        if all(isinstance(row.get(name), int | float | Interval | None) for row in rows)
    }


Block = Figure | Table


@dataclass(frozen=True)
class Section:
    """A heading, and blocks."""

    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Fact:
    """A number beside the verdict, such as `speedup`, `1.42x`, `1.38 to 1.47`."""

    name: str
    value: str
    detail: str = ""

    @classmethod
    def of(cls, name: str, found: Interval, format: str = ".2f", unit: str = "") -> Fact:
        """A figure with its interval."""
        value, _, bounds = interval_text(found, format, unit).partition(" (")
        return cls(name, value, bounds.rstrip(")"))


@dataclass(frozen=True)
class Page:
    """A report: a verdict as one sentence with its numbers and as a word, and sections."""

    title: str
    verdict: str
    sections: Sequence[Section]
    word: str = ""
    tone: Tone = "neutral"
    facts: Sequence[Fact] = ()
    about: Sequence[str] = ()
    source: Source | None = None

    @property
    def blocks(self) -> list[Block]:
        """The blocks of all sections."""
        return [block for section in self.sections for block in section.blocks]


def source_of(
    command: str,
    config: StrictModel | Mapping[str, Any] | None,
    environment: Mapping[str, Any] | None = None,
) -> Source:
    """A source whose command reads the configuration from a file that the page offers."""
    if config is None:
        return Source(f"paceline {command}", None, environment)
    values = config.model_dump(mode="json") if isinstance(config, StrictModel) else config
    file = command.split()[0] + ".yaml"
    return Source(f"paceline {command} --config {file}", values, environment, file)


def about(source: Source, *lines: str) -> list[str]:
    """The models of the source's configuration, and further lines."""
    config = source.config or {}
    names = [name for name in ("target", "draft") if config.get(name)]
    models = [f"{name.capitalize()}: {config[name]}" for name in names]
    return [*models, *(line for line in lines if line)]


def sampling_words(sampling: Mapping[str, Any]) -> str:
    """Sampling parameters in words, such as `temperature 0.7, top-p 0.9`."""
    parts = [f"temperature {sampling.get('temperature', 1):g}"]
    if sampling.get("top_p", 1) < 1:
        parts.append(f"top-p {sampling['top_p']:g}")
    if sampling.get("top_k"):
        parts.append(f"top-k {sampling['top_k']}")
    if sampling.get("repetition_penalty", 1) != 1:
        parts.append(f"repetition penalty {sampling['repetition_penalty']:g}")
    return ", ".join(parts)


def case_of(row: Row) -> str:
    """The task and the sampling parameters of a result row."""
    return f"{row.setting['task']}, {sampling_words(row.setting)}"


def sentence(text: str) -> str:
    """The text with a capital letter and a full stop."""
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")
