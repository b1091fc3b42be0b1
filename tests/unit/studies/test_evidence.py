"""Effects of paired tests against the delete-one jackknife, resampling and sums by hand."""

import math
from typing import Any, NamedTuple

import pytest
import torch
from scipy import stats

from paceline.config import validate
from paceline.core.bootstrap import Interval, student_quantile
from paceline.errors import UsageError
from paceline.results.row import Row
from paceline.studies.claim_file import Paired
from paceline.studies.evidence import Part, paired_evidence, ranked
from support.results import study_row

TAIL = 0.025


def paired_test(**changes: Any) -> Paired:
    values = {
        "figure": "block_efficiency",
        "first": {"where": {"label": "end"}},
        "second": {"where": {"label": "start"}},
        "matters": 0.02,
    }
    return validate(Paired, values | changes)


def numbers(count: int, seed: int, gain: float = 1.0) -> dict[str, list[float]]:
    """Tokens and target calls of texts whose length and difficulty vary."""
    draws = torch.Generator().manual_seed(seed)
    tokens = (20 + 40 * torch.rand(count, generator=draws, dtype=torch.float64)).round()
    tau = gain * (2 + torch.rand(count, generator=draws, dtype=torch.float64))
    return {"emitted": tokens.tolist(), "calls": (tokens / tau).tolist()}


class Effect(NamedTuple):
    interval: Interval
    part: Part

    @property
    def strata(self) -> dict[str, float]:
        return dict(self.part.strata)


def measured(test: Paired, rows: list[Row], tail: float = TAIL) -> Effect:
    """The effect over examples, without the spread between runs of training."""
    found = paired_evidence(test, rows, tail, ())
    assert found is not None
    part = found.part(tail)
    return Effect(part.at(tail), part)


def rate(sums: dict[str, list[float]], left_out: int | None = None) -> float:
    kept = [number for number in range(len(sums["emitted"])) if number != left_out]
    return sum(sums["emitted"][n] for n in kept) / sum(sums["calls"][n] for n in kept)


def half_width(found: Effect, compare: str) -> float:
    low, high = found.interval.low, found.interval.high
    return (math.log1p(high) - math.log1p(low)) / 2 if compare == "ratio" else (high - low) / 2


@pytest.mark.parametrize("compare", ["ratio", "difference"])
def test_the_interval_is_little_wider_than_that_of_the_delete_one_jackknife(compare: str):
    """It allows for one text that is half as far again from the mean as the farthest of 200."""
    first, second = numbers(200, 1, 1.1), numbers(200, 2)
    rows = [study_row(first, label="end"), study_row(second, label="start")]
    found = measured(paired_test(compare=compare), rows)

    def effect(left_out: int | None = None) -> float:
        one, other = rate(first, left_out), rate(second, left_out)
        return math.log(one / other) if compare == "ratio" else one - other

    without = [effect(number) for number in range(200)]
    mean = sum(without) / 200
    error = math.sqrt(199 / 200 * sum((one - mean) ** 2 for one in without))
    assert 0.98 < half_width(found, compare) / (student_quantile(0.95, 199) * error) < 1.25
    value = effect()
    assert found.interval.value == pytest.approx(math.expm1(value) if compare == "ratio" else value)
    assert (found.part.first, found.part.second) == pytest.approx((rate(first), rate(second)))
    assert found.part.num_units == 200


@pytest.mark.parametrize(("tail", "quantile"), [(0.025, 2.364624), (1e-4, 7.063433)])
def test_a_difference_of_means_is_nowhere_inside_the_paired_t_test_of_the_textbook(tail, quantile):
    """Differences 1 to 8: mean 4.5, standard deviation sqrt(6); t of 7 degrees of freedom."""
    rows = [
        study_row({"score": [float(3 * n) for n in range(8)]}, label="start"),
        study_row({"score": [3.0 * n + n + 1 for n in range(8)]}, label="end"),
    ]
    test = paired_test(figure="quality", compare="difference")
    found, half = measured(test, rows, tail).interval, quantile * math.sqrt(6 / 8)
    assert found.value == pytest.approx(4.5)
    assert 1 - 1e-6 <= (4.5 - found.low) / half < 2
    assert 1 - 1e-6 <= (found.high - 4.5) / half < 2


