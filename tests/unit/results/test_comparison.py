"""Statistics of two families of cells, on rows made by hand."""

import math

import numpy as np
import pytest
import torch

from paceline.core.bootstrap import Interval
from paceline.core.rules import (
    BiLDRule,
    Chow,
    ChowLog,
    Diff,
    DiffLog,
    Lenient,
    Lossless,
    Lossy,
    Opt,
    OptLog,
    Rule,
    TokenV1,
    TokenV2,
    TokenV3,
)
from paceline.decode.draft_policies import Confident
from paceline.decode.strategies import AnyStrategy, Oracle, Speculative, TokenByToken
from paceline.errors import UsageError
from paceline.results import comparison
from paceline.results.comparison import (
    ACCEPTED,
    CALLS_SAVED,
    SPEEDUP,
    AtQuality,
    Comparison,
    Group,
    QualityAt,
    compare,
    paired_difference,
)
from paceline.results.figures import FIGURES
from paceline.results.frontier import Frontier, family_of
from paceline.results.row import Row
from support.results import ALONE, example, row, steady, study_row


def compared(
    statistic: AtQuality | QualityAt, *cells: Row, names: tuple[str, str] = ("opt", "chow")
) -> Comparison:
    alone = steady(ALONE, count=len(cells[0].units))
    found = compare(Frontier([alone, *cells]), *map(Group, names), statistic)
    assert found is not None
    return found


def test_the_best_cell_is_chosen_on_one_half_and_measured_on_the_other_by_turns():
    draws = torch.Generator().manual_seed(1)
    speeds = (1.1 + torch.rand(5, 2, generator=draws, dtype=torch.float64)).tolist()
    plain = [example(calls=place) for place in range(40)]
    chosen = set(Frontier([row(ALONE, plain)]).halves[0].target.sums["calls"])

    def cell(number: int) -> Row:
        seconds = [1 / speeds[number][place not in chosen] for place in range(40)]
        return row(Opt(number / 10), [example(seconds=one) for one in seconds])

    found = compared(AtQuality(SPEEDUP, 1.0), *map(cell, range(5)), steady(Chow(0.1), count=40))
    measured = max(speeds)[1] + max(speeds, key=lambda pair: pair[1])[0]
    assert found.first == pytest.approx(measured / 2)


def test_a_half_without_a_right_answer_of_the_target_is_in_no_interval():
    """Six of 64 right: one resample of a half in twenty has none, and qualities of x / 0.

    With one of 32 right or more, qualities are at most 0.5 * 32 and 0.4 * 32.
    """
    alone = row(ALONE, [example(float(place % 11 == 0)) for place in range(64)])
    cells = steady(Opt(0.1), 0.5, 2.0, count=64), steady(Chow(0.1), 0.4, 2.0, count=64)
    groups = Group("opt"), Group("chow")
    found = compare(Frontier([alone, *cells]), *groups, QualityAt(SPEEDUP, 1.0))
    assert found is not None
    assert (~found.difference_R.isfinite()).any(), "some resample has none"
    assert found.difference().high <= 0.1 * 32 + 1e-9


@pytest.mark.parametrize(
    ("floor", "speeds"),
    [(1.0, (2.0, 1.0)), (0.98, (2.0, 1.0)), (0.95, (3.0, 1.5)), (0.9, (4.0, 1.5))],
)
def test_the_best_speed_is_that_of_the_cells_that_reach_the_floor(
    floor: float, speeds: tuple[float, float]
):
    """At 1 only the slowest, at 0.98 too, at 0.95 the middle one, at 0.9 the fastest."""
    first = [steady(Opt(0.1), 1.0, 2.0), steady(Opt(0.5), 0.96, 3.0), steady(Opt(0.9), 0.9, 4.0)]
    second = [steady(Chow(alpha), 0.95, 1.5) for alpha in (0.1, 0.2, 0.3)]
    found = compared(AtQuality(SPEEDUP, floor), *first, *second)
    assert (found.first, found.second) == pytest.approx(speeds)
    assert found.difference() == pytest.approx((speeds[0] - speeds[1],) * 3)


