"""Documents: what they list is in the sources, and what they tell to type or import works."""

import ast
import importlib
import json
import os
import pkgutil
import re
import runpy
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer.main
import yaml

from paceline.cli import options
from paceline.cli.main import SCHEMAS, app, schema_of
from paceline.config import validate
from surface.test_house import PROJECT
from surface.test_surface import RECORDED

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
DOCUMENTS = [*PAGES, *sorted(ROOT.glob("*.md"))]
RUN_ELSEWHERE = {f"add_a_{what}.md" for what in ("rule", "divergence", "task", "policy")}
"""tests/end_to_end/test_extend_guides.py runs all blocks of these guides."""
NO_CODE = {"text", "yaml", "json"}
FILES = {"TARGET": "target", "DRAFT": "draft", "PROMPTS": "prompts.jsonl", "TEXT": "text.jsonl"}


class Block(NamedTuple):
    """A fenced block, and the reason for which its commands that are not ours are not run."""

    reason: str
    language: str
    content: str


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks_of(page: Path) -> list[Block]:
    fenced = re.compile(
        r"(?:^<!-- not run: ([^\n]+) -->\n\n?)?^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL
    )
    found = [Block(*match) for match in fenced.findall(page.read_text("utf-8"))]
    return [block for block in found if block.language not in NO_CODE]


# Bash itself expands variables, loops and quotes; nothing is found, so every command is recorded,
# in one write, as commands in the background write at the same time.
RECORDER = """
PATH=nowhere
command_not_found_handle() { printf '%s\\0' "$block" "$@" $'\\036' >> calls; }
"""
OWN_PROGRAMS = re.compile(r"(^|&& |\d )\.(?:venv|engines/vllm)/bin/", re.MULTILINE)


class Typed(NamedTuple):
    block: Block
    words: list[str]


def typed(page: Path, folder: Path) -> Iterator[Typed]:
    """The commands that the blocks of a page would start, in order."""
    blocks = [block for block in blocks_of(page) if block.language != "python"]
    shell = "".join(
        f"block={number}\n" + OWN_PROGRAMS.sub(r"\1", block.content)
        for number, block in enumerate(blocks)
    )
    bash = shutil.which("bash")
    assert bash is not None
    ran = subprocess.run(
        [bash, "-c", f"{RECORDER}{shell}\nwait"],
        cwd=folder,
        env=os.environ | FILES,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "syntax error" not in ran.stderr, ran.stderr
    calls = folder / "calls"
    for call in calls.read_text().split("\x1e\0")[:-1] if calls.exists() else ():
        number, *words = call.split("\0")[:-1]
        yield Typed(blocks[int(number)], words)


class _BuiltError(BaseException):
    """The configuration of a command is valid; ends the command."""


def check_ours(words: list[str], *, build: bool) -> None:
    """Parse a command line of Paceline and build its configuration, unless its file is to come."""
    program: Any = typer.main.get_command(app)
    made: Any = program.commands[words[0]]
    context = made.make_context(words[0], words[1:])
    config = context.params.get("config")
    reads_file = words[0] in SCHEMAS and "config" in context.params
    if build and reads_file and (config is None or config.exists()):
        with pytest.raises(_BuiltError):
            made.invoke(context)


def check_make(words: list[str]) -> None:
    known = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert [word for word in words if "/" not in word and word not in known] == []


def check_pip(words: list[str]) -> None:
    extras = ",".join(re.findall(r"\[(.+?)\]", " ".join(words)))
    assert set(filter(None, extras.split(","))) <= PROJECT["optional-dependencies"].keys()


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=name_of)
def test_every_command_of_a_page_fits_its_program_or_the_page_says_why_it_is_not_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for block in re.findall(r"^```yaml\n(# (\S+\.yaml)\n.*?)^```", page.read_text(), re.M | re.S):
        (tmp_path / block[1]).write_text(block[0])
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    built = options.build

    def build(*given: Any, **named: Any) -> None:
        built(*given, **named)
        raise _BuiltError

    monkeypatch.setattr(options, "build", build)
    for block, words in typed(page, tmp_path):
        if words[:2] == ["accelerate", "launch"] and "paceline.cli.main" in words:
            words = ["paceline", *words[words.index("paceline.cli.main") + 1 :]]
        match words:
            case ["paceline", *rest]:
                check_ours(rest, build=page.name not in RUN_ELSEWHERE)
            case ["make", *rest]:
                check_make(rest)
            case ["pip", "install", *rest]:
                check_pip(rest)
            case _:
                assert block.reason, f"{words[0]} is not checked; say why: <!-- not run: ... -->"


