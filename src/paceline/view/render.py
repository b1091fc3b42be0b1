"""Writes a page as one HTML file that needs no network: template, style, charts, data."""

from __future__ import annotations

import base64
import csv
import functools
import io
import itertools
import json
from importlib import resources
from typing import TYPE_CHECKING, Any

import jinja2
import vl_convert
import yaml

import paceline
from paceline.records import atomic_write_text
from paceline.view.definitions import DEFINITIONS, TERMS_OF_WORDS
from paceline.view.page import Figure, Mark, Table, columns_of, is_unknown, numeric

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from paceline.view.page import Block, Page, Row, Section, Token

_VEGA_LITE = "6.4"  # the version that Vega-Altair 6 writes


def render(page: Page) -> str:
    """The page as HTML.

    Raises:
        KeyError: a section names a term that `definitions.DEFINITIONS` lacks.
    """
    terms = {number: terms_of(section) for number, section in enumerate(page.sections)}
    used = dict.fromkeys(term for names in terms.values() for term in names)
    blocks = [block for section in page.sections for block in section.blocks]
    return (
        _environment()
        .get_template("page.html.j2")
        .render(
            page=page,
            terms=terms,
            definitions={term: DEFINITIONS[term] for term in used},
            style=template("style.css"),
            script=template("page.js"),
            bundle=_bundle() if any(isinstance(block, Figure) for block in blocks) else "",
            version=paceline.__version__,
        )
        .lstrip()
    )


def terms_of(section: Section) -> list[str]:
    """The section's own terms, and those that are columns of its blocks."""
    columns = [name for block in section.blocks for name in columns_of(block.rows)]
    found = [TERMS_OF_WORDS[name] for name in columns if name in TERMS_OF_WORDS]
    return list(dict.fromkeys([*section.terms, *found]))


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
        writer.writerow({key: "" if is_unknown(value) else value for key, value in row.items()})
    return stream.getvalue()


@functools.cache
def _environment() -> jinja2.Environment:
    found = jinja2.Environment(
        loader=jinja2.FunctionLoader(template),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {
        "csv_uri": lambda rows: _data_uri(to_csv(rows), "text/csv"),
        "yaml": _yaml,
        "yaml_uri": lambda config: _data_uri(_yaml(config), "application/yaml"),
        "cells": lambda rows: Table("", rows).cells(),
        "counted": _counted,
        "by_block": _by_block,
        "spec": _script_json,
        "kind": _kind_of,
        "slug": lambda text: "-".join("".join(c if c.isalnum() else " " for c in text).split()),
        "numeric": numeric,
        "words": lambda name: str(name).replace("_", " "),
    }
    found.tests["mark"] = lambda value: isinstance(value, Mark)
    return found


def _kind_of(block: Block) -> str:
    return "chart" if isinstance(block, Figure) else "table" if isinstance(block, Table) else "text"


def template(name: str) -> str:
    """A file of the templates' directory."""
    return (resources.files("paceline.view") / "templates" / name).read_text("utf-8")


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


def _counted(tokens: Sequence[Token]) -> list[tuple[str, int]]:
    """The sources of tokens that occur, with their numbers."""
    sources = [token.source for token in tokens]
    return [(source, sources.count(source)) for source in dict.fromkeys(sources)]


def _by_block(tokens: Sequence[Token]) -> list[list[Token]]:
    """Consecutive tokens of the same block."""
    return [list(group) for _, group in itertools.groupby(tokens, key=lambda token: token.block)]
