"""Recipes, rules and papers that occur have a definition; names without one are left out."""

from typing import Any, get_args

import pytest

from paceline.config import validate
from paceline.core.bootstrap import Interval
from paceline.report.html.glossary import (
    ALPHA,
    MEANINGS,
    NAMED,
    PAPERS,
    terms_of_findings,
    terms_of_rows,
)
from paceline.studies.claim_file import Claim, Paper
from paceline.studies.verdicts import HOLDS, Finding
from paceline.train.config import RECIPES
from study_rows import claim, study_row


def finding(test: dict[str, Any], **changes: Any) -> Finding:
    made = validate(Claim, claim(test, **changes))
    return Finding(made, HOLDS, Interval(1.0, 0.5, 1.5), 2.0, 1.0, 12, "", "")


def paired(first: dict[str, Any], second: dict[str, Any], **changes: Any) -> dict[str, Any]:
    sides = {"first": {"where": first}, "second": {"where": second}}
    return {"kind": "paired", "over": "emitted_5", "matters": 0.1} | sides | changes


def test_every_recipe_of_the_package_has_a_definition_with_its_paper():
    for name in RECIPES:
        assert NAMED[name].meaning.startswith("recipe: ")
        assert NAMED[name].link == PAPERS["DistillSpec"].link


def test_every_paper_that_claims_may_name_is_known():
    assert set(PAPERS) == set(get_args(Paper))


@pytest.mark.parametrize(
    ("paper", "number"),
    [
        ("DistillSpec", "2310.08461"),
        ("Faster Cascades", "2405.19261"),
        ("Direct Alignment", "2403.00858"),
    ],
)
def test_papers_link_to_arxiv(paper: str, number: str):
    assert MEANINGS[paper].link == f"https://arxiv.org/abs/{number}"
    assert MEANINGS[paper].source == f"arXiv {number}"


@pytest.mark.parametrize(
    ("draft", "term"),
    [
        ("forward_kl", "KLD"),
        ("tvd", "TVD"),
        ("tvd_plus_plus", "TVD++"),
        ("base", "unaligned"),
        ("start of run-1", "unaligned"),
        ("gkd", "gkd"),
    ],
)
def test_the_name_of_a_draft_is_explained_by_its_objective_or_recipe(draft: str, term: str):
    assert terms_of_rows([study_row({"tokens": [1.0]}, draft=draft)])[0] == term


def test_names_that_have_no_term_are_left_out():
    row = study_row({"tokens": [1.0]}, draft="mine", task="documentation", family="new 0.5")
    assert terms_of_rows([row]) == []
    assert terms_of_findings([finding(paired({"draft": "mine"}, {"draft": ["one", "two"]}))]) == []


def test_rules_of_rows_bring_alpha_and_the_terms_of_their_meanings():
    row = study_row({"regret opt_log 0.1": [1.0], "bound opt_log 0.1": [2.0]})
    assert terms_of_rows([row]) == ["opt_log", "TVD", ALPHA]
    cell = study_row({"tokens": [1.0]}, family="chow", alpha=0.2)
    assert terms_of_rows([cell]) == ["chow", ALPHA]


def test_the_drafts_of_both_sides_of_a_claim_are_explained():
    test = paired({"draft": ["gkd", "imit_kd"]}, {"label": "start"}, rows={"task": "code"})
    assert terms_of_findings([finding(test)]) == ["gkd", "imit_kd", "unaligned"]


def test_the_families_of_a_frontier_are_explained_without_their_settings():
    test = {"kind": "frontier", "statistic": "curve", "matters": 0.1}
    test |= {"firsts": ["token_v3"], "seconds": ["lossy beta 1.0", "unknown"]}
    assert terms_of_findings([finding(test)]) == ["token_v3", "lossy", ALPHA]


def test_terms_in_the_text_of_a_claim_are_explained():
    test = paired({"draft": "a"}, {"draft": "b"})
    said = finding(test, says="TVD++ beats KLD, and TVDs do not.", here="MBSU is larger.")
    assert terms_of_findings([said]) == ["MBSU", "TVD++", "TVD", "KLD"]


def test_a_formula_of_a_claim_is_explained():
    test = paired({"draft": "kld"}, {"label": "start"})
    test["first"]["transform"] = {"formula": "mbsu", "gamma": 3}
    assert terms_of_findings([finding(test)]) == ["KLD", "MBSU", "unaligned"]
    test["first"]["transform"] = {"formula": "iid_block_efficiency", "gamma": 3}
    assert terms_of_findings([finding(test)]) == ["KLD", "unaligned"]


def test_all_terms_that_can_occur_have_a_meaning():
    every = [study_row({"mbsu_5": [1.0], "regret diff 0.1": [1.0]}, draft=name) for name in NAMED]
    found = terms_of_rows([*every, study_row({"tokens": [1.0]}, label="start")])
    assert {"MBSU", "diff", ALPHA, "unaligned", "TVD++"} <= set(found)
    assert set(found) <= set(MEANINGS)
