"""The learning rate of each arm, chosen on draws that are not used again."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

from paceline.records import atomic_write_text

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from paceline.results import Row


def best_rates(rows: Iterable[Row], folder: Path) -> dict[str, float]:
    """The rate with the largest mean of log tau over draws; `folder/rates.json` keeps all.

    `rows`: of drafts whose names are `ARM RATE`, such as `own 0.003`.
    """
    taus: dict[str, dict[float, list[float]]] = {}
    for row in rows:
        if row.has(label="end"):
            arm, rate = str(row.setting["draft"]).split()
            tau = math.fsum(map(float, row.sums["emitted"])) / math.fsum(
                map(float, row.sums["calls"])
            )
            taus.setdefault(arm, {}).setdefault(float(rate), []).append(math.log(tau))
    rates = {arm: max(own, key=lambda rate: math.fsum(own[rate])) for arm, own in taus.items()}
    text = json.dumps({"rates": rates, "log_tau": taus}, indent=2) + "\n"
    atomic_write_text(folder / "rates.json", text)
    return rates
