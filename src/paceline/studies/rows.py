"""Result rows of studies: rows whose decoding settings are kept whole, for frontiers."""

from __future__ import annotations

from paceline.decode.strategies import DecodingConfig
from paceline.results.row import Row


class StudyRow(Row):
    """One setting of a study on one set of examples.

    Attributes:
        decoding: Of a cell of a bench; None for other rows.
    """

    decoding: DecodingConfig | None = None
