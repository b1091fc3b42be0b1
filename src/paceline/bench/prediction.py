"""Predicts the figures of cells from teacher-forced passes over the target's answers."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Literal

from pydantic import ValidationError

from paceline.bench.schema import SCHEMA_VERSION
from paceline.config import StrictModel, describe
from paceline.core.rule_base import with_bonus
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
    from paceline.core.rule_base import Rule
    from paceline.core.sampling import SamplingParams
    from paceline.decode.strategies import DecodingConfig

    Passes = Callable[[Sequence[int]], PassCosts]

_PASSES = 15
FILE = "predictions.jsonl"


class Prediction(StrictModel):
    """Prediction for a cell with a rule and blocks of a fixed length.

    Attributes:
        key: Key of the cell.
        predicted_rejection: Rejected / examined drafted tokens; None if none would be examined.
        predicted_surprisal: Mean surprisal of the rule's tokens under the target, nats per token.
        predicted_speedup: tau / (c * drafted tokens per block + block cost).
    """

    schema_version: Literal[1] = SCHEMA_VERSION
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
    """Predict cells that have a rule and blocks of a fixed length.

    Cells whose sampling has no finished row of the target alone are skipped. `passes`: gives the
    costs of passes for gammas; None: passes are timed.
    """
    predictions: list[Prediction] = []
    for row in rows:
        if row.status != "done" or not isinstance(row.decoding.strategy, Autoregressive):
            continue
        same = [cell for cell in cells if cell.sampling == row.decoding.sampling]
        for drafts in dict.fromkeys(map(_draft_sampling, same)):
            group = [cell for cell in same if _draft_sampling(cell) == drafts]
            predictions += _predict(work, row, group, progress, passes)
    return predictions


def _rule(strategy: Speculative) -> Rule:
    return with_bonus(strategy.rule, strategy.bonus)


def _draft_sampling(cell: DecodingConfig) -> SamplingParams | None:
    return cell.strategy.draft_sampling if isinstance(cell.strategy, Speculative) else None


def read_predictions(folder: Path) -> dict[str, Prediction]:
    """Read the predictions of a run, by the keys of their cells.

    Raises:
        UsageError: the file has a row that is not a prediction.
    """
    path = folder / FILE
    try:
        predictions = [Prediction.model_validate(values) for values in read_jsonl(path)]
    except ValidationError as error:
        raise UsageError(
            f"{path} has a row that is not a prediction: {describe(error)}; remove the file and "
            "run the bench again to rewrite it"
        ) from None
    return {prediction.key: prediction for prediction in predictions}


def add_predictions(folder: Path, predictions: Sequence[Prediction]) -> None:
    """Add predictions to the run's `predictions.jsonl`, for the comparison in reports."""
    known = read_predictions(folder) | {prediction.key: prediction for prediction in predictions}
    lines = [json.dumps(prediction.model_dump(mode="json")) + "\n" for prediction in known.values()]
    atomic_write_text(folder / FILE, "".join(lines))


def cells_to_predict(folder: Path, rows: Sequence[ResultRow]) -> list[DecodingConfig]:
    """The finished cells without a prediction that have a rule and blocks of a fixed length."""
    known = read_predictions(folder)
    done = [row for row in rows if row.status == "done" and row.key not in known]
    return [row.decoding for row in done if _is_predictable(row.decoding)]


def _is_predictable(cell: DecodingConfig) -> bool:
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
    strategies = [cell.strategy for cell in cells if isinstance(cell.strategy, Speculative)]
    rules = list({repr(rule): rule for rule in map(_rule, strategies)}.values())
    gammas = sorted({min(strategy.num_speculative_tokens, most) for strategy in strategies})
    sampling, drafts = cells[0].sampling, _draft_sampling(cells[0])
    positive = [gamma for gamma in gammas if gamma]
    if passes and positive:
        costs = passes(positive)
    else:
        # without the last token, so that a block after it stays within the context
        begun = row.examples[0].tokens[:-1]
        timed = PassTimer(*work.pair, work.prompts[0], positive, sampling, drafts, begun)
        costs = timed.run(_PASSES)
    target, draft = work.pair
    analyzed = analyze_rules(
        *(target, draft, work.prompts, texts, rules, sampling, gammas),
        *(work.seed, progress, work.max_new_tokens, drafts),
    )
    by_rule = dict(zip(map(repr, rules), analyzed, strict=True))
    predictions: list[Prediction] = []
    for cell, strategy in zip(cells, strategies, strict=True):
        gamma = min(strategy.num_speculative_tokens, most)
        effect = by_rule[repr(_rule(strategy))]
        blocks = effect.blocks[gamma]
        rejection, tau = blocks.rejection_rate.value, blocks.block_efficiency
        prediction = Prediction(
            key=work.key_of(cell),
            predicted_rejection=None if math.isnan(rejection) else rejection,
            predicted_surprisal=effect.surprisal,
            predicted_speedup=costs.expected_speedup(tau, gamma, blocks.drafted_per_block)
            if gamma
            else 1.0,
        )
        predictions.append(prediction)
    return predictions
