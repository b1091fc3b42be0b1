"""What a study measured, with what and at what cost; and the commands for models of one's own."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from paceline.report.html.page import Commands, Listing, Source
from paceline.studies.collect import MODELS, model_path

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from paceline.report.html.background import Background
    from paceline.studies.rows import Source as RowSource
    from paceline.studies.rows import StudyRow
    from paceline.studies.study_file import StudyConfig

_DATA = {"data", "tasks", "prompts", "task"}
_FILE = re.compile(r"[^\s{}:]+\.[A-Za-z]\w*")
_NO_PATH = "path not recorded"
_UNKNOWN_DAY = "not recorded in these rows"
_DIGEST = re.compile(r" [0-9a-f]{16}$")  # of the task, at the end of a population
_MOST_COVERED = 8
_FIRST = ("models", "examples", "machine", "date")  # a page of many studies stays short
_OPTIONS = (
    ("--dry-run", "add it to see the stages, their minutes and the disk space only."),
    ("--scale smoke", "add it to try the commands on a few examples."),
)


def setup(name: str, rows: Sequence[StudyRow], background: Background) -> Listing:
    """Models, examples, settings, machine, versions and cost of one study."""
    study = background.studies.get(name)
    sources = list({row.source.command: row.source for row in rows}.values())
    covers = list(dict.fromkeys(item for row in rows for item in row.covers))
    more = len(covers) - _MOST_COVERED
    covered = ", ".join(covers[:_MOST_COVERED]) + (f" and {more} more" if more > 0 else "")
    entries: list[tuple[str, list[str]]] = [
        ("covers", [covered] if covers else []),
        ("models", _models(rows, sources, background)),
        ("examples", _examples(rows)),
        ("data", _data(sources, background)),
        ("settings", _settings(rows)),
        ("machine", list(dict.fromkeys(source.machine for source in sources))),
        ("date", sorted({source.date for source in sources if source.date}) or [_UNKNOWN_DAY]),
        ("versions", _versions(sources)),
        ("cost", [] if study is None else _cost(study)),
    ]
    title = name.replace("_", " ").capitalize() if study is None else study.title
    known = [one for one in entries if one[1]]
    first = [one for one in known if one[0] in _FIRST]
    more = [one for one in known if one[0] not in _FIRST]
    about = "" if study is None else f" {study.about}"
    return Listing(title, first, f"Study {name}.{about}", more)


def _models(
    rows: Sequence[StudyRow], sources: Sequence[RowSource], background: Background
) -> list[str]:
    """A line per model: its key, its path, its size and its fingerprint, as far as they are known.

    Commands record different parts. Two fingerprints mean that a model was replaced in between.
    """
    found: dict[tuple[str, str], dict[str, None]] = {}
    for source in sources:
        config = background.config(source)
        for key in MODELS:
            path = model_path(config, key)
            mark = source.fingerprints.get(key) or source.fingerprints.get(f"{key}_fingerprint")
            if path is None and mark is None:
                continue
            facts = found.setdefault((key, path or _NO_PATH), {})
            if key in source.sizes:
                facts[f"{_count(source.sizes[key])} parameters"] = None
            if mark is not None:
                facts[f"fingerprint {mark}"] = None
    lines = [
        f"{key}: {', '.join([path, *facts])}"
        for (key, path), facts in found.items()
        if not any(  # the model of a line with its path
            key == name and path == _NO_PATH != other and facts.keys() <= more.keys()
            for (name, other), more in found.items()
        )
    ]
    ratios = {row.setting["parameter_ratio"] for row in rows if "parameter_ratio" in row.setting}
    sizes = ", ".join(f"{100 * float(ratio):.3g}%" for ratio in sorted(ratios, key=float))
    return [*lines, f"the draft has {sizes} of the target's parameters"] if sizes else lines


def _count(parameters: int) -> str:
    """A number of parameters in short, such as 1.2 million."""
    for unit, name in ((10**9, " billion"), (10**6, " million")):
        if parameters >= unit:
            return f"{parameters / unit:.3g}{name}"
    return f"{parameters:,}"


def _examples(rows: Sequence[StudyRow]) -> list[str]:
    """Number of examples of each population; a study's looks add to it."""
    units: dict[str, set[int]] = {}
    for row in rows:
        units.setdefault(_DIGEST.sub("", row.population), set()).update(row.units)
    return [f"{len(each):,} {population}" for population, each in units.items()]


