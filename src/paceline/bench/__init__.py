"""Compares quality and speed of decoding settings on a task.

grid.py               rules, strategies, thresholds, block lengths and temperatures -> cells
workbench.py          models, task and examples that all cells share
runner.py             runs every cell on every example, interleaved with the target alone; resumes
schema.py             versioned result rows
prediction.py         predicts the figures of a cell from teacher-forced passes
measured_frontier.py  rows -> figures with intervals, best cell under a constraint
tune.py               chooses a setting for a quality floor or a latency budget
tune_result.py        configuration and result of tune
sequential_test.py    tests of the settings that tune proposes, and their order
cell.py               one setting that answers the examples, and its row
quality_curves.py     two families of cells compared by their quality at equal cost
served_cells.py       runs cells in vLLM
score.py              scores a model behind a URL on a task
engine_seconds.py     replaces the seconds of rows by those of a serving engine
"""

from paceline.bench.runner import bench, read_rows
from paceline.bench.schema import ResultRow
from paceline.bench.workbench import BenchConfig, Grid

__all__ = ["BenchConfig", "Grid", "ResultRow", "bench", "read_rows"]
