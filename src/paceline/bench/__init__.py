"""Compares quality and speed of decoding settings on a task.

schema.py             versioned result rows
workbench.py          rules, thresholds, block lengths and temperatures -> cells; models, task and
                      examples that all cells share; a cell that answers them
runner.py             runs every cell on every example, interleaved with the target alone; resumes
served_cells.py       runs cells in vLLM
prediction.py         predicts the figures of a cell from teacher-forced passes
measured_frontier.py  rows -> figures with intervals, best cell under a constraint
sequential_test.py    bound and result of tune; tests of the settings, and their order
tune.py               chooses a setting for a quality floor or a latency budget
comparison.py         two families of cells compared by one statistic
quality_curves.py     two families of cells compared by their quality at equal cost
score.py              scores a model behind a URL on a task
"""

from paceline.bench.runner import bench, read_rows
from paceline.bench.schema import ResultRow
from paceline.bench.workbench import BenchConfig, Grid

__all__ = ["BenchConfig", "Grid", "ResultRow", "bench", "read_rows"]
