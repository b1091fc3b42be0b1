"""Pages of studies from rows made by hand: verdicts first, then the figures that the rows allow."""

from typing import Any

import pytest

from paceline.config import validate
from paceline.results.row import Row
from paceline.studies.claim_file import ClaimFile
from paceline.studies.verdicts import judge
from paceline.view.page import Figure, Page, Table, Text
from paceline.view.render import render
from paceline.view.study_page import study_page
from support.results import claim, claims_page, study_row

UNITS = 12
STUDY = "tiny"


def drafts(tau: float, **setting: Any) -> Row:
    """Twelve texts of 20 tokens; tau varies a little between them."""
    blocks = [20 / (tau + 0.02 * (unit % 3)) for unit in range(UNITS)]
    sums = {"tokens": [20.0] * UNITS, "acceptance": [10.0 + tau] * UNITS}
    sums |= {"emitted": [20.0] * UNITS, "calls": blocks}
    return study_row(sums, task="sums", temperature=1.0, gamma=5, **setting)


def rows() -> list[Row]:
    return [
        drafts(1.5, label="start"),
        drafts(1.7, label="step 50", step=50, draft="gkd", trained_on="sums", seed=0),
        *(
            drafts(2.05, label="end", step=90, draft="gkd", trained_on="sums", seed=seed)
            for seed in (0, 1)
        ),
    ]


def claims() -> ClaimFile:
    common = {"rows": {"task": "sums"}, "over": "emitted", "under": "calls"}
    sides = {
        "first": {"where": {"label": "end", "draft": "gkd"}},
        "second": {"where": {"label": "start"}},
    }
    first = common | sides | {"kind": "paired", "across": ["seed"], "matters": 0.02}
    alone = {"where": sides["first"]["where"] | {"seed": 0}}
    second = common | {"kind": "dominance", "matters": 0.1, "first": alone}
    second |= {"second": sides["second"]}
    about = {"paper": "DistillSpec", "item": "Figure 1", "says": "It helps.", "study": STUDY}
    about |= {"size": {"text": "direction only"}, "fixed": "2026-11-25"}
    texts = {"gains": "Distilled drafts have a larger tau.", "dominates": "Everywhere."}
    return validate(
        ClaimFile,
        {
            "claims": [
                about | {"id": "gains", "here": texts["gains"], "test": first},
                about | {"id": "dominates", "here": texts["dominates"], "test": second},
            ]
        },
    )


@pytest.fixture
def page() -> Page:
    return study_page("Study tiny", rows(), judge(claims(), rows()))


def blocks(page: Page, kind: type) -> list[Any]:
    return [one for section in page.sections for one in section.blocks if isinstance(one, kind)]


def claims_of(page: Page) -> list[dict[str, Any]]:
    tables = [one for one in blocks(page, Table) if one.title.startswith("Claims of")]
    return [row for table in tables for row in table.rows]


def test_the_verdict_counts_the_claims_and_names_the_clearest_effect(page: Page):
    """tau 2.05 with either seed against 1.5, with the same spread: a gain of 36%."""
    assert page.verdict.startswith("2 of 2 claims were tested: 2 hold.")
    assert "+36%" in page.verdict
    assert "Distilled drafts have a larger tau." in page.verdict


def test_a_claim_shows_what_the_paper_says_and_the_command(page: Page):
    rows = claims_of(page)
    assert [one["verdict"].word for one in rows] == ["holds", "holds"]
    says = "Figure 1: It helps. Size in the paper: direction only."
    assert rows[0]["what the paper says"] == says
    assert rows[0]["command"] == "paceline study run tiny"
    assert rows[0]["effect is"].startswith("+36.")
    assert rows[0]["effect_low"] <= rows[0]["effect"] <= rows[0]["effect_high"]


def test_drafts_have_their_tau_over_seeds_and_acceptance_over_steps(page: Page):
    figures = {one.title: one for one in blocks(page, Figure)}
    tau = figures["Tokens per target call: sums, temperature 1"]
    names = {row["name"]: row["tau"] for row in tau.rows}
    assert set(names) == {"unaligned", "gkd, sums"}
    assert names["unaligned"] == pytest.approx(1.52, abs=0.001)
    assert names["gkd, sums"] == pytest.approx(2.07, abs=0.001)
    steps = figures["Acceptance over training: sums, temperature 1"]
    assert [row["step"] for row in steps.rows] == [0, 50, 90]
    assert "Tau per example: dominates" in figures


def test_bounds_are_a_table_of_means():
    names = ("acceptance", "tight", "proven", "printed")
    sums = {name: [0.1 * place] * UNITS for place, name in enumerate(names, start=1)}
    regret = {"positions": [10.0] * UNITS, "regret": [2.0] * UNITS, "bound": [5.0] * UNITS}
    rows = [
        study_row(sums, max_new_tokens=16, theorem="4.1"),
        study_row(regret, max_new_tokens=16, lemma=5, rule="opt", alpha=0.1),
    ]
    made = study_page("Bounds", rows, [])
    (table,) = blocks(made, Table)
    values = {row[""]: row["value"] for row in table.rows}
    assert values["bound as proven"] == pytest.approx(0.3)
    assert values["regret of opt 0.1"] == pytest.approx(0.2)
    assert values["regret bound of opt 0.1"] == pytest.approx(0.5)
    assert made.verdict.startswith("These rows belong to no claim")


