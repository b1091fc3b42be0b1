"""Confidence intervals over independent units (prompts, pairs of runs).

`bootstrap_t` makes them all: of a ratio of sums, in logarithms, and of a difference. Coverage of
95% intervals of a speedup in simulations with three distributions of request lengths
(`tests/statistical/test_intervals.py`):

    units                   2         3         5         8         16        64
    percentile bootstrap    48-51%    72-74%    81-84%    86-89%    90-93%    92-95%
    these intervals         89-92%    85-90%    84-91%    92-97%    92-97%    92-97%

At 8 units BCa is no better than the percentile bootstrap, and the jackknife covers 89-94%.
"""

# N units, P columns, Q pairs of columns, K = P + Q, R resamples
from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, cast

import torch
from pydantic import AfterValidator, BeforeValidator, GetCoreSchemaHandler, PlainSerializer
from scipy import special  # pyright: ignore[reportMissingTypeStubs]
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# With fewer units there is an interval, but it does not support a decision.
LEAST_UNITS = 8
_NUM_RESAMPLES = 4000
_SEED = 0  # of the resamples, which are the same for all samples of a size
# Relative spread that can be rounding error.
_ROUNDING = 1e-12
# Part of the sample's spread that is rounding in a resample without spread.
_DEGENERATE = 1e-6
# Numbers of a block of resamples.
_NUM_AT_ONCE = 2_000_000
_PICKS_AT_ONCE = 100_000


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

    def text(self, form: str = ".3f", unit: str = "", level: str = "") -> str:
        """Such as `0.412 (0.380 to 0.445)`; `form`: of each number, `unit`: of the value."""
        value, low, high = (f"{end:{form if abs(end) < 1e6 else '.1e'}}" for end in self)
        return f"{value}{unit} ({level}{low} to {high})"


def _of_object(given: Any) -> Any:
    unknown = {"value": math.nan, "low": -math.inf, "high": math.inf}
    if not isinstance(given, dict):
        return given
    values = cast("dict[str, Any]", given)
    if values.keys() != unknown.keys():
        return values
    return tuple(end if values[name] is None else values[name] for name, end in unknown.items())


Ratio = tuple[Tensor, Tensor]
"""Numerators and denominators, [N] each; the ratio is that of their sums."""


def bootstrap_t(
    columns_NP: Tensor, figure: Callable[[Tensor], Tensor], confidence: float = 0.95
) -> Interval:
    """A smooth function of the means of columns, with an interval over their rows.

    The figure's slopes at the means give the influence of each unit, and these its standard error.
    From 8 units, the quantiles of error / standard error are those of resamples. With fewer units,
    or too many resamples without spread, they are Student's. Units without spread give width 0, a
    single unit an unbounded interval.

    `figure`: of means [..., P], gives [...].
    Shapes: [N, P].
    Paper: Efron and Tibshirani 1993, section 12.5 (bootstrap-t).
    """
    size, means_P = len(columns_NP), columns_NP.mean(0)
    value, slopes_P = _with_slopes(figure, means_P)
    if size == 1:
        return Interval(float(value), -math.inf, math.inf)
    centred_NP = columns_NP - means_P
    influence_N = centred_NP @ slopes_P
    error = float(influence_N.square().sum() / (size * (size - 1))) ** 0.5
    if error <= _ROUNDING * float((means_P * slopes_P).abs().sum()):
        return Interval(*[float(value)] * 3)
    low = high = error * student_quantile(confidence, size - 1)
    if size >= LEAST_UNITS:
        first_Q, second_Q = torch.triu_indices(len(means_P), len(means_P))
        products_NQ = centred_NP[:, first_Q] * centred_NP[:, second_Q] * (1 + (first_Q != second_Q))
        found_KR = _resampled_means(torch.cat([centred_NP, products_NQ], 1))
        shifts_PR, products_QR = torch.tensor_split(found_KR, [len(means_P)])
        values_R, slopes_RP = _with_slopes(figure, means_P + shifts_PR.T)
        # slopes' covariances slopes, with each pair of columns once
        pairs_QR = slopes_RP.T[first_Q] * slopes_RP.T[second_Q]
        variances_R = (pairs_QR * products_QR).sum(0) - (slopes_RP.T * shifts_PR).sum(0).square()
        errors_R = (variances_R / (size - 1)).clamp(min=0).sqrt()
        scores_R = (values_R - value) / errors_R.where(errors_R > _DEGENERATE * error, 0.0)
        scores_R = scores_R[~scores_R.isnan()]
        tail = int((1 - confidence) / 2 * (len(scores_R) - 1))
        ranks = (tail + 1, len(scores_R) - tail) if len(scores_R) else ()
        ends = [float(scores_R.kthvalue(rank).values) for rank in ranks]
        if ends and all(map(math.isfinite, ends)):
            low, high = error * ends[1], error * -ends[0]
    return Interval(float(value), float(value) - low, float(value) + high)


def _with_slopes(figure: Callable[[Tensor], Tensor], means: Tensor) -> tuple[Tensor, Tensor]:
    """Values of a figure and its slopes. [..., P] -> [...], [..., P]."""
    with torch.inference_mode(mode=False), torch.enable_grad():
        means = means.clone().requires_grad_()
        values = figure(means)
        (slopes,) = torch.autograd.grad(values.sum(), means)
    return values.detach(), slopes


