"""Scores by hand, and what is said where a library is missing."""

import importlib.metadata
import math
import sys

import pytest

from paceline.errors import UsageError
from paceline.tasks import scoring
from paceline.tasks.scoring import Metric, metric_versions, score_sum, score_text


@pytest.fixture(autouse=True)
def _nothing_kept():
    scoring._rouge.cache_clear()
    yield
    scoring._rouge.cache_clear()


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


@pytest.mark.parametrize(
    ("answer", "bleu"),
    [
        # n-gram precisions 5/6, 3/5, 2/4, 1/3 and as long as the reference
        ("the cat sat on a mat", (5 / 6 * 3 / 5 * 2 / 4 * 1 / 3) ** 0.25),
        # every n-gram is right, and the brevity penalty is exp(1 - 6/4)
        ("the cat sat on", math.exp(-0.5)),
        ("the cat sat on the mat", 1.0),
        (" the cat sat on the mat\n", 1.0),
        ("", 0.0),
    ],
)
def test_bleu_is_the_one_computed_by_hand(answer: str, bleu: float):
    score = score_text("bleu", "the cat sat on the mat", answer)
    assert score == pytest.approx(bleu)
    assert score <= 1


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
        ("bleu", ["sacrebleu"]),
    ],
)
def test_versions_are_those_that_are_installed(metric: Metric, libraries: list[str]):
    assert metric_versions(metric) == {name: importlib.metadata.version(name) for name in libraries}


@pytest.mark.parametrize(
    ("module", "library", "score"),
    [
        ("reasoning_gym", "reasoning-gym", lambda: score_sum("1", "1")),
        ("rouge_score.rouge_scorer", "rouge-score", lambda: score_text("rougeL", "a", "a")),
        ("sacrebleu", "sacrebleu", lambda: score_text("bleu", "a", "a")),
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
    assert "\n" not in message


def test_a_version_that_is_not_there_is_the_same_line():
    with pytest.raises(UsageError, match=r"install it with pip install -e '\.\[tasks\]'"):
        scoring.installed_version("no-such-library")
