"""Confidence intervals for ratios of sums over independent units (prompts, pairs of runs).

Coverage of 95% intervals of a speedup in simulations with three distributions of request lengths
(`tests/statistical/test_intervals.py`):

    units                   2         3         5         8         16        64
    percentile bootstrap    48-51%    72-74%    81-84%    86-89%    90-93%    92-95%
    these intervals         92-93%    89-92%    90-93%    92-97%    94-97%    94-96%

At 8 units BCa is no better than the percentile bootstrap, and the jackknife covers 89-94%.
"""

# N units, R resamples
from __future__ import annotations

import functools
import math
from statistics import NormalDist
from typing import Annotated, Any, NamedTuple, cast

import torch
from pydantic import AfterValidator, BeforeValidator, GetCoreSchemaHandler, PlainSerializer
from torch import Tensor

# With fewer units there is an interval, but it does not support a decision.
LEAST_UNITS = 8
# Relative spread that can be rounding error.
_ROUNDING = 1e-12
# Part of the sample's spread that is rounding in a resample without spread.
DEGENERATE = 1e-6
# Degrees of freedom from which the series of Student's t is exact.
_MANY = 500
# Numbers of a block of resamples.
_NUM_AT_ONCE = 2_000_000
_PICKS_AT_ONCE = 100_000
_MOST_KEPT = 2_000_000  # bytes of counts; more are drawn again


class Interval(NamedTuple):
    """A value and its confidence interval.

    In JSON: an object with these keys, null where a number is not finite, such as the bounds of a
    single request.
    """

    value: float
    low: float
    high: float

    @classmethod
    def __get_pydantic_core_schema__(cls, _source: Any, handler: GetCoreSchemaHandler) -> Any:
        parts = BeforeValidator(_of_object), AfterValidator(cls._make)
        written = PlainSerializer(cls.as_object, return_type=dict[str, float | None])
        return handler(Annotated[tuple[float, float, float], *parts, written])

    def as_object(self) -> dict[str, float | None]:
        """As in JSON."""
        ends = self._asdict().items()
        return {name: end if math.isfinite(end) else None for name, end in ends}

    def __str__(self) -> str:
        return self.text()

    def text(self, form: str = ".3f", between: str = " to ") -> str:
        """Such as `0.412 (0.380 to 0.445)`; `form` is the format of each number."""
        return f"{self.value:{form}} ({self.low:{form}}{between}{self.high:{form}})"


def _of_object(given: Any) -> Any:
    unknown = {"value": math.nan, "low": -math.inf, "high": math.inf}
    if not isinstance(given, dict):
        return given
    values = cast("dict[str, Any]", given)
    if values.keys() != unknown.keys():
        return values
    return tuple(end if values[name] is None else values[name] for name, end in unknown.items())


Ratios = list[tuple[Tensor, Tensor]]
"""Numerators and denominators, [N] each; the value is the product of the ratios of their sums."""


def mean_interval(values_N: Tensor, confidence: float = 0.95) -> Interval:
    """Mean of a few independent values, with Student's interval.

    Shapes: [N], N at least 2.

    Raises:
        ValueError: fewer than two values.
    """
    count = len(values_N)
    if count < 2:
        raise ValueError(f"wanted at least 2 values, got {count}")
    mean = float(values_N.double().mean())
    error = float(values_N.double().std(correction=1)) / count**0.5
    half = student_quantile(confidence, count - 1) * error
    return Interval(mean, mean - half, mean + half)


def median_interval(values_N: Tensor, confidence: float = 0.95) -> Interval:
    """Median, with order statistics as an interval of at least this confidence.

    Makes no assumption on the distribution and is robust to outliers. With fewer than
    `least_values`, this confidence is not attainable: the interval is the range.

    Shapes: [N].

    Raises:
        ValueError: no values.
    """
    count = len(values_N)
    if not count:
        raise ValueError("wanted at least 1 value, got none")
    values_N = values_N.double().sort().values
    outside, rank = 0.0, -1  # P(the true median is below the value of this rank)
    while rank + 1 <= (count - 1) // 2:
        outside += math.comb(count, rank + 1) / 2**count
        if 2 * outside > 1 - confidence:
            break
        rank += 1
    rank = max(rank, 0)
    low, high = float(values_N[rank]), float(values_N[count - 1 - rank])
    return Interval(float(values_N.quantile(0.5)), low, high)