def _data(sources: Iterable[RowSource], background: Background) -> list[str]:
    """Paths of texts in the configurations."""
    found: dict[str, None] = {}
    for source in sources:
        found |= dict.fromkeys(_paths(background.config(source)))
    return list(found)


def _paths(value: Any, *, is_data: bool = False) -> Iterator[str]:
    """Names of files; other texts, such as a task's prompt, have spaces or no suffix."""
    if isinstance(value, str):
        if is_data and _FILE.fullmatch(value):
            yield value
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from _paths(part, is_data=is_data or key in _DATA)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _paths(part, is_data=is_data)


def _settings(rows: Sequence[StudyRow]) -> list[str]:
    """Values of the settings that most studies vary."""
    names = {
        "temperature": "temperature",
        "top_p": "top-p",
        "max_new_tokens": "new tokens, at most",
        "gamma": "gamma",
        "seed": "seed of training",
    }
    lines: list[str] = []
    for key, words in names.items():
        values = sorted({row.setting[key] for row in rows if key in row.setting}, key=float)
        if key == "gamma":
            drafted = {name[7:] for row in rows for name in row.sums if name.startswith("blocks_")}
            values = sorted({*values, *map(int, drafted)}, key=float)
        if values:
            lines.append(f"{words}: {', '.join(f'{float(value):g}' for value in values)}")
    return lines


def _versions(sources: Sequence[RowSource]) -> list[str]:
    versions = dict.fromkeys(
        ", ".join(f"{name} {value}" for name, value in source.versions.items() if value)
        for source in sources
    )
    commits = dict.fromkeys(
        f"{source.commit[:12]}{' with changes' if source.modified else ''}"
        for source in sources
        if source.commit
    )
    lines = [text for text in versions if text]
    return [*lines, f"commit of Paceline: {', '.join(commits)}"] if commits else lines


def _cost(study: StudyConfig) -> list[str]:
    """Expected minutes in the study file: of each stage, and of all stages in one look."""
    stages = study.stages.items()
    cpu, gpu = (sum(getattr(one.minutes, kind) for _, one in stages) for kind in ("cpu", "gpu"))
    each = ", ".join(f"{name} {stage.minutes.cpu:g}" for name, stage in stages)
    lines = [f"expected: {cpu:g} minutes on two CPU cores, {gpu:g} on a GPU"]
    if len(study.stages) > 1:
        lines.append(f"minutes of each stage on two cores: {each}")
    if study.looks > 1 and any(one.is_drawn_again for one in study.stages.values()):
        again = sum(one.minutes.cpu for one in study.stages.values() if one.is_drawn_again)
        lines.append(
            f"{again:g} minutes more each time that claims are undecided and more "
            f"examples are drawn; {study.looks - 1} at most"
            if study.looks > 2
            else f"{again:g} minutes more if claims are undecided and more examples are drawn"
        )
    return lines


def commands(name: str, study: StudyConfig) -> Commands:
    """The commands that run the study on models of one's own and judge its claims."""
    places = {variable: variable.upper() for variable in study.variables}
    output = f"runs/mine/{name}"
    settings = [f"--set variables.{variable}={word}" for variable, word in places.items()]
    run = " \\\n  ".join([f"paceline study run {name}", *settings, f"--output {output}"])
    meanings = [
        (word, f"{_needs(study, variable)}here it was {study.variables[variable]}.")
        for variable, word in places.items()
    ]
    return Commands(
        title=study.title,
        text=(
            "In a clone of Paceline. The models of a pair need the same tokenizer. The last "
            "command writes this page for your models."
        ),
        lines=[
            "pip install -e '.[study,tasks,report]'",
            run,
            "paceline claims --rows runs/mine \\\n  --html claims.html",
        ],
        places=[*meanings, *_OPTIONS],
        source=Source(
            f"paceline study run {name}",
            study.model_dump(mode="json", exclude_defaults=True),
            note=f"The study file, configs/studies/{name}.yaml, as it is now.",
            name=f"{name}.yaml",
        ),
    )


def _needs(study: StudyConfig, variable: str) -> str:
    """The files that the stages read from a variable's directory, in words."""
    heads = (f"${variable}/", f"${{{variable}}}/")
    files = dict.fromkeys(
        text.partition("/")[2]
        for stage in study.stages.values()
        for text in stage.inputs
        if text.startswith(heads)
    )
    return f"a directory with {', '.join(files)}; " if files else ""