def test_a_family_that_misses_the_quality_saves_what_lossless_decoding_saves():
    """Calls a token: lossless 0.4; Opt, too bad, 0.2; Chow 0.7. A token cascade has no gamma."""
    rules = {Lossless(): (1.0, 4), Opt(0.1): (0.5, 2), Chow(0.1): (1.0, 7)}
    made = [row(rule, [example(score, calls=n)] * 20) for rule, (score, n) in rules.items()]
    made.append(row(TokenByToken(alpha=0.5), [example(0.5, calls=1)] * 20))
    found = compared(AtQuality(CALLS_SAVED, 0.9), *made)
    assert (found.first, found.second) == pytest.approx((0.6, 0.6))
    found = compared(AtQuality(CALLS_SAVED, 0.9), *made, names=("lossless", "token_cascade"))
    assert (found.first, found.second) == pytest.approx((0.6, 0.0))


def test_a_cell_slower_than_the_target_counts_as_the_target():
    slower, faster = steady(Opt(0.1), 1.0, 0.4), steady(Chow(0.2), 1.0, 2.0)
    found = compared(AtQuality(SPEEDUP, 0.95), slower, faster)
    assert (found.first, found.second) == (1.0, 2.0)
    assert found.difference() == Interval(-1.0, -1.0, -1.0)


def test_target_calls_saved_are_counted_and_not_timed():
    """Calls a token 0.4 and 0.7; the untimed, slow answer counts as any other."""
    quick = row(
        Opt(0.1), [example(seconds=9.0, calls=4, baseline_s=None)] + [example(calls=4)] * 19
    )
    found = compared(AtQuality(CALLS_SAVED, 0.9), quick, row(Chow(0.2), [example(calls=7)] * 20))
    assert found.first == pytest.approx(0.6)
    assert found.difference().value == pytest.approx(0.7 - 0.4)


def test_a_family_without_the_quality_saves_no_call_and_no_rejection():
    bad = row(Opt(0.1), [example(0.5, calls=2, examined=8, rejected=1)] * 20)
    good = row(Chow(0.1), [example(1.0, calls=8, examined=10, rejected=3)] * 20)
    calls = compared(AtQuality(CALLS_SAVED, 1.0), bad, good)
    assert (calls.first, calls.second) == pytest.approx((0.0, 0.2))
    accepted = compared(AtQuality(ACCEPTED, 1.0), bad, good)
    assert (accepted.first, accepted.second) == pytest.approx((0.0, 0.7))


def test_quality_within_the_targets_latency_is_that_of_cells_no_slower():
    first = [steady(Opt(0.1), 1.2, 0.9), steady(Opt(0.2), 0.8, 1.0)]
    second = [steady(Chow(0.1), 1.3, 0.8), steady(Chow(0.2), 1.1, 0.5)]
    found = compared(QualityAt(SPEEDUP, 1.0), *first, *second)
    assert found.first == pytest.approx(0.8)
    assert found.second == 0.0


ENDS: list[Rule] = [
    *(Lossy(0.0), Lossy(0.0, "tuned"), Lenient("linear", 1.0), Lenient("exponential", 1.0)),
    *(BiLDRule(0.0), Chow(0.0), ChowLog(-1.0), Diff(-1.0), DiffLog(-9.0), Opt(-1e6), OptLog(-1e6)),
    *(TokenV1(-1.0), TokenV2(-1.0)),
]
"""Rules at the end of their threshold where all is the target's."""


def test_the_families_that_end_in_lossless_decoding_do_and_v3_does_not():
    draws = torch.Generator().manual_seed(2)
    target, draft = torch.rand(2, 50, 5, generator=draws, dtype=torch.float64).softmax(-1)
    groups = comparison._LOSSLESS_AT_AN_END
    for rule in ENDS:
        assert torch.allclose(rule.induced_distribution(target, draft), target), rule
        assert any(group.has(family_of(steady(rule))) for group in groups), rule
    for alpha in (0.0, 0.5, 1.0):
        made = TokenV3(alpha).induced_distribution(target, draft)
        assert not torch.isclose(made, target).all(-1).any()
        assert not any(group.has(family_of(steady(TokenV3(alpha)))) for group in groups)


