"""Read the run directory of a bench: rows by temperature, predictions and manifest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from paceline.bench.measured_frontier import Frontier
from paceline.bench.prediction import read_predictions
from paceline.bench.runner import read_rows, without_dropped
from paceline.bench.schema import ResultRow, family
from paceline.bench.workbench import Grid
from paceline.decode.strategies import Autoregressive
from paceline.errors import UsageError
from paceline.permissions import Origin
from paceline.places import refuse_links_out
from paceline.records import RunDirectory

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from paceline.bench.prediction import Prediction
    from paceline.core.sampling import SamplingParams
    from paceline.decode.strategies import DecodingConfig


@dataclass(frozen=True)
class Section:
    """The cells with one set of sampling parameters.

    Attributes:
        name: Such as `temperature 0.7, top-p 0.9`.
        frontier: None if the target alone has no finished cell.
        done: Finished cells.
        failed: Failed cells.
        missing: Cells of the manifest's grid without a row.
    """

    name: str
    frontier: Frontier | None
    done: Sequence[ResultRow]
    failed: Sequence[ResultRow]
    missing: Sequence[DecodingConfig]

    @property
    def slug(self) -> str:
        """The name as a file name."""
        return self.name.replace(",", "").replace(" ", "-")

    @property
    def empty_families(self) -> list[str]:
        """Families in the grid without a finished cell."""
        asked = [*(row.decoding for row in self.failed), *self.missing]
        finished = {family(row.decoding) for row in self.done}
        return sorted({family(decoding) for decoding in asked} - finished)

    @property
    def judged(self) -> Frontier | None:
        """The frontier if quality and speed can be compared; else None, see `silence`."""
        return None if self.silence else self.frontier

    @property
    def silence(self) -> str | None:
        """Why quality and speed cannot be compared; None if they can."""
        if self.frontier is None:
            return (
                "The target alone has no finished cell here, so there is nothing to compare "
                f"{len(self.done)} finished cells with; run the bench again."
            )
        if self.frontier.target.metric is None:
            return "The task has no metric, so there is no quality to compare with speed."
        if not self.frontier.value("quality", self.frontier.target) > 0:
            return "The target's own quality is 0, so quality / target's is undefined."
        return None


@dataclass(frozen=True)
class Results:
    """Contents of a run directory."""

    rows: Sequence[ResultRow]
    sections: Sequence[Section]
    predictions: dict[str, Prediction]
    manifest: dict[str, Any] | None


def read_results(folder: Path) -> Results:
    """Read a run directory; raises UsageError if it has no rows or an invalid one."""
    refuse_links_out(folder, "remove it: a report shows what is in the directory")
    manifest = RunDirectory(folder).read_manifest()
    rows = read_rows(folder, (manifest or {}).get("context"))
    if not rows:
        other = "only result rows of another bench" if read_rows(folder) else "no result rows"
        raise UsageError(f"{folder} has {other}; run `paceline bench` with this output first")
    planned = _planned(manifest)
    if planned:
        rows = without_dropped(rows, planned)
    samplings = dict.fromkeys(row.decoding.sampling for row in rows)
    samplings |= dict.fromkeys(decoding.sampling for decoding in planned)
    ordered = sorted(samplings, key=lambda sampling: sampling.temperature)
    return Results(
        rows=rows,
        sections=[_section(sampling, rows, planned) for sampling in ordered],
        predictions=read_predictions(folder),
        manifest=manifest,
    )


def _section(
    sampling: SamplingParams, rows: Sequence[ResultRow], planned: Sequence[DecodingConfig]
) -> Section:
    here = [row for row in rows if row.decoding.sampling == sampling]
    done = [row for row in here if row.status == "done"]
    answered = any(isinstance(row.decoding.strategy, Autoregressive) for row in done)
    tried = [row.decoding for row in here]
    return Section(
        name=_name(sampling),
        frontier=Frontier(done) if answered else None,
        done=done,
        failed=[row for row in here if row.status == "failed"],
        missing=[cell for cell in planned if cell.sampling == sampling and cell not in tried],
    )


def _name(sampling: SamplingParams) -> str:
    parts = [f"temperature {sampling.temperature:g}"]
    if sampling.top_p < 1:
        parts.append(f"top-p {sampling.top_p:g}")
    if sampling.top_k:
        parts.append(f"top-k {sampling.top_k}")
    if sampling.repetition_penalty != 1:
        parts.append(f"repetition penalty {sampling.repetition_penalty:g}")
    return ", ".join(parts)


def _planned(manifest: dict[str, Any] | None) -> list[DecodingConfig]:
    """Cells of the manifest's grid; none if another version wrote it."""
    try:
        grid = (manifest or {})["config"]["grid"]
        return Grid.model_validate(grid, context=Origin.RESULTS).cells()
    except (KeyError, ValidationError):
        return []
