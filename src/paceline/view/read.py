"""Reads a run directory or a result file by the kind that it names, and makes its page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.bench.tune import Tuned
from paceline.config import read_json, read_result
from paceline.errors import UsageError
from paceline.measure import DraftComparison, Measurement
from paceline.measure.losslessness import LosslessnessReport
from paceline.measure.served import ServedMeasurement
from paceline.measure.speculators import SpeculatorTable
from paceline.places import neighbour
from paceline.records import RunDirectory, read_jsonl
from paceline.results.row import read_rows
from paceline.view import Report
from paceline.view.bench_pages import bench_page, tune_page
from paceline.view.measure_pages import (
    drafts_page,
    measure_page,
    served_page,
    speculators_page,
    verify_page,
)
from paceline.view.training_pages import training_page, trajectory_page

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from paceline.view.page import Page

_WANTED = (
    "the directory of a bench, tune, trajectory, align or pretrain, or a file written by measure, "
    "verify or tune with --json"
)


def read_page(path: Path) -> Report:
    """Make the page of a run directory or of a result file."""
    page = _of_file(path) if path.is_file() else _of_directory(path)
    return Report(page, path.with_suffix(".html") if path.is_file() else path / "report.html")


def _of_directory(path: Path) -> Page:
    if not path.is_dir():
        raise UsageError(f"{path} does not exist{neighbour(path)}; give {_WANTED}")
    manifest = RunDirectory(path).read_manifest() or {}
    kind = manifest.get("kind")
    if kind is None:
        raise UsageError(f"{path} holds no run; give {_WANTED}")
    if kind not in _RUNS:
        raise UsageError(f"{path} holds a run of kind {kind}, which has no report; give {_WANTED}")
    return _RUNS[kind](path, manifest)


def _tune(path: Path, manifest: dict[str, Any]) -> Page:
    file = path / "result.json"
    if not file.exists():
        raise UsageError(f"{path} has no result.json yet; run `paceline tune` to its end")
    return tune_page(read_result(Tuned, file, "paceline tune"), manifest.get("environment"))


def _trajectory(path: Path, manifest: dict[str, Any]) -> Page:
    rows = read_rows(path / "rows.jsonl") if (path / "rows.jsonl").exists() else []
    if not rows:
        raise UsageError(f"{path} has no rows yet; run `paceline trajectory` with this output")
    return trajectory_page(rows, manifest)


def _training(path: Path, manifest: dict[str, Any]) -> Page:
    run, command = RunDirectory(path), manifest["kind"].lower()
    metrics = read_jsonl(run.metrics)
    if not metrics:
        raise UsageError(f"{path} has no metrics yet; run `paceline {command}` first")
    return training_page(command, manifest, metrics, run.read_result())


_RUNS: dict[str, Callable[[Path, dict[str, Any]], Page]] = {
    "Bench": bench_page,
    "Tune": _tune,
    "Trajectory": _trajectory,
    "Align": _training,
    "Pretrain": _training,
}
_FILES: dict[str, tuple[Any, Callable[[Any], Page]]] = {
    "measure": (Measurement, measure_page),
    "measure drafts": (DraftComparison, drafts_page),
    "measure --engine": (ServedMeasurement, served_page),
    "measure --speculative-config": (SpeculatorTable, speculators_page),
    "verify": (LosslessnessReport, verify_page),
    "tune": (Tuned, tune_page),
}


def _of_file(path: Path) -> Page:
    found = read_json(path, f"give {_WANTED}")
    kind = str(found.get("kind")) if isinstance(found, dict) else ""
    if kind not in _FILES:
        raise UsageError(f"{path} is not a result that has a report; give {_WANTED}")
    model, page = _FILES[kind]
    return page(read_result(model, path, f"paceline {kind.split()[0]} --json"))
