"""Translations score as sacrebleu's own functions score them, to the last digit."""

from pathlib import Path
from typing import Any

import pytest
import sacrebleu

from paceline.data import CorpusConfig
from paceline.data.prompts import Record
from paceline.errors import ConfigError
from paceline.tasks import TaskExample, Translation, build_task

REFERENCES = [
    "The cat sat on the mat.",
    "It is raining, so we stay at home.",
    "He bought three apples and a pear.",
    "Where is the station?",
]
ANSWERS = [
    " The cat sits on the mat.\n",
    "It's raining, therefore we stay home.",
    "He bought 3 apples and one pear.",
    "",
]
EXAMPLES = [TaskExample(Record(f"row {n}", "prompt"), text) for n, text in enumerate(REFERENCES)]


def task(**settings: Any) -> Translation:
    return Translation(corpus=CorpusConfig(path="unread.jsonl"), **settings)


@pytest.mark.parametrize("tokenize", ["13a", "intl", "char", "zh", "none"])
@pytest.mark.parametrize("lowercase", [False, True])
def test_corpus_bleu_is_sacrebleus(tokenize: str, lowercase: bool):
    found = task(tokenize=tokenize, lowercase=lowercase).corpus_scores(EXAMPLES, ANSWERS)
    wanted = sacrebleu.corpus_bleu(ANSWERS, [REFERENCES], tokenize=tokenize, lowercase=lowercase)
    assert found["bleu"] == wanted.score


@pytest.mark.parametrize("word_order", [0, 2])
def test_corpus_chrf_is_sacrebleus(word_order: int):
    found = task(chrf_word_order=word_order).corpus_scores(EXAMPLES, ANSWERS)
    wanted = sacrebleu.corpus_chrf(ANSWERS, [REFERENCES], word_order=word_order)
    assert found["chrf"] == wanted.score


def test_corpus_bleu_is_not_the_mean_of_the_sentences():
    found = task().corpus_scores(EXAMPLES, ANSWERS)["bleu"] / 100
    scores = [task().score(*each) for each in zip(EXAMPLES, ANSWERS, strict=True)]
    assert abs(found - sum(scores) / len(scores)) > 0.01


@pytest.mark.parametrize(("reference", "answer"), list(zip(REFERENCES, ANSWERS, strict=True)))
def test_a_sentence_scores_as_sacrebleu_scores_it(reference: str, answer: str):
    example = TaskExample(Record("row", "prompt"), reference)
    bleu = sacrebleu.sentence_bleu(answer, [reference]).score / 100
    chrf = sacrebleu.sentence_chrf(answer, [reference]).score / 100
    assert task().score(example, answer) == bleu
    assert task(metric="chrf").score(example, answer) == chrf
    assert task().score(example, reference) == task(metric="chrf").score(example, reference) == 1


def test_what_follows_a_stop_counts_in_no_figure():
    stopped = task(stop=["\n"])
    longer = [f"{answer.strip()}\nand more" for answer in ANSWERS[:3]]
    assert stopped.corpus_scores(EXAMPLES[:3], longer) == task().corpus_scores(
        EXAMPLES[:3], ANSWERS[:3]
    )


def test_signatures_are_those_of_the_command_line(tmp_path: Path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "a", "completion": "b"}\n')
    version = sacrebleu.__version__
    found = Translation(corpus=CorpusConfig(path=str(file)), lowercase=True).signatures()
    assert found["bleu"] == f"nrefs:1|case:lc|eff:no|tok:13a|smooth:exp|version:{version}"
    assert found["chrf"] == f"nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no|version:{version}"
    assert set(found) == {"bleu", "chrf", "sacrebleu", "task_version", "corpus"}
    assert found["sacrebleu"] == version


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"metric": "rougeL"}, ["metric", "bleu", "chrf"]),
        ({"tokenize": "words"}, ["tokenize", "13a"]),
        ({"chrf_word_order": -1}, ["chrf_word_order"]),
    ],
)
def test_a_wrong_setting_is_one_line(settings: dict[str, Any], words: list[str]):
    with pytest.raises(ConfigError) as caught:
        build_task({"task": "translation", "corpus": "a.jsonl", **settings})
    assert [word for word in words if word not in str(caught.value)] == []
