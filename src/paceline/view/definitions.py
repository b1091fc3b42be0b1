"""The words and definitions of tables and pages: the figures of `results`, and a few others."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from paceline.results.figures import FIGURES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from paceline.results.figures import Figure

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


def definitions_of(columns: Iterable[str]) -> list[Definition]:
    """Of the columns that have one, and of intervals if there are any."""
    columns = list(columns)
    found: list[Definition] = []
    for name in columns:
        if (figure := figure_of(name)) is not None:
            term = figure.term or figure.words
            found.append(Definition(term, f"{figure.definition}.", figure.symbol))
        elif name in _OTHERS:
            found.append(Definition(name, _OTHERS[name]))
    if any(name.endswith("_low") for name in columns):
        found.append(Definition("95% interval", _INTERVAL))
    return found


def words_of(name: str) -> str:
    """A figure in tables and on axes; a name that is no figure, with spaces."""
    known = FIGURES.get(name)
    return name.removeprefix("num_").replace("_", " ") if known is None else known.words


def meaning_of(words: str) -> str:
    """The definition of a column or axis; empty if it has none."""
    figure = figure_of(words)
    return _OTHERS.get(words, "") if figure is None else f"{figure.definition}."


def figure_of(words: str) -> Figure | None:
    """The figure with these words."""
    return next((one for one in FIGURES.values() if one.words == words), None)
