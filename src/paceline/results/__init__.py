"""Result rows, the figures that they give, and their intervals.

Everything that measures writes rows; tables, charts and pages read them.

    import paceline.results
    frame = paceline.results.load("runs/drafts")     # a pandas DataFrame: a line per row

Read `row` first, then `figures` and `built_in`.
"""

from paceline.results import built_in as built_in
from paceline.results.figures import FIGURES as FIGURES
from paceline.results.figures import Figure as Figure
from paceline.results.figures import frame_of as frame_of
from paceline.results.figures import load as load
from paceline.results.figures import register as register
from paceline.results.row import Row as Row
from paceline.results.row import Source as Source
from paceline.results.row import read_rows as read_rows

load_rows = load  # for `paceline`, where `load` loads a model
