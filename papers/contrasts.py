"""Contrasts between ways of aligning a draft, from the rows of draws.

A contrast is first - second of one figure, of each draw. Either side is the mean of its arms.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

ALONE = "none"  # the draft before alignment


def figure(rows: pd.DataFrame, name: str) -> pd.Series:
    """A figure of each row, from its sums."""
    match name:
        case "log_tau":
            return np.log(rows["emitted"] / rows["calls"])
        case "acceptance":
            return rows["acceptance"] / rows["tokens"]
        case "cross_entropy":
            return rows["cross_entropy"] / rows["tokens"]
        case "accuracy":
            return rows["score"] / rows["n"]
    raise KeyError(name)


def by_arm(rows: pd.DataFrame, name: str, label: str = "end") -> pd.DataFrame:
    """A figure of rows of one task, temperature and gamma: a line per draw, a column per arm."""
    start = rows["label"] == "start"
    chosen = rows[start | (rows["label"] == label)]
    arms = chosen["draft"].where(chosen["label"] != "start", ALONE)
    table = chosen.assign(arm=arms, value=figure(chosen, name))
    return table.pivot_table(index="draw", columns="arm", values="value", aggfunc="first")


def shuffled(rows: pd.DataFrame, how: dict[str, Any], drawn: np.random.Generator) -> pd.DataFrame:
    """The rows with the names of drafts shuffled in each draw, so that no contrast has an effect.

    Of a contrast over steps, the checkpoints of every draft that has them are shuffled.
    """
    named = rows.assign(draft=rows["draft"].where(rows["label"] != "start", ALONE))
    named = named.drop_duplicates(["draw", "draft", "label"])
    if "less" in how:
        followed = named.loc[named["label"].str.startswith("step"), "draft"]
        chosen = named[named["draft"].isin(followed)]
    else:
        chosen = named[named["label"].isin(["start", "end"])]
    order = np.arange(len(chosen))
    for _, places in sorted(chosen.groupby("draw").indices.items()):
        order[places] = drawn.permutation(places)
    return chosen.assign(**{name: chosen[name].to_numpy()[order] for name in ("draft", "label")})


def statistic(
    rows: pd.DataFrame, how: dict[str, Any], drawn: np.random.Generator | None = None
) -> pd.Series:
    """The contrast of each draw, in rows of one task, temperature and gamma.

    `drawn`: with it, the names of drafts are shuffled.
    """
    rows = rows if drawn is None else shuffled(rows, how, drawn)

    def difference(table: pd.DataFrame) -> pd.Series:
        first = table[how["first"]].mean(axis=1)
        return first - table[how["second"]].mean(axis=1) if "second" in how else first

    found = difference(by_arm(rows, how["contrast"]))
    if how.get("less") == "first checkpoint":
        label = min((one for one in rows["label"].unique() if "step" in one), key=step_of)
        found = found - difference(by_arm(rows, how["contrast"], label))
    return found


def step_of(label: str) -> float:
    """The step of a checkpoint by its label: `step 30`, or `end`."""
    return math.inf if label == "end" else float(label.split()[1])