def test_python_of_a_page_is_run_or_the_page_says_why_not():
    left = {
        page.name
        for page in PAGES
        for block in blocks_of(page)
        if block.language == "python" and not block.reason
    }
    assert left == RUN_ELSEWHERE | {"decode.md"}


@pytest.mark.slow
@pytest.mark.parametrize("page", [DOCS / "guides/decode.md", ROOT / "README.md"], ids=name_of)
def test_the_python_of_this_page_runs(
    page: Path,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    (tmp_path / "runs/mine").mkdir(parents=True)
    (tmp_path / "models").symlink_to(folder)
    (tmp_path / "my-model").symlink_to(folder / "target")
    (tmp_path / "runs/mine/draft").symlink_to(folder / "draft")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}  # a block goes on from those above it
    for block in blocks_of(page):
        if block.language == "python":
            exec(compile(block.content, page.name, "exec"), names)
    assert "tokens per target call" in capsys.readouterr().out


@pytest.mark.slow
def test_the_notebook_was_executed_and_runs(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    cells = json.loads((DOCS / "tutorial_python.ipynb").read_text("utf-8"))["cells"]
    codes = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in codes] == list(range(1, len(codes) + 1))
    assert not [out for cell in codes for out in cell["outputs"] if out["output_type"] == "error"]
    text, draft = str(folder / "corpus.jsonl"), str(folder / "draft")
    tiny: dict[str, Any] = {"TARGET": str(folder / "target"), "BEFORE": draft, "AFTER": draft}
    tiny |= {"PROMPTS": text, "TEXT": text, "RUN": tmp_path / "run"}
    tiny |= {"PROMPT_TOKENS": 6, "NEW_TOKENS": 8}
    names: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for cell in codes:
            exec(compile("".join(cell["source"]), "notebook", "exec"), names)
            names |= tiny
    assert "tokens per target call" in capsys.readouterr().out
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) >= 50
    assert set(names["table"]["draft"]) == {"before", "50 steps", "six minutes"}


