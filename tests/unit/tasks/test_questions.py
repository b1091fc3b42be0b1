"""Closed questions score as SQuAD's script does; its definitions are written out again here."""

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.data import CorpusConfig
from paceline.data.prompts import Record
from paceline.errors import PromptError
from paceline.tasks import Questions, TaskExample
from paceline.tasks.base import corpus_figures
from paceline.tasks.row_task import exact_match, f1, normalised

CASES = [
    (["The Eiffel Tower"], "eiffel tower!"),
    (["The Eiffel Tower"], " The  Eiffel\nTower in Paris"),
    (["Denver Broncos", "The Denver Broncos", "Broncos"], "Broncos"),
    (["Denver Broncos", "Broncos"], "the Denver team"),
    (["1,000 metres"], "1000 metres"),
    (["U.S.A."], "usa"),
    (["a"], "the"),
    (["two two three"], "two three three"),
    (["blue"], "red"),
    (["blue"], ""),
    (["mother-in-law"], "motherinlaw"),
    (["theory"], "theory of an answer"),
    (["Ünïcode the “quotes”"], "ünïcode “quotes”"),
]


def reference_words(text: str) -> list[str]:
    """Lower case, ASCII punctuation deleted, words that are articles deleted."""
    marks = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"
    bare = "".join(c for c in text.lower() if c not in marks)
    return [word for word in bare.split() if word not in ("a", "an", "the")]


def reference_f1(reference: str, answer: str) -> float:
    given, wanted = reference_words(answer), reference_words(reference)
    left, shared = list(wanted), 0
    for word in given:
        if word in left:
            left.remove(word)
            shared += 1
    if not shared:
        return 0
    precision, recall = 1.0 * shared / len(given), 1.0 * shared / len(wanted)
    return (2 * precision * recall) / (precision + recall)


def example(references: list[str]) -> TaskExample:
    return TaskExample(Record("row", "prompt"), references[0], tuple(references[1:]))


def task(**settings: Any) -> Questions:
    return Questions(corpus=CorpusConfig(path="unread.jsonl"), **settings)


@pytest.mark.parametrize(("references", "answer"), CASES)
def test_an_answer_scores_its_best_match(references: list[str], answer: str):
    words = reference_words(answer)
    exact = max(float(words == reference_words(text)) for text in references)
    assert task(metric="exact_match").score(example(references), answer) == exact
    assert task().score(example(references), answer) == max(
        reference_f1(text, answer) for text in references
    )


def test_figures_of_the_corpus_are_percentages():
    answers = [answer for _, answer in CASES]
    found = corpus_figures(task(), [example(r) for r, _ in CASES], answers).scores
    sums = {"exact_match": 0.0, "f1": 0.0}
    for references, answer in CASES:
        sums["f1"] += max(reference_f1(text, answer) for text in references)
        words = reference_words(answer)
        sums["exact_match"] += max(words == reference_words(text) for text in references)
    assert found == {name: 100.0 * total / len(CASES) for name, total in sums.items()}


@pytest.mark.parametrize(
    ("text", "bare"),
    [
        ("The  Cat, an animal.", "cat animal"),
        ("A-B", "ab"),
        ("another theatre", "another theatre"),
        ("the", ""),
        ("it's a.m.", "its am"),
    ],
)
def test_case_punctuation_articles_and_spaces_do_not_count(text: str, bare: str):
    assert normalised(text) == bare


def test_f1_by_hand():
    """One of two words given, one of three wanted: precision 1/2, recall 1/3."""
    assert f1("red green blue", "red yellow") == pytest.approx(2 / 5)
    assert exact_match("red green blue", "red yellow") == 0.0


def test_rows_of_squad_have_a_context_and_a_list_of_answers(tmp_path: Path):
    row = {
        "context": "Paris is in France.",
        "question": "Where is Paris?",
        "answers": {"text": ["France", "in France"], "answer_start": [12, 9]},
    }
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps(row) + "\n")
    corpus = CorpusConfig(path=str(file), prompt_field="question", completion_field="answers.text")
    prompt = "{context}\n\nQuestion: {source}\nAnswer:"
    (found,) = Questions(corpus=corpus, prompt=prompt).examples("test", 1)
    assert found.record.text == "Paris is in France.\n\nQuestion: Where is Paris?\nAnswer:"
    assert (found.reference, found.alternatives) == ("France", ("in France",))
    assert found.record.completion == " France"
    assert set(Questions(corpus=corpus).versions()) == {"task_version", "corpus", "match"}


@pytest.mark.parametrize("answers", [[], [""], ["yes", " "], [None], None, {"text": "yes"}])
def test_a_question_without_an_answer_is_one_line(tmp_path: Path, answers: Any):
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"prompt": "why?", "completion": answers}) + "\n")
    with pytest.raises(PromptError) as caught:
        Questions(corpus=CorpusConfig(path=str(file))).examples("test", 1)
    assert "a.jsonl line 1 has no " in str(caught.value)
    assert str(caught.value).endswith("fill it or leave the row out")
