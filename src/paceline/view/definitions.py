"""The words and definitions of tables and pages: the figures of `results`, and other terms."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from paceline.core.rule_base import Rule, name_of
from paceline.core.rules import RULES
from paceline.decode.strategies import STRATEGIES
from paceline.extensions import imported_variants
from paceline.results import figures
from paceline.results.built_in import PAPERS

if TYPE_CHECKING:
    from paceline.results.figures import Figure


class Definition(NamedTuple):
    """A term with its meaning, its symbol in the papers, the place in a paper, and its address."""

    term: str
    definition: str
    symbol: str = ""
    source: str = ""
    link: str = ""


_OTHERS = (
    ("gamma", "number of tokens that the draft proposes in a block."),
    ("95% interval", "the range that contains the true value in 95 of 100 repetitions. It comes "
     "from the independent units: prompts, examples or seeds. Of speedups and rates by the "
     "studentised bootstrap; of mean scores by Dirichlet weights with one more example at the "
     "worst score."),
    ("family", "an acceptance rule or decoding strategy with all its settings; a line of a chart."),
    ("setting", "threshold, and gamma, the maximum number of drafted tokens per block."),
    ("lossless", "the text has the target's distribution. At temperature 0 it is the target's "
     "text."),
    ("accepted", "a drafted token that the target's check kept."),
    ("recovered", "the token that replaces the first rejected token of a block, from the target's "
     "residual distribution."),
    ("bonus", "the token after a block that was accepted completely, from the target."),
    ("G-test", "compares counts with their expectation; a chi-square test of likelihoods."),
    ("cell of the G-test", "a part of the vocabulary with the same probability under the target as "
     "every other part; a lossless rule puts the same number of tokens into each."),
    ("loss", "the training objective per token."),
)  # fmt: skip


def _registered(figure: Figure) -> Definition:
    term, paper = figure.term or figure.words, figure.paper
    place = ("", "") if paper is None else (paper.authors, paper.link)
    return Definition(term, f"{figure.definition}.", figure.symbol, *place)


def _cited(term: str, text: str, source: tuple[str, str] | None) -> Definition:
    paper = PAPERS.get(source[0]) if source else None
    return Definition(term, text, "", ", ".join(source or ()), paper.link if paper else "")


def _of_rule(kind: type[Rule]) -> Definition:
    text = kind.definition or (kind.__doc__ or "").strip().partition("\n")[0]
    return _cited(name_of(kind), f"rule: {text[:1].lower()}{text[1:]}", kind.source)


_FIGURES = {one.words: _registered(one) for one in figures.FIGURES.values()}
_TERMS = (
    *_FIGURES.values(),
    *(Definition(*one) for one in _OTHERS),
    *(_of_rule(kind) for kind in RULES if not kind.exact),
    *(
        _cited(name, kind.definition, kind.source)
        for name, kind in STRATEGIES.items()
        if kind.definition
    ),
)
DEFINITIONS = {one.term: one for one in _TERMS}
"""Everything by its term."""
TERMS_OF_WORDS = {term: term for term in DEFINITIONS} | {
    words: one.term for words, one in _FIGURES.items()
}
"""Terms by the words of tables and axes."""


def of_users() -> dict[str, Definition]:
    """The users' rules that configurations have named, except those with the name of a term."""
    return {
        name_of(kind): _of_rule(kind)
        for kind in imported_variants(Rule)
        if name_of(kind) not in DEFINITIONS
    }


def words_of(name: str) -> str:
    """A figure in tables and on axes; a name that is no figure, with spaces."""
    known = figures.FIGURES.get(name)
    return name.removeprefix("num_").replace("_", " ") if known is None else known.words


def meaning_of(words: str) -> str:
    """The definition of a column or axis; empty if it has none."""
    figure = figure_of(words)
    if figure is not None:
        return f"{figure.definition}."
    term = TERMS_OF_WORDS.get(words)
    return "" if term is None else DEFINITIONS[term].definition


def figure_of(words: str) -> Figure | None:
    """The figure with these words."""
    return next((one for one in figures.FIGURES.values() if one.words == words), None)
