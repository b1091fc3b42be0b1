"""HTML reports: one file that needs no network, from result rows only.

page.py            the model of a page: sections of figures, tables, claims, pictures of text
charts.py          charts by Vega-Altair: frontiers, curves, heat maps, dominance, intervals
encodings.py       axes, colours, shapes and text alternatives of charts
theme.py           colours as CSS variables, and the configuration of all charts
definitions.py     the terms that the margin defines
render.py          page -> HTML by the templates
made_by.py         the command and configuration behind rows
read.py            a run directory or a result file -> its page
installation.py    checks that the libraries are installed
*_page.py          one module for each kind of run; bench_figures.py: further figures of a bench

Modules other than `installation`, `page` and `definitions` import the libraries of the extra
`report`; call `installation.require` first.
"""
