"""Print the figures that `make demo` measured; exits with the code of the best aligned verdict."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from paceline.cli.result_tables import verdict_lines
from paceline.measure import Measurement
from paceline.measure.results import gamma_of
from paceline.measure.verdict import best_code
from paceline.results.figures import FIGURES


def read(folder: Path, when: str, temperature: int) -> Measurement:
    """A measurement of `make demo`."""
    file = folder / f"measure-{when}-t{temperature}.json"
    return Measurement.model_validate_json(file.read_bytes())


def before_and_after(folder: Path) -> tuple[Table, int]:
    """The table of a folder's measurements, and the exit code."""
    table = Table("", "before", "after", title="Held-out Python documentation")
    codes: list[int] = []
    for t in (1, 0):
        pair = [read(folder, when, t) for when in ("before", "after")]
        for name, figure in (
            ("expected acceptance,", "expected_acceptance"),
            ("greedy agreement, text at", "greedy_agreement"),
        ):
            table.add_row(f"{name} T={t}", *(str(found.figure(figure)) for found in pair))
        taus, speedups = zip(*map(_timed, pair), strict=True)
        table.add_row(f"tokens per target call, T={t}", *taus)
        table.add_row(f"measured speedup, T={t}", *speedups)
        table.add_row(f"verdict, T={t}", *(found.verdict.word for found in pair))
        table.add_section()
        codes.append(pair[1].verdict.exit_code)
    return table, best_code(codes)


def _timed(found: Measurement) -> tuple[str, str]:
    if (row := found.requests) is None:
        return "-", "not timed"
    speedup = f"{found.figure('speedup', row)}x at gamma {gamma_of(row)}"
    return f"{FIGURES['block_efficiency'].value(row):.3f}", speedup


if __name__ == "__main__":
    console = Console(highlight=False, soft_wrap=True)
    for when in ("before", "after"):  # as paceline measure prints it, without --json
        console.print(*verdict_lines(read(Path(sys.argv[1]), when, 1)), sep="\n")
    table, code = before_and_after(Path(sys.argv[1]))
    console.print(table)
    sys.exit(code)
