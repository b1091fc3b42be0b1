"""The model of an HTML page: sections of figures, tables, claims, commands, pictures of text.

A page knows nothing of HTML or of the plotting library: a chart is a Vega-Lite specification made
by `charts`, and `render` writes the page.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from paceline.core.bootstrap import Interval
    from paceline.measure.results import IntervalRow

Row = dict[str, Any]
"""One line of a figure's data by column. The bounds of column `x` are `x_low` and `x_high`."""

Tone = Literal["good", "bad", "neutral"]


def bounded(name: str, interval: Interval | IntervalRow) -> Row:
    """The three columns of a value with its interval."""
    return {name: interval.value, f"{name}_low": interval.low, f"{name}_high": interval.high}


@dataclass(frozen=True)
class Source:
    """The command and the configuration that made some rows.

    Attributes:
        command: Such as `paceline bench --config bench.yaml`; the page offers `config` under this
            file name.
        config: The resolved configuration; None if the rows do not record it.
        environment: Versions, machine and git state, if they are recorded.
        note: Where the configuration was read; may be empty.
        name: File name of the configuration, if the command does not name it.
    """

    command: str
    config: Mapping[str, Any] | None = None
    environment: Mapping[str, Any] | None = None
    note: str = ""
    name: str = ""

    @property
    def file(self) -> str:
        """File name of the configuration: `name`, that in the command, else `config.yaml`."""
        words = self.command.split()
        names = [word.rpartition("/")[2] for word in words if word.endswith(".yaml")]
        return self.name or next(iter(names), "config.yaml")


@dataclass(frozen=True)
class Panel:
    """One chart of a figure; the title is empty if the figure has a single chart."""

    chart: Mapping[str, Any]
    title: str = ""


@dataclass(frozen=True)
class Figure:
    """Charts with their data.

    Attributes:
        title: What is plotted against what.
        text: What the figure shows and how to read it.
        panels: The charts; several share the data, the source and the space.
        rows: All plotted values, for the table and the CSV file.
        source: What made the rows.
    """

    title: str
    text: str
    panels: Sequence[Panel]
    rows: Sequence[Row]
    source: Source


@dataclass(frozen=True)
class Table:
    """A table that is always visible; `rows` as in a figure, but texts are allowed."""

    title: str
    rows: Sequence[Row]
    source: Source
    text: str = ""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Definitions of columns, printed below the table."""


@dataclass(frozen=True)
class Claim:
    """A statement of a paper, and what was measured.

    Attributes:
        claim: The statement.
        source: Where the paper says so, in its words or by section and figure.
        effect: The measured effect, such as a difference; None if it was not measured.
        effect_name: What the effect is, such as `speedup, first - second`.
        count: Number of independent units, such as examples.
        verdict: Such as `held`, `did not hold` or `not decided`.
        tone: How the verdict is marked.
        command: What measured it.
        reason: Why it is not decided; may be empty.
        effect_text: The effect as shown, if not as plain numbers.
    """

    claim: str
    source: str
    effect: Interval | None
    effect_name: str
    count: int | None
    verdict: str
    tone: Tone
    command: str
    reason: str = ""
    effect_text: str = ""


@dataclass(frozen=True)
class Claims:
    """A table of claims; the headings are those of a claim's source and of its effect."""

    title: str
    claims: Sequence[Claim]
    source: Source
    text: str = ""
    source_heading: str = "statistic of"
    effect_heading: str = "effect (95% interval)"

    @property
    def rows(self) -> list[Row]:
        """The claims as data."""
        return [
            {
                "claim": one.claim,
                "paper": one.source,
                "effect of": one.effect_name,
                **({} if one.effect is None else bounded("effect", one.effect)),
                "n": one.count,
                "verdict": one.verdict,
                "reason": one.reason,
                "command": one.command,
            }
            for one in self.claims
        ]


@dataclass(frozen=True)
class Token:
    """A piece of decoded text; `source` as in `decode.result.Source`, `block` counts from 0."""

    text: str
    source: str
    block: int


@dataclass(frozen=True)
class TextPicture:
    """Decoded text whose tokens are marked by their source, and whose blocks are separated."""

    title: str
    text: str
    tokens: Sequence[Token]
    source: Source
    prompt: str = ""

    @property
    def rows(self) -> list[Row]:
        """The tokens as data."""
        return [
            {"block": one.block, "source": one.source, "token": one.text} for one in self.tokens
        ]


@dataclass(frozen=True)
class Prose:
    """Paragraphs between figures."""

    paragraphs: Sequence[str]


@dataclass(frozen=True)
class Listing:
    """Names with one or more lines each, such as what a study measured."""

    title: str
    entries: Sequence[tuple[str, Sequence[str]]]
    text: str = ""
    more: Sequence[tuple[str, Sequence[str]]] = ()
    """Entries that a click shows."""


@dataclass(frozen=True)
class Commands:
    """Commands to copy, and what to replace in them."""

    title: str
    text: str
    lines: Sequence[str]
    source: Source
    """The first command with its configuration."""
    places: Sequence[tuple[str, str]] = ()
    """Placeholders and options of the commands with their meanings."""


@dataclass(frozen=True)
class Mark:
    """A verdict in a cell: a sign and a word, so that no meaning depends on colour."""

    word: str
    tone: Tone
    sign: str
    detail: str = ""
    """The effect, as shown below the verdict."""


@dataclass(frozen=True)
class FindingRow:
    """A statement, and its verdict in each column; columns without a verdict are left out."""

    statement: str
    tested: str
    item: str
    marks: Mapping[str, Mark]


@dataclass(frozen=True)
class Summary:
    """Verdicts as a table with a row per statement and a column per task and temperature."""

    title: str
    text: str
    columns: Sequence[str]
    findings: Sequence[FindingRow]
    source: Source

    @property
    def rows(self) -> list[Row]:
        """The verdicts as data."""
        return [
            {"statement": one.statement, "tested": one.tested, "item": one.item}
            | {
                name: f"{one.marks[name].word} {one.marks[name].detail}".rstrip()
                for name in self.columns
                if name in one.marks
            }
            for one in self.findings
        ]


Block = Figure | Table | Claims | TextPicture | Summary | Prose | Listing | Commands


@dataclass(frozen=True)
class Section:
    """A heading, blocks, and the terms that the margin defines; see `glossary.MEANINGS`."""

    title: str
    blocks: Sequence[Block]
    terms: Sequence[str] = ()
    note: str = ""
    """A line below the heading; may be empty."""


@dataclass(frozen=True)
class Fact:
    """A number beside the verdict, such as `speedup`, `1.42x`, `1.38 to 1.47`."""

    name: str
    value: str
    detail: str = ""


@dataclass(frozen=True)
class Page:
    """A report.

    Attributes:
        title: Of the page and of the browser's tab.
        verdict: One sentence with its numbers.
        word: The verdict as a word, such as GO or passed; may be empty.
        tone: How the word is marked.
        facts: A few numbers below the verdict.
        sections: In reading order; a term is defined where it first occurs.
        about: Lines on what was run: models, task, machine.
    """

    title: str
    verdict: str
    sections: Sequence[Section]
    word: str = ""
    tone: Tone = "neutral"
    facts: Sequence[Fact] = ()
    about: Sequence[str] = ()

    @property
    def sources(self) -> list[Source]:
        """The sources of all blocks, each once."""
        found: list[Source] = []
        for source in self._all_sources():
            if source not in found:
                found.append(source)
        return found

    def _all_sources(self) -> Iterator[Source]:
        for section in self.sections:
            for block in section.blocks:
                if not isinstance(block, Prose | Listing):
                    yield block.source
