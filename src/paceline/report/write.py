"""Write the report of a bench into its run directory: `report.md` and `plots/`."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from paceline.errors import UsageError
from paceline.records import atomic_directory, atomic_write_text
from paceline.report import bench_tables, claims, predictions
from paceline.report.markdown import definitions, escape, figure
from paceline.report.plots import draw_plots
from paceline.report.run_folder import Results, Section, read_results

if TYPE_CHECKING:
    from pathlib import Path

FILE = "report.md"
PLOTS = "plots"
_HEAD = b"# Bench report\n"

_INTERVALS = (
    "Intervals are 95% intervals over the examples: of mean scores and of quality / target's by "
    "Dirichlet weights with one more example at the worst score (exact for scores of 0 and 1), of "
    "speedups and rates by the studentised bootstrap; speeds use the timed examples only."
)
_LUCK = (
    "A lossless rule has the target's quality by proof. Above temperature 0 it samples other "
    "texts, so its mean score differs from the target's by chance."
)
_CAPTION = (
    "A line connects the cells of a family in the order of their thresholds; the line style shows "
    "gamma, or the fallback threshold of big_little. token_cascade and sequence_cascade examine no "
    "drafted token, so they have no rejection rate. The latency of oracles is omitted, because "
    "they run both models."
)


class Report(NamedTuple):
    """Path of the report, and its summary tables."""

    path: Path
    summary: str


def write_report(folder: Path) -> Report:
    """Write the report of a bench's run directory.

    Raises:
        UsageError: The folder has no valid rows, `report.md` or a file in `plots/` is another
            program's, or matplotlib is not installed; in the latter case `report.md` is written
            without plots.
        StorageError: The report cannot be written.
    """
    results = read_results(folder)
    plots = folder / PLOTS
    for path in plots.iterdir() if plots.is_dir() and not plots.is_symlink() else ():
        if not path.name.startswith("temperature-"):
            raise UsageError(f"{path} is no plot of this report, which replaces {plots}; move it")
    path = folder / FILE
    if path.is_file() and not path.is_symlink() and not path.read_bytes().startswith(_HEAD):
        raise UsageError(f"{path} is no report of Paceline, which would replace it; move it")
    atomic_write_text(path, render(results))
    if any(section.judged for section in results.sections):
        with atomic_directory(plots) as scratch:
            draw_plots(results.sections, scratch)
    return Report(path, _summaries(results))


def render(results: Results) -> str:
    """Return the report as Markdown."""
    facts = "\n".join(f"- {escape(line)}" for line in bench_tables.run_lines(results))
    parts = [
        f"# Bench report\n\n{facts}\n\n{_INTERVALS}",
        f"## Speedup at the target's quality, quality within its latency\n\n{_summaries(results)}",
        f"{definitions(bench_tables.SUMMARY_COLUMNS)}\n\n{_LUCK}",
        f"## The paper's claims\n\n{_claims(results)}",
        f"## Plots\n\n{_plots(results)}",
        *_predictions(results),
        f"## All cells\n\n{_cells(results)}",
        *_failures(results),
    ]
    return "\n\n".join(parts) + "\n"


def _summaries(results: Results) -> str:
    return "\n\n".join(
        f"### {_title(section)}\n\n{bench_tables.summary_table(section)}"
        for section in results.sections
    )


def _claims(results: Results) -> str:
    parts = [
        'From section 6 and appendices E.6 and E.7 of "Faster Cascades via Speculative Decoding".'
    ]
    if any(section.judged for section in results.sections):
        parts.append(claims.explanation())
    for section in results.sections:
        text = claims.claims_text(section.judged) if section.judged else section.silence
        parts.append(f"### {_title(section)}\n\n{text}")
    return "\n\n".join(parts)


def _plots(results: Results) -> str:
    lines = [
        f"![{section.name}]({PLOTS}/{section.slug}.png)"
        if section.judged
        else f"{_title(section)}: {section.silence}"
        for section in results.sections
    ]
    return "\n\n".join([*lines, _CAPTION])


def _predictions(results: Results) -> list[str]:
    found = {
        section.name: predictions.predictions_text(section, results.predictions)
        for section in results.sections
    }
    parts = [f"### {name.capitalize()}\n\n{text}" for name, text in found.items() if text]
    if not parts:
        return []
    body = "\n\n".join(parts)
    columns = definitions(predictions.COLUMNS)
    return [f"## Predicted and measured rejection rates\n\n{body}\n\n{columns}"]


def _cells(results: Results) -> str:
    parts: list[str] = []
    scored = False
    for section in results.sections:
        parts.append(f"### {_title(section)}")
        if section.frontier is None:
            parts.append(section.silence or "")
            continue
        scored = section.frontier.target.metric is not None
        parts.append(bench_tables.cells_table(section, section.frontier))
        if corpus := bench_tables.corpus_table(section.done):
            parts.append(f"Figures of all answers together, in each metric's scale:\n\n{corpus}")
        again = figure(section.frontier.against_itself())
        parts.append(f"The target alone, timed twice: speedup against itself: {again}.")
    return "\n\n".join([*parts, definitions(bench_tables.cell_columns(scored=scored))])


def _failures(results: Results) -> list[str]:
    parts = [
        f"### {_title(section)}\n\n{bench_tables.failed_table(section.failed)}"
        for section in results.sections
        if section.failed
    ]
    return ["## Failed cells", *parts] if parts else []


def _title(section: Section) -> str:
    return section.name.capitalize()
