"""Tables and verdicts of DistillSpec, from the committed rows alone."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pandas as pd

from papers.contrasts import by_arm, step_of
from papers.contrasts import statistic as contrast
from papers.statistics import interval, percent

if TYPE_CHECKING:
    from papers.statistics import Claim

TASKS = ("spelling", "sums")
ERROR = 0.05  # of intervals in tables


def at(rows: pd.DataFrame, task: str, temperature: float = 1.0, gamma: int = 5) -> pd.DataFrame:
    """The rows of one task and setting."""
    chosen = (rows["task"] == task) & (rows["temperature"] == temperature)
    return rows[chosen & (rows["gamma"] == gamma)]


def statistic(rows: pd.DataFrame, claim: Claim, task: str) -> pd.Series:
    """The claim's number of each draw."""
    return contrast(at(rows, task), claim.statistic)


def tables(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Table C.1, Figures 2 and 4: log tau above the unaligned draft; Figure 3: over steps."""
    return {"table c": table_c1(rows), "recipes": recipes(rows), "steps": steps(rows)}


def table_c1(rows: pd.DataFrame) -> pd.DataFrame:
    """Tau of the draft before and after alignment on its own text, and the gain in percent."""
    lines = []
    for (garden, task, temperature, gamma), own in rows.groupby(
        ["garden", "task", "temperature", "gamma"]
    ):
        log_tau = by_arm(own, "log_tau")
        gain = interval(list(log_tau["own"] - log_tau["none"]), ERROR)
        lines.append(
            {"garden": garden, "task": task, "T": temperature, "gamma": gamma, "n": gain.num_draws}
            | {
                "tau before": f"{math.exp(log_tau['none'].mean()):.3f}",
                "after": f"{math.exp(log_tau['own'].mean()):.3f}",
            }
            | {"gain": percent(gain)}
        )
    return pd.DataFrame(lines)


def recipes(rows: pd.DataFrame) -> pd.DataFrame:
    """Gain in tau of each recipe over the unaligned draft, T=1, gamma 5."""
    lines: dict[str, dict[str, str]] = {}
    for garden, own in rows.groupby("garden"):
        for task in TASKS:
            log_tau, accuracy = (by_arm(at(own, task), name) for name in ("log_tau", "accuracy"))
            for arm in log_tau.columns:
                gain = interval(list(log_tau[arm] - log_tau["none"]), ERROR)
                line = lines.setdefault(arm, {"recipe": arm})
                line[f"{task}, garden {garden}"] = percent(gain)
                line[f"accuracy, {task}, {garden}"] = f"{accuracy[arm].mean():.2f}"
    return pd.DataFrame(lines.values())


def steps(rows: pd.DataFrame) -> pd.DataFrame:
    """Acceptance over the steps of training, T=1."""
    lines = []
    for (garden, task), own in at_each(rows):
        for label in sorted(set(own["label"]) - {"start"}, key=step_of):
            table = by_arm(own, "acceptance", label)
            means = {arm: f"{table[arm].mean():.4f}" for arm in ("fixed", "own")}
            lines.append({"garden": garden, "task": task, "step": label} | means)
    return pd.DataFrame(lines)


def at_each(rows: pd.DataFrame) -> list[tuple[tuple[int, str], pd.DataFrame]]:
    """The rows at T=1 and gamma 5 of each garden and task."""
    return [
        ((int(garden), task), at(own, task))
        for garden, own in rows.groupby("garden")
        for task in TASKS
    ]
