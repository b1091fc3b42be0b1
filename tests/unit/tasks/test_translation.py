"""Translations score as sacrebleu's own functions score them, to the last digit."""

import random
from pathlib import Path
from typing import Any

import pytest
import sacrebleu

from paceline.data import CorpusConfig
from paceline.data.prompts import Record
from paceline.errors import ConfigError
from paceline.tasks import TaskExample, Translation, build_task
from paceline.tasks.base import corpus_figures

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
    assert found["bleu"].value == wanted.score


@pytest.mark.parametrize("word_order", [0, 2])
def test_corpus_chrf_is_sacrebleus(word_order: int):
    found = task(chrf_word_order=word_order).corpus_scores(EXAMPLES, ANSWERS)
    wanted = sacrebleu.corpus_chrf(ANSWERS, [REFERENCES], word_order=word_order)
    assert found["chrf"].value == wanted.score


@pytest.mark.parametrize("name", ["bleu", "chrf"])
def test_an_interval_is_sacrebleus_own(name: str):
    rng = random.Random(0)
    words = ["the", "a", "cat", "dog", "sat", "ran", "on", "in", "mat", "hat", "red", "then"]
    texts = [[rng.choice(words) for _ in range(rng.randint(5, 14))] for _ in range(60)]
    references = [" ".join(text) for text in texts]
    answers = [" ".join(w if rng.random() < 0.8 else rng.choice(words) for w in t) for t in texts]
    examples = [TaskExample(Record("row", "prompt"), text) for text in references]
    metric = {"bleu": sacrebleu.BLEU, "chrf": sacrebleu.CHRF}[name]()
    wanted = metric.corpus_score(answers, [references], n_bootstrap=1000)
    found = corpus_figures(task(), examples, answers)
    low, high = found.intervals[name]
    assert found.scores[name] == wanted.score
    assert (high - low) / 2 == pytest.approx(wanted._ci, rel=1e-6)
    assert (high + low) / 2 == pytest.approx(wanted._mean, rel=1e-6)


def test_where_all_answers_are_right_or_one_there_is_no_interval():
    for answers in (REFERENCES, ANSWERS[:1]):
        found = corpus_figures(task(), EXAMPLES[: len(answers)], answers)
        assert found.intervals == {}
        assert set(found.scores) == {"bleu", "chrf"}


@pytest.mark.parametrize(("reference", "answer"), list(zip(REFERENCES, ANSWERS, strict=True)))
def test_a_sentence_scores_as_sacrebleu_scores_it(reference: str, answer: str):
    example = TaskExample(Record("row", "prompt"), reference)
    for order in (0, 2):
        chrf = sacrebleu.sentence_chrf(answer, [reference], word_order=order).score / 100
        assert task(chrf_word_order=order).score(example, answer) == chrf
        assert task(chrf_word_order=order).score(example, reference) == 1


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
    found = Translation(corpus=CorpusConfig(path=str(file)), lowercase=True).versions()
    assert found["bleu"] == f"nrefs:1|case:lc|eff:no|tok:13a|smooth:exp|version:{version}"
    assert found["chrf"] == f"nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no|version:{version}"
    assert set(found) == {"bleu", "chrf", "sacrebleu", "task_version", "corpus"}
    assert found["sacrebleu"] == version


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"metric": "rougeL"}, ["metric", "chrf"]),
        ({"metric": "bleu"}, ["bleu is a figure of all answers together", "use chrf as metric"]),
        ({"tokenize": "words"}, ["tokenize", "13a"]),
        ({"chrf_word_order": -1}, ["chrf_word_order"]),
    ],
)
def test_a_wrong_setting_is_one_line(settings: dict[str, Any], words: list[str]):
    with pytest.raises(ConfigError) as caught:
        build_task({"task": "translation", "corpus": "a.jsonl", **settings})
    assert [word for word in words if word not in str(caught.value)] == []