def least_values(confidence: float) -> int:
    """The fewest values whose range contains the median with this confidence; 6 for 95%."""
    return math.ceil(1 - math.log2(1 - confidence))


def ratio_interval(
    numerators_N: Tensor,
    denominators_N: Tensor,
    *,
    rng: torch.Generator,
    confidence: float = 0.95,
    num_resamples: int = 4000,
    most: float = math.inf,
    counted: bool = False,
) -> Interval:
    """sum(numerators) / sum(denominators) of values >= 0, with an interval over units.

    From 8 units: studentised bootstrap of the ratio's logarithm. With fewer units, or too many
    resamples without spread: Student's t with the jackknife's standard error. Units of zeros are
    ignored. A single unit gives the interval [0, `most`].

    Units without spread give width 0, unless numerators are `counted` events, which equal units may
    have by chance. Then a part of all units that is not among N of them with probability
    (1 - confidence)/2, which is 1 - ((1 - confidence)/2)^(1/N), may have the ratio 0 or `most`.

    Shapes: [N], one entry per independent unit. `most`, such as 1 for a fraction, truncates the
    interval.

    Raises:
        ValueError: no units, a negative number, or denominators that sum to 0.
    Paper: ours. Differs: Efron and Tibshirani 1993, sections 11 (jackknife) and 12.5 (bootstrap-t),
    here of a logarithm and for several ratios at once.
    """
    ratios = [(numerators_N, denominators_N)]
    found = _interval(ratios, rng, confidence, num_resamples)
    if counted and found.low == found.high:
        num_units = int(((numerators_N != 0) | (denominators_N != 0)).sum())
        unseen = 1 - ((1 - confidence) / 2) ** (1 / num_units)
        low, high = found.value * (1 - unseen), found.value + unseen * (most - found.value)
        return Interval(found.value, low, high)
    return Interval(found.value, min(found.low, most), min(found.high, most))


def ratio_of_ratios_interval(
    over: tuple[Tensor, Tensor],
    under: tuple[Tensor, Tensor],
    *,
    rng: torch.Generator,
    confidence: float = 0.95,
    num_resamples: int = 4000,
) -> Interval:
    """Ratio of two ratios of sums, such as seconds per token of two decoding methods.

    Both ratios come from the same units and are resampled together, so variation that affects both
    cancels. The interval is computed as in `ratio_interval`.

    Shapes: (numerators, denominators) of either ratio, [N] each.

    Raises:
        ValueError: no units, a negative number, or a denominator that sums to 0.
    """
    return _interval([over, (under[1], under[0])], rng, confidence, num_resamples)


def product_interval(*factors: Interval) -> Interval:
    """Product of independent estimates above 0, whose intervals have one confidence.

    The distances of the bounds from the value, in logarithms, add as squares.
    Paper: ours. Differs: Zou and Donner 2008 (method of variance estimates recovery), for sums.
    """
    value = math.prod(factor.value for factor in factors)
    below = math.hypot(*(log_distance(factor.value, factor.low) for factor in factors))
    above = math.hypot(*(log_distance(factor.value, factor.high) for factor in factors))
    high = value * math.exp(above) if above < 700 else math.inf
    return Interval(value, value * math.exp(-below), high)


def log_distance(value: float, bound: float) -> float:
    """|log(bound / value)| of a bound of 0 or more; infinite at 0."""
    return abs(math.log(bound / value)) if bound > 0 else math.inf


def resample_counts(num_units: int, num_resamples: int, rng: torch.Generator) -> Tensor:
    """How often each unit is in each resample, drawn with replacement. -> [R, N] float64."""
    state = rng.get_state().numpy().tobytes()
    is_kept = num_units * num_resamples <= _MOST_KEPT
    drawn = _drawn_counts if is_kept else _drawn_counts.__wrapped__
    counts_RN, after = drawn(num_units, num_resamples, state)
    rng.set_state(after)
    return counts_RN.double()


