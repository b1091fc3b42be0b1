"""Tables and verdicts of Direct Alignment, from the committed rows alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from papers.contrasts import by_arm
from papers.contrasts import statistic as contrast
from papers.statistics import interval, percent

if TYPE_CHECKING:
    from papers.statistics import Claim

NAMES = {"documentation": "held_out", "code": "code"}
TASKS = tuple(NAMES)


def at(rows: pd.DataFrame, task: str, temperature: float, gamma: int) -> pd.DataFrame:
    """The rows of one task and setting, without the draft before pretraining."""
    chosen = (rows["task"] == NAMES[task]) & (rows["temperature"] == temperature)
    cut = (rows["label"] == "start") & (rows["draft"] == "not_pretrained")
    return rows[chosen & (rows["gamma"] == gamma) & ~cut]


def statistic(rows: pd.DataFrame, claim: Claim, task: str) -> pd.Series:
    """The claim's number of each draw."""
    return contrast(at(rows, task, 0.6, 3), claim.statistic)


def tables(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Figures 1 to 3: tau of each draft."""
    lines = []
    for garden, own in rows.groupby("garden"):
        for task in TASKS:
            for temperature, gamma in ((0.6, 3), (0.6, 5), (0.0, 3), (0.0, 5)):
                log_tau = by_arm(at(own, task, temperature, gamma), "log_tau")
                for arm in log_tau.columns:
                    gain = interval(list(log_tau[arm] - log_tau["none"]), 0.05)
                    lines.append(
                        {"garden": garden, "task": task, "T": temperature, "gamma": gamma}
                        | {"draft": arm, "n": gain.num_draws, "gain in tau": percent(gain)}
                    )
    return {"tau": pd.DataFrame(lines)}
