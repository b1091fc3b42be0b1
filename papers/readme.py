"""Writes the tables of a paper's README from its committed rows.

    python -m papers.readme distillspec             all tables and charts
    python -m papers.readme distillspec recipes     prints one table

A table stands between `<!-- NAME -->` and `<!-- end -->`; the words around it are written by hand.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import math
import re
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from papers.rows import read
from papers.statistics import (
    NAMES,
    PAPERS,
    Claim,
    Interval,
    digest_of_claims,
    error_of_a_claim,
    interval,
    power,
    read_claims,
    verdict_in_each,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

_TABLE = re.compile(r"(<!-- ([a-z_0-9]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_SHUFFLES = 40
_NOT = ("does not hold", "no gain that matters")


def found_of(
    name: str, claim: Claim, rows: pd.DataFrame, drawn: np.random.Generator | None = None
) -> dict[str, pd.Series]:
    """The numbers of each draw, by task and statistic, in the rows of one garden.

    `drawn`: with it, the names of what the claim compares are shuffled in each draw.
    """
    figures = importlib.import_module(f"papers.{name}.figures")
    return {
        f"{task}{_sides(how) if len(claim.statistics) > 1 else ''}": figures.statistic(
            rows, how, task, drawn
        )
        for task in claim.tasks or figures.TASKS
        for how in claim.statistics
    }


def _sides(how: dict[str, Any]) -> str:
    """Which of several statistics it is."""
    first, second = (", ".join(how[side]) for side in ("first", "second"))
    alpha = f" at {how['accuracy']:g}" if "accuracy" in how else ""
    return f" ({first} less {second}{alpha})"


def intervals_of(found: dict[str, pd.Series]) -> list[Interval]:
    """An interval for each; they share the claim's error."""
    error = error_of_a_claim() / len(found)
    return [interval(list(values), error) for values in found.values()]


def sentences(name: str) -> pd.DataFrame:
    """The claims of a paper: its sentence, and what is measured."""
    return pd.DataFrame(
        {"": claim.id, "the paper": f"{claim.says} ({claim.place})", "here": claim.words}
        for claim in read_claims(name)
    )


def verdicts(name: str, rows: pd.DataFrame) -> pd.DataFrame:
    """Each garden's answer to each claim of a paper."""
    lines: list[dict[str, Any]] = []
    for claim, (garden, own) in itertools.product(read_claims(name), rows.groupby("garden")):
        found = found_of(name, claim, own)
        each = intervals_of(found)
        line = {"": claim.id, "garden": garden, "verdict": _said(claim, own, each)}
        line["intervals"] = "; ".join(map(_shown, found, each))
        lines.append(line | {"n, planned power": _power(claim, each)})
    return pd.DataFrame(lines)


def _said(claim: Claim, rows: pd.DataFrame, each: Sequence[Interval]) -> str:
    if set(rows["claims"]) != {digest_of_claims()}:
        return "no verdict: the claims changed"
    if not all(math.isfinite(one.mean) for one in each):
        return "no verdict: a draw has no number"
    return verdict_in_each(claim, each)


def _shown(task: str, found: Interval) -> str:
    return f"{task} {found.mean:+.3f} ({found.low:+.3f} to {found.high:+.3f})"


def _power(claim: Claim, each: Sequence[Interval]) -> str:
    draws = each[0].num_draws
    chance = power(claim, draws, error_of_a_claim() / len(each))
    return str(draws) if chance is None else f"{draws}, {chance:.2f}"


def wrong_verdicts(name: str, rows: pd.DataFrame) -> tuple[int, int, float]:
    """Of claims with no effect, verdicts with a sign, how many were tried, and how many are stated.

    The names of what a claim compares are shuffled in each draw. The claim is "holds" if it is
    above 0 in each task, "does not hold" if it is below 0 in one.
    """
    drawn = np.random.default_rng(0)
    wrong = total = 0
    for claim, (_, own), _ in itertools.product(
        read_claims(name), rows.groupby("garden"), range(_SHUFFLES)
    ):
        each = intervals_of(found_of(name, claim, own, drawn))
        wrong += all(one.low > 0 for one in each) or any(one.high < 0 for one in each)
        total += 1
    return wrong, total, total * error_of_a_claim()


def compared(table: pd.DataFrame) -> str:
    """Claims whose verdicts differ between gardens: those that contradict, and others."""
    told = table[~table["verdict"].str.startswith("no verdict")]
    said = told.pivot(index="", columns="garden", values="verdict").reindex(table[""].unique())
    if said.shape[1] < 2:
        return ""
    differ = said.nunique(axis=1) > 1
    flipped = said.eq("holds").any(axis=1) & said.isin(_NOT).any(axis=1)
    flips, others = (", ".join(said.index[one]) or "none" for one in (flipped, differ & ~flipped))
    return (
        f"Claims that hold in one garden and are refused in another: {flips}. "
        f"Verdicts that differ otherwise, such as undecided in one: {others}. "
    )


def texts_of(name: str) -> dict[str, str]:
    """Every table of a paper as Markdown."""
    rows = read(name)
    figures = importlib.import_module(f"papers.{name}.figures")
    texts = {key: f"{one.to_markdown(index=False)}\n" for key, one in figures.tables(rows).items()}
    return texts | ({"verdicts": text_of_claims(name, rows)} if name in NAMES else {})


def text_of_claims(name: str, rows: pd.DataFrame) -> str:
    """The claims of a paper with their verdicts, and the null."""
    table = verdicts(name, rows)
    wrong, total, stated = wrong_verdicts(name, rows)
    return (
        f"{sentences(name).to_markdown(index=False)}\n\n{table.to_markdown(index=False)}\n\n"
        f"{compared(table)}With names shuffled in each draw, {wrong} of {total} claims have a "
        f"sign; stated are {stated:.1f}.\n"
    )


def write(name: str) -> None:
    """Write the tables and charts of a paper's README."""
    texts = texts_of(name)
    figures = importlib.import_module(f"papers.{name}.figures")
    if hasattr(figures, "charts"):
        for key, chart in figures.charts(read(name)).items():
            chart.save(PAPERS / name / f"{key}.svg")
    path = PAPERS / name / "README.md"
    text = _TABLE.sub(lambda m: m[1] + texts[m[2]] + m[3], path.read_text("utf-8"))
    path.write_text(text, "utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paper", choices=(*NAMES, "parallel_drafts", "fine_tuning", "drift"))
    parser.add_argument(
        "table", nargs="?", help="such as verdicts; as named in the page's comments"
    )
    given = parser.parse_args()
    if given.table is None:
        write(given.paper)
    else:
        sys.stdout.write(texts_of(given.paper)[given.table])
