"""Table of predicted (one teacher-forced pass) and measured rejection rates."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.bench.schema import family, setting
from paceline.report.markdown import figure, number, table

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.bench.prediction import Prediction
    from paceline.report.run_folder import Section

COLUMNS = {
    "family": "the rule.",
    "setting": "threshold and gamma.",
    "predicted": "rejected / examined drafted tokens, from one pass over the target's answers.",
    "measured": "the same while decoding, with its 95% interval over examples.",
    "inside": (
        "whether that prediction is in that interval, which ignores the error of the prediction: "
        "correct predictions are inside in somewhat fewer than 95 of 100 cases."
    ),
    "predicted speedup": "from the same pass and the seconds of a block.",
    "speedup": "measured, of whole requests.",
    "decoding speedup": "measured, without the first token.",
}
_ROUNDING = 1e-6  # rounding error of sums of probabilities


def predictions_text(section: Section, predictions: Mapping[str, Prediction]) -> str | None:
    """Table of the predicted cells and the number inside; None without predictions."""
    frontier = section.frontier
    if frontier is None:
        return None
    lines: list[list[str]] = []
    num_inside = 0
    for row in sorted(frontier.rows, key=lambda row: family(row.decoding)):
        found = predictions.get(row.key)
        measured = frontier.rejection_rate(row)
        if found is None or found.predicted_rejection is None or measured.value != measured.value:
            continue
        low, high = measured.low - _ROUNDING, measured.high + _ROUNDING
        inside = low <= found.predicted_rejection <= high
        num_inside += inside
        names = [family(row.decoding), setting(row.decoding)]
        predicted = number(found.predicted_rejection)
        measures = frontier.speedup(row), frontier.decoding_speedup(row)
        speeds = [number(found.predicted_speedup), *map(figure, measures)]
        lines.append([*names, predicted, figure(measured), "yes" if inside else "NO", *speeds])
    if not lines:
        return None
    count = f"Inside: {num_inside} of {len(lines)}."
    return f"{table(list(COLUMNS), lines)}\n\n{count}"
