"""Tables and chart of parallel drafts, from the committed rows alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from papers.charts import line_chart, means
from papers.statistics import Interval, interval

if TYPE_CHECKING:
    from collections.abc import Iterable

    import altair as alt

KEYS = ["layers", "minutes", "temperature", "drafts"]


def with_figures(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with tau, how the draft drafts, and the speedup by the costs timed."""
    how = rows["arm"].where(
        rows["parallel"] | (rows["arm"] == "ordinary"), rows["arm"] + ", one by one"
    )
    tau = rows["emitted"] / rows["calls"]
    return rows.assign(drafts=how, tau=tau, expected=tau / rows["block_cost"])


def main_arms(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows without drafts of other weights."""
    return rows[~rows["arm"].str.contains("weights")]


def scored(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of scored texts, without those of requests that were decoded."""
    return rows[rows["timed"].isna()]


def by_gamma(rows: pd.DataFrame, figure: str, keys: list[str]) -> pd.DataFrame:
    """A line per setting, a column per gamma: mean over draws, and half its interval."""
    table = rows.groupby([*keys, "gamma"])[figure].apply(
        lambda one: shown(interval(list(one), 0.05))
    )
    return table.unstack("gamma").rename(columns="gamma {}".format).reset_index()


def shown(found: Interval) -> str:
    """A mean with half of its interval; `-` if a draw has no number."""
    if not np.isfinite(found.mean):
        return "-"
    return f"{found.mean:.2f} ± {found.high - found.mean:.2f}"


def tables(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Tau, speedup by the costs timed, speedup of decoded requests, and weights."""
    rows = with_figures(rows)
    main = main_arms(rows)
    return {
        "tau": by_gamma(scored(main), "tau", KEYS),
        "expected": by_gamma(scored(main), "expected", KEYS),
        "timed": timed(main),
        "weights": weights(scored(rows)),
    }


def timed(rows: pd.DataFrame) -> pd.DataFrame:
    """The speedup of decoded requests, timed beside the plain target, and the cost of a pass."""
    kept = rows[rows["timed"] == "requests"]
    lines = []
    for key, own in kept.groupby(KEYS):
        cost = own["draft_pass_s"] / own["target_pass_s"]
        gammas = ", ".join(str(one) for one in sorted(set(own["gamma"])))
        lines.append(
            dict(zip(KEYS, key, strict=True))
            | {"gamma": gammas, "n": own["draw"].nunique()}
            | {"draft pass / target pass": shown(interval(list(cost), 0.05))}
            | {"speedup": shown(interval(list(own["speedup"]), 0.05))}
        )
    return pd.DataFrame(lines)


def weights(rows: pd.DataFrame) -> pd.DataFrame:
    """Tau of each weight of places less that of efficiency weights, of the same draws, T=1."""
    named = rows["arm"].str.contains("weights")
    settings = rows[named][["layers", "minutes"]].drop_duplicates()
    own = rows.merge(settings)
    own = own[own["parallel"] & (own["temperature"] == 1)]
    table = own.pivot_table(index=["gamma", "draw"], columns="arm", values="tau")
    less = table.sub(table["parallel 4"], axis=0).drop(columns="parallel 4")
    long = less.stack().rename("tau").reset_index()
    return by_gamma(long, "tau", ["arm"])


def predicted(rows: pd.DataFrame, costs: Iterable[float]) -> pd.DataFrame:
    """The largest speedup over gamma at each cost of a draft pass, if verification costs one pass.

    A block costs 1 + gamma c with an ordinary draft, and 1 + c with a parallel one.
    """
    own = main_arms(with_figures(scored(rows)))
    own = own[own["parallel"] | (own["arm"] == "ordinary")]
    passes = own["gamma"].where(~own["parallel"], 1)
    parts = [
        own.assign(cost=cost, speedup=own["tau"] / (1 + cost * passes))
        .groupby([*KEYS, "draw", "cost"], as_index=False)["speedup"]
        .max()
        for cost in costs
    ]
    return pd.concat(parts)


def charts(rows: pd.DataFrame) -> dict[str, alt.FacetChart]:
    """Where a parallel draft is faster: predicted speedup over the cost of a draft pass, T=1."""
    table = predicted(rows, np.arange(0.05, 0.51, 0.05).round(2))
    table = table[table["temperature"] == 1]
    panel = table["layers"].astype(str) + " layers, " + table["minutes"].astype(str) + " minutes"
    found = means(table.assign(panel=panel), ["panel", "drafts", "cost"], ["speedup"])
    return {"costs": line_chart(found, "cost", "speedup", "drafts", "panel", "cost")}
