"""Predicts the figures of cells from teacher-forced passes over the target's answers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from paceline.bench.answers import key_of
from paceline.core.rule_base import with_bonus
from paceline.decode.strategies import Speculative
from paceline.measure.acceptance import PairTexts
from paceline.measure.analysis import analyze_rules
from paceline.measure.latency import PassCosts, PassTimer
from paceline.measure.results import gamma_of
from paceline.progress import Progress, silent
from paceline.results.figures import FIGURES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from paceline.bench.workbench import Examples
    from paceline.core.rule_base import Rule
    from paceline.core.sampling import SamplingParams
    from paceline.decode.strategies import DecodingConfig
    from paceline.results.row import Row

    Passes = Callable[[Sequence[int]], PassCosts]
    Predictions = dict[str, dict[str, float]]

_PASSES = 15
_FIGURES = ("expected_rejection_rate", "block_efficiency", "surprisal")
REJECTION, SURPRISAL, SPEEDUP = (
    *("predicted_rejection_rate", "predicted_surprisal", "predicted_decoding_speedup"),
)
"""Totals of a predicted row: rejected / examined drafted tokens, without any of which it has none;
mean surprisal of the rule's tokens under the target, nats per token; tau / cost of a block."""


def predict(
    work: Examples,
    texts: Mapping[SamplingParams, list[list[int]]],
    cells: Sequence[DecodingConfig],
    progress: Progress = silent,
    passes: Passes | None = None,
) -> Predictions:
    """Predict cells that have a rule and blocks of a fixed length. -> totals by key of the cell.

    Args:
        work: Models and prompts.
        texts: Answers of the target alone, by sampling; cells with another one are skipped.
        cells: The cells.
        progress: Progress callback.
        passes: Gives the costs of passes for gammas; None: passes are timed.
    """
    predictions: Predictions = {}
    for sampling, answers in texts.items():
        same = [cell for cell in cells if cell.sampling == sampling]
        for drafts in dict.fromkeys(map(_draft_sampling, same)):
            group = [cell for cell in same if _draft_sampling(cell) == drafts]
            predictions |= _predict(work, answers, group, progress, passes)
    return predictions


def is_predictable(cell: DecodingConfig) -> bool:
    """True if the cell has a rule and blocks of a fixed length."""
    strategy = cell.strategy
    return isinstance(strategy, Speculative) and strategy.policy.name == "fixed"


def is_predicted(row: Row) -> bool:
    """True if the row has a prediction."""
    return SURPRISAL in row.totals


def with_predictions(rows: Sequence[Row], predictions: Predictions) -> list[Row]:
    """The rows, with the predictions of their cells as totals."""
    return [row.extended({}, predictions.get(key_of(row))) for row in rows]


def _rule(strategy: Speculative) -> Rule:
    return with_bonus(strategy.rule, strategy.bonus)


def _draft_sampling(cell: DecodingConfig) -> SamplingParams | None:
    return cell.strategy.draft_sampling if isinstance(cell.strategy, Speculative) else None


def _predict(
    work: Examples,
    texts: list[list[int]],
    cells: Sequence[DecodingConfig],
    progress: Progress,
    passes: Passes | None,
) -> Predictions:
    most = work.max_new_tokens - 1  # a block leaves one token of the budget to the target
    strategies = [cell.strategy for cell in cells if isinstance(cell.strategy, Speculative)]
    rules = list(dict.fromkeys(map(_rule, strategies)))
    gammas = sorted({min(strategy.num_speculative_tokens, most) for strategy in strategies})
    sampling, drafts = cells[0].sampling, _draft_sampling(cells[0])
    positive = [gamma for gamma in gammas if gamma]
    if passes and positive:
        costs = passes(positive)
    else:
        timed = PassTimer(*work.pair, work.prompts[0], positive, sampling, drafts, texts[0])
        costs = timed.run(_PASSES)
    answers = PairTexts(*work.pair, work.prompts, texts, sampling, drafts, work.max_new_tokens)
    analyzed = analyze_rules(answers, rules, gammas, progress)
    by_rule = {
        (rule, gamma_of(row)): row
        for rule, (_, *rows) in zip(rules, analyzed, strict=True)
        for row in rows
    }
    predictions: Predictions = {}
    for cell, strategy in zip(cells, strategies, strict=True):
        gamma = min(strategy.num_speculative_tokens, most)
        row = by_rule[_rule(strategy), gamma]
        rejection, tau, surprisal = (FIGURES[name].value(row) for name in _FIGURES)
        tau = 1.0 if math.isnan(tau) else tau  # texts of a single token
        cost = costs.block_cost(gamma, row.totals["drafted_per_block"]) if gamma else tau
        known = {} if math.isnan(rejection) else {REJECTION: rejection}
        predictions[work.key_of(cell)] = known | {SURPRISAL: surprisal, SPEEDUP: tau / cost}
    return predictions
