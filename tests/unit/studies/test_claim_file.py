"""A claim that stands for several: places, ids, texts and values."""

from typing import Any

from paceline.config import validate
from paceline.studies.claim_file import ClaimFile, Paired
from support.results import claim

TEST: dict[str, Any] = {
    "kind": "paired",
    "rows": {"task": "$task", "temperature": "$t"},
    "figure": "quality",
    "first": {"where": {"draft": "$drafts"}},
    "than": 1.0,
    "matters": 0.1,
}
OVER = {
    "task": ["code", "docs"],
    "temperature": {
        "T=0": {"as": "greedy", "t": 0, "drafts": ["a", "b"]},
        "T=1": {"as": "t1", "t": 1, "drafts": "a"},
    },
}


def test_a_claim_is_repeated_for_each_combination_of_its_places():
    here = "More on $task at T=$t."
    one = claim(TEST, id="more-$task-$temperature", here=here, over=OVER)
    plain = claim(TEST | {"rows": {}, "first": {}}, id="alone")
    file = validate(ClaimFile, {"claims": [one, plain]})
    ids = ["more-code-greedy", "more-code-t1", "more-docs-greedy", "more-docs-t1", "alone"]
    assert [it.id for it in file.claims] == ids
    first, *_, last = file.claims
    assert first.sentence == file.claims[3].sentence == "more-task-temperature"
    assert (first.place, last.place) == ({"task": "code", "temperature": "T=0"}, {})
    assert (first.here, first.pattern) == ("More on code at T=0.", "More on … at T=….")
    assert isinstance(first.test, Paired)
    assert first.test.rows == {"task": "code", "temperature": 0}
    assert first.test.first.where == {"draft": ("a", "b")}


def test_expanded_claims_are_a_file_of_claims_again():
    one = claim(TEST, id="more-$task-$temperature", over=OVER)
    file = validate(ClaimFile, {"claims": [one]})
    written = [it.model_dump(mode="json", exclude_unset=True) for it in file.claims]
    assert validate(ClaimFile, {"claims": written}) == file
