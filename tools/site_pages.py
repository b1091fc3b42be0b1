"""Hooks of mkdocs: pages of commands and keys from their schemas, and files beside docs/.

`make docs` runs them. Nothing here is part of the package.
"""

from __future__ import annotations

import inspect
import itertools
import json
import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer.main
from mkdocs.structure.files import File

import paceline
from paceline.cli.command import COMMANDS, Command
from paceline.cli.defaults import default_text, literals, meaning_of, variants_of
from paceline.cli.main import app, schema_of
from paceline.cli.options import SCHEMAS, Setting, settings_of
from paceline.config import fields_of, models_in

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
BESIDE = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")  # pages of the site, outside docs/
KEYS = "reference/keys.md"
NOTEBOOK = ROOT / "docs/tutorial_python.ipynb"
_OPTION = r"--[a-z][a-z-]*(?: (?:\d+|[\w./]*[/=][\w./=]*\w))?"
"""An option with its value, if this is a number, a path or an assignment."""


def on_config(config: MkDocsConfig) -> None:
    """Put the page of each command into the navigation."""
    for tab in config.nav or ():
        for item in tab.get("Reference", ()):
            if "Commands" in item:
                item["Commands"] += [{name: page_of(name)} for name in COMMANDS]


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the pages that are not in docs/."""
    for name in BESIDE:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    files.append(File.generated(config, "tutorial_python.md", content=notebook_page(NOTEBOOK)))
    for name, command in COMMANDS.items():
        files.append(File.generated(config, page_of(name), content=command_page(command)))


def on_post_build(config: MkDocsConfig) -> None:
    """Show the navigation beside the page from 1,120 pixels on; the theme does from 1,220."""
    for path in Path(config.site_dir, "assets").glob("*/*.min.*s"):
        text = path.read_text("utf-8")
        path.write_text(
            text.replace("76.25em", "70em").replace("76.234375em", "69.984375em"), "utf-8"
        )


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fill in what a page has from the sources, and correct links out of docs/."""
    source = page.file.src_uri
    if source in BESIDE:
        markdown = markdown.replace("](docs/", "](")
    elif source == "reference/commands.md":
        markdown += list_of_commands()
    elif source == KEYS:
        markdown += "\n".join(key_sections())
    elif source == "reference/api/paceline.md":
        markdown = markdown.replace("<!-- a sentence on each name -->", "\n".join(public_names()))
    folder = posixpath.dirname(source)
    for name in BESIDE:
        above = posixpath.relpath(f"../{name}", folder or ".")
        markdown = markdown.replace(f"]({above}", f"]({posixpath.relpath(name, folder or '.')}")
    markdown = re.sub(r"!\[[^]]*\]\((assets/\w+\.svg)\)", inline_drawing, markdown)
    if source == "tutorial.md":
        blocks = re.compile(r"^```text\n.*?^```", re.MULTILINE | re.DOTALL)
        markdown = blocks.sub(wrapped, markdown)
    return markdown


def wrapped(block: re.Match[str]) -> str:
    """A block of output whose lines are broken, unless it is a table in box characters."""
    return block[0] if "│" in block[0] else block[0].replace("```text", "```{ .text .wrap }", 1)


