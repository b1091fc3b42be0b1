"""Correlations over drafts by hand: without errors, with known errors, and what is refused."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from paceline.config import validate
from paceline.errors import UsageError
from paceline.results.row import Row
from paceline.studies.claim_file import Correlation
from paceline.studies.evidence_of_drafts import correlation, correlation_effect
from support.results import study_row

TAIL = 0.025
TAUS, SCORES = (1.0, 2.0, 4.0, 3.0), (0.1, 0.4, 0.3, 0.6)
TEST = validate(
    Correlation,
    {
        "rows": {"label": "end"},
        "first": "quality",
        "second": "block_efficiency",
        "than": 0.5,
        "matters": 0.1,
    },
)


def drafts(count: int = 8, **changes: Any) -> list[Row]:
    """Four drafts, each with the same figures in every example."""
    return [
        study_row(
            {"score": [score] * count, "emitted": [tau] * count, "calls": [1.0] * count},
            **{"label": "end", "draft": str(number)} | changes,
        )
        for number, (tau, score) in enumerate(zip(TAUS, SCORES, strict=True))
    ]


def test_without_errors_it_is_the_correlation_of_the_values():
    found = correlation_effect(TEST, drafts(), TAIL)
    assert found is not None
    assert found.interval == pytest.approx([np.corrcoef(TAUS, SCORES)[0, 1]] * 3)
    assert (found.num_drafts, found.num_units) == (4, 8)


@pytest.mark.parametrize("ranks", [False, True])
def test_the_range_without_one_draft_is_that_of_numpy(ranks: bool):
    test = TEST.model_copy(update={"ranks": ranks})
    found = correlation_effect(test, drafts(), TAIL)
    assert found is not None
    parts = [np.delete(np.array([TAUS, SCORES]), one, axis=1) for one in range(4)]
    if ranks:
        parts = [part.argsort().argsort() for part in parts]
    left = [np.corrcoef(part)[0, 1] for part in parts]
    assert found.without_one == pytest.approx((min(left), max(left)))
    assert found.note == (
        "4 drafts, seeds of training among them; without any one of them "
        f"{min(left):.2f} to {max(left):.2f}"
    )


def test_errors_are_subtracted_from_squares_and_products():
    """By hand: x has the centred values (-1, -1, 1, 1), y has (-1, 0, 0, 1).

    The squares of x are 4, those of y 2, the products 2. The influences of four examples on the
    first draft alone are 1 and -1; centred over the drafts, 3/4 on it and 1/4 on the others.
    """
    x_D = torch.tensor([0.0, 0.0, 2.0, 2.0], dtype=torch.float64)
    y_D = torch.tensor([0.0, 1.0, 1.0, 2.0], dtype=torch.float64)
    zeros_ND = torch.zeros(4, 4, dtype=torch.float64)
    errors_ND = zeros_ND.clone()
    errors_ND[:, 0] = torch.tensor([1.0, -1.0, 1.0, -1.0])
    square = 4 * (0.75**2 + 3 * 0.25**2) / (3 * 4)  # over 4 examples, of the variance of a mean
    plain = correlation(x_D, zeros_ND, y_D, zeros_ND, TAIL).value
    assert plain == pytest.approx(2 / math.sqrt(4 * 2))
    found = correlation(x_D, errors_ND, y_D, zeros_ND, TAIL).value
    assert found == pytest.approx(2 / math.sqrt((4 - square) * 2))
    # errors of both figures that are the same: their products are subtracted too
    found = correlation(x_D, errors_ND, y_D, errors_ND, TAIL).value
    assert found == pytest.approx((2 - square) / math.sqrt((4 - square) * (2 - square)))


def test_drafts_that_differ_by_no_more_than_their_errors_say_nothing():
    x_D = torch.tensor([0.0, 0.1], dtype=torch.float64)
    errors_ND = torch.tensor([[0.0, 0.6], [0.0, -0.6]], dtype=torch.float64)
    assert tuple(correlation(x_D, errors_ND, x_D, errors_ND, TAIL)) == (0.0, -1.0, 1.0)


def test_looks_are_pooled_and_too_little_is_no_measurement():
    first = drafts()
    later = [
        row.model_copy(update={"units": tuple(unit + 8 for unit in row.units)}) for row in first
    ]
    found = correlation_effect(TEST, [*first, *later], TAIL)
    assert found is not None
    assert found.num_units == 16
    assert correlation_effect(TEST, first[:3], TAIL) is None
    assert correlation_effect(TEST, drafts(7), TAIL) is None
    with pytest.raises(UsageError, match="the drafts of a claim have different examples"):
        correlation_effect(TEST, [*first, *later[:1]], TAIL)
    rows = [study_row({"score": [1.0] * 8}, label="end", draft=str(n)) for n in range(4)]
    with pytest.raises(UsageError, match=r"needs calls, which a row of .* lacks"):
        correlation_effect(TEST, rows, TAIL)
