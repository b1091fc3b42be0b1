"""What one teacher-forced pass says of cells before they are decoded, on the target's own answers."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Literal

from pydantic import ValidationError

from paceline.bench.schema import SCHEMA_VERSION
from paceline.config import StrictModel, describe
from paceline.decode.strategies import Autoregressive, Speculative
from paceline.errors import UsageError
from paceline.measure.analysis import analyze_rules
from paceline.measure.latency import PassCosts, PassTimer
from paceline.progress import Progress, silent
from paceline.records import atomic_write_text, read_jsonl

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from paceline.bench.schema import ResultRow
    from paceline.bench.workbench import Workbench
    from paceline.core.sampling import SamplingParams
    from paceline.decode.strategies import DecodingConfig

    Passes = Callable[[Sequence[int]], PassCosts]

_PASSES = 15
FILE = "predictions.jsonl"


class Prediction(StrictModel):
    """One cell with a rule and blocks of one length.

    Attributes:
        key: Of the cell.
        predicted_rejection: Rejected / judged drafted tokens; None where no token would be judged.
        predicted_surprisal: How unlikely the target finds what the rule makes, nats a token.
        predicted_speedup: tau / (c drafted per block + block cost), passes timed here.
    """

    schema_version: Literal[2] = SCHEMA_VERSION
    key: str
    predicted_rejection: float | None
    predicted_surprisal: float
    predicted_speedup: float


def predict(
    work: Workbench,
    rows: Sequence[ResultRow],
    cells: Sequence[DecodingConfig],
    progress: Progress = silent,
    passes: Passes | None = None,
) -> list[Prediction]:
    """Predictions for cells that have a rule and blocks of a fixed length.

    Args:
        work: Models and prompts.
        rows: Among them the target alone's; cells of a sampler without it are left out.
        cells: With a rule.
        progress: Called as work goes on.
        passes: The costs of these gammas; None: passes are timed here.
    """
    found: list[Prediction] = []
    for row in rows:
        alone = row.status == "done" and isinstance(row.decoding.strategy, Autoregressive)
        here = [cell for cell in cells if cell.sampling == row.decoding.sampling]
        for drafts in list(dict.fromkeys(map(_draft_sampling, here))) if alone else []:
            alike = [cell for cell in here if _draft_sampling(cell) == drafts]
            found += _predict(work, row, alike, progress, passes)
    return found


def _draft_sampling(cell: DecodingConfig) -> SamplingParams | None:
    return cell.strategy.draft_sampling if isinstance(cell.strategy, Speculative) else None


def read_predictions(folder: Path) -> dict[str, Prediction]:
    """A run's predictions by their cells' keys.

    Raises:
        UsageError: the file holds something else.
    """
    path = folder / FILE
    try:
        found = [Prediction.model_validate(values) for values in read_jsonl(path)]
    except ValidationError as error:
        raise UsageError(
            f"{path} has a row that is no prediction: {describe(error)}; remove the file and run "
            "the bench again, which writes it"
        ) from None
    return {one.key: one for one in found}


def add_predictions(folder: Path, predictions: Sequence[Prediction]) -> None:
    """Into the run's `predictions.jsonl`, which a report compares with what was measured."""
    known = read_predictions(folder) | {one.key: one for one in predictions}
    lines = [json.dumps(one.model_dump(mode="json")) + "\n" for one in known.values()]
    atomic_write_text(folder / FILE, "".join(lines))


def cells_to_predict(folder: Path, rows: Sequence[ResultRow]) -> list[DecodingConfig]:
    """The finished cells that can be predicted and have not been."""
    known = read_predictions(folder)
    done = [row for row in rows if row.status == "done" and row.key not in known]
    return [row.decoding for row in done if _is_ruled(row.decoding)]


def _is_ruled(cell: DecodingConfig) -> bool:
    strategy = cell.strategy
    return isinstance(strategy, Speculative) and strategy.policy.name == "fixed"


def _predict(
    work: Workbench,
    row: ResultRow,
    cells: Sequence[DecodingConfig],
    progress: Progress,
    passes: Passes | None,
) -> list[Prediction]:
    texts = [list(example.tokens) for example in row.examples]
    most = work.max_new_tokens - 1  # a block leaves one token of the budget to the target
    strategies = [cell.strategy for cell in cells]
    chosen = [one for one in strategies if isinstance(one, Speculative)]
    rules = list({repr(one.rule): one.rule for one in chosen}.values())
    gammas = sorted({min(one.num_speculative_tokens, most) for one in chosen})
    drafts = _draft_sampling(cells[0])
    samplings = cells[0].sampling, drafts
    some = [gamma for gamma in gammas if gamma]
    costs = passes(some) if passes and some else _costs(work, row, some, samplings)
    analysed = analyze_rules(
        *work.pair,
        work.prompts,
        texts,
        rules,
        cells[0].sampling,
        gammas,
        work.seed,
        progress,
        work.max_new_tokens,
        drafts,
    )
    by_rule = dict(zip(map(repr, rules), analysed, strict=True))
    found: list[Prediction] = []
    for cell, strategy in zip(cells, chosen, strict=True):
        gamma = min(strategy.num_speculative_tokens, most)
        effect = by_rule[repr(strategy.rule)]
        rejection = effect.rejection_rate[gamma].value
        tau, drafted = effect.block_efficiency[gamma], effect.drafted_per_block[gamma]
        speedup = costs.expected_speedup(tau, gamma, drafted) if gamma else 1.0
        found.append(
            Prediction(
                key=work.key_of(cell),
                predicted_rejection=None if math.isnan(rejection) else rejection,
                predicted_surprisal=effect.surprisal,
                predicted_speedup=speedup,
            )
        )
    return found


def _costs(
    work: Workbench,
    row: ResultRow,
    gammas: Sequence[int],
    samplings: tuple[SamplingParams, SamplingParams | None],
) -> PassCosts:
    # without the last token: a block behind it could end beyond the context
    text = [*work.prompts[0], *row.examples[0].tokens[:-1]]
    timer = PassTimer(*work.pair, text, gammas, *samplings)
    for _ in range(_PASSES):
        timer.time_once()
    return timer.costs()
