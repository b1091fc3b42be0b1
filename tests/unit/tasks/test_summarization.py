"""Summaries score as rouge_score scores them, to the last digit."""

from pathlib import Path
from typing import Any

import pytest
from rouge_score.rouge_scorer import RougeScorer

from paceline.data import CorpusConfig
from paceline.data.prompts import Record
from paceline.tasks import Summarization, TaskExample
from paceline.tasks.base import corpus_figures

REFERENCES = [
    "The council met on Monday.\nIt raised the tax on water.",
    "A storm closed the harbour.\nNobody was hurt.",
    "Two players were injured. The match ended early.",
]
ANSWERS = [
    "It raised the water tax.\nThe council was meeting on Monday.",
    "Harbour closed by storms.",
    "The match ended early. Two players had injuries.",
]
EXAMPLES = [TaskExample(Record(f"row {n}", "prompt"), text) for n, text in enumerate(REFERENCES)]
VARIANTS = ["rouge1", "rouge2", "rougeL", "rougeLsum"]


def task(**settings: Any) -> Summarization:
    return Summarization(corpus=CorpusConfig(path="unread.jsonl"), **settings)


@pytest.mark.parametrize("metric", VARIANTS)
@pytest.mark.parametrize("stem", [True, False])
def test_a_summary_scores_as_rouge_score_scores_it(metric: str, stem: bool):
    scorer = RougeScorer([metric], use_stemmer=stem)
    for example, reference, answer in zip(EXAMPLES, REFERENCES, ANSWERS, strict=True):
        wanted = scorer.score(reference, answer)[metric].fmeasure
        assert task(metric=metric, stem=stem).score(example, answer) == wanted


def test_figures_of_the_corpus_are_means_of_the_three_variants():
    scorer = RougeScorer(["rouge1", "rouge2", "rougeLsum"], use_stemmer=True)
    scores = [scorer.score(*each) for each in zip(REFERENCES, ANSWERS, strict=True)]
    assert corpus_figures(task(), EXAMPLES, ANSWERS).scores == {
        name: sum(found[name].fmeasure for found in scores) / 3
        for name in ("rouge1", "rouge2", "rougeLsum")
    }


def test_sentences_are_lines_unless_punctuation_ends_them_too():
    """As lines, the third pair is one sentence each: its LCS is "the match ended early" of 8."""
    example, answer = EXAMPLES[2], ANSWERS[2]
    assert task(stem=False).score(example, answer) == 4 / 8
    scorer = RougeScorer(["rougeLsum"], use_stemmer=True)
    on_lines = [text.replace(". ", ".\n") for text in (REFERENCES[2], answer)]
    wanted = scorer.score(*on_lines)["rougeLsum"].fmeasure
    assert task(sentences="punctuation").score(example, answer) == wanted > 4 / 8


def test_the_default_is_rouge_l_over_sentences_and_an_empty_answer_is_0():
    assert task().metric == "rougeLsum"
    assert task().score(EXAMPLES[0], "") == 0.0
    assert task().score(EXAMPLES[0], f"\n{REFERENCES[0]} ") == 1.0


def test_signatures_say_how_rouge_is_computed(tmp_path: Path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "a", "completion": "b"}\n')
    found = Summarization(corpus=CorpusConfig(path=str(file)), stem=False).versions()
    assert set(found) == {"rouge", "rouge-score", "nltk", "task_version", "corpus"}
    assert found["rouge"] == "f-measure|mean|stem:no|sentences:lines"
