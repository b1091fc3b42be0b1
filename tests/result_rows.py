"""Result rows made by hand: what a bench or a measurement would give, without models."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from paceline.bench.schema import Baseline, ExampleRow, ResultRow, digest
from paceline.core.rules import AnyRule
from paceline.core.sampling import SamplingParams
from paceline.decode.strategies import AnyStrategy, Autoregressive, DecodingConfig, Speculative
from paceline.measure.results import AcceptanceRow, GammaRow, IntervalRow, SpeedRow

ALONE = Autoregressive()


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
) -> ExampleRow:
    """An answer of 11 tokens in a second, as the target alone gives it; no baseline_s: untimed."""
    beside = None
    if baseline_s is not None:
        beside = Baseline(
            seconds=baseline_s, first_seconds=baseline_first_s, num_tokens=baseline_tokens
        )
    return ExampleRow(
        tokens=tuple(range(num_tokens)),
        score=score,
        seconds=seconds,
        first_seconds=first_s,
        baseline=beside,
        num_target_calls=calls,
        num_drafted=examined,
        num_examined=examined,
        num_rejected=rejected,
        num_first_tokens=first_tokens,
        num_prefill_tokens=prefill_tokens,
    )


def row(
    strategy: AnyStrategy | AnyRule,
    examples: Sequence[ExampleRow] = (),
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    gamma: int = 4,
    metric: str | None = "accuracy",
    error: str | None = None,
) -> ResultRow:
    """A cell; a rule stands for speculative decoding with it."""
    if hasattr(strategy, "accept_probs"):
        strategy = Speculative(rule=strategy, num_speculative_tokens=gamma)  # pyright: ignore
    sampling = SamplingParams(temperature=temperature, top_p=top_p)
    decoding = DecodingConfig(strategy=strategy, sampling=sampling)  # pyright: ignore
    return ResultRow(
        key=digest(decoding.model_dump(mode="json")),
        context="c0ffee",
        decoding=decoding,
        metric=metric,
        status="failed" if error else "done",
        error=error,
        examples=() if error else tuple(examples),
    )


def steady(
    strategy: AnyStrategy | AnyRule,
    quality: float | None = 1.0,
    speedup: float = 1.0,
    count: int = 20,
    **settings: Any,
) -> ResultRow:
    """A cell that does the same on every example, so that every resample is the data again."""
    return row(strategy, [example(quality, 1 / speedup)] * count, **settings)


def write_rows(folder: Path, rows: Sequence[ResultRow]) -> Path:
    """A run folder that holds these rows."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(one.model_dump(mode="json")) + "\n" for one in rows]
    (folder / "results.jsonl").write_text("".join(lines), encoding="utf-8")
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