LOSSLESS_BESIDE = [
    row(Lossless(), [example(0.97, calls=5)] * 20),
    row(Lossy(0.5), [example(0.8, calls=4)] * 20),
    row(TokenV3(0.5), [example(0.9, calls=4)] * 20),
    row(Opt(0.1), [example(1.1, calls=9)] * 20),
    row(TokenByToken(alpha=0.5), [example(0.7, calls=6)] * 20),
]


@pytest.mark.parametrize(
    ("names", "level", "qualities"),
    [
        (("token_v3", "lossy beta 1.0"), 0.0, (0.9, 1.0)),
        (("token_v3", "lossy beta 1.0"), 0.6, (0.9, 0.8)),  # lossless decoding saves 0.5
        (("opt", "token_cascade"), 0.0, (1.1, 1.0)),
        (("opt", "token_cascade"), 0.2, (1.0, 0.7)),  # the target alone saves nothing
    ],
)
def test_lossless_decoding_is_a_setting_of_the_families_that_end_in_it(
    names: tuple[str, str],
    level: float,
    qualities: tuple[float, float],
    monkeypatch: pytest.MonkeyPatch,
):
    """Its quality is 1 by proof, though its texts score 0.97. The mutant has what was run only."""
    statistic = QualityAt(CALLS_SAVED, level)
    found = compared(statistic, *LOSSLESS_BESIDE, names=names)
    assert (found.first, found.second) == pytest.approx(qualities)
    monkeypatch.setattr(comparison, "_ends_of", lambda *_: [])
    mutant = compared(statistic, *LOSSLESS_BESIDE, names=names)
    assert (1.0 in qualities) == ((mutant.first, mutant.second) != pytest.approx(qualities))


def test_quality_at_high_speed_is_that_of_cells_at_the_upper_quartile():
    """Speeds 1, 2, 3, 4, 5 have their 75th percentile at 4; oracle and target are not asked."""
    cells = [
        steady(Chow(0.1), 1.0, 1.0),
        steady(Chow(0.2), 0.9, 2.0),
        steady(Chow(0.3), 0.8, 3.0),
        steady(Chow(0.4), 0.3, 4.0),
        steady(TokenByToken(alpha=0.9), 0.5, 5.0),
        steady(Oracle(rule=Diff(0.2)), 1.0, 9.0),
    ]
    statistic = QualityAt(SPEEDUP, None)
    found = compared(statistic, *cells, names=("token_cascade", "chow"))
    assert found.first == pytest.approx(0.5)
    assert found.second == pytest.approx(0.3)
    frontier = Frontier([steady(ALONE), *cells])
    assert statistic.least_gain(frontier)[0] == pytest.approx(4.0)


def test_a_family_without_a_cell_is_not_compared():
    frontier = Frontier([steady(ALONE), steady(Opt(0.1))])
    assert compare(frontier, Group("opt"), Group("chow"), AtQuality(SPEEDUP, 1.0)) is None


def test_an_interval_with_smaller_tails_is_wider():
    noisy = row(Opt(0.1), [example(seconds=0.3 + number / 50) for number in range(20)])
    found = compared(AtQuality(SPEEDUP, 1.0), noisy, steady(Chow(0.1), 1.0, 2.0))
    narrow, wide = found.difference(), found.difference(0.005)
    assert wide.low < narrow.low < narrow.high < wide.high


CELLS: dict[str, AnyStrategy | object] = {
    "lossy": Lossy(0.2),
    "lossy tuned": Lossy(0.2, "tuned"),
    "bild": BiLDRule(1.0),
    "chow": Chow(0.2),
    "chow_log": ChowLog(0.2),
    "opt": Opt(0.2),
    "token_v1": TokenV1(0.2),
    "chow confident": Speculative(rule=Chow(0.2), policy=Confident(0.5)),
    "token_cascade": TokenByToken(alpha=0.2),
    "oracle": Oracle(rule=Opt(0.2)),
}


