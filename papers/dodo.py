"""The three papers, repeated: `make papers`, or parts of it.

    .venv/bin/python -m doit list -f papers/dodo.py -d . --all -s     the parts and their state
    .venv/bin/python -m doit -f papers/dodo.py -d . garden:sums       one, and what it needs
    GARDEN=8 make papers                         another garden: other texts, targets and draws
    .venv/bin/python -m doit -f papers/dodo.py -d . -n 2 parallel     parallel drafts, for hours

A part that was stopped goes on when it is run again. A part whose files have the digests of its
last run is not run, nor is a draw of a study whose rows are there.
"""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from doit.dependency import JsonDB

from paceline.records import atomic_write_text
from papers.fine_tuning import run as tuned
from papers.parallel_drafts import run as parallel
from papers.rows import gather
from papers.statistics import NAMES, PAPERS

if TYPE_CHECKING:
    from collections.abc import Iterator

GARDEN = int(os.environ.get("GARDEN", "5"))
ROOT = Path("runs/papers")
FOLDER = ROOT / f"garden-{GARDEN}"
DOIT_CONFIG = {"backend": "kept", "dep_file": "runs/papers/doit.json", "verbosity": 2}
TASKS = ("spelling", "sums")
NUM_DRAWS = {"spelling": 8, "sums": 12, "faster_cascades": 10, "direct_alignment": 8}
PACELINE = str(Path(sys.executable).parent / "paceline")
CHAT = ".cache/SmolLM2-135M-Instruct.Q4_1.gguf"
SHARED = [PAPERS / name for name in ("garden.py", "spelling.py", "tuning.py")]
START = "--layers 0,1,2,29 --set hidden_size=288 --set intermediate_size=1024 --set num_heads=6"
START += " --set num_key_value_heads=2 --vocabulary 12288"
PACKAGES = ("torch", "transformers", "numpy", "datasets", "pandas")


class KeptDB(JsonDB):
    """Which parts are done. doit's own are written when all parts are, and lost if it is killed."""

    def set(self, task_id: str, dependency: str, value: Any) -> None:
        super().set(task_id, dependency, value)
        if dependency == "deps:":  # the last value of a part
            self.dump()

    def dump(self) -> None:
        atomic_write_text(Path(self.name), self.codec.encode(self._db))


# searches first: a part that waits for one runs behind all that do not
DOIT_CONFIG["default_tasks"] = ["tune:direct", "tune:spelling", "tune:sums", "readme"]
# Layers of the drafts and minutes of alignment, and how many draws
PARALLEL = {(4, 6): 3, (4, 12): 3, (4, 30): 3, (12, 12): 3}


def target_of(task: str) -> Path:
    """The weights of a task's target."""
    return FOLDER / task / "target" / "model" / "model.safetensors"


def part(name: str, module: str, options: str, needs: list[Path], makes: Path) -> dict[str, Any]:
    """A part that runs a module of the papers."""
    command = [sys.executable, "-m", f"papers.{module}", "--garden", str(GARDEN), *options.split()]
    return {"name": name, "actions": [command], "file_dep": needs, "targets": [makes]}


def draw_of_study(
    name: str, study: str, options: str, needs: list[str], makes: Path
) -> dict[str, Any]:
    """A draw whose rows are committed by themselves, as all draws take days; after these parts."""
    made = part(name, f"{study}.run", options, [], makes)
    return made | {"setup": needs, "uptodate": [True]}


def page_of_study(name: str, files: list[Path]) -> dict[str, Any]:
    """The tables of a study's README, once all draws are there."""
    actions = [[sys.executable, "-m", "papers.readme", name]]
    return {"name": "page", "actions": actions, "file_dep": [*files, PAPERS / name / "figures.py"]}


def task_garden() -> Iterator[dict[str, Any]]:
    """Text and target of each task, and the gate of its quality."""
    for task in TASKS:
        yield part(task, "garden", f"--task {task}", SHARED, target_of(task))


def task_tune() -> Iterator[dict[str, Any]]:
    """The learning rate of every arm, on draws that are not used again."""
    module = PAPERS / "distillspec" / "run.py"
    for task in TASKS:
        needs, makes = [*SHARED, module, target_of(task)], FOLDER / task / "rates.json"
        yield part(task, "distillspec.run", f"--task {task} --tune", needs, makes)
    module = PAPERS / "direct_alignment" / "run.py"
    made = FOLDER / "direct" / "rates.json"
    found = part("direct", "direct_alignment.run", "--tune", [module], made)
    yield found | {"actions": [*begin_direct(), *found["actions"]]}


def begin_direct() -> list[str]:
    """Text, and the draft that is cut from the chat model.

    They belong to the search of rates, the longest part, which can so begin first: a part that
    waits for another one runs behind all that do not.
    """
    text, out = ROOT / "documentation", ROOT / "start"
    packages = " ".join(f"--package {name}" for name in PACKAGES)
    corpus = f"{PACELINE} corpus --overwrite --out {text} {packages}"
    draft = f"{PACELINE} draft --target {CHAT} --out {out} --text {text}/beginnings.jsonl {START}"
    return [f"test -e {text}/pretraining.jsonl || {corpus}", f"test -e {out} || {draft}"]


