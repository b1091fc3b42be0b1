"""Reads the run directory of a bench: rows by temperature, predictions and manifest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import ValidationError

from paceline.bench.measured_frontier import Frontier
from paceline.bench.prediction import read_predictions
from paceline.bench.runner import read_rows, without_dropped
from paceline.bench.schema import TARGET_ALONE, TARGET_BONUS, ResultRow, family
from paceline.bench.workbench import Grid
from paceline.decode.strategies import Autoregressive, BigLittle, Speculative
from paceline.errors import UsageError
from paceline.permissions import Origin
from paceline.records import RunDirectory
from paceline.view.page import sampling_words

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from paceline.bench.prediction import Prediction
    from paceline.core.sampling import SamplingParams
    from paceline.decode.strategies import DecodingConfig

_ORDER = (  # related families next to each other, as in the papers
    *("lossless", "lossy beta 1.0", "lossy beta tuned"),
    *("lenient linear", "lenient square", "lenient exponential"),
    *("bild", "chow", "chow_log", "diff", "diff_log", "opt", "opt_log"),
    *("token_v1", "token_v2", "token_v3"),
    *("token_cascade", "sequence_cascade", "sequence_cascade normalised", "big_little"),
)
_THRESHOLDS = ("alpha", "epsilon", "threshold", "rollback")


@dataclass(frozen=True)
class Cells:
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
    def silence(self) -> str:
        """Why quality and speed cannot be compared; empty if they can."""
        if self.frontier is None:
            return (
                "The target alone has no finished cell here, so there is nothing to compare "
                f"{len(self.done)} finished cells with; run the bench again."
            )
        if self.frontier.target.metric is None:
            return "The task has no metric, so there is no quality to compare with speed."
        if not self.frontier.value("quality", self.frontier.target) > 0:
            return "The target's own quality is 0, so quality / target's is undefined."
        return ""


@dataclass(frozen=True)
class Results:
    """Contents of a run directory."""

    rows: Sequence[ResultRow]
    parts: Sequence[Cells]
    predictions: dict[str, Prediction]
    manifest: dict[str, Any] | None


class Curve(NamedTuple):
    """Cells of a family that differ only in the threshold, sorted by it."""

    name: str
    length: float
    cells: list[ResultRow]


def read_results(folder: Path) -> Results:
    """Read a run directory; raises UsageError if it has no rows or an invalid one."""
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
        parts=[_cells(sampling, rows, planned) for sampling in ordered],
        predictions=read_predictions(folder),
        manifest=manifest,
    )


def _cells(
    sampling: SamplingParams, rows: Sequence[ResultRow], planned: Sequence[DecodingConfig]
) -> Cells:
    here = [row for row in rows if row.decoding.sampling == sampling]
    done = [row for row in here if row.status == "done"]
    answered = any(isinstance(row.decoding.strategy, Autoregressive) for row in done)
    tried = [row.decoding for row in here]
    return Cells(
        name=sampling_words(vars(sampling)),
        frontier=Frontier(done) if answered else None,
        done=done,
        failed=[row for row in here if row.status == "failed"],
        missing=[cell for cell in planned if cell.sampling == sampling and cell not in tried],
    )


def _planned(manifest: dict[str, Any] | None) -> list[DecodingConfig]:
    """Cells of the manifest's grid; none if another version wrote it."""
    try:
        grid = (manifest or {})["config"]["grid"]
        return Grid.model_validate(grid, context=Origin.RESULTS).cells()
    except (KeyError, ValidationError):
        return []


def curves(frontier: Frontier) -> list[Curve]:
    """A curve per family and gamma (or fallback), related families next to each other."""
    families = {name: rows for name, rows in frontier.families().items() if name != TARGET_ALONE}
    places = {name: place for place, name in enumerate(_ORDER)}

    def place(name: str) -> tuple[int, str]:
        # A bench has one bonus, so the families of rules with either are in one place.
        return places.get(name.removesuffix(f" {TARGET_BONUS}"), len(places)), name

    found: list[Curve] = []
    for name in sorted(families, key=place):
        for length in sorted({_length(row) for row in families[name]}):
            alike = [row for row in families[name] if _length(row) == length]
            found.append(Curve(name, length, sorted(alike, key=_threshold)))
    return found


def _length(row: ResultRow) -> float:
    strategy = row.decoding.strategy
    if isinstance(strategy, Speculative):
        return strategy.num_speculative_tokens
    return strategy.fallback if isinstance(strategy, BigLittle) else 0


def _threshold(row: ResultRow) -> float:
    strategy = row.decoding.strategy
    chosen = getattr(strategy, "rule", strategy)
    given = (getattr(chosen, name, None) for name in _THRESHOLDS)
    return next((value for value in given if value is not None), 0.0)
