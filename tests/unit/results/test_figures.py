"""Figures of rows: values by hand, intervals of the sums, and figures that users add."""

import math

import numpy as np
import pytest
import torch

from paceline.core.bootstrap import Interval, product_interval, ratio_interval
from paceline.errors import UsageError
from paceline.results import FIGURES, Figure, Row, Source, register
from paceline.results.figures import as_values

COUNT = 24
RNG = np.random.default_rng(0)


def row(**more: object) -> Row:
    values = {
        "population": "prompts",
        "units": tuple(range(COUNT)),
        "setting": {"gamma": 3},
        "sums": {
            "emitted": tuple(map(float, RNG.integers(5, 30, COUNT))),
            "calls": tuple(map(float, RNG.integers(2, 9, COUNT))),
        },
        "source": Source(command="measure"),
    }
    return Row.model_validate(values | more)


def test_the_interval_is_that_of_the_sums():
    measured, figure = row(), FIGURES["block_efficiency"]
    columns = tuple(torch.tensor(measured.sums[name]) for name in ("emitted", "calls"))
    expected = ratio_interval(columns, most=4)
    assert figure.measure(measured) == pytest.approx(expected)


def test_parts_can_be_differences_of_sums():
    measured = row(units=(0, 1), sums={"examined": (4.0, 6.0), "rejected": (1.0, 0.0)})
    assert FIGURES["acceptance_rate"].value(measured) == 9 / 10
    assert FIGURES["rejection_rate"].value(measured) == 1 / 10
    nothing = row(units=(0, 1), sums={"examined": (0.0, 0.0), "rejected": (0.0, 0.0)})
    assert all(map(math.isnan, FIGURES["rejection_rate"].measure(nothing)))


def test_a_formula_is_applied_to_the_value_and_to_both_bounds():
    measured = row(totals={"parameter_ratio": 0.1})
    tau, figure = FIGURES["block_efficiency"].measure(measured), FIGURES["mbsu"].measure(measured)
    assert figure == pytest.approx([bound / (0.1 * 3 + 1) for bound in tau])


def test_a_formula_has_the_errors_of_totals_with_bounds():
    """Tokens per target call / cost of a block: the relative errors add as squares."""
    exact = row(totals={"block_cost": 2.0})
    priced = exact.model_copy(update={"bounds": {"block_cost": (1.9, 2.2)}})
    by_texts = FIGURES["expected_speedup"].measure(exact)
    found = FIGURES["expected_speedup"].measure(priced)
    assert found == product_interval(by_texts, Interval(1.0, 2 / 2.2, 2 / 1.9))
    wider = FIGURES["expected_speedup"].measure(priced, confidence=0.99)
    assert wider.low < found.low < by_texts.low


def test_a_decreasing_formula_exchanges_the_bounds():
    names = ("tokens", "seconds", "target_tokens", "target_seconds")
    measured = row(sums={name: tuple(map(float, RNG.uniform(1, 5, COUNT))) for name in names})
    value, low, high = FIGURES["speedup"].measure(measured)
    latency = Figure("latency", "1 / speedup", of="speedup", formula=lambda speedup, _: 1 / speedup)
    found = latency.measure(measured)
    assert found == pytest.approx((1 / value, 1 / high, 1 / low))


def test_a_total_is_a_figure_with_the_bounds_of_its_row():
    measured = row(totals={"gain": 1.2, "accuracy": 0.4}, bounds={"gain": (1.1, 1.3)})
    assert FIGURES["gain"].measure(measured) == (1.2, 1.1, 1.3)
    unbounded = (0.4, math.nan, math.nan)
    assert FIGURES["accuracy"].measure(measured) == pytest.approx(unbounded, nan_ok=True)


def test_a_formula_can_need_another_figure():
    each = {"tokens": 10, "first_tokens": 1, "emitted": 9, "seconds": 5, "first_seconds": 0.5}
    each |= {"calls": 4, "target_tokens": 10, "target_seconds": 10}
    each |= {"target_first_tokens": 1, "target_first_seconds": 1}
    measured = row(
        units=tuple(range(9)),
        setting={"gamma": 2},
        sums={name: (float(value),) * 9 for name, value in each.items()},
        totals={"cost_ratio": 0.25},
    )
    assert FIGURES["decoding_speedup"].value(measured) == 2
    assert FIGURES["engine_efficiency"].value(measured) == pytest.approx(2 / (9 / 4 / 1.5))


def test_a_gain_is_paired():
    base = row()
    emitted = tuple(1.1 * value for value in base.sums["emitted"] if value is not None)
    better = base.model_copy(update={"sums": base.sums | {"emitted": emitted}})
    assert FIGURES["block_efficiency"].gain(better, base) == pytest.approx((1.1, 1.1, 1.1))
    fewer = row(units=(0, 1), sums={"emitted": (1.0, 2.0), "calls": (1.0, 1.0)})
    with pytest.raises(UsageError, match="other units"):
        FIGURES["block_efficiency"].gain(better, fewer)


def test_a_row_has_the_figures_of_its_sums():
    assert list(as_values(row())) == ["block_efficiency", "deferral_rate"]
    with_ratio = row(totals={"parameter_ratio": 0.2, "cost_ratio": 0.3})
    formulas = {"block_efficiency", "deferral_rate", "mbsu", "predicted_speedup"}
    assert as_values(with_ratio).keys() == formulas | {"cost_ratio"}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("quality", "quality needs score, which a row of measure lacks"),
        ("mbsu", "MBSU needs parameter_ratio"),
        ("gain", "gain is a total, which a row of measure lacks"),
    ],
)
def test_a_figure_without_what_it_needs_says_so(name: str, said: str):
    with pytest.raises(UsageError, match=said):
        FIGURES[name].value(row())


def test_users_add_figures_by_their_sums(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(FIGURES, "energy", FIGURES["quality"])  # what is added goes with the test
    del FIGURES["energy"]
    register(Figure("energy", "joules per token", (("joules", "tokens"),), unit="J"))
    measured = row(units=(0, 1), sums={"joules": (3.0, 5.0), "tokens": (2.0, 2.0)})
    assert as_values(measured)["energy"].value == 2.0
    with pytest.raises(ValueError, match="there is a figure energy already"):
        register(Figure("energy", "something else", (("joules", "seconds"),)))
