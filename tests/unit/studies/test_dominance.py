"""Distances of distributions whose values are known."""

from typing import Any

import pytest
import torch

from paceline.config import validate
from paceline.errors import ConfigError, UsageError
from paceline.studies.claim_file import Dominance
from paceline.studies.evidence_of_drafts import distances, dominance_effect
from support.results import study_row


def wanted(**changes: Any) -> Dominance:
    sides = {"first": {"where": {"label": "end"}}, "second": {"where": {"label": "start"}}}
    return validate(Dominance, {"figure": "quality", "matters": 0.1} | sides | changes)


def test_a_sample_that_is_larger_everywhere_dominates():
    """1 to 100 against the same less 10: the functions differ by 10 / 100 in one direction."""
    first = torch.arange(1, 101, dtype=torch.float64)
    found = distances(first, first - 10, 0.025)
    assert (found.against.value, found.above.value) == pytest.approx((0.0, 0.1))
    assert found.against.low == 0
    assert found.gain == pytest.approx((10, 10, 10))


def test_the_distances_change_places_with_the_samples():
    draws = torch.Generator().manual_seed(1)
    first, second = torch.randn(2, 60, generator=draws, dtype=torch.float64)
    one, other = distances(first, second, 0.025), distances(second, first, 0.025)
    assert (one.against, one.above) == (other.above, other.against)
    assert one.gain.value == pytest.approx(-other.gain.value)


def test_functions_that_cross_differ_in_both_directions():
    """A quarter of the values fall below all others, the rest rise above them."""
    second = torch.arange(40, dtype=torch.float64)
    first = second + 100
    first[:10] = -100
    found = distances(first, second, 0.025)
    assert (found.against.value, found.above.value) == pytest.approx((0.25, 0.75))
    assert found.against.low < 0.25 < found.against.high


def test_distances_are_those_of_a_loop_over_all_points():
    draws = torch.Generator().manual_seed(2)
    first, second = torch.randn(2, 30, generator=draws, dtype=torch.float64)

    def below(values: torch.Tensor, point: float) -> float:
        return sum(value <= point for value in values.tolist()) / 30

    points = [*first.tolist(), *second.tolist()]
    gaps = [below(first, point) - below(second, point) for point in points]
    found = distances(first, second, 0.025)
    assert found.against.value == pytest.approx(max(0, *gaps))
    assert found.above.value == pytest.approx(max(0, *(-gap for gap in gaps)))


def test_figures_of_units_are_ratios_and_are_paired_by_unit():
    end = study_row({"emitted": [6.0] * 10, "calls": [2.0] * 10}, label="end")
    start = study_row({"emitted": [4.0] * 10, "calls": [2.0] * 10}, range(9, -1, -1), label="start")
    found = dominance_effect(wanted(figure="block_efficiency"), [end, start], 0.025)
    assert found is not None
    assert (found.gain.value, found.above.value, found.num_units) == (1.0, 1.0, 10)


def test_sides_without_rows_or_with_few_units_are_no_effect():
    rows = [study_row({"score": [1.0] * 7}, label=label) for label in ("end", "start")]
    assert dominance_effect(wanted(), rows, 0.025) is None
    assert dominance_effect(wanted(), rows[:1], 0.025) is None


@pytest.mark.parametrize(
    ("start", "said"),
    [
        ({"population": "other"}, "different examples"),
        ({"units": range(1, 11)}, "different examples"),
    ],
)
def test_sides_of_other_examples_are_not_compared(start: dict[str, Any], said: str):
    rows = [
        study_row({"score": [1.0] * 10}, label="end"),
        study_row({"score": [1.0] * 10}, label="start", **start),
    ]
    with pytest.raises(UsageError, match=said):
        dominance_effect(wanted(), rows, 0.025)


def test_a_side_of_several_settings_is_refused():
    rows = [
        study_row({"score": [1.0] * 10}, range(10 * seed, 10 * seed + 10), label="end", seed=seed)
        for seed in (0, 1)
    ]
    with pytest.raises(UsageError, match="matches several settings; name one in where"):
        dominance_effect(wanted(), rows, 0.025)


def test_a_figure_that_is_no_ratio_has_no_values_of_units():
    with pytest.raises(ConfigError, match="mbsu is not one ratio of sums, so that a unit has none"):
        wanted(figure="mbsu")
    with pytest.raises(ConfigError, match="no figure block_efficency; did you mean block_eff"):
        wanted(figure="block_efficency")
