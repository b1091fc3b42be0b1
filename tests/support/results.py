"""Result rows, made by hand: without models."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.bench.answers import keep, setting_of, sums_of_answer
from paceline.bench.workbench import cell_key
from paceline.core.rule_base import Rule
from paceline.core.rules import AnyRule
from paceline.core.sampling import SamplingParams
from paceline.core.stats import DecodeStats, TimedAnswer, Times
from paceline.decode.strategies import AnyStrategy, Autoregressive, DecodingConfig, Speculative
from paceline.results.row import Row, Source, sums_of

ALONE = Autoregressive()
Sums = dict[str, float]


def example(
    score: float | None = 1.0,
    seconds: float = 1.0,
    num_tokens: int = 11,
    *,
    baseline_s: float | None = 1.0,
    baseline_tokens: int = 11,
    first_s: float = 0.0,
    baseline_first_s: float = 0.0,
    calls: int = 10,
    examined: int = 0,
    rejected: int = 0,
    first_tokens: int = 1,
    prefill_tokens: int = 1,
) -> Sums:
    """An answer of 11 tokens in a second, as the target alone gives it; no baseline_s: untimed."""
    stats = DecodeStats(
        num_blocks=calls,
        num_drafted=examined,
        num_accepted=examined - rejected,
        num_recovered=rejected,
        num_bonus=num_tokens - prefill_tokens - examined,
        num_prefill_tokens=prefill_tokens,
    )
    times = Times(seconds, first_s, num_tokens, first_tokens)
    sums = sums_of_answer(TimedAnswer([0] * num_tokens, times, stats), score)
    if baseline_s is None:
        return sums
    return sums | Times(baseline_s, baseline_first_s, baseline_tokens, 1).sums("target_")


def row(
    strategy: AnyStrategy | AnyRule,
    examples: Sequence[Sums] = (),
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    gamma: int = 4,
    metric: str | None = "accuracy",
    error: str = "",
    context: str = "c0ffee",
) -> Row:
    """A cell; a rule stands for speculative decoding with it."""
    if isinstance(strategy, Rule):
        strategy = Speculative(rule=strategy, num_speculative_tokens=gamma)  # pyright: ignore
    sampling = SamplingParams(temperature=temperature, top_p=top_p)
    decoding = DecodingConfig(strategy=strategy, sampling=sampling)  # pyright: ignore
    marks = {"context": context, "key": cell_key(context, decoding)}
    return Row(
        population="examples",
        units=() if error else tuple(range(len(examples))),
        setting=setting_of(decoding) | ({"metric": metric} if metric else {}),
        sums={} if error else sums_of(examples),
        error=error,
        source=Source(command="paceline bench", fingerprints=marks),
    )


def with_sums(cell: Row, **columns: Sequence[float]) -> Row:
    """The cell with these sums in place of its own, for simulations of many benches."""
    sums = {name: tuple(values) for name, values in columns.items()}
    return cell.model_copy(update={"sums": cell.sums | sums})


def steady(
    strategy: AnyStrategy | AnyRule,
    quality: float | None = 1.0,
    speedup: float = 1.0,
    count: int = 20,
    **settings: Any,
) -> Row:
    """A cell that does the same on every example, so that every resample is the data again."""
    return row(strategy, [example(quality, 1 / speedup)] * count, **settings)


def write_rows(folder: Path, rows: Sequence[Row]) -> Path:
    """A run folder that holds these rows."""
    folder.mkdir(parents=True, exist_ok=True)
    keep(folder, rows)
    return folder


def gamma_row(gamma: int, tau: float = 2.0, count: int = 32, **totals: float) -> Row:
    """Blocks that draft gamma tokens of texts of 64 tokens and cost two target passes."""
    known = {"drafted_per_block": gamma, "break_even_acceptance": 0.5, "block_cost": 2.0}
    return Row(
        population="texts",
        units=tuple(range(count)),
        setting={"gamma": gamma},
        sums={"emitted": (64.0,) * count, "calls": (64 / tau,) * count},
        totals=known | totals,
        source=Source(command="measure"),
    )


def result_row(
    sums: dict[str, Sequence[float | None]],
    units: Sequence[int] | None = None,
    **setting: Any,
) -> Row:
    """A row of some command; without `units` they are counted from 0."""
    count = len(next(iter(sums.values())))
    return Row(
        population="prompts",
        units=tuple(range(count) if units is None else units),
        setting=setting,
        sums={name: tuple(values) for name, values in sums.items()},
        source=Source(command="paceline trajectory"),
    )
