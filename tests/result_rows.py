"""Result rows made by hand: what a bench or a measurement would give, without models."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from paceline.bench.answers import Answer, Times, keep, sums_of
from paceline.bench.settings import setting_of
from paceline.bench.workbench import cell_key
from paceline.core.rules import AnyRule
from paceline.core.sampling import SamplingParams
from paceline.decode.strategies import AnyStrategy, Autoregressive, DecodingConfig, Speculative
from paceline.measure.results import AcceptanceRow, GammaRow, IntervalRow, SpeedRow
from paceline.results.row import Row, Source

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
    answer = Answer.of(
        range(num_tokens),
        score,
        Times(seconds, first_s, num_tokens, first_tokens),
        prefill_tokens=prefill_tokens,
        calls=calls,
        drafted=examined,
        examined=examined,
        rejected=rejected,
    )
    if baseline_s is None:
        return answer.sums
    return answer.sums | Times(baseline_s, baseline_first_s, baseline_tokens).sums("target_")


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
    if hasattr(strategy, "accept_probs"):
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


def acceptance_row(count: int = 32, alpha: float = 0.5, error: float = 0.05) -> AcceptanceRow:
    """Texts of 64 tokens."""
    interval = IntervalRow(value=alpha, low=alpha - error, high=alpha + error)
    return AcceptanceRow(
        num_prompts=count,
        num_tokens=64 * count,
        expected_acceptance=interval,
        greedy_draft_acceptance=interval,
        greedy_agreement=interval,
        acceptance_by_position=[alpha],
    )


def gamma_row(gamma: int, tau: float = 2.0, **figures: Any) -> GammaRow:
    """Blocks that draft gamma tokens."""
    values = {"drafted_per_block": gamma, "break_even_acceptance": 0.5, "mbsu": 1.0} | figures
    return GammaRow(gamma=gamma, block_efficiency_iid=tau, block_efficiency=tau, **values)


def speed_row(speedup: IntervalRow, count: int = 32, gamma: int = 3) -> SpeedRow:
    """Timed requests of 64 tokens."""
    return SpeedRow(
        gamma=gamma,
        num_requests=count,
        num_tokens=64 * count,
        speedup=speedup,
        decoding_speedup=speedup,
        cost_ratio=0.2,
        predicted_speedup=1.0,
        measured_over_predicted=1.0,
        engine_efficiency=1.0,
        baseline_tokens_per_s=1.0,
        speculative_tokens_per_s=1.0,
        block_efficiency=2.0,
        acceptance_rate=0.5,
    )


def read_tables(text: str) -> list[list[dict[str, str]]]:
    """Every Markdown table of a text, its lines by column."""
    return list(_read_tables(text))


def _read_tables(text: str) -> Iterator[list[dict[str, str]]]:
    lines: list[list[str]] = []
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            lines.append([cell.strip() for cell in line.strip("|").split(" | ")])
        elif lines:
            header, _, *others = lines
            yield [dict(zip(header, cells, strict=True)) for cells in others]
            lines = []
