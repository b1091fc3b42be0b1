"""What the demo keeps of an earlier run: only what still holds for this configuration and draft."""

import json
import os
import re
from pathlib import Path

import pytest

from paceline.cli.demo import Demo, median_acceptance, remember
from paceline.config import StrictModel
from paceline.core.stats import DecodeStats
from paceline.decode import Generation
from paceline.errors import UsageError
from paceline.measure.verdict import best_code
from paceline.progress import Progress
from support.runs import write_pair


class Question(StrictModel):
    number: int


class Answer(StrictModel):
    config: Question
    half: float


class Asked:
    """Answers, and counts how often it was asked."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self, config: Question, _progress: Progress) -> Answer:
        self.times += 1
        return Answer(config=config, half=config.number / 2)


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    (tmp_path / "draft").mkdir()
    weights = tmp_path / "draft" / "model.safetensors"
    weights.write_bytes(b"")
    os.utime(weights, (1000, 1000))
    return tmp_path / "draft"


def test_an_answer_is_kept_for_the_same_question(tmp_path: Path, draft: Path):
    asked = Asked()
    for _ in range(2):
        found = remember(tmp_path / "a.json", draft, Answer, Question(number=3), asked)
        assert found.half == 1.5
    assert asked.times == 1
    assert remember(tmp_path / "a.json", draft, Answer, Question(number=4), asked).half == 2
    assert asked.times == 2


def test_a_newer_draft_is_asked_again(tmp_path: Path, draft: Path):
    asked = Asked()
    remember(tmp_path / "a.json", draft, Answer, Question(number=3), asked)
    later = (tmp_path / "a.json").stat().st_mtime + 10
    os.utime(draft / "model.safetensors", (later, later))
    remember(tmp_path / "a.json", draft, Answer, Question(number=3), asked)
    assert asked.times == 2


def test_an_answer_of_another_version_is_asked_again(tmp_path: Path, draft: Path):
    asked = Asked()
    (tmp_path / "a.json").write_text('{"config": {"number": 3}, "third": 1.0}')
    found = remember(tmp_path / "a.json", draft, Answer, Question(number=3), asked)
    assert (found.half, asked.times) == (1.5, 1)


@pytest.mark.parametrize(
    ("codes", "wanted"), [([0, 3], 0), ([1, 0], 0), ([1, 1], 1), ([1, 3], 3), ([3, 3], 3)]
)
def test_a_demo_without_go_is_undecided_unless_all_verdicts_are_no_go(
    codes: list[int], wanted: int
):
    assert best_code(codes) == wanted


def generation(num_tokens: int, num_accepted: int, num_recovered: int) -> Generation:
    stats = DecodeStats(num_accepted=num_accepted, num_recovered=num_recovered)
    return Generation([1] * num_tokens, "length", stats)


def test_the_shown_text_has_median_acceptance_among_those_of_full_length():
    rates = [(8, 9, 1), (3, 5, 5), (8, 1, 9), (8, 5, 5), (8, 4, 6)]
    assert median_acceptance([generation(*rate) for rate in rates], 8) == 4
    assert median_acceptance([generation(3, 1, 1), generation(2, 1, 3)], 8) == 1


def test_a_draft_of_other_layers_is_not_taken_for_that_of_these(
    model_directory: Path, tmp_path: Path
):
    target = str(model_directory)
    first = Demo(target, tmp_path / "demo", [0])
    first.docs.train.parent.mkdir(parents=True)
    for path in first.docs:
        path.write_text('{"text": "the cat sat on the mat"}\n')
    first.check()
    first.prepare()
    Demo(target, tmp_path / "demo", [0]).check()
    others = {"layers [0], and this demo [0, 1]": Demo(target, tmp_path / "demo", [0, 1])}
    others[f"target {target}, and this demo other"] = Demo("other", tmp_path / "demo", [0])
    for difference, other in others.items():
        with pytest.raises(UsageError, match=re.escape(f"{difference}; choose another --out")):
            other.check()
    config = json.loads((tmp_path / "demo" / "draft-before" / "config.json").read_text())
    assert config["num_hidden_layers"] == 1
    first.made.unlink()  # as older versions left it
    with pytest.raises(UsageError, match="does not say its target and layers, as those of older"):
        first.check()


def test_drafts_that_are_stored_in_float32_are_not_measured_with_int8_weights(tmp_path: Path):
    """A trained one has weights that bfloat16 does not hold, though the target's are such."""
    target = str(write_pair(tmp_path) / "target")
    assert Demo(target, tmp_path / "demo", [0])._common["draft_weights"] == "auto"
