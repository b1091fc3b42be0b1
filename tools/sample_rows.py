"""Write a small sample of the rows of studies, for tests: the first examples of each row.

python tools/sample_rows.py runs/studies tests/unit/studies/rows.jsonl.gz

It has the rows whose effects tests/unit/studies/test_effects_by_numpy.py computes.
"""

import sys
from pathlib import Path
from typing import Any

from paceline.results.row import Row, Source, rounded, write_rows
from paceline.studies.session import study_rows

NUM_UNITS = 8
DIGITS = 4


_RULES = {"part": "rules", "family": ("autoregressive", "lossless", "chow", "token_cascade")}
CHOSEN: dict[str, list[dict[str, Any]]] = {
    "bounds": [{}],
    "cascades_sums": [_RULES],
    "cascades_t5": [_RULES],
    "direct_alignment": [{"gamma": 3, "task": "documentation"}],
    "distillspec_garden": [{}],
    "distillspec_quality": [{"gamma": 7, "label": "end"}],
    "distillspec_recipes": [
        {"gamma": 5, "label": ("start", "end")},
        {"gamma": 7, "label": "end", "temperature": 1.0},
    ],
    "distillspec_transfer": [{"gamma": (5, 7), "part": "larger target"}],
}


def shortened(row: Row) -> Row:
    """The row with the first units, rounded, and without its source.

    Units that have all values come first; where few have, sums that others lack are left out.
    """
    places = sorted(
        range(len(row.units)), key=lambda place: any(v[place] is None for v in row.sums.values())
    )[:NUM_UNITS]
    chosen = {name: [values[place] for place in places] for name, values in row.sums.items()}
    sums = {
        name: rounded([value for value in values if value is not None], DIGITS)
        for name, values in chosen.items()
        if None not in values
    }
    return row.model_copy(
        update={
            "units": tuple(row.units[place] for place in places),
            "sums": sums,
            "covers": (),
            "source": Source(command=row.source.command.partition(" --config")[0]),
        }
    )


if __name__ == "__main__":
    rows = study_rows([Path(sys.argv[1])])
    chosen = [row for row in rows if any(row.has(**one) for one in CHOSEN.get(row.study, ()))]
    write_rows(Path(sys.argv[2]), map(shortened, chosen))
