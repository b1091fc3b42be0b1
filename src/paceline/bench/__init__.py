"""Compares quality and speed of decoding settings on a task.

answers.py            answers of a cell as sums of a row; the files of a bench; names of decoding
                      settings in rows and tables
workbench.py          rules, thresholds, block lengths and temperatures -> cells; models, task and
                      examples that all cells share; a cell that answers them
runner.py             runs every cell on every example, interleaved with the target alone; resumes
served_cells.py       runs cells in vLLM
sequential_test.py    configuration and bound of tune; tests of the settings, and their order
tune.py               predicts cells by teacher-forced passes, measures some, and chooses one for a
                      quality floor or a latency budget
score.py              scores a model behind a URL on a task

Its rows are `results.row.Row`; `results.frontier` computes from them.
"""

from paceline.bench.answers import read_rows
from paceline.bench.runner import bench
from paceline.bench.workbench import BenchConfig, Grid

run_bench = bench  # for `paceline`, where `bench` is this package

__all__ = ["BenchConfig", "Grid", "bench", "read_rows", "run_bench"]