def notebook_page(path: Path) -> str:
    """A notebook with its outputs as Markdown."""
    parts: list[str] = []
    for cell in json.loads(path.read_text("utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            shown = output.get("data", {})
            drawn = shown.get("image/svg+xml") or shown.get("text/html")
            text = output.get("text") or shown.get("text/plain") or ()
            if drawn:
                parts.append(
                    f'<div class="output">\n{"".join(drawn)}\n</div>'.replace("\n\n", "\n")
                )
            elif text:
                parts.append(f"```{{ .text .wrap }}\n{''.join(text).rstrip()}\n```")
    return "\n\n".join(parts) + f"\n\n[The notebook]({path.name})\n"


def inline_drawing(image: re.Match[str]) -> str:
    """The drawing itself in place of its image: it then has the colours of the page."""
    drawing = (ROOT / "docs" / image[1]).read_text("utf-8")
    return f"<div>\n{drawing}</div>"  # Markdown knows no svg, and leaves the content of a div alone


def page_of(command: str) -> str:
    """The path of a command's page."""
    return f"reference/commands/{command}.md"


def list_of_commands() -> str:
    """The commands of each group with the first sentence of their help."""
    lines: list[str] = []
    for panel, group in itertools.groupby(COMMANDS.values(), lambda one: one.rich_help_panel):
        lines.append(f"\n## {panel}\n")
        for command in group:
            link = posixpath.relpath(page_of(command.name), "reference")
            first = command.help.split("\n")[0]
            lines.append(f"[`paceline {command.name}`]({link})\n:   {text_of(first)}\n")
    return "\n".join(lines)


def public_names() -> Iterator[str]:
    """What `paceline` offers, each name with the first sentence of its docstring."""
    for name in paceline.__all__:
        found = getattr(paceline, name)
        page = f"{found.__module__.split('.')[1]}.md"
        first = (inspect.getdoc(found) or "").split("\n\n")[0]
        yield f"[`{name}`]({page})\n:   {text_of(' '.join(first.split()))}\n"


def command_page(command: Command) -> str:
    """The help of a command, its options and the keys of its configuration."""
    made: Any = typer.main.get_command(app).commands[command.name]  # pyright: ignore
    context = made.make_context(command.name, [], resilient_parsing=True)
    usage = " ".join([f"paceline {command.name}", *made.collect_usage_pieces(context)])
    lines = [f"# paceline {command.name}\n", text_of(command.help), f"\n```\n{usage}\n```\n"]
    set_by: set[str] = set()
    for option, schema in command.schemas.items():
        cls = schema_of(f"{command.name}-{option}".rstrip("-"))
        lines += [f"## Settings{f' with `--{option}`' if option else ''}\n"]
        lines += [f"Keys of a file (`{cls.__name__}`), and the options that set them.\n"]
        settings = settings_of(schema)
        lines += settings_list(cls, settings)
        set_by |= {setting.parameter for setting in settings}
    others = [param for param in made.params if param.name not in set_by]
    if others:
        lines.append("## Options\n" if not set_by else "## Other options\n")
        for param in others:
            names = [*param.opts, *param.secondary_opts]  # of an argument: its own name
            lines.append(entry(names, (), getattr(param, "help", None) or "Print the help."))
    return "\n".join(lines)


def settings_list(cls: type[Any], settings: list[Setting]) -> Iterator[str]:
    """Each key of a configuration with the options that set it or a key below it."""
    for key in fields_of(cls):
        own = [setting for setting in settings if setting.key == key]
        names = own[0].names if own else []
        yield key_entry(cls, key, names, "reference/commands")
        for setting in settings:
            if setting.key.startswith(f"{key}."):
                notes = [f"default `{setting.default}`"] if setting.default else []
                values = f" One of {values_text(setting.values)}." if setting.values else ""
                text = text_of(setting.help.partition(": ")[2]) + values
                yield entry([setting.key, *setting.names], notes, text, escaped=True)


def key_entry(cls: type[Any], key: str, options: list[str], folder: str) -> str:
    """A key with its options, default, description, values and sections."""
    field = fields_of(cls)[key]
    default = default_text(cls, key)
    notes = ["required"] if field.is_required() else [f"default `{default}`"] if default else []
    text = text_of(meaning_of(cls, key))
    values = literals(field.annotation)
    if len(values) > 1:
        text += f" One of {values_text(values)}."
    models = models_in(field.annotation)
    if models:
        here = posixpath.relpath(KEYS, folder)
        links = [f"[{name_of(model)}]({here}#{anchor(model)})" for model in models]
        text += f" Keys of {', '.join(links)}."
    return entry([key, *options], notes, text, escaped=True)


def entry(names: list[str], notes: Any, text: str, *, escaped: bool = False) -> str:
    """An item of a definition list."""
    head = ", ".join([*(f"`{name}`" for name in names), *notes])
    return f"{head}\n:   {text if escaped else text_of(text)}\n"


def key_sections() -> Iterator[str]:
    """Each class below a configuration once, with its keys."""
    found: dict[str, type[Any]] = {}
    waiting = [model for kind in SCHEMAS for model in below(schema_of(kind))]
    while waiting:
        model = waiting.pop()
        if anchor(model) not in found:
            found[anchor(model)] = model
            waiting += below(model)
    for place, model in sorted(found.items(), key=lambda item: name_of(item[1]).lower()):
        yield f"\n## {name_of(model)} {{ #{place} }}\n"
        first = (model.__doc__ or "").strip().split("\n\n")[0]
        yield f"`{model.__name__}`: {text_of(' '.join(first.split()))}\n"
        for key in fields_of(model):
            yield key_entry(model, key, [], "reference")


def below(cls: type[Any]) -> list[type[Any]]:
    """The classes that the keys of a class hold."""
    return [model for field in fields_of(cls).values() for model in models_in(field.annotation)]


def name_of(model: type[Any]) -> str:
    """The key and value that select a variant, such as `kind: jsd`, or the name of the class."""
    tag, values = variants_of([model])
    return f"{tag}: {values[0]}" if tag else model.__name__


def anchor(model: type[Any]) -> str:
    """Where the class is on the page of keys."""
    return f"{model.__module__}.{model.__qualname__}".removeprefix("paceline.")


def values_text(values: list[str]) -> str:
    """Values as code."""
    return ", ".join(f"`{value}`" for value in values)


def text_of(text: str) -> str:
    """Plain text as Markdown: what Markdown would read as marks is escaped, except code."""
    parts = re.split(
        r"(`[^`]+`)", re.sub(rf"(?<![\w`-]){_OPTION}(?: {_OPTION})*", r"`\g<0>`", text)
    )
    marks = [re.sub(r"([\\*_\[\]>#])", r"\\\1", part) for part in parts[::2]]
    parts[::2] = [part.replace("<", "&lt;") for part in marks]  # Markdown knows no \<
    return "".join(parts)
