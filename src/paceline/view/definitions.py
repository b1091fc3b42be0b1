"""The words and definitions of tables and pages: the figures of `results`, and a few others."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from paceline.results.figures import FIGURES

if TYPE_CHECKING:
    from collections.abc import Iterable

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


class Definition(NamedTuple):
    """A term with its meaning, and its symbol in the papers."""

    term: str
    definition: str
    symbol: str = ""


def definitions_of(columns: Iterable[str], *, intervals: bool = False) -> list[Definition]:
    """Of the columns that have one, and of `intervals` if there are any."""
    found: list[Definition] = []
    for name in columns:
        if (figure := FIGURES.get(name)) is not None:
            found.append(Definition(figure.words, f"{figure.definition}.", figure.symbol))
        elif name in _OTHERS:
            found.append(Definition(name, _OTHERS[name]))
    return [*found, *([Definition("95% interval", _INTERVAL)] if intervals else [])]


def words_of(name: str) -> str:
    """A column in tables and on axes: the words of a figure; another name, with spaces."""
    known = FIGURES.get(name)
    return name.removeprefix("num_").replace("_", " ") if known is None else known.words


def meaning_of(name: str) -> str:
    """The definition of a column; empty if it has none."""
    figure = FIGURES.get(name)
    return _OTHERS.get(name, "") if figure is None else f"{figure.definition}."
