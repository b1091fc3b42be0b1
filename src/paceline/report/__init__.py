"""What a bench found, for a person: tables, the papers' claims, plots. From its rows alone.

run_folder.py   a run folder -> rows by temperature, predictions, manifest
markdown.py     tables and figures as text
bench_tables.py  every cell, the two summaries of a trade-off, failed cells, what the run was
claims.py       what the paper claims, and whether it held here
comparison.py   two families of cells compared by one statistic
predictions.py  rejection rates as predicted and as measured
plots.py        quality against latency, deferral and rejection
write.py        all of it into the run folder
"""

from paceline.report.write import Report, write_report

__all__ = ["Report", "write_report"]