def test_units_are_paired_by_their_numbers_and_looks_are_pooled():
    first, second = numbers(16, 1, 1.1), numbers(16, 2)
    together = [study_row(first, label="end"), study_row(second, label="start")]
    parts = [slice(8, 16), slice(0, 8)]
    apart = [
        study_row({k: v[part] for k, v in first.items()}, range(16)[part], label="end")
        for part in parts
    ]
    backwards = {key: values[::-1] for key, values in second.items()}
    apart.append(study_row(backwards, range(15, -1, -1), label="start"))
    one, other = (measured(paired_test(), rows) for rows in (together, apart))
    assert one.interval == pytest.approx(other.interval)


def test_strata_of_one_population_share_their_units():
    """The same text twice is no more evidence: two equal strata have the interval of one."""
    first, second = numbers(20, 1, 1.2), numbers(20, 2)
    start = study_row(second, label="start")
    ends = [study_row(first, label="end", seed=seed) for seed in (0, 1)]
    one = measured(paired_test(across=["seed"]), [ends[0], start])
    two = measured(paired_test(across=["seed"]), [*ends, start])
    assert two.interval == pytest.approx(one.interval)
    assert set(two.strata) == {"seed 0", "seed 1"}


def test_strata_of_two_populations_are_independent():
    """Two equal strata of other texts: the error is smaller by about the square root of 2."""
    first, second = numbers(20, 1, 1.2), numbers(20, 2)
    rows = [
        study_row(sums, label=label, task=task, population=task)
        for task in ("a", "b")
        for sums, label in ((first, "end"), (second, "start"))
    ]
    one = measured(paired_test(rows={"task": "a"}), rows)
    two = measured(paired_test(across=["task"]), rows)
    widths = [half_width(found, "ratio") for found in (one, two)]
    assert widths[0] == pytest.approx(math.sqrt(2) * widths[1], rel=0.1)


def test_effects_of_strata_are_averaged_as_logarithms():
    ends = [
        study_row(numbers(10, 1, gain), label="end", seed=seed) for seed, gain in enumerate((2, 8))
    ]
    rows = [*ends, study_row(numbers(10, 1), label="start")]
    found = measured(paired_test(across=["seed"]), rows)
    assert found.interval.value == pytest.approx(math.sqrt(2 * 8) - 1)
    assert found.strata == pytest.approx({"seed 0": 1.0, "seed 1": 7.0})


def test_a_side_without_a_setting_belongs_to_every_stratum():
    """An unaligned draft has no seed and no recipe."""
    ends = [
        study_row(numbers(10, seed, 1.5), label="end", seed=seed, draft=draft)
        for seed in (0, 1)
        for draft in ("gkd", "kd")
    ]
    test = paired_test(across=["draft", "seed"], rows={"task": "t"})
    ends = [row.model_copy(update={"setting": row.setting | {"task": "t"}}) for row in ends]
    start = study_row(numbers(10, 9), label="start", task="t")
    assert len(measured(test, [*ends, start]).strata) == 4
    assert paired_evidence(test, ends, TAIL) is None


def test_a_side_may_be_a_constant():
    rows = [study_row(numbers(12, 3), label="end")]
    found = measured(paired_test(second=None, than=2.0, compare="difference"), rows)
    assert found.interval.value == pytest.approx(rate(numbers(12, 3)) - 2)


