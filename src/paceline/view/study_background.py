"""What a study page says besides its rows: study files, setup, commands, terms that occur."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.config import read_yaml
from paceline.errors import ConfigError
from paceline.places import leads_out
from paceline.studies.collect import MODELS, command_of, model_path
from paceline.studies.execute import StageFolder
from paceline.studies.plan import plan
from paceline.studies.session import row_files
from paceline.studies.study_file import FOLDER, find_studies, read_study
from paceline.view.definitions import ALPHA, DEFINITIONS, OCCURRING
from paceline.view.page import Source, Text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from paceline.results.row import Row
    from paceline.results.row import Source as RowSource
    from paceline.studies.study_file import StudyConfig
    from paceline.studies.verdicts import Finding

_STUDY_FILE = "From the study file as it is now; the stage's own file is not beside these rows."
_DATA = {"data", "tasks", "prompts", "task"}
_FILE = re.compile(r"[^\s{}:]+\.[A-Za-z]\w*")
_NO_PATH = "path not recorded"
_UNKNOWN_DAY = "not recorded in these rows"
_DIGEST = re.compile(r" [0-9a-f]{16}$")  # of the task, at the end of a population
_MOST_COVERED = 8
_FIRST = ("models", "examples", "machine", "date")  # a page of many studies stays short
_OPTIONS = (
    ("--dry-run", ["add it to see the stages, their minutes and the disk space only."]),
    ("--scale smoke", ["add it to try the commands on a few examples."]),
)
_JUDGE = "paceline claims --rows runs/mine \\\n  --html claims.html"
_WRITTEN = re.compile(r"(?<!\w)(?:KLD|TVD\+\+|TVD|MBSU)(?![\w+])")
"""Terms that are looked for in texts: their names are no common words."""
_NAMED = OCCURRING | {name: DEFINITIONS[name] for name in ("lossless", "MBSU")}
_ALIASES = {
    "kld": "KLD",
    "forward_kl": "KLD",
    "tvd": "TVD",
    "tvd++": "TVD++",
    "tvd_plus_plus": "TVD++",
    "mbsu": "MBSU",
    "base": "unaligned",
    "start": "unaligned",
}
"""Names in settings of rows, and the terms that they stand for."""


class StageConfig(NamedTuple):
    """The configuration of a stage, and where it was read."""

    config: Mapping[str, Any]
    note: str


class Background(NamedTuple):
    """Study files beside rows; empty if there are none.

    Attributes:
        studies: The study files by name.
        stages: The configurations by the command of a row's source.
    """

    studies: Mapping[str, StudyConfig]
    stages: Mapping[str, StageConfig]

    def config(self, source: RowSource) -> Mapping[str, Any]:
        """The configuration of the command that made a row; empty if it is not known."""
        found = self.stages.get(source.command)
        return {} if found is None else found.config


NO_BACKGROUND = Background({}, {})


def read_background(
    rows: Sequence[Row], places: Sequence[Path] | None = None, folder: Path = FOLDER
) -> Background:
    """Read the study files of rows, and the configurations of their stages.

    A configuration is `stages/STAGE.yaml` beside the rows; else what the study file makes of the
    stage, if the stage's output is in the directory that the study file names.

    Args:
        rows: The rows.
        places: Where they were read, as in `study_rows`.
        folder: Directory of the study files.
    """
    names = dict.fromkeys(row.study for row in rows)
    paths = {name: path for name, path in find_studies(folder).items() if name in names}
    studies = {name: read_study(path) for name, path in paths.items()}
    stages: dict[str, StageConfig] = {}
    for study in studies.values():
        stages |= _planned(study)
    folders = {path.parent for path in row_files(places)}
    for source in {row.source.command: row.source for row in rows}.values():
        name = Path(_config_file(source)).name
        for folder in sorted(folders):
            path = folder / "stages" / name
            is_there = bool(name) and path.is_file() and not leads_out(path, folder)
            if is_there and _is_of(path, source):
                stages[source.command] = StageConfig(
                    read_yaml(path), f"As it ran, from stages/{name} beside the rows."
                )
    return Background(studies, stages)


def _planned(study: StudyConfig) -> dict[str, StageConfig]:
    """The configurations of all stages by command; none if a file that they name is missing."""
    try:
        stages = plan(study)
    except ConfigError:
        return {}
    files = StageFolder(study.output)
    return {command_of(one, files): StageConfig(one.config, _STUDY_FILE) for one in stages}


def _config_file(source: RowSource) -> str:
    words = shlex.split(source.command)
    return words[words.index("--config") + 1] if "--config" in words[:-1] else ""


def _is_of(path: Path, source: RowSource) -> bool:
    """Whether the file is in the directory of the row's study, wherever that was moved to."""
    return path.parts[-3:] == Path(_config_file(source)).parts[-3:]


