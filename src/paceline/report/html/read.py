"""Recognises the kind of a run by its files, and makes its page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import ValidationError

from paceline.config import as_written, describe, read_json
from paceline.errors import UsageError
from paceline.permissions import Origin
from paceline.places import refuse_links_out
from paceline.records import RunDirectory, read_jsonl

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.report.html.page import Page

_WANTED = (
    "the directory of a study, bench, tune, trajectory, sweep, align or pretrain, or a file "
    "written by measure, verify or decode with --json"
)
_MARK, _HEAD = b'<meta name="generator" content="Paceline ', 2_000  # where a report has it


class Found(NamedTuple):
    """A run's page, and the file that it belongs in."""

    page: Page
    path: Path


def read_page(path: Path) -> Found:
    """Make the page of a run directory or of a result file.

    Raises:
        UsageError: the path is not a run, its rows cannot be read, or another program wrote the
            file that the page belongs in.
    """
    page = recognise(path)()
    place = path.with_suffix(".html") if path.is_file() else path / "report.html"
    if place.is_file() and not place.is_symlink() and _MARK not in place.read_bytes()[:_HEAD]:
        raise UsageError(f"{place} is no report of Paceline, which would replace it; move it")
    return Found(page, place)


def recognise(path: Path) -> Callable[[], Page]:
    """A function that makes the page of a run directory or of a result file.

    Raises:
        UsageError: the path is not a run.
    """
    if path.is_file():
        return _file(path)
    if not path.is_dir():
        raise UsageError(f"{path} does not exist; give {_WANTED}")
    refuse_links_out(path, "remove it: a report shows what is in the directory")
    if is_study(path):
        return lambda: _study(path)
    manifest = RunDirectory(path).read_manifest()
    kind = (manifest or {}).get("kind")
    if kind is None:  # written before manifests named their kind
        files = {"sweep.json": "Sweep", "results.jsonl": "Bench"}
        kind = next((files[name] for name in files if (path / name).exists()), None)
    if kind is None:
        raise UsageError(f"{path} holds no run; give {_WANTED}")
    if kind not in _READERS:
        raise UsageError(f"{path} holds a run of kind {kind}, which has no report; give {_WANTED}")
    return lambda: _READERS[kind](path, manifest or {})


def is_study(path: Path) -> bool:
    """Whether the directory has the rows of a study."""
    return (path / "rows.jsonl.gz").exists() or (path / "stages").is_dir()


def _study(path: Path) -> Page:
    from paceline.report.html.background import read_background
    from paceline.report.html.study_page import study_page
    from paceline.studies.session import judge_all, study_rows

    rows = study_rows([path])
    names = {row.study for row in rows}
    own = [one for one in judge_all(rows) if one.claim.study in names]
    return study_page(f"Study {path.name}", rows, own, read_background(rows, [path]))


def _bench(path: Path, _: dict[str, Any]) -> Page:
    from paceline.report.html.bench_page import bench_page
    from paceline.report.run_folder import read_results

    return bench_page(read_results(path))


def _tune(path: Path, manifest: dict[str, Any]) -> Page:
    from paceline.bench.tune import Tuned
    from paceline.report.html.tune_page import tune_page

    found = _validated(Tuned, _required(path, "result.json"), path / "result.json")
    return tune_page(found, manifest.get("environment"))


def _trajectory(path: Path, manifest: dict[str, Any]) -> Page:
    from paceline.measure.trajectory import SCHEMA_VERSION, TrajectoryRow
    from paceline.report.html.trajectory_page import trajectory_page

    file = path / "rows.jsonl"
    known = [row for row in read_jsonl(file) if row.get("schema_version") == SCHEMA_VERSION]
    rows = [_validated(TrajectoryRow, row, file) for row in known]
    runs = [Path(run) for run in manifest.get("config", {}).get("runs", ())]
    if runs:  # a run or a sweep of it; the file keeps the rows of runs that were left out later
        rows = [row for row in rows if {row.stop.run, *row.stop.run.parents} & set(runs)]
    if not rows:
        raise UsageError(f"{path} has no rows yet; run `paceline trajectory` with this output")
    return trajectory_page(rows, manifest)


def _sweep(path: Path, manifest: dict[str, Any]) -> Page:
    from paceline.report.html.sweep_page import sweep_page

    rows = _required(path, "sweep.json")
    return sweep_page(rows, manifest.get("config"), manifest.get("environment"))


def _training(command: str) -> Callable[[Path, dict[str, Any]], Page]:
    def read(path: Path, manifest: dict[str, Any]) -> Page:
        from paceline.report.html.training_page import training_page

        run = RunDirectory(path)
        metrics = read_jsonl(run.metrics)
        if not metrics:
            raise UsageError(f"{path} has no metrics yet; run `paceline {command}` first")
        return training_page(command, manifest, metrics, run.read_result())

    return read


_READERS: dict[str, Callable[[Path, dict[str, Any]], Page]] = {
    "Bench": _bench,
    "Tune": _tune,
    "Trajectory": _trajectory,
    "Sweep": _sweep,
    "Align": _training("align"),
    "Pretrain": _training("pretrain"),
}


def _file(path: Path) -> Callable[[], Page]:
    if path.name == "sweep.json":
        return lambda: _sweep(path.parent, {})
    found = read_json(path, f"give {_WANTED}")
    keys = set(found) if isinstance(found, dict) else set()
    for wanted, reader in _KEYS.items():
        if wanted <= keys:
            return lambda: reader(found, path)
    raise UsageError(f"{path} is not a result that has a report; give {_WANTED}")


def _served(found: dict[str, Any], path: Path) -> Page:
    from paceline.measure.served import ServedMeasurement
    from paceline.report.html.served_page import served_page

    return served_page(_validated(ServedMeasurement, found, path))


def _measurement(found: dict[str, Any], path: Path) -> Page:
    from paceline.measure import Measurement
    from paceline.report.html.measure_page import measure_page

    return measure_page(_validated(Measurement, found, path))


def _losslessness(found: dict[str, Any], path: Path) -> Page:
    from paceline.measure.losslessness import LosslessnessReport
    from paceline.report.html.verify_page import verify_page

    values = {key: value for key, value in found.items() if key != "passed"}
    return verify_page(_validated(LosslessnessReport, values, path))


def _tuned(found: dict[str, Any], path: Path) -> Page:
    from paceline.bench.tune import Tuned
    from paceline.report.html.tune_page import tune_page

    return tune_page(_validated(Tuned, found, path))


def _decoded(found: dict[str, Any], path: Path) -> Page:
    from paceline.report.html.decode_page import decode_page

    with as_written(path):
        return decode_page(found)


_KEYS: dict[frozenset[str], Callable[[dict[str, Any], Path], Page]] = {
    frozenset({"served", "agreement"}): _served,
    frozenset({"acceptance", "gammas", "verdict"}): _measurement,
    frozenset({"greedy", "distribution"}): _losslessness,
    frozenset({"tried", "chosen", "statement"}): _tuned,
    frozenset({"blocks", "stats"}): _decoded,
}


def _required(path: Path, name: str) -> Any:
    if not (path / name).exists():
        raise UsageError(f"{path} has no {name} yet; run the command to its end")
    return read_json(path / name)


def _validated(kind: Any, values: Any, path: Path) -> Any:
    try:
        return kind.model_validate(values, context=Origin.RESULTS)
    except ValidationError as error:
        raise UsageError(
            f"{path} is not a result of this version: {describe(error)}; run the command again"
        ) from None