def test_a_product_of_ratios_has_the_effect_and_the_error_of_two_sides():
    """A speedup against 1 is the tokens per second of the draft against those without."""
    first, second = numbers(30, 1, 1.5), numbers(30, 2)
    sums = {"tokens": first["emitted"], "seconds": first["calls"]}
    sums |= {"target_tokens": second["emitted"], "target_seconds": second["calls"]}
    timed = paired_test(figure="speedup", first={}, second=None, than=1.0)
    one = measured(timed, [study_row(sums)])
    other = measured(
        paired_test(), [study_row(first, label="end"), study_row(second, label="start")]
    )
    assert one.interval == pytest.approx(other.interval)


def test_the_formula_of_tau_and_its_error_follow_the_acceptance_rate():
    """tau(a) = 1 + a + a^2 + a^3; the spread is that of tau over resamples of the texts."""
    draws = torch.Generator().manual_seed(4)
    accepted = 10 * (0.5 + 0.4 * torch.rand(300, generator=draws, dtype=torch.float64))
    row = study_row({"acceptance": accepted.tolist(), "tokens": [10.0] * 300}, label="end", gamma=3)
    test = paired_test(figure="block_efficiency_iid", second=None, than=1.0, compare="difference")
    found = measured(test, [row])
    rate = float(accepted.sum()) / 3000
    assert found.interval.value == pytest.approx(rate + rate**2 + rate**3)
    picks = torch.randint(300, (4000, 300), generator=draws)
    rates = accepted[picks].mean(-1) / 10
    spread = float((rates + rates**2 + rates**3).std())
    expected = student_quantile(0.95, 299) * spread
    assert 0.95 < half_width(found, "difference") / expected < 1.2


def test_a_memory_bound_speedup_is_tau_over_what_a_block_costs():
    """tau 2.3 at gamma 3 of a draft with 1.64% of the parameters: 2.3 / 1.0492 = 2.19."""
    sums = {"emitted": [2.0, 2.6] * 50, "calls": [1.0] * 100}
    row = study_row(sums, parameter_ratio=0.0164, gamma=3)
    test = {"first": {}, "second": None, "than": 1.0, "compare": "difference"}
    plain = measured(paired_test(**test), [row])
    found = measured(paired_test(**test, figure="mbsu"), [row])
    assert found.interval.value == pytest.approx(2.3 / (0.0164 * 3 + 1) - 1)
    assert half_width(found, "difference") * 1.0492 == pytest.approx(
        half_width(plain, "difference")
    )


def test_a_memory_bound_speedup_needs_the_ratio_of_parameters():
    row = study_row({"emitted": [2.0] * 20, "calls": [1.0] * 20}, gamma=3)
    test = paired_test(figure="mbsu", first={}, second=None, than=1.0)
    with pytest.raises(UsageError, match="parameter_ratio"):
        measured(test, [row])


@pytest.mark.parametrize("count", [8, 400])
def test_units_without_any_difference_leave_room_for_rare_ones(count: int):
    """If a fraction f of all units differ, none of N does with probability (1 - f)^N."""
    rows = [study_row({"score": [1.0] * count}, label=label) for label in ("end", "start")]
    found = measured(paired_test(figure="quality", compare="difference"), rows, 0.01)
    assert found.interval.value == 0
    for bound in (found.interval.high, -found.interval.low):
        assert (1 - bound) ** count == pytest.approx(0.01, rel=0.5)  # 40 draws are beyond it


def test_a_rare_difference_is_that_of_one_wrong_answer_in_twenty():
    """The lower bound is that of Clopper and Pearson for 1 of 20; the upper allows for a gain."""
    scores = [1.0] * 19 + [0.0]
    rows = [
        study_row({"score": scores}, label="end"),
        study_row({"score": [1.0] * 20}, label="start"),
    ]
    found = measured(paired_test(figure="quality", compare="difference"), rows)
    assert found.interval.value == pytest.approx(-0.05)
    assert stats.beta.sf(-found.interval.low, 2, 19) == pytest.approx(TAIL, rel=0.4)
    assert 0 < found.interval.high < 0.16