def test_python_in_documents_imports_what_is_there_and_uses_names_that_it_defines(tmp_path: Path):
    """One start of ruff for all documents, whose names it prints."""
    for page in DOCUMENTS:
        blocks = [block.content for block in blocks_of(page) if block.language == "python"]
        for node in ast.walk(ast.parse("\n".join(blocks))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("paceline"):
                module = importlib.import_module(node.module or "")
                assert [a.name for a in node.names if not hasattr(module, a.name)] == []
        (tmp_path / f"{name_of(page).replace('/', '.')}.py").write_text("\n".join(blocks))
    check = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--select", "F821"]
    found = subprocess.run([*check, str(tmp_path)], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout


@pytest.mark.parametrize("page", DOCUMENTS, ids=name_of)
def test_commands_links_lists_and_configurations_in_the_text_of_a_document_work(page: Path):
    """Python-Markdown, which makes the site, ends a list at 1 to 3 spaces; GitHub does not."""
    text = page.read_text("utf-8")
    for verb, rest in re.findall(r"`paceline ([a-z][a-z-]+)([^`\n]*)`", text):
        options = RECORDED["options"][verb].split()
        assert {*re.findall(r"(?<!\S)--[a-z][a-z-]*", rest)} <= {*options, "--help"}, verb
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    files = [(page.parent / link).resolve() for link in links]
    assert [file for file in files if not file.exists()] == []
    if page.is_relative_to(DOCS):  # the site has no other pages
        outside = {file for file in files if not file.is_relative_to(DOCS)}
        assert outside <= {
            ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
        }
    for content in re.findall(r"^```yaml\n(.*?)^```", text, re.M | re.S):
        if "output:" in content:
            named = re.match(r"# (\w+)\.yaml", content)
            kind = named[1] if named and named[1] in SCHEMAS else "align"
            validate(schema_of(kind), yaml.safe_load(content))
    plain = re.sub(r"^( *)```.*?^\1```", "", text, flags=re.M | re.S)
    assert re.findall(r"^ {1,3}(?:[-*]|\d+\.) .*|(?<=\n\n) {1,3}\S.*", plain, flags=re.M) == []


@cache
def texts_of_the_package() -> list[str]:
    """Texts in the code, with `…` for each value in them."""
    nodes = (
        node
        for path in (ROOT / "src/paceline").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
    )
    texts: list[str] = []
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
            texts.append("".join(map(str, parts)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.append(node.value)
    return texts


MESSAGES = re.findall(r"^- `(.+)`:\n  ", (DOCS / "failures.md").read_text("utf-8"), re.MULTILINE)


def test_the_page_of_failures_has_at_least_15_messages():
    assert len(MESSAGES) >= 15


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_on_the_page_of_failures_is_one_of_the_package(message: str):
    assert [text for text in texts_of_the_package() if message in text] != []


def test_the_reference_has_every_public_name():
    pages = (DOCS / "reference/api").glob("*.md")
    listed = {
        name for page in pages for name in re.findall(r"^::: (\S+)", page.read_text(), re.MULTILINE)
    }
    objects = [pkgutil.resolve_name(name) for name in listed]
    assert len(objects) == len(listed)
    packages = {name.split(".")[1] for name in listed} - {"errors"}
    wanted = {
        f"{module}.{name}"
        for module, names in RECORDED["names"].items()
        for name in names
        if module.count(".")
    }
    for package in packages:
        module = importlib.import_module(f"paceline.{package}")
        wanted |= {f"paceline.{package}.{name}" for name in getattr(module, "__all__", ())}
    assert wanted - listed == set()


def test_every_page_is_in_the_navigation_once():
    def pages(part: Any) -> list[str]:
        if isinstance(part, str):
            return [part]
        below = part.values() if isinstance(part, dict) else part
        return [page for one in below for page in pages(one)]

    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    beside = {"CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"}
    listed = sorted(pages(site["nav"]))
    notebooks = {f"{path.stem}.md" for path in DOCS.glob("*.ipynb")}
    assert listed == sorted({str(page.relative_to(DOCS)) for page in PAGES} | beside | notebooks)


def test_the_picture_of_the_demo_is_that_of_its_output():
    made = runpy.run_path(str(ROOT / "tools/demo_picture.py"))
    output = (DOCS / "assets/demo.txt").read_text("utf-8")
    assert (DOCS / "assets/demo.svg").read_text("utf-8") == made["demo_drawing"](output)
    assert "0.89x" in made["demo_drawing"](output)
    assert "0.50x" in made["demo_drawing"](output.replace("0.889 (", "0.502 ("))


def test_the_tutorial_prints_what_the_demo_printed():
    output = (DOCS / "assets/demo.txt").read_text("utf-8")
    tutorial = (DOCS / "tutorial.md").read_text("utf-8")
    printed = re.findall(r"^```text\n(.*?)^```", tutorial, re.MULTILINE | re.DOTALL)
    lines = [line for block in printed for line in block.splitlines()]
    assert len(printed) == 4
    assert [line for line in lines if line not in output.splitlines()] == []


def test_each_command_of_the_tutorial_takes_what_one_before_wrote():
    """What is in runs/mine is written above, and what is in runs/demo by `make demo`."""
    tutorial, written = (DOCS / "tutorial.md").read_text("utf-8"), set[str]()
    for command in re.findall(r"^paceline .*(?:(?<=\\)\n.*)*", tutorial, re.M):
        words = command.replace("\\\n", " ").split()
        read = {words[at + 1] for at, word in enumerate(words) if word in ("--draft", "export")}
        assert read <= written, command
        outputs = [words[at + 1] for at, word in enumerate(words) if word in ("--out", "--output")]
        written |= {*outputs, *(f"{output}/draft" for output in outputs)}
    assert "runs/mine/align/draft" in written


def test_no_text_of_the_package_installs_it_from_a_registry():
    """It is in none: an extra follows the path of a clone or of a wheel."""
    hints = [text for text in texts_of_the_package() if "pip install" in text]
    assert hints
    assert [text for text in hints if re.search(r"paceline\[", text)] == []
