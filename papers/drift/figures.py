"""Table and chart of drafts under drift, from the committed rows alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import altair as alt
import pandas as pd

from papers.drift.run import NOON, ROUNDS

if TYPE_CHECKING:
    from typing import Any

ARMS = ("frozen", "daily", "followed")
PARTS = (
    "day 1, documentation",
    "day 1, questions",
    "day 2, questions",
    "day 2, the fine-tuned target",
)


def tables(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Tokens per target call in each half of a day: means over the rounds of one run."""
    part = (rows["round"] - 1) // NOON
    lines = [
        {"part": PARTS[number], "rounds": len(own)}
        | {arm: f"{own[arm].mean():.2f}" for arm in ARMS}
        | {"swaps": int((own["decision"] == "swapped").sum())}
        | {"back": int((own["decision"] == "brought back").sum())}
        | {"minutes": f"{own['seconds'].sum() / 60:.0f}"}
        for number, own in rows.groupby(part)
    ]
    return {"parts": pd.DataFrame(lines)}


def charts(rows: pd.DataFrame) -> dict[str, Any]:
    """Tokens per target call over the requests."""
    table = rows.melt(["round"], list(ARMS), "draft", "tokens per target call")
    table = table.assign(day=table["round"] / ROUNDS)
    lines = (
        alt.Chart(table)
        .mark_line(point=True)
        .encode(
            x=alt.X("day:Q").title("days (20,000 requests each)"),
            y=alt.Y("tokens per target call:Q").scale(zero=False),
            color=alt.Color("draft:N").title(None),
        )
    )
    return {"days": lines.properties(width=520, height=280)}
