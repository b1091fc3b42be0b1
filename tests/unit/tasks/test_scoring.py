"""Scores by hand, and what is said where a library is missing."""

import importlib.metadata
import sys

import pytest
import sacrebleu
from scipy import stats

from paceline.errors import UsageError
from paceline.tasks import scoring
from paceline.tasks.scoring import Metric, mean_score, metric_versions, score_sum, score_text


@pytest.fixture(autouse=True)
def _nothing_kept():
    scoring._rouge.cache_clear()
    scoring.chrf_metric.cache_clear()
    yield
    scoring._rouge.cache_clear()
    scoring.chrf_metric.cache_clear()


@pytest.mark.parametrize(
    ("answer", "rouge1", "rouge2", "rouge_l"),
    [
        ("the cat sat", 1, 1, 1),
        ("the cat ran", 2 / 3, 1 / 2, 2 / 3),
        ("sat the cat", 1, 1 / 2, 2 / 3),
        ("cat", 1 / 2, 0, 1 / 2),  # precision 1, recall 1/3
        ("the the the", 1 / 3, 0, 1 / 3),
        ("a dog ran", 0, 0, 0),
        ("", 0, 0, 0),
        ("The CAT, sat!", 1, 1, 1),
    ],
)
def test_rouge_is_the_f_measure_counted_by_hand(
    answer: str, rouge1: float, rouge2: float, rouge_l: float
):
    scores = [score_text(m, "the cat sat", answer) for m in ("rouge1", "rouge2", "rougeL")]
    assert scores == pytest.approx([rouge1, rouge2, rouge_l])


def test_rouge_compares_stems():
    assert score_text("rouge1", "returns numbers", "returning number") == 1.0


@pytest.mark.parametrize("answer", ["the cat sat on a mat", " a cat\n", "zzz", "", "Katze"])
def test_chrf_is_sacrebleus_of_the_sentence(answer: str):
    reference = "the cat sat on the mat"
    wanted = sacrebleu.sentence_chrf(answer.strip(), [reference]).score / 100
    assert score_text("chrf", reference, answer) == wanted
    assert score_text("chrf", reference, f" {reference}\n") == 1


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


@pytest.mark.parametrize(
    ("metric", "libraries"),
    [
        ("exact_match", []),
        ("rouge1", ["rouge-score", "nltk"]),
        ("rougeL", ["rouge-score", "nltk"]),
        ("chrf", ["sacrebleu"]),
    ],
)
def test_versions_are_those_that_are_installed(metric: Metric, libraries: list[str]):
    assert metric_versions(metric) == {name: importlib.metadata.version(name) for name in libraries}


@pytest.mark.parametrize(
    ("module", "library", "score"),
    [
        ("reasoning_gym", "reasoning-gym", lambda: score_sum("1", "1")),
        ("rouge_score.rouge_scorer", "rouge-score", lambda: score_text("rougeL", "a", "a")),
        ("sacrebleu.metrics", "sacrebleu", lambda: score_text("chrf", "a", "a")),
    ],
)
def test_a_missing_library_is_one_line_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, module: str, library: str, score
):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UsageError) as caught:
        score()
    message = str(caught.value)
    assert message.startswith(f"{library} cannot be imported")
    assert message.endswith("install it with pip install -e '.[tasks]'")


def test_a_version_that_is_not_there_is_the_same_line():
    with pytest.raises(UsageError, match=r"install it with pip install -e '.\[tasks\]'"):
        scoring.installed_version("no-such-library")


def test_a_mean_of_scores_has_their_exact_interval():
    """190 of 200 right: the bounds of Clopper and Pearson, in percent."""
    found = mean_score([1.0] * 190 + [0.0] * 10, most=100.0)
    low, high = stats.beta.ppf(0.025, 190, 11), stats.beta.ppf(0.975, 191, 10)
    assert found == pytest.approx((95.0, 100 * low, 100 * high), abs=0.3)