# Results of equal size share their seed, and to draw takes most of the time of an interval.
@functools.lru_cache(maxsize=64)
def _drawn_counts(num_units: int, num_resamples: int, state: bytes) -> tuple[Tensor, Tensor]:
    """Counts [R, N] from this state of a generator, and its state afterwards.

    The counts are bytes: that a unit is drawn 256 times has a probability below 1e-500.
    """
    rng = torch.Generator()
    rng.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    counts_RN = torch.zeros(num_resamples, num_units, dtype=torch.uint8)
    # few picks at once: large gaps in the heap beside blocks that are kept would stay
    at_once = max(1, _PICKS_AT_ONCE // num_units)
    for begun in range(0, num_resamples, at_once):
        part_RN = counts_RN[begun : begun + at_once]
        picks_RN = torch.randint(num_units, part_RN.shape, generator=rng)
        ones_RN = torch.ones(1, 1, dtype=torch.uint8).expand_as(picks_RN)
        part_RN.scatter_add_(1, picks_RN, ones_RN)
    return counts_RN, rng.get_state()


def resampled_means(columns_NP: Tensor, num_resamples: int, rng: torch.Generator) -> Tensor:
    """Means of columns in resamples of their rows. [N, P] -> [R, P]."""
    size = len(columns_NP)
    at_once = max(1, _NUM_AT_ONCE // size)
    parts = [min(at_once, num_resamples - begun) for begun in range(0, num_resamples, at_once)]
    return torch.cat([resample_counts(size, part, rng) @ columns_NP / size for part in parts])


def _interval(
    ratios: Ratios, rng: torch.Generator, confidence: float, num_resamples: int
) -> Interval:
    """The product of the ratios, with its interval."""
    shapes = [tuple(part.shape) for ratio in ratios for part in ratio]
    if len(set(shapes)) > 1 or len(shapes[0]) != 1:
        raise ValueError(f"wanted {len(shapes)} vectors of one length, got {shapes}")
    if shapes[0][0] == 0 or any(bottoms_N.sum() == 0 for _, bottoms_N in ratios):
        raise ValueError("no units to take a ratio of")
    if any((part < 0).any() for ratio in ratios for part in ratio):
        raise ValueError("a ratio of sums needs numbers of 0 or more; use mean_interval")
    used_N = torch.stack([part != 0 for ratio in ratios for part in ratio]).any(0)
    ratios = [(tops_N[used_N].double(), bottoms_N[used_N].double()) for tops_N, bottoms_N in ratios]
    value = math.prod(float(tops_N.sum() / bottoms_N.sum()) for tops_N, bottoms_N in ratios)
    num_units = int(used_N.sum())
    if num_units == 1:
        return Interval(value, 0.0, math.inf)
    deviations_NP, signs_P = _deviations(ratios)
    error = _log_error(deviations_NP @ signs_P)
    if value == 0 or error < _ROUNDING:
        return Interval(value, value, value)
    errors_R = torch.empty(0)
    if num_units >= LEAST_UNITS:
        errors_R = _studentised(deviations_NP, signs_P, error, rng, num_resamples)
    return Interval(value, *_bounds(ratios, value, errors_R, confidence))


def _deviations(ratios: Ratios) -> tuple[Tensor, Tensor]:
    """Relative deviations of all parts from their means, and their powers. -> [N, P], [P]."""
    parts = [part_N for ratio in ratios for part_N in ratio]
    signs_P = torch.tensor([1.0, -1.0] * len(ratios), dtype=torch.float64)
    return torch.stack([part_N / part_N.mean() - 1 for part_N in parts], 1), signs_P


def _log_error(influence_N: Tensor) -> float:
    """Standard error of the product's logarithm, linearised."""
    size = len(influence_N)
    return float((influence_N.square().sum() / (size * (size - 1))).sqrt())


def _studentised(
    deviations_NP: Tensor, signs_P: Tensor, error: float, rng: torch.Generator, num_resamples: int
) -> Tensor:
    """Bootstrap-t errors of the logarithm, [R]; fewer if resamples lack spread."""
    size, width = deviations_NP.shape
    products_NQ = (deviations_NP[:, :, None] * deviations_NP[:, None, :]).flatten(1)
    columns_NK = torch.cat([deviations_NP, products_NQ], 1)
    found_RK = resampled_means(columns_NK, num_resamples, rng)
    means_RP, products_RPP = found_RK[:, :width], found_RK[:, width:].reshape(-1, width, width)
    covariances_RPP = products_RPP - means_RP[:, :, None] * means_RP[:, None, :]
    slopes_RP = signs_P / (1 + means_RP)  # of the logarithm
    variances_R = torch.einsum("rp,rpq,rq->r", slopes_RP, covariances_RPP, slopes_RP) / (size - 1)
    errors_R = variances_R.clamp(min=0).sqrt()
    shifts_R = torch.log1p(means_RP) @ signs_P
    scores_R = shifts_R / errors_R.where(errors_R > DEGENERATE * error, 0.0)
    return scores_R[~scores_R.isnan()] * error


def _bounds(
    ratios: Ratios, value: float, errors_R: Tensor, confidence: float
) -> tuple[float, float]:
    """Of the resampled errors of the logarithm; of the jackknife if too few have spread."""
    if len(errors_R):
        tail = int((1 - confidence) / 2 * (len(errors_R) - 1))
        ends = 1 + tail, len(errors_R) - tail
        least, most = (errors_R.kthvalue(rank).values for rank in ends)
        low, high = (value * (-end).exp() for end in (most, least))
        if most.isfinite() and high.isfinite():
            return float(low), float(high)
    return _jackknife(ratios, value, confidence)


def _jackknife(ratios: Ratios, value: float, confidence: float) -> tuple[float, float]:
    """Student's t bounds with the jackknife's standard error."""
    num_units = len(ratios[0][0])
    without_N = torch.ones(num_units, dtype=torch.float64)
    for tops_N, bottoms_N in ratios:
        without_N = without_N * (tops_N.sum() - tops_N) / (bottoms_N.sum() - bottoms_N)
    if not without_N.isfinite().all():  # one unit holds all of a denominator
        return 0.0, math.inf
    quantile = student_quantile(confidence, num_units - 1)
    in_logs = bool((without_N > 0).all())
    points_N = without_N.log() if in_logs else without_N
    half = quantile * float(points_N.std(correction=0)) * (num_units - 1) ** 0.5
    if in_logs:
        return value * math.exp(-half), value * math.exp(min(half, 700.0))
    return max(0.0, value - half), value + half


@functools.cache
def student_quantile(confidence: float, freedom: int) -> float:
    """Two-sided quantile of Student's t: by bisection, or from many degrees of freedom by a series.

    Relative error: below 1e-10 up to a confidence of 0.99999.
    """
    if freedom >= _MANY:
        return _student_series(NormalDist().inv_cdf((1 + confidence) / 2), freedom)
    low, high = 0.0, math.pi / 2  # of atan(t / sqrt(freedom))
    for _ in range(60):
        middle = (low + high) / 2
        if _within(middle, freedom) < confidence:
            low = middle
        else:
            high = middle
    return math.tan(high) * freedom**0.5


def _student_series(normal: float, freedom: int) -> float:
    """The quantile by that of the normal distribution; Abramowitz and Stegun 26.7.5."""
    x, y = normal, normal**2
    terms = (
        (y + 1) * x / 4,
        ((5 * y + 16) * y + 3) * x / 96,
        (((3 * y + 19) * y + 17) * y - 15) * x / 384,
        ((((79 * y + 776) * y + 1482) * y - 1920) * y - 945) * x / 92160,
    )
    return x + sum(term / freedom**power for power, term in enumerate(terms, 1))


def _within(angle: float, freedom: int) -> float:
    """P(|Student's t| < sqrt(freedom) tan(angle)): Abramowitz and Stegun 26.7.3 and 26.7.4."""
    odd = freedom % 2
    term = math.cos(angle) if odd else 1.0
    total = term if freedom > 1 else 0.0
    for number in range(2 + odd, freedom - 1, 2):
        term *= math.cos(angle) ** 2 * (number - 1) / number
        total += term
    share = math.sin(angle) * total
    return 2 / math.pi * (angle + share) if odd else share
