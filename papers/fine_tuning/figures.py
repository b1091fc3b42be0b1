"""Table of alignment after fine-tuning, from the committed rows alone."""

from __future__ import annotations

import pandas as pd

from papers.parallel_drafts.figures import shown
from papers.statistics import interval


def tables(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Acceptance of the old draft, and after minutes of alignment: means over draws, T=1."""
    keys, figure = ["kind", "source", "minutes"], "expected_acceptance"
    after = rows[rows["when"] == "after"].groupby(keys)[figure].apply(_shown).unstack("minutes")
    # the same number whatever the minutes that follow
    before = rows[rows["when"] == "before"].drop_duplicates([*keys[:2], "draw"])
    before = before.groupby(keys[:2])[figure].apply(_shown)
    table = pd.concat([before.rename("before"), after.rename(columns="{:g} min".format)], axis=1)
    return {"acceptance": table.fillna("-").reset_index()}


def _shown(values: pd.Series) -> str:
    return shown(interval(list(values), 0.05))