def ratio_interval(
    *ratios: Ratio, confidence: float = 0.95, most: float = math.inf, counted: bool = False
) -> Interval:
    """A product of ratios of sums of values >= 0, with an interval over units.

    Several ratios come from the same units and are resampled together, so variation that affects
    all cancels: seconds per token of two decoding methods are `(a, b), (d, c)`. The interval is
    that of the logarithm. Units of zeros are ignored. A single unit gives the interval [0, `most`].

    Units without spread give width 0, unless numerators are `counted` events, which equal units may
    have by chance. Then a part of all units that is not among N of them with probability
    (1 - confidence)/2, which is 1 - ((1 - confidence)/2)^(1/N), may have the ratio 0 or `most`.

    Shapes: [N], one entry per independent unit. `most`, such as 1 for a fraction, truncates the
    interval.

    Raises:
        ValueError: no units, a negative number, or denominators that sum to 0.
    """
    columns_NP = _columns(ratios)
    if (columns_NP < 0).any():
        raise ValueError("a ratio of sums needs numbers of 0 or more")
    columns_NP = columns_NP[(columns_NP != 0).any(1)]
    value = float(_product(columns_NP.sum(0)))
    found = Interval(value, value, value)
    if len(columns_NP) == 1:
        found = Interval(value, 0.0, most)
    elif value:
        logs = bootstrap_t(columns_NP, lambda means: _product(means).log(), confidence)
        low, high = (math.exp(min(end, 700.0)) for end in (logs.low, logs.high))
        found = Interval(value, *((low, high) if low < high else (value, value)))
    if counted and found.low == found.high:
        unseen = 1 - ((1 - confidence) / 2) ** (1 / len(columns_NP))
        low, high = found.value * (1 - unseen), found.value + unseen * (most - found.value)
        return Interval(found.value, low, high)
    return Interval(found.value, min(found.low, most), min(found.high, most))


def difference_interval(
    first: Sequence[Ratio],
    second: Sequence[Ratio],
    *,
    scales: tuple[float, float] = (1.0, 1.0),
    confidence: float = 0.95,
) -> Interval:
    """A product of ratios of sums less another one, on the same units, with an interval over them.

    `scales`: factors of either product.
    Shapes: [N], one entry per independent unit.

    Raises:
        ValueError: no units, or denominators that sum to 0.
    """
    parts, (one, two) = 2 * len(first), scales

    def figure(means: Tensor) -> Tensor:
        return one * _product(means[..., :parts]) - two * _product(means[..., parts:])

    return bootstrap_t(_columns([*first, *second]), figure, confidence)


def _columns(ratios: Sequence[Ratio]) -> Tensor:
    """Numerators and denominators in turn, [N, P]."""
    columns = [part_N for ratio in ratios for part_N in ratio]
    shapes = [tuple(part_N.shape) for part_N in columns]
    if len(set(shapes)) > 1 or len(shapes[0]) != 1:
        raise ValueError(f"wanted {len(shapes)} vectors of one length, got {shapes}")
    if shapes[0][0] == 0 or any(bottoms_N.sum() == 0 for _, bottoms_N in ratios):
        raise ValueError("no units to take a ratio of")
    return torch.stack([part_N.double() for part_N in columns], 1)


def _product(means: Tensor) -> Tensor:
    """Of the ratios of neighbours. [..., P] -> [...]."""
    return (means[..., ::2] / means[..., 1::2]).prod(-1)


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
    # P(the true median is below the value of a rank)
    outside = special.bdtr(range((count + 1) // 2), count, 0.5)
    rank = max(int((2 * outside <= 1 - confidence).sum()) - 1, 0)
    low, high = float(values_N[rank]), float(values_N[count - 1 - rank])
    return Interval(float(values_N.quantile(0.5)), low, high)


def least_values(confidence: float) -> int:
    """The fewest values whose range contains the median with this confidence; 6 for 95%."""
    return math.ceil(1 - math.log2(1 - confidence))


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


def student_quantile(confidence: float, freedom: int) -> float:
    """Two-sided quantile of Student's t."""
    return float(special.stdtrit(freedom, (1 + confidence) / 2))


# Results of equal size share their resamples, and to draw takes most of the time of an interval.
@functools.lru_cache(maxsize=8)
def resample_counts(num_units: int, num_resamples: int = _NUM_RESAMPLES) -> Tensor:
    """How often each unit is in each resample, drawn with replacement. -> [R, N] uint8.

    That a unit is drawn 256 times has a probability below 1e-500.
    """
    rng = torch.Generator().manual_seed(_SEED)
    counts_RN = torch.zeros(num_resamples, num_units, dtype=torch.uint8)
    # few picks at once: large gaps in the heap beside blocks that are kept would stay
    for part_RN in torch.split(counts_RN, max(1, _PICKS_AT_ONCE // num_units)):
        picks_RN = torch.randint(num_units, part_RN.shape, generator=rng)
        ones_RN = torch.ones(1, 1, dtype=torch.uint8).expand_as(picks_RN)
        part_RN.scatter_add_(1, picks_RN, ones_RN)
    return counts_RN


def _resampled_means(columns_NP: Tensor) -> Tensor:
    """Means of columns in resamples of their rows. [N, P] -> [P, R]."""
    size, means_PN = len(columns_NP), columns_NP.T / len(columns_NP)
    parts = torch.split(resample_counts(size), max(1, _NUM_AT_ONCE // size))
    return torch.cat([means_PN @ part_RN.double().T for part_RN in parts], 1)