@pytest.mark.parametrize(
    ("name", "members"),
    [
        ("chow", ["chow", "chow confident"]),
        ("opt", ["opt"]),
        ("lossy beta 1.0", ["lossy"]),
        ("lossy beta tuned", ["lossy tuned"]),
        ("token_v1", ["token_v1"]),
        ("token_cascade", ["token_cascade"]),
    ],
)
def test_a_group_holds_its_family_whatever_its_blocks_and_no_oracle(name: str, members: list[str]):
    cells = {key: steady(strategy) for key, strategy in CELLS.items()}  # pyright: ignore
    found = Group(name).cells(Frontier([steady(ALONE), *cells.values()]))
    assert [key for key, cell in cells.items() if cell in found] == members


def test_a_family_is_not_of_the_group_whose_name_it_only_begins_with():
    has = [Group("lossy beta 1.0").has(name) for name in ("lossy beta 1.0", "lossy beta 1.05")]
    assert has == [True, False]


def rows_on(units: range, seed: int, gain: float = 0.0) -> Row:
    """Tokens and calls of blocks; what makes a unit hard is the same for every seed."""
    hard, own = np.random.default_rng(0), np.random.default_rng(seed)
    calls = hard.integers(4, 30, 64)
    tau = 2 + hard.normal(0, 0.5, 64) + own.normal(0, 0.05, 64) + gain
    sums = {"emitted": (calls * tau).tolist(), "calls": calls.tolist()}
    return study_row(sums, gamma=5, parameter_ratio=0.1, seed=seed).only(units)


def test_a_paired_difference_has_the_interval_of_a_paired_bootstrap():
    """By numpy, 50,000 resamples. An unpaired interval would be ten times as wide."""
    first, second = rows_on(range(64), 1, gain=0.1), rows_on(range(64), 2)
    sums = [np.array([row.sums["emitted"], row.sums["calls"]]) for row in (first, second)]
    picks = np.random.default_rng(3).integers(0, 64, (50_000, 64))
    taus = [side[0][picks].sum(1) / side[1][picks].sum(1) for side in sums]
    low, high = np.quantile(taus[0] - taus[1], [0.025, 0.975])
    found = paired_difference(FIGURES["block_efficiency"], first, second)
    values = [side[0].sum() / side[1].sum() for side in sums]
    assert found.value == pytest.approx(values[0] - values[1])
    assert found.low == pytest.approx(low, abs=0.15 * (high - low))
    assert found.high == pytest.approx(high, abs=0.15 * (high - low))
    other = paired_difference(FIGURES["block_efficiency"], second, first)
    assert other.value == pytest.approx(-found.value)
    # MBSU is tau / (0.1 * 5 + 1)
    mbsu = paired_difference(FIGURES["mbsu"], first, second)
    assert mbsu.value == pytest.approx(found.value / 1.5)
    assert mbsu.high - mbsu.low == pytest.approx((found.high - found.low) / 1.5, rel=0.1)


def test_a_paired_difference_is_on_the_units_of_both():
    part = paired_difference(
        FIGURES["block_efficiency"], rows_on(range(20, 64), 1), rows_on(range(40), 2)
    )
    shared = range(20, 40)
    both = [rows_on(shared, seed) for seed in (1, 2)]
    values = [sum(row.sums["emitted"]) / sum(row.sums["calls"]) for row in both]  # type: ignore
    assert part.value == pytest.approx(values[0] - values[1])
    one = paired_difference(FIGURES["block_efficiency"], *(row.only([25]) for row in both))
    assert (one.low, one.high) == (-math.inf, math.inf)
    with pytest.raises(UsageError, match="share no units; measure both on the same"):
        paired_difference(FIGURES["block_efficiency"], both[0].only([20]), both[1].only([30]))
