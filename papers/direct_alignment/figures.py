"""Tables and verdicts of Direct Alignment, from the committed rows alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pandas as pd

from papers.contrasts import by_arm
from papers.contrasts import statistic as contrast
from papers.statistics import interval, percent

if TYPE_CHECKING:
    import numpy as np

NAMES = {"documentation": "held_out"}
TASKS = tuple(NAMES)


def at(rows: pd.DataFrame, task: str, gamma: int) -> pd.DataFrame:
    """The rows of one task and setting, without the draft before pretraining."""
    chosen = (rows["task"] == NAMES[task]) & (rows["gamma"] == gamma)
    cut = (rows["label"] == "start") & rows["draft"].isin(["not_pretrained", "longer"])
    return rows[chosen & ~cut]


def statistic(
    rows: pd.DataFrame, how: dict[str, Any], task: str, drawn: np.random.Generator | None = None
) -> pd.Series:
    """A claim's number of each draw; with `drawn`, the names of drafts are shuffled."""
    return contrast(at(rows, task, 3), how, drawn)


def tables(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Figures 1 to 3: tau of each draft."""
    lines = []
    for garden, own in rows.groupby("garden"):
        for task in TASKS:
            for gamma in (3, 5):
                log_tau = by_arm(at(own, task, gamma), "log_tau")
                rates = own.groupby("draft")["rate"].first()
                for arm in log_tau.columns:
                    gain = interval(list(log_tau[arm] - log_tau["none"]), 0.05)
                    lines.append(
                        {"garden": garden, "task": task, "gamma": gamma}
                        | {"draft": arm, "rate": rates.get(arm, "-"), "n": gain.num_draws}
                        | {"gain in tau": percent(gain)}
                    )
    return {"tau": pd.DataFrame(lines)}