def test_too_few_units_and_no_rows_are_no_effect():
    rows = [study_row(numbers(7, seed), label=label) for seed, label in enumerate(("end", "start"))]
    assert paired_evidence(paired_test(), rows, TAIL) is None
    assert paired_evidence(paired_test(), [], TAIL) is None


@pytest.mark.parametrize(
    ("changes", "rows", "said"),
    [
        (
            {"rows": {"task": "t"}},
            [{"label": "end", "seed": 0}, {"label": "end", "seed": 1}, {"label": "start"}],
            "matches rows with different seed; name them in where, or average over them",
        ),
        (
            {"figure": "regret"},
            [{"label": "end"}, {"label": "start"}],
            "regret needs positions, which a row of .* lacks",
        ),
        (
            {"figure": "rejection_rate"},
            [{"label": "end"}, {"label": "start"}],
            "rejection rate of .* has a denominator of 0 in all units",
        ),
        (
            {"figure": "quality"},
            [{"label": "end"}, {"label": "start"}],
            "is 0, so there is no ratio; compare the difference",
        ),
        (
            {},
            [{"label": "end"}, {"label": "start", "population": "other"}],
            "the sides of a claim measure different examples",
        ),
        (
            {},
            [{"label": "end"}, {"label": "start", "units": range(1, 11)}],
            "the sides of a claim measure different examples",
        ),
        (
            {"across": ["seed"]},
            [
                {"label": "end", "seed": 0},
                {"label": "start", "seed": 0},
                {"label": "end", "seed": 1, "units": range(5, 15)},
                {"label": "start", "seed": 1, "units": range(5, 15)},
            ],
            "settings of one claim measure different examples of prompts",
        ),
    ],
)
def test_what_a_claim_cannot_compare_is_said(
    changes: dict[str, Any], rows: list[dict[str, Any]], said: str
):
    sums = numbers(10, 1) | dict.fromkeys(("score", "examined", "rejected"), [0.0] * 10)
    made = [study_row(sums, **({"task": "t"} | row)) for row in rows]
    with pytest.raises(UsageError, match=said):
        paired_evidence(paired_test(**changes), made, TAIL)


def test_examples_that_were_not_timed_are_left_out():
    """Seconds of 10 of 12 examples: the speeds are those of rows with these ten alone."""
    timed = [None, *numbers(10, 1)["calls"], None]
    slow = [None if value is None else 2 * value for value in timed]
    tokens = [9.0, *numbers(10, 1)["emitted"], 9.0]
    test = paired_test(figure="tokens_per_s")
    rows = [
        study_row({"tokens": tokens, "seconds": seconds}, label=label)
        for label, seconds in (("end", timed), ("start", slow))
    ]
    found = measured(test, rows)
    assert found.part.num_units == 10
    assert found.interval.value == pytest.approx(1.0)
    assert found.part.first == pytest.approx(rate(numbers(10, 1)))


def test_a_run_that_is_missing_on_one_side_is_no_part_of_a_mean():
    """GKD has lost seed 1 by divergence, and f-Distill is not there at all."""
    made = [
        study_row(numbers(10, seed, 1.5), label="end", seed=seed, draft=draft)
        for draft in ("gkd", "kd")
        for seed in (0, 1)
    ]
    start = study_row(numbers(10, 9), label="start")
    test = paired_test(across=["draft", "seed"])
    assert len(measured(test, [*made, start]).strata) == 4
    gone = [row for row in made if (row.setting["draft"], row.setting["seed"]) != ("gkd", 1)]
    with pytest.raises(UsageError, match="no rows at draft gkd, seed 1; a run that diverged"):
        paired_evidence(test, [*gone, start], TAIL)
    named = {"where": {"label": "end", "draft": ["gkd", "kd", "f_distill"]}}
    with pytest.raises(UsageError, match="no rows at draft f_distill, seed 0"):
        paired_evidence(paired_test(across=["draft", "seed"], first=named), [*made, start], TAIL)
    # families of rules have thresholds of their own
    rules = [
        study_row(numbers(10, 1, gain), label=label, family=family, epsilon=epsilon)
        for label, gain in (("end", 1.5), ("start", 1.0))
        for family, epsilon in (("linear", 0.1), ("linear", 0.5), ("square", 0.7))
    ]
    families = {"family": ["linear", "square"]}
    given = paired_test(across=["family", "epsilon"], rows=families)
    assert len(measured(given, rules).strata) == 3
    # the second side has a seed that the first one lacks
    starts = [study_row(numbers(10, 9), label="start", seed=seed) for seed in (0, 1)]
    with pytest.raises(UsageError, match="no rows at seed 1"):
        paired_evidence(paired_test(across=["seed"]), [made[0], *starts], TAIL)