def task_draw() -> Iterator[dict[str, Any]]:
    """One draw of a paper."""
    for name, parts in parts_of_papers().items():
        for makes, options, needs in parts:
            needs = [*needs, PAPERS / name / "run.py", *SHARED]
            yield part(
                f"{name}:{makes.parent.parent.name}:{makes.parent.name}",
                f"{name}.run",
                options,
                needs,
                makes,
            )


def parts_of_papers() -> dict[str, list[tuple[Path, str, list[Path]]]]:
    """The draws of each paper: file of rows, options, and files that it reads."""
    draws = {name: range(count) for name, count in NUM_DRAWS.items()}
    rows = "draw-{}/rows.csv"
    return {
        "distillspec": [
            (
                FOLDER / task / rows.format(draw),
                f"--task {task} --draw {draw}",
                [target_of(task), FOLDER / task / "rates.json"],
            )
            for task in TASKS
            for draw in draws[task]
        ],
        "faster_cascades": [
            (FOLDER / "cascades" / rows.format(draw), f"--draw {draw}", [target_of("sums")])
            for draw in draws["faster_cascades"]
        ],
        "direct_alignment": [
            (
                FOLDER / "direct" / rows.format(draw),
                f"--draw {draw}",
                [FOLDER / "direct" / "rates.json"],
            )
            for draw in draws["direct_alignment"]
        ],
    }


def task_parallel_start() -> Iterator[dict[str, Any]]:
    """Text, and the drafts that parallel and ordinary ones begin from."""
    text, target = parallel.TEXT, parallel.TARGET
    yield {
        "name": "text",
        "actions": [[PACELINE, "corpus", "--overwrite", "--out", str(text)]],
        "targets": [text / "train.jsonl", text / "beginnings.jsonl", text / "prompts.jsonl"],
        "uptodate": [True],
    }
    for layers, kept in parallel.LAYERS.items():
        out = parallel.FOLDER / f"start-{layers}"
        command = f"{PACELINE} draft --target {target} --layers {kept} --vocabulary 12288"
        yield {
            "name": str(layers),
            "actions": [f"test -e {out} || {command} --text {text / 'train.jsonl'} --out {out}"],
            "file_dep": [target, text / "train.jsonl"],
            "targets": [out / "model.safetensors"],
        }


def task_parallel() -> Iterator[dict[str, Any]]:
    """One draw of parallel and ordinary drafts; then their rows and the tables of their page."""
    name, files = "parallel_drafts", []
    for (layers, minutes), count in PARALLEL.items():
        for draw in range(count):
            files.append(parallel.rows_of_draw(GARDEN, layers, minutes, draw))
            label = f"{layers}-layers-{minutes}-minutes:draw-{draw}"
            options = f"--layers {layers} --minutes {minutes} --draw {draw}"
            yield draw_of_study(label, name, options, [f"parallel_start:{layers}"], files[-1])
    yield page_of_study(name, files)


def task_fine_tuning() -> Iterator[dict[str, Any]]:
    """The targets, one alignment after fine-tuning, and the table of them."""
    name, module, files = "fine_tuning", PAPERS / "fine_tuning" / "run.py", []
    begin = [parallel.FOLDER / "start-4" / "model.safetensors", module]
    made = {kind: tuned.FOLDER / kind / "draft" / "model.safetensors" for kind in tuned.KINDS}
    made["original"] = tuned.FOLDER / "start" / "draft" / "model.safetensors"
    for kind, model in made.items():
        yield part(f"target:{kind}", f"{name}.run", f"--kind {kind}", begin, model)
    for source, kind, lengths in tuned.PLAN:
        for minutes, draw in itertools.product(lengths, range(tuned.DRAWS)):
            files.append(tuned.file_of(kind, source, minutes, draw))
            options = f"--kind {kind} --source {source} --minutes {minutes} --draw {draw}"
            needs = [f"fine_tuning:target:{one}" for one in (kind, "original")]
            label = f"{kind}:{source}-{minutes}-minutes:draw-{draw}"
            yield draw_of_study(label, name, options, needs, files[-1])
    yield page_of_study(name, files)


def task_rows() -> Iterator[dict[str, Any]]:
    """The rows of a paper beside its README."""
    for name, parts in parts_of_papers().items():
        files = [makes for makes, _, _ in parts]
        tasks = TASKS if name == "distillspec" else ()
        qualities = [FOLDER / task / "quality.json" for task in tasks]
        yield {
            "name": name,
            "actions": [(gather, [name, GARDEN, files, qualities])],
            "file_dep": files,
            "targets": [PAPERS / name / "rows" / f"garden-{GARDEN}.csv"],
        }


def task_readme() -> Iterator[dict[str, Any]]:
    """The tables of a paper's README; first that of the longest draws."""
    for name in reversed(NAMES):
        folder = PAPERS / name
        yield {
            "name": name,
            "actions": [[sys.executable, "-m", "papers.readme", name]],
            "file_dep": [
                folder / "rows" / f"garden-{GARDEN}.csv",
                folder / "claims.yaml",
                folder / "figures.py",
                *(PAPERS / one for one in ("readme.py", "contrasts.py", "statistics.py")),
            ],
        }
