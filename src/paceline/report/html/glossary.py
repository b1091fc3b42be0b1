"""Recipes, rules and papers: one line each, for the margin of pages on which they occur."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from paceline.report.html.definitions import TERMS, Term
from paceline.studies.claim_file import Dominance, FrontierTest, Paired

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from paceline.studies.rows import StudyRow
    from paceline.studies.verdicts import Finding


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
_WRITTEN = re.compile(r"(?<!\w)(?:KLD|TVD\+\+|TVD|MBSU)(?![\w+])")
"""Terms that are looked for in texts: their names are no common words."""
_ALIASES = {
    "kld": "KLD",
    "forward_kl": "KLD",
    "tvd": "TVD",
    "tvd++": "TVD++",
    "tvd_plus_plus": "TVD++",
    "mbsu": "MBSU",
    "base": "unaligned",
    "start": "unaligned",
}
"""Names in settings of rows, and the terms that they stand for."""


def _recipe(name: str, meaning: str) -> Term:
    return Term(name, meaning, source="DistillSpec, table 1", link=PAPERS["DistillSpec"].link)


def _objective(name: str, meaning: str) -> Term:
    source, link = "Direct Alignment, section 2.3", PAPERS["Direct Alignment"].link
    return Term(name, meaning, source=source, link=link)


def _rule(name: str, meaning: str, place: str) -> Term:
    source = f"Faster Cascades, {place}"
    return Term(name, meaning, source=source, link=PAPERS["Faster Cascades"].link)


_NAMED = (
    _recipe("supervised_kd", "recipe: forward KL on fixed text."),
    _recipe("seq_kd", "recipe: cross entropy with the tokens of the target's text."),
    _recipe("imit_kd", "recipe: forward KL, half on fixed text, half on the draft's text."),
    _recipe("f_distill", "recipe: TVD, half on the draft's text, half on the target's."),
    _recipe("gkd", "recipe: forward KL on the draft's own text (on-policy)."),
    _objective(
        "KLD",
        "objective forward_kl: the forward Kullback-Leibler divergence, the sum over the "
        "vocabulary of p log(p / q), p the target's and q the draft's distribution.",
    ),
    _objective(
        "TVD",
        "objective tvd: the total variation distance, half the sum over the vocabulary of "
        "|p - q|. It is 1 - expected acceptance.",
    ),
    _objective(
        "TVD++",
        "objective tvd_plus_plus: the policy gradient of TVD with normalised rewards. The reward "
        "of a token is 1 if p > q, else 0; the advantage is (reward - mean) / standard deviation.",
    ),
    Term("unaligned", "the draft before distillation, also called the base draft."),
    Term("autoregressive", "the model alone, without a draft."),
    Term(
        "lenient",
        "rule: accept a drafted token with probability min(1, f(p) / q). f is p / epsilon "
        "(linear), p / epsilon squared (square) or p to the power of epsilon (exponential); "
        "epsilon 1 is lossless. At temperature 0: if f(p) is at least the largest p, with p before "
        "temperature.",
        source="DistillSpec, section 4",
        link=PAPERS["DistillSpec"].link,
    ),
    _rule(
        "lossy",
        "rule: accept with probability min(1, p / ((1 - alpha) q)); beta scales p where a rejected "
        "token is replaced. At temperature 0: if p / (1 - alpha) is at least the largest p, with p "
        "before temperature.",
        "section 2",
    ),
    _rule(
        "bild",
        "rule: defer to the target where the cross entropy of the draft with the target is above a "
        "threshold; after Kim et al. 2023.",
        "section 5",
    ),
    _rule("chow", "rule: defer where the draft's largest probability is below 1 - alpha.", "eq. 2"),
    _rule("chow_log", "rule: defer where the draft's entropy is above alpha.", "table 1"),
    _rule(
        "diff",
        "rule: defer where the target's largest probability is above the draft's by alpha.",
        "eq. 5",
    ),
    _rule(
        "diff_log",
        "rule: defer where the draft's entropy is above the target's by alpha.",
        "table 1",
    ),
    _rule(
        "opt",
        "rule: defer where the target's largest probability is above the draft's by alpha times "
        "the TVD of the two distributions.",
        "eq. 10",
    ),
    _rule(
        "opt_log",
        "rule: defer where the draft's entropy is above the target's by alpha times the TVD of the "
        "two distributions.",
        "table 1",
    ),
    _rule(
        "token_v1",
        "rule: defer the tokens whose draft probability is below the target's largest - alpha.",
        "eq. 13",
    ),
    _rule(
        "token_v2",
        "rule: defer the tokens whose target probability is below the target's largest - alpha.",
        "eq. 14",
    ),
    _rule(
        "token_v3",
        "rule: defer the tokens whose target probability is below (1 - alpha) times the target's "
        "largest.",
        "eq. 15",
    ),
    _rule(
        "token_cascade",
        "the draft writes while it is confident; the target writes the next token. Nothing is "
        "checked.",
        "algorithm 2",
    ),
    _rule("oracle_cascade", "a cascade whose rule sees both models at every token.", "algorithm 3"),
    _rule("sequence_cascade", "the draft answers whole prompts where it is confident.", "eq. 1"),
    Term(
        "big_little",
        "the draft writes while it is confident; the target checks the text and rolls it back "
        "where they differ. Kim et al. 2023.",
    ),
    Term(
        ALPHA,
        "the number in a rule's setting, which trades quality for cost. It is not the acceptance, "
        "which DistillSpec also calls alpha.",
    ),
    *(
        Term(name, f"{one.authors}: {one.title}.", source=f"arXiv {one.link[-10:]}", link=one.link)
        for name, one in PAPERS.items()
    ),
)
NAMED = {term.name: term for term in _NAMED}
MEANINGS = TERMS | NAMED
_OCCURRING = NAMED | {name: TERMS[name] for name in ("lossless", "MBSU")}


def terms_of_rows(rows: Iterable[StudyRow]) -> list[str]:
    """The recipes and rules that these rows measure, in order of appearance."""
    found: list[str] = []
    for row in rows:
        values = [value for value in row.setting.values() if isinstance(value, str)]
        rules = [name.partition(" ")[2] for name in row.sums if name.startswith("regret ")]
        found += [*values, *rules]
        if row.setting.get("label") == "start":
            found.append("unaligned")
        if rules or "alpha" in row.setting:
            found.append(ALPHA)
        if any("mbsu" in name for name in row.sums):
            found.append("MBSU")
    return _known(found)


def terms_of_findings(findings: Sequence[Finding]) -> list[str]:
    """The recipes and rules that the tests of these claims compare, and terms of their texts."""
    found: list[str] = []
    for one in findings:
        match one.claim.test:
            case FrontierTest(firsts=firsts, seconds=seconds):
                found += [*firsts, *seconds, ALPHA]
            case Paired() | Dominance() as test:
                for side in filter(None, (test.first, test.second)):
                    found += _names_of(side.where.get("draft"), side.where.get("family"))
                    if side.where.get("label") == "start":
                        found.append("unaligned")
                    found.append((side.over or test.over).partition(" ")[2])
                    found.append("" if side.transform is None else side.transform.formula)
                found += _names_of(test.rows.get("draft"), test.rows.get("family"))
        found += _WRITTEN.findall(f"{one.claim.here} {one.claim.says}")
    return _known(found)


def _names_of(*conditions: object) -> list[str]:
    parts = [one if isinstance(one, tuple) else (one,) for one in conditions]
    return [value for part in parts for value in part if isinstance(value, str)]


def _known(names: Iterable[str]) -> list[str]:
    """The terms of names such as `lossy beta 1.0`, and the terms in their meanings, each once.

    Names without a term are left out: drafts, tasks and families may have any name.
    """
    found: dict[str, None] = {}
    for name in names:
        first = name if name == ALPHA else name.partition(" ")[0].lower()
        term = _ALIASES.get(first, first)
        if term in _OCCURRING:
            found |= dict.fromkeys([term, *_WRITTEN.findall(_OCCURRING[term].meaning)])
    return list(found)
