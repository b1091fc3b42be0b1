"""Writes a page as one HTML file that needs no network: templates, styles, charts, data."""

from __future__ import annotations

import base64
import csv
import functools
import io
import itertools
import json
import math
from importlib import resources
from typing import TYPE_CHECKING, Any, NamedTuple

import jinja2
import vl_convert
import yaml

import paceline
from paceline.records import atomic_write_text
from paceline.report.html.glossary import MEANINGS
from paceline.report.html.page import (
    Claims,
    Commands,
    Figure,
    Listing,
    Prose,
    Summary,
    Table,
    TextPicture,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from paceline.report.html.definitions import Term
    from paceline.report.html.page import Block, Page, Row, Section, Source, Token

_TEMPLATES = "templates"
_UNKNOWN = "-"
_VEGA_LITE = "6.4"  # the version that Vega-Altair 6 writes
_KINDS: dict[type[Block], str] = {
    Figure: "figure",
    Table: "table",
    Claims: "claims",
    TextPicture: "text",
    Summary: "summary",
    Prose: "prose",
    Listing: "listing",
    Commands: "commands",
}


class _Marked(NamedTuple):
    """A section with the terms that it is the first to use."""

    section: Section
    terms: list[Term]


def render(page: Page) -> str:
    """The page as HTML.

    Raises:
        KeyError: a section names a term that `glossary.MEANINGS` lacks.
    """
    environment = _environment()
    charts = [
        panel.chart
        for section in page.sections
        for block in section.blocks
        if isinstance(block, Figure)
        for panel in block.panels
    ]
    return environment.get_template("page.html.j2").render(
        page=page,
        sections=_marked(page.sections),
        has_charts=bool(charts),
        style=_text("style.css"),
        script=_text("page.js"),
        bundle=_bundle() if charts else "",
        version=paceline.__version__,
    )


def write(page: Page, path: Path) -> None:
    """Write the page.

    Raises:
        StorageError: the file cannot be written.
    """
    atomic_write_text(path, render(page))


def to_csv(rows: Sequence[Row]) -> str:
    """The rows as CSV, numbers in full precision; empty where a value is unknown."""
    stream = io.StringIO()
    writer = csv.DictWriter(stream, columns_of(rows), restval="")
    writer.writeheader()
    for row in rows:
        writer.writerow({key: "" if _unknown(value) else value for key, value in row.items()})
    return stream.getvalue()


def columns_of(rows: Sequence[Row]) -> list[str]:
    """The columns of all rows, in order of appearance."""
    return list(dict.fromkeys(name for row in rows for name in row))


def shown(value: Any) -> str:
    """A value in a table: three decimals, fewer of large numbers."""
    if value is None:
        return _UNKNOWN
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        if math.isnan(value):
            return _UNKNOWN
        if math.isinf(value):
            return "∞" if value > 0 else "-∞"
        if 0 < abs(value) < 0.0005:
            return f"{value:.1e}"
        return f"{value:,.1f}" if abs(value) >= 100 else f"{value:.3f}"
    return str(value)


def merged(rows: Sequence[Row]) -> list[dict[str, str]]:
    """The rows as text, with the bounds of a value in the value's own cell."""
    names = columns_of(rows)
    bounds = {
        part for name in names for part in (f"{name}_low", f"{name}_high") if f"{name}_low" in names
    }
    lines: list[dict[str, str]] = []
    for row in rows:
        line: dict[str, str] = {}
        for name in names:
            if name in bounds:
                continue
            text = shown(row.get(name))
            low, high = row.get(f"{name}_low"), row.get(f"{name}_high")
            if not _unknown(low) and not _unknown(high):
                text += f" ({shown(low)} to {shown(high)})"
            line[name] = text
        lines.append(line)
    return lines


def _unknown(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _marked(sections: Sequence[Section]) -> list[_Marked]:
    seen: set[str] = set()
    found: list[_Marked] = []
    for section in sections:
        new = [name for name in dict.fromkeys(section.terms) if name not in seen]
        seen.update(new)
        found.append(_Marked(section, [MEANINGS[name] for name in new]))
    return found


@functools.cache
def _environment() -> jinja2.Environment:
    found = jinja2.Environment(
        loader=jinja2.FunctionLoader(_text),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {
        "csv_uri": lambda rows: _data_uri(to_csv(rows), "text/csv"),
        "yaml": _yaml,
        "yaml_uri": lambda config: _data_uri(_yaml(config), "application/yaml"),
        "merged": merged,
        "counted": _counted,
        "by_block": _by_block,
        "environment": environment_lines,
        "spec": _script_json,
        "kind": _kind_of,
        "slug": lambda text: "-".join("".join(c if c.isalnum() else " " for c in text).split()),
        "numeric": _numeric,
        "words": lambda name: str(name).replace("_", " "),
    }
    return found


def _kind_of(block: Block) -> str:
    return _KINDS[type(block)]


def _numeric(lines: Sequence[dict[str, str]]) -> set[str]:
    """The columns of numbers, which are aligned by their digits."""
    known = [{name: text for name, text in line.items() if text != _UNKNOWN} for line in lines]
    names = {name for line in known for name in line}
    return {name for name in names if all(_is_number(line.get(name, "0")) for line in known)}


def _is_number(text: str) -> bool:
    first = text.partition(" (")[0].replace(",", "")
    try:
        float(first.replace("∞", "inf"))
    except ValueError:
        return False
    return True


def _text(name: str) -> str:
    return (resources.files("paceline.report.html") / _TEMPLATES / name).read_text("utf-8")


@functools.cache
def _bundle() -> str:
    """Vega, Vega-Lite and their embedding as one script, which no tag inside may end."""
    bundle = vl_convert.javascript_bundle(vl_version=_VEGA_LITE)  # pyright: ignore[reportCallIssue]
    return bundle.replace("</script", "<\\/script")


def _script_json(value: Any) -> str:
    """JSON that is safe inside a script element."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def _yaml(config: Any) -> str:
    return yaml.safe_dump(config, sort_keys=False, allow_unicode=True)


def _data_uri(text: str, kind: str) -> str:
    return f"data:{kind};charset=utf-8;base64,{base64.b64encode(text.encode()).decode()}"


def environment_lines(source: Source) -> list[str]:
    """Versions, machine and git state of a source, one fact a line."""
    lines: list[str] = []
    for name, value in (source.environment or {}).items():
        parts = (
            ", ".join(f"{key} {part}" for key, part in value.items())
            if isinstance(value, dict)
            else str(value)
        )
        lines.append(f"{name.replace('_', ' ')}: {parts}")
    return lines


def _counted(tokens: Sequence[Token]) -> list[tuple[str, int]]:
    """The sources of tokens that occur, with their numbers."""
    sources = [token.source for token in tokens]
    return [(source, sources.count(source)) for source in dict.fromkeys(sources)]


def _by_block(tokens: Sequence[Token]) -> list[list[Token]]:
    """Consecutive tokens of the same block."""
    return [list(group) for _, group in itertools.groupby(tokens, key=lambda token: token.block)]
