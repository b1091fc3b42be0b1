"""Tables and verdicts of DistillSpec, from the committed rows alone."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pandas as pd

from papers.charts import line_chart, means
from papers.contrasts import by_arm, figure, step_of
from papers.contrasts import statistic as contrast
from papers.rows import read_quality
from papers.statistics import interval, percent

if TYPE_CHECKING:
    import altair as alt
    import numpy as np


TASKS = ("spelling", "sums")
ERROR = 0.05  # of intervals in tables
FOLLOWED = ("fixed", "own")  # the arms whose checkpoints are measured


def at(rows: pd.DataFrame, task: str, temperature: float = 1.0, gamma: int = 5) -> pd.DataFrame:
    """The rows of one task and setting."""
    chosen = (rows["task"] == task) & (rows["temperature"] == temperature)
    return rows[chosen & (rows["gamma"] == gamma)]


def statistic(
    rows: pd.DataFrame, how: dict[str, Any], task: str, drawn: np.random.Generator | None = None
) -> pd.Series:
    """A claim's number of each draw; with `drawn`, the names of drafts are shuffled."""
    return contrast(at(rows, task, how.get("temperature", 1.0)), how, drawn)


def tables(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Targets, then Table C.1, Figures 2 and 4: log tau above the unaligned draft."""
    return {"targets": targets(), "table_c1": table_c1(rows), "recipes": recipes(rows)}


def targets() -> pd.DataFrame:
    """Accuracy of each garden's targets, and the best of answers that need no model."""
    trivial = ("constant", "source", "random")
    return pd.DataFrame(
        [
            {"garden": garden, "task": task, "accuracy": f"{found['target']:.3f}"}
            | {"without a model": f"{max(found[name] for name in trivial):.3f}"}
            | {"other sums": f"{found['six_terms']:.3f}" if "six_terms" in found else "-"}
            for garden, tasks in sorted(read_quality().items())
            for task, found in sorted(tasks.items())
        ]
    )


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
    """Each recipe at T=1, gamma 5: gain in tau over the unaligned draft, and its own figures."""
    lines = []
    for (garden, task), own in at_each(rows):
        log_tau, entropy, accuracy = (
            by_arm(own, name) for name in ("log_tau", "cross_entropy", "accuracy")
        )
        rates = own.groupby("draft")["rate"].first()
        for arm in log_tau.columns:
            gain = interval(list(log_tau[arm] - log_tau["none"]), ERROR)
            lines.append(
                {"garden": garden, "task": task, "recipe": arm, "n": gain.num_draws}
                | {"rate": rates.get(arm, "-"), "gain in tau": percent(gain)}
                | {"cross-entropy": f"{entropy[arm].mean():.3f}"}
                | {"accuracy": f"{accuracy[arm].mean():.2f}"}
            )
    return pd.DataFrame(lines)


def charts(rows: pd.DataFrame) -> dict[str, alt.FacetChart]:
    """Figures 3 and C.12: acceptance over the steps of training, T=1."""
    own = pd.concat(own for _, own in at_each(rows))
    begun = own["label"] == "start"
    followed = own[own["draft"].isin(FOLLOWED) & ~begun]
    order = ["start", *sorted(set(followed["label"]), key=step_of)]
    table = pd.concat([followed, *(own[begun].assign(draft=arm) for arm in FOLLOWED)])
    table = table.assign(
        quarter=table["label"].map(order.index),
        acceptance=figure(table, "acceptance"),
        panel=table["task"] + ", garden " + table["garden"].astype(str),
    )
    shown = means(table, ["panel", "draft", "quarter"], ["acceptance"])
    return {"steps": line_chart(shown, "quarter", "acceptance", "draft", "panel", "quarter")}


def at_each(rows: pd.DataFrame) -> list[tuple[tuple[int, str], pd.DataFrame]]:
    """The rows at T=1 and gamma 5 of each garden and task."""
    return [
        ((int(garden), task), at(own, task))
        for garden, own in rows.groupby("garden")
        for task in TASKS
    ]
