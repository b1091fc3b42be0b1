"""Report of a bench from its result rows: tables, the paper's claims, plots.

run_folder.py         a run directory -> rows by temperature, predictions, manifest
markdown.py           tables and numbers as text
bench_tables.py       all cells, summaries by family, failed cells, description of the run
claims.py             the paper's claims, and whether they hold here
comparison.py         two families of cells compared by one statistic
predictions.py        predicted and measured rejection rates
plots.py              quality against latency, deferral rate and rejection rate
trajectory_plots.py   tokens per target call over the course of training
write.py              writes the report into the run directory
"""

from paceline.report.write import Report, write_report

__all__ = ["Report", "write_report"]
