"""Reports from result rows: a bench as Markdown and plots, every run as an HTML page.

run_folder.py         a run directory -> rows by temperature, predictions, manifest
markdown.py           tables and numbers as text
bench_tables.py       all cells, summaries by family, failed cells, description of the run
claims.py             the paper's claims, and whether they hold here
comparison.py         two families of cells compared by one statistic
predictions.py        predicted and measured rejection rates
plots.py              quality against latency, deferral rate and rejection rate
trajectory_plots.py   tokens per target call over the course of training
write.py              writes the Markdown report into the run directory
run_kind.py           what kind of run a directory holds
html/                 one HTML file for each kind of run
"""

from paceline.report.write import Report, write_report

__all__ = ["Report", "write_report"]