def test_each_stratum_has_its_own_effect():
    ends = [
        study_row(numbers(20, 1, gain), label="end", seed=seed) for seed, gain in enumerate((2, 8))
    ]
    start = study_row(numbers(20, 1), label="start")
    found = paired_evidence(paired_test(each=["seed"]), [*ends, start], TAIL)
    assert found is not None
    assert found.rank == 2
    for part, end in zip(found.parts, ends, strict=True):
        alone = paired_test(rows={}, first={"where": dict(end.setting)})
        for tail in (TAIL, TAIL / 2):
            assert part.at(tail) == pytest.approx(measured(alone, [end, start], tail).interval)
        assert part.name == f"seed {end.setting['seed']}"
    assert found.part(TAIL).name == "seed 0"
    assert paired_evidence(paired_test(each=["seed"]), ends, TAIL) is None


def test_the_best_of_some_values_is_compared_at_each_place():
    """tvd against the best of two divergences on two texts; `less` turns the order."""
    gains = {("kl", "a"): 1.1, ("jsd", "a"): 1.3, ("kl", "b"): 1.2, ("jsd", "b"): 0.9}
    rows = [study_row(numbers(20, 1, g), draft=d, text=t) for (d, t), g in gains.items()]
    rows += [study_row(numbers(20, 1), draft="tvd", text=t) for t in "ab"]
    sides = {"first": {"where": {"draft": ["kl", "jsd"]}}, "second": {"where": {"draft": "tvd"}}}
    found = paired_evidence(paired_test(each=["text"], some=["draft"], **sides), rows, TAIL)
    assert found is not None
    assert [part.at(TAIL).value for part in found.parts] == pytest.approx([0.3, 0.2])
    assert [part.name for part in found.parts] == ["text a, draft jsd", "text b, draft kl"]
    test = paired_test(each=["text"], some=["draft"], expect="less", **sides)
    found = paired_evidence(test, rows, TAIL)
    assert found is not None
    assert [part.at(TAIL).value for part in found.parts] == pytest.approx([-0.1, 0.1])


def test_the_bounds_of_a_rank_share_the_error_among_the_effects_that_could_be_it():
    """Parts whose bounds are value -+ 1 / tail: bounds show which tail was used."""

    def part(name: str, value: float) -> Part:
        def at(tail: float) -> Interval:
            return Interval(value, value - 1 / tail, value + 1 / tail)

        return Part(name, at, value, 0.0, 9)

    parts = [part("a", 100.0), part("b", 300.0), part("c", 200.0)]
    for rank, name, value, low, high in (
        (1, "b", 300, 300 - 3 * 10, 300 + 10),  # one of three: any of them may be the largest
        (2, "c", 200, 200 - 2 * 10, 200 + 2 * 10),
        (3, "a", 100, 100 - 10, 100 + 3 * 10),  # all of them: the least at its own level
    ):
        found = ranked(parts, rank, 0.1)
        assert found.name == name
        assert found.at(0.1) == pytest.approx(Interval(value, low, high))
    assert ranked(parts[:1], 1, 0.1) is parts[0]
