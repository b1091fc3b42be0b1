"""The words and definitions of tables and pages: the figures of `results`, and other terms."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from paceline.results import figures

if TYPE_CHECKING:
    from paceline.results.figures import Figure


class Definition(NamedTuple):
    """A figure or another term.

    Attributes:
        term: The name in a list of definitions.
        definition: What it is.
        name: The name in code and result rows; empty for other terms than figures.
        words: The name of a figure in tables and on axes.
        format: Of a figure's values.
        better: Which values of a figure are better: `more` or `less`.
        symbol: In the papers.
        source: The place in a paper.
        link: Address of the paper.
    """

    term: str
    definition: str
    name: str = ""
    words: str = ""
    format: str = ""
    better: str = ""
    symbol: str = ""
    source: str = ""
    link: str = ""


class Publication(NamedTuple):
    """A paper with its authors, title and address."""

    authors: str
    title: str
    link: str


PAPERS = {
    "DistillSpec": Publication(
        "Zhou et al. 2023",
        "DistillSpec: Improving Speculative Decoding via Knowledge Distillation",
        "https://arxiv.org/abs/2310.08461",
    ),
    "Faster Cascades": Publication(
        "Narasimhan et al. 2024",
        "Faster Cascades via Speculative Decoding",
        "https://arxiv.org/abs/2405.19261",
    ),
    "Direct Alignment": Publication(
        "Goel et al. 2024",
        "Direct Alignment of Draft Model for Speculative Decoding with Chat-Fine-Tuned LLMs",
        "https://arxiv.org/abs/2403.00858",
    ),
}
ALPHA = "alpha of a rule"

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
    ("verdict", "by the claim's interval and the smallest effect that matters. A claim of more "
     "holds if the interval is above 0, and is small if the estimate is below that effect; it is "
     "too small to matter if the interval is within that effect on both sides, and does not hold "
     "if such a gain is excluded. A claim of the same holds if the interval is within that effect; "
     "a claim of no less holds if the interval is above minus that effect. Undecided: the examples "
     "do not tell."),
    ("claim's interval", "wider than 95%: the probability that any claim of a paper gets a wrong "
     "verdict is at most 5%."),
    ("regret", "expected loss of a rule minus that of the best rule, which knows the true "
     "distribution."),
    ("dominance", "if one curve is above the other everywhere, its values are smaller at every "
     "rank."),
)  # fmt: skip

_RECIPES = (
    ("supervised_kd", "recipe: forward KL on fixed text."),
    ("seq_kd", "recipe: cross entropy with the tokens of the target's text."),
    ("imit_kd", "recipe: forward KL, half on fixed text, half on the draft's text."),
    ("f_distill", "recipe: TVD, half on the draft's text, half on the target's."),
    ("gkd", "recipe: forward KL on the draft's own text (on-policy)."),
)

_OBJECTIVES = (
    ("KLD", "objective forward_kl: the forward Kullback-Leibler divergence, the sum over the "
     "vocabulary of p log(p / q), p the target's and q the draft's distribution."),
    ("TVD", "objective tvd: the total variation distance, half the sum over the vocabulary of "
     "|p - q|. It is 1 - expected acceptance."),
    ("TVD++", "objective tvd_plus_plus: the policy gradient of TVD with normalised rewards. The "
     "reward of a token is 1 if p > q, else 0; the advantage is (reward - mean) / standard "
     "deviation."),
)  # fmt: skip

_RULES = (
    ("lossy", "section 2", "rule: accept with probability min(1, p / ((1 - alpha) q)); beta scales "
     "p where a rejected token is replaced. At temperature 0: if p / (1 - alpha) is at least the "
     "largest p, with p before temperature."),
    ("bild", "section 5", "rule: defer to the target where the cross entropy of the draft with the "
     "target is above a threshold; after Kim et al. 2023."),
    ("chow", "eq. 2", "rule: defer where the draft's largest probability is below 1 - alpha."),
    ("chow_log", "table 1", "rule: defer where the draft's entropy is above alpha."),
    ("diff", "eq. 5", "rule: defer where the target's largest probability is above the draft's by "
     "alpha."),
    ("diff_log", "table 1", "rule: defer where the draft's entropy is above the target's by "
     "alpha."),
    ("opt", "eq. 10", "rule: defer where the target's largest probability is above the draft's by "
     "alpha times the TVD of the two distributions."),
    ("opt_log", "table 1", "rule: defer where the draft's entropy is above the target's by alpha "
     "times the TVD of the two distributions."),
    ("token_v1", "eq. 13", "rule: defer the tokens whose draft probability is below the target's "
     "largest - alpha."),
    ("token_v2", "eq. 14", "rule: defer the tokens whose target probability is below the target's "
     "largest - alpha."),
    ("token_v3", "eq. 15", "rule: defer the tokens whose target probability is below (1 - alpha) "
     "times the target's largest."),
    ("token_cascade", "algorithm 2", "the draft writes while it is confident; the target writes "
     "the next token. Nothing is checked."),
    ("oracle_cascade", "algorithm 3", "a cascade whose rule sees both models at every token."),
    ("sequence_cascade", "eq. 1", "the draft answers whole prompts where it is confident."),
)  # fmt: skip

_NAMES = (
    ("unaligned", "the draft before distillation, also called the base draft."),
    ("autoregressive", "the model alone, without a draft."),
    ("big_little", "the draft writes while it is confident; the target checks the text and rolls "
     "it back where they differ. Kim et al. 2023."),
    (ALPHA, "the number in a rule's setting, which trades quality for cost. It is not the "
     "acceptance, which DistillSpec also calls alpha."),
)  # fmt: skip


def _from(paper: str, term: str, place: str, definition: str) -> Definition:
    return Definition(term, definition, source=f"{paper}, {place}", link=PAPERS[paper].link)


def _registered(figure: Figure) -> Definition:
    source, link = figure.paper or ("", "")
    return Definition(
        figure.term or figure.words,
        f"{figure.definition}.",
        figure.name,
        figure.words,
        figure.format,
        figure.better or "",
        figure.symbol,
        source,
        link,
    )


FIGURES = {name: _registered(figure) for name, figure in figures.FIGURES.items()}
"""Figures by their names in code."""
_OCCURRING = (
    *(_from("DistillSpec", term, "table 1", text) for term, text in _RECIPES),
    *(_from("Direct Alignment", term, "section 2.3", text) for term, text in _OBJECTIVES),
    _from(
        "DistillSpec",
        "lenient",
        "section 4",
        "rule: accept a drafted token with probability min(1, f(p) / q). f is p / epsilon "
        "(linear), p / epsilon squared (square) or p to the power of epsilon (exponential); "
        "epsilon 1 is lossless. At temperature 0: if f(p) is at least the largest p, with p before "
        "temperature.",
    ),
    *(_from("Faster Cascades", term, place, text) for term, place, text in _RULES),
    *(Definition(*one) for one in _NAMES),
    *(
        Definition(name, f"{one.authors}: {one.title}.", source=f"arXiv {one.link[-10:]}",
                   link=one.link)
        for name, one in PAPERS.items()
    ),
)  # fmt: skip
OCCURRING = {one.term: one for one in _OCCURRING}
"""Recipes, objectives, rules and papers, which a page defines if they occur in its rows."""
DEFINITIONS = (
    {one.term: one for one in FIGURES.values()}
    | {term: Definition(term, text) for term, text in _OTHERS}
    | OCCURRING
)
"""Everything by its term."""
TERMS_OF_WORDS = {one.words or one.term: one.term for one in DEFINITIONS.values()}
"""Terms by the words of tables and axes."""


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
