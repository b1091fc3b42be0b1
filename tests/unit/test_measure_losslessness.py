"""`verify` on table models: it passes what is lossless and fails what is not."""

import pytest

from paceline.core.rules import Lenient, Lossless
from paceline.core.sampling import SamplingParams
from paceline.measure.losslessness import (
    KeepsHalfOfTheRejected,
    Models,
    VerifyConfig,
    check_greedy,
    first_split,
    verify_models,
)
from paceline.models.fakes import TableModel

PROMPTS = [[1, 2], [3, 3], [4, 5]] * 10


def _models():
    return TableModel.random(8, 2, seed=1), TableModel.random(8, 2, seed=2)


def _config(**values):
    return VerifyConfig(target="t", draft="d", prompts="p.txt", num_prompts=30, **values)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(temperature=0.6, top_p=0.9),
        SamplingParams(top_k=4, repetition_penalty=1.2),
    ],
)
def test_the_lossless_rule_passes(sampling):
    """n = 1,890 tokens in 16 cells; each sampler fails once in 10,000 seeds."""
    report = verify_models(*_models(), PROMPTS, _config(sampling=sampling))
    assert report.passed
    assert report.distribution.num_tokens == 30 * 63


@pytest.mark.parametrize("drafts", [None, {"temperature": 0}, {"temperature": 0.5, "top_p": 0.8}])
def test_the_self_test_catches_the_broken_rule(drafts):
    report = verify_models(*_models(), PROMPTS, _config(self_test=True, draft_sampling=drafts))
    assert report.passed
    assert report.broken_distribution is not None
    assert report.broken_distribution.p_value < 1e-4


def test_a_self_test_that_catches_nothing_fails():
    # A draft equal to its target has nothing to reject, so no rule can be told from another.
    model = TableModel.random(8, 2, seed=1)
    assert not verify_models(model, model, PROMPTS, _config(self_test=True)).passed


@pytest.mark.parametrize("rule", [KeepsHalfOfTheRejected(), Lenient("linear", 0.5)])
def test_a_rule_that_changes_the_text_fails(rule):
    report = verify_models(*_models(), PROMPTS, _config(), rule=rule)
    assert not report.distribution.passed
    assert not report.passed


def test_a_broken_rule_fails_the_greedy_check_and_the_place_is_named():
    check = check_greedy(
        Models(*_models(), _models()[0]), PROMPTS, _config(), KeepsHalfOfTheRejected()
    )
    assert not check.passed
    assert check.first_difference is not None
    assert check.first_difference.startswith("prompt ")


def test_greedy_texts_are_all_equal_for_the_lossless_rule():
    check = check_greedy(Models(*_models(), _models()[0]), PROMPTS, _config(), Lossless())
    assert (check.num_identical, check.num_tokens, check.num_ties) == (30, 30 * 64, 0)


def test_a_served_target_that_is_not_the_reference_fails_both_checks():
    target, draft = _models()
    wrong = TableModel.random(8, 2, seed=3)
    report = verify_models(wrong, draft, PROMPTS, _config(), reference=target)
    assert not report.greedy.passed
    assert not report.distribution.passed


def test_first_split_finds_a_missing_end_too():
    assert first_split([1, 2, 3], [1, 2, 3]) is None
    assert first_split([1, 2, 3], [1, 5, 3]) == 1
    assert first_split([1, 2, 3], [1, 2]) == 2
