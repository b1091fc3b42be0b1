"""Theorems of the papers on drawn distributions: rules and TVD are ours, the rest is numpy."""

from typing import Any

import numpy as np
import pytest
import torch

from paceline.core.divergences import total_variation
from paceline.core.rule_base import Position
from paceline.core.rules import Chow, ChowLog, Diff, DiffLog, Lossless, Opt, OptLog

LENGTH, SEEDS = 6, range(40)


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits)
    return weights / weights.sum(-1, keepdims=True)


def at_positions(writer: np.ndarray, figure_V: np.ndarray) -> np.ndarray:
    """Means at each position of a chain's texts of a figure of the token before, 0 at first."""
    return np.array([(np.linalg.matrix_power(writer, t) @ figure_V)[0] for t in range(LENGTH)])


def test_acceptance_is_above_the_bound_of_theorem_4_1_and_of_lemma_a3():
    """DistillSpec; epsilon and E_t on the draft's text. Errors that do not drift are the mutant.

    alpha >= 1 - sum_t (1 + 2 (T - t)) E_t / T >= 1 - 2 T epsilon: the proof has the 2.
    """
    beyond_mutant = 0
    for seed in SEEDS:
        drawn = np.random.default_rng(seed)
        logits, change = drawn.normal(0, 2, (2, 4, 4))
        p, q = softmax(logits), softmax(logits + drawn.uniform(0, 0.5) * change)
        target, draft = torch.tensor(p), torch.tensor(q)
        accepted_V = (draft * Lossless().accept_at(Position.of(target, draft))).sum(-1).numpy()
        alpha = at_positions(p, accepted_V).mean()
        errors_T = at_positions(q, total_variation(target, draft).numpy())
        tight = 1 - ((1 + 2 * np.arange(LENGTH)[::-1]) * errors_T).sum() / LENGTH
        assert alpha >= tight - 1e-12
        assert tight >= 1 - 2 * LENGTH * errors_T.mean() - 1e-12
        beyond_mutant += alpha < 1 - errors_T.mean() - 1e-6
    assert beyond_mutant > 0


def loss_and_error(truth: np.ndarray, model: np.ndarray, *, is_log: bool) -> Any:
    """Expected loss of a model under the truth, and how far its own estimate may be off."""
    if is_log:
        widest = np.abs(np.log(model)).max(-1)
        return -(truth * np.log(model)).sum(-1), widest * np.abs(truth - model).sum(-1)
    best = model.argmax(-1)[:, None]
    return 1 - np.take_along_axis(truth, best, -1)[:, 0], np.abs(truth - model).max(-1)


@pytest.mark.parametrize("kind", [Chow, ChowLog, Diff, DiffLog, Opt, OptLog])
def test_the_regret_of_a_plug_in_rule_is_within_its_lemma(kind: Any):
    """Faster Cascades, lemmas 1 (Diff), 5 (OPT), 6 (Chow) and 7 (log loss).

    The best rule knows the truth and defers where the draft's loss is above the cost: alpha (6),
    the target's loss + alpha (1) or + alpha TVD(p, q) (5, 7). The mutant always defers.
    """
    is_log, beyond_mutant = kind in (ChowLog, DiffLog, OptLog), 0
    for seed in SEEDS:
        drawn = np.random.default_rng(seed)
        truth, p, q = softmax(drawn.normal(0, 1.5, (3, 50, 5)))
        q[:10] = truth[:10]  # without an error of q
        alpha = drawn.uniform(0, 1)
        alpha = 20 * alpha**3 if kind is OptLog else alpha
        loss, bound = loss_and_error(truth, q, is_log=is_log)
        cost = np.full(50, alpha)
        if kind not in (Chow, ChowLog):
            of_target, error = loss_and_error(truth, p, is_log=is_log)
            tvd = np.abs(p - q).sum(-1) / 2 if kind in (Opt, OptLog) else 1.0
            cost, bound = of_target + alpha * tvd, bound + error
        defers = kind(alpha=alpha).defers(Position.of(torch.tensor(p), torch.tensor(q)))[:, 0]
        regret = np.where(defers.numpy(), cost, loss) - np.minimum(cost, loss)
        assert (regret <= bound + 1e-9).all()
        beyond_mutant += (cost - np.minimum(cost, loss) > bound + 1e-9).sum()
    assert beyond_mutant > 0