def setup(name: str, rows: Sequence[Row], background: Background) -> Text:
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
    return Text(title, f"Study {name}.{about}", entries=first, more=more)


def _models(rows: Sequence[Row], sources: Sequence[RowSource], background: Background) -> list[str]:
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


def _examples(rows: Sequence[Row]) -> list[str]:
    """Number of examples of each population; the same one in several rows counts once."""
    units: dict[str, set[int]] = {}
    for row in rows:
        units.setdefault(_DIGEST.sub("", row.population), set()).update(row.units)
    return [f"{len(each):,} {population}" for population, each in units.items()]


def _data(sources: Iterable[RowSource], background: Background) -> list[str]:
    """Paths of texts in the configurations."""
    texts = (text for source in sources for text in _data_in(background.config(source)))
    return list(dict.fromkeys(text for text in texts if _FILE.fullmatch(text)))


def _data_in(config: Any) -> Iterator[str]:
    """Texts below the keys of data; of these, a task's prompt has spaces, others no suffix."""
    if isinstance(config, dict):
        for key, part in config.items():
            yield from (_strings if key in _DATA else _data_in)(part)
    elif isinstance(config, list | tuple):
        for part in config:
            yield from _data_in(part)


def _settings(rows: Sequence[Row]) -> list[str]:
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
    """Expected minutes in the study file: of each stage, and of all stages."""
    stages = study.stages.items()
    cpu, gpu = (sum(getattr(one.minutes, kind) for _, one in stages) for kind in ("cpu", "gpu"))
    each = ", ".join(f"{name} {stage.minutes.cpu:g}" for name, stage in stages)
    lines = [f"expected: {cpu:g} minutes on two CPU cores, {gpu:g} on a GPU"]
    if len(study.stages) > 1:
        lines.append(f"minutes of each stage on two cores: {each}")
    return lines


def commands(name: str, study: StudyConfig) -> Text:
    """The commands that run the study on models of one's own and judge its claims."""
    places = {variable: variable.upper() for variable in study.variables}
    output = f"runs/mine/{name}"
    settings = [f"--set variables.{variable}={word}" for variable, word in places.items()]
    run = " \\\n  ".join([f"paceline study run {name}", *settings, f"--output {output}"])
    meanings = [
        (word, [f"{_needs(study, variable)}here it was {study.variables[variable]}."])
        for variable, word in places.items()
    ]
    return Text(
        title=study.title,
        text=(
            "The models of a pair need the same tokenizer. The last command writes this page for "
            "your models."
        ),
        code=f"pip install -e '.[tasks,report]'\n{run}\n{_JUDGE}",
        entries=[*meanings, *_OPTIONS],
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


def terms_of_rows(rows: Iterable[Row]) -> list[str]:
    """The recipes and rules that these rows measure, in order of appearance."""
    found: list[str] = []
    for row in rows:
        found += [*_strings(row.setting), *([ALPHA] if "alpha" in row.setting else [])]
    return _known(found)


def terms_of_findings(findings: Sequence[Finding]) -> list[str]:
    """The recipes and rules that the tests of these claims compare, and terms of their texts."""
    found: list[str] = []
    for one in findings:
        found += _strings(one.claim.test.model_dump())
        if one.claim.test.kind == "frontier":
            found.append(ALPHA)
        found += _WRITTEN.findall(f"{one.claim.here} {one.claim.says}")
    return _known(found)


def _strings(value: Any) -> Iterator[str]:
    """All texts in a value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _strings(part)


def _known(names: Iterable[str]) -> list[str]:
    """The terms of names such as `lossy beta 1.0`, and the terms in their meanings, each once.

    Names without a term are left out: drafts, tasks and families may have any name.
    """
    found: dict[str, None] = {}
    for name in names:
        first = name if name == ALPHA else name.partition(" ")[0].lower()
        term = _ALIASES.get(first, first)
        if term in _NAMED:
            found |= dict.fromkeys([term, *_WRITTEN.findall(_NAMED[term].definition)])
    return list(found)
