"""Ways of decoding compared on a task: quality against speed.

grid.py      rules, strategies, thresholds, block lengths and temperatures -> cells
workbench.py models, task and examples that all cells share
runner.py    every cell on every example, the target alone timed beside it; kept, resumed
schema.py    result rows, versioned, from which everything else is computed
prediction.py what one teacher-forced pass says of the cells
measured_frontier.py  rows -> figures with intervals, and the best that a family of cells reaches
tune_result.py  what tune is asked for, and what it found
sequential_test.py  order of the tests, and the test, of the settings that tune proposes
tune.py      choose a setting for a quality floor or a latency budget
"""

from paceline.bench.grid import Grid
from paceline.bench.runner import bench, read_rows
from paceline.bench.schema import ResultRow
from paceline.bench.workbench import BenchConfig

__all__ = ["BenchConfig", "Grid", "ResultRow", "bench", "read_rows"]
