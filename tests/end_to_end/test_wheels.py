"""The wheels: what they hold, and that the library of the processor's level is used."""

import ctypes
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
import yaml

from paceline import processor
from paceline.compilation import library_name
from paceline.models.hf.cache import RoomyCache
from paceline.models.llama.cpu import NativeLlama
from paceline.native import compiled, kernels, library, library_in_use
from paceline.native.library import library_with
from paceline.native.structures import DivergenceKind, Term
from paceline.processor import GENERIC, LEVELS
from support.models import tiny_hf
from support.processes import LEVEL_FLAGS
from support.reports import trajectory_run
from surface.test_house import PROJECT

ROOT = Path(__file__).parents[2]
BUILD = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
# argv: commands of Paceline, which run one after the other. -> what each has printed.
COMMANDS = """
import contextlib, io, json, runpy, sys

said = []
for command in sys.argv[1:]:
    sys.argv = ["paceline", *command.split()]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            runpy.run_module("paceline", run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise
    said.append(out.getvalue())
print(json.dumps(said))
"""
# One after the other on the same worker, which builds each wheel once.
pytestmark = [pytest.mark.first, pytest.mark.slow]
is_x86 = pytest.mark.skipif(
    shutil.which("cc") is None or len(LEVEL_FLAGS) < 2, reason="needs a C compiler, and AVX2"
)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the wheels are built from; a build writes beside its sources."""
    tree = tmp_path_factory.mktemp("tree")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
    for name in ("src", "kernels"):
        shutil.copytree(ROOT / name, tree / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, tree)
    return tree


def unpacked(project: Path, tree: Path) -> Path:
    """The content of the wheel of a project."""
    made = tree / f"wheel of {project.name}"
    made.mkdir()
    command = [sys.executable, "-c", BUILD, str(made)]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    (wheel,) = made.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(made / "content")
    return made / "content"


@pytest.fixture(scope="module")
def wheel(tree: Path) -> Path:
    """The content of the wheel of paceline."""
    return unpacked(tree, tree)


def files_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_the_wheel_of_paceline_is_python_the_sources_in_c_and_the_configurations(
    tree: Path, wheel: Path
):
    content = wheel
    package = {name for name in files_in(content) if ".dist-info/" not in name}
    sources = {name for name in files_in(tree / "src") if "__pycache__/" not in name}
    assert package == {name for name in sources if ".egg-info/" not in name}
    kinds = {".py", ".pyi", ".c", ".h", ".typed", ".j2", ".html", ".js", ".css", ".yaml"}
    assert {Path(name).suffix for name in package} == kinds
    assert {"paceline/py.typed", "paceline/native/products.c"} < package


def test_outside_a_clone_the_wheel_finds_configurations_and_makes_reports(
    wheel: Path, tmp_path: Path
):
    trajectory_run(tmp_path / "taus")
    commands = ["validate align configs/align/quick.yaml", "report taus"]
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS, *commands],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(wheel)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    shown, said = json.loads(done.stdout)
    known = yaml.safe_load((ROOT / "configs/align/quick.yaml").read_text("utf-8"))
    read = yaml.safe_load(shown)
    for key in ("target_rounds", "loss_vocabulary", "max_seconds"):
        assert read[key] == known[key]
    assert "taus/report.html" in said
    assert "paceline trajectory" in (tmp_path / "taus/report.html").read_text()


def test_the_extra_names_the_version_of_this_release():
    (kernels_of_release,) = PROJECT["optional-dependencies"]["cpu"]
    assert kernels_of_release.startswith(f"paceline-kernels=={PROJECT['version']};")


@pytest.fixture(scope="module")
def content(tree: Path) -> Path:
    """The content of the wheel of paceline-kernels."""
    return unpacked(tree / "kernels", tree)


def results_of(made: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What a library computes: passes over few and many tokens, probabilities, losses, slopes."""
    hf, results = tiny_hf().bfloat16().float(), []
    for int8 in (False, True):
        native = NativeLlama(hf, None, int8=int8, library=made)
        for count in (1, 2, 3, 12, 13, 33):
            text = torch.arange(count)[None] * 7 % 61
            results.append(native(text, RoomyCache(), [count], 0))
    rng = torch.Generator().manual_seed(3)
    logits_CV, others_CV = (3 * torch.randn(5, 203, generator=rng) for _ in "pq")
    monkeypatch.setattr(kernels, "library", lambda: made)
    backend = kernels.NativeBackend()
    probs_CV = backend.softmax(logits_CV, 0.7)
    assert probs_CV is not None
    backend.keep_top_p(probs_CV, 0.9)
    results.append(probs_CV)
    for kind in DivergenceKind:
        slopes_CV, labels_C = others_CV.clone(), torch.arange(5)
        terms, weights_C = [Term(kind, 1.0, 0.3)], torch.ones(5)
        results.append(kernels.losses_and_slopes(terms, logits_CV, slopes_CV, labels_C, weights_C))
        results.append(slopes_CV)
    return results


@is_x86
def test_the_wheel_has_a_library_for_each_level_with_the_results_of_first_use_to_the_bit(
    content: Path, monkeypatch: pytest.MonkeyPatch
):
    package = content / "paceline_kernels"
    assert files_in(package) == {"__init__.py", *map(library_name, (GENERIC, *LEVELS))}
    (tags,) = content.glob("*.dist-info/WHEEL")
    assert "\nTag: py3-none-linux_x86_64\n" in tags.read_text()
    for level, flags in LEVEL_FLAGS.items():
        ahead = results_of(library._load(package / library_name(level)), monkeypatch)
        here = results_of(library_with(flags), monkeypatch)
        assert [torch.equal(*pair) for pair in zip(ahead, here, strict=True)] == [True] * len(here)


@is_x86
@pytest.mark.parametrize("level", [GENERIC, *LEVELS])
def test_the_library_of_the_processors_level_is_loaded_without_a_compiler(
    content: Path, level: str, monkeypatch: pytest.MonkeyPatch
):
    lower = LEVELS[: 0 if level == GENERIC else LEVELS.index(level) + 1]
    flags = {flag for name in lower for flag in processor._LEVELS[name].flags}
    monkeypatch.setattr(processor, "processor_flags", lambda: frozenset(flags))
    monkeypatch.setattr(processor, "_may_use_tiles", lambda: True)
    monkeypatch.delenv(processor.VARIABLE, raising=False)
    monkeypatch.syspath_prepend(content)
    monkeypatch.setenv("CC", "/nowhere/cc")
    caches = (processor.usable_levels, processor.machine_level, compiled)
    for cache in caches:
        cache.cache_clear()
    try:
        assert library_in_use() == f"paceline-kernels, level {level}"
        assert getattr(compiled(), "_name", "") == str(
            content / "paceline_kernels" / library_name(level)
        )
    finally:
        for cache in caches:
            cache.cache_clear()