def test_the_page_is_one_file(page: Page):
    text = render(page)
    assert text.startswith("<!DOCTYPE html>")
    assert len(text) < 500_000


@pytest.fixture(scope="module")
def whole() -> Page:
    return claims_page()


def test_sections_ask_questions_in_the_order_of_a_reader(whole: Page):
    assert [one.title for one in whole.sections] == [
        "What was tested, and with what?",
        "Are the papers' claims true here?",
        "How do I run it on my own models?",
        "What was measured for each claim of Direct Alignment?",
        "What was measured for each claim of DistillSpec?",
        "Does distillation raise the block efficiency?",
        "Are the bounds true, and do they say anything?",
    ]
    kinds = [type(one.blocks[0]) for one in whole.sections]
    assert kinds == [Text, Table, Text, Table, Table, Figure, Table]


def test_terms_of_drafts_and_claims_are_defined_and_unknown_drafts_are_shown(whole: Page):
    assert {"KLD", "TVD++", "unaligned", "Direct Alignment"} <= set(whole.sections[1].terms)
    names = [row["name"] for one in blocks(whole, Figure) for row in one.rows]
    assert {"forward_kl, code", "tvd_plus_plus, code", "mine, documentation"} <= set(names)
    text = render(whole)
    assert '<a href="https://arxiv.org/abs/2403.00858">' in text
    assert "<dt>TVD++" in text


def test_a_bound_that_says_nothing_is_counted_on_its_own(whole: Page):
    assert "Theorems, identities and algebra: 1 says nothing here." in whole.verdict
    words = [one["verdict"] for one in claims_of(whole)]
    bound = next(mark for mark in words if mark.word == "says nothing here")
    assert bound.detail == (
        "0 violations in 12; the bound is -2.99 on average, which is always true"
    )


def test_figures_of_drafts_share_an_axis_and_the_colours_of_training_texts(whole: Page):
    """On one task, a training text has no draft; its colour is not taken by another."""
    figures = blocks(whole, Figure)
    assert len(figures) == 4
    layers = [layer for one in figures for panel in one.panels for layer in panel.chart["layer"]]
    encodings = [layer["encoding"] for layer in layers if "shape" in layer["encoding"]]
    scales = [{key: one[key]["scale"] for key in ("x", "color", "shape")} for one in encodings]
    assert all(one == scales[0] for one in scales)
    assert scales[0]["color"]["domain"] == ["not trained", "code", "documentation"]
    values = [row["tau"] for one in figures for row in one.rows]
    low, high = scales[0]["x"]["domain"]
    assert low <= min(values) < max(values) <= high


def test_a_figure_names_the_command_and_the_configuration_of_its_own_rows(whole: Page, page: Page):
    figure = blocks(whole, Figure)[0]
    assert figure.source.command == "paceline trajectory --config tau.yaml"
    assert figure.source.config == {"target": "models/target", "draft": "models/draft"}
    table = blocks(whole, Table)[-1]
    assert table.source.command == "paceline bounds --config bounds.yaml"
    assert table.source.config is None
    sweep = study_row({"tau": [1.0, 2.0]}, row="gkd", column="sums")
    source = sweep.source.model_copy(update={"command": "paceline sweep --config sweep.yaml"})
    first = sweep.model_copy(update={"source": source})
    found = study_page("Tiny", [first, *rows()], judge(claims(), rows()))
    titles = {one.title: one.source.command for one in blocks(found, Figure)}
    assert titles["Tau per example: dominates"] == "paceline trajectory --config tau.yaml"


def test_quality_of_drafts_is_a_point_each_and_a_correlation_a_claim():
    """Four drafts whose quality falls as their tau grows."""
    made = []
    for number in range(4):
        row = drafts(1.5 + number / 4, label="end", draft=f"d{number}", trained_on="sums", seed=0)
        scores = {"score": tuple(0.5 - number / 10 for _ in range(UNITS))}
        made.append(row.model_copy(update={"sums": row.sums | scores}))
    test = {
        "kind": "correlation",
        "rows": {"label": "end"},
        "first": {"over": "score"},
        "second": {"over": "emitted", "under": "calls"},
        "than": 0.5,
        "matters": 0.1,
        "expect": "less",
    }
    file = validate(ClaimFile, {"claims": [claim(test, id="weak", study=STUDY)]})
    page = study_page("Study tiny", made, judge(file, made))
    (figure,) = [one for one in blocks(page, Figure) if one.title.startswith("Quality of drafts")]
    assert [row["score"] for row in figure.rows] == pytest.approx([0.5, 0.4, 0.3, 0.2])
    assert [row["tau"] for row in figure.rows] == pytest.approx([1.52, 1.77, 2.02, 2.27], abs=1e-3)
    (row,) = claims_of(page)
    assert row["verdict"].word == "holds"
    assert row["effect is"] == "correlation - 0.5; smallest that matters 0.1"
    assert "Quality of drafts" in render(page)
