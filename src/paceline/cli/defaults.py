"""List the keys of a configuration with defaults and descriptions, as commented YAML."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import re
import textwrap
from typing import Any, get_args

from pydantic import BaseModel

from paceline.cli.key_descriptions import MEANINGS
from paceline.config import fields_of, models_in

_WIDTH = 100
_LONGEST_DEFAULT = 40
_REQUIRED = object()
_ENTRY = re.compile(r"^    (\w+): (.*)$")


def describe_defaults(cls: type[BaseModel]) -> str:
    """The keys of `cls`, each below its description; keys without a default are `(required)`."""
    return "\n".join(_lines(cls, "", (cls,))) + "\n"


def _lines(cls: type[Any], indent: str, above: tuple[type, ...]) -> list[str]:
    lines: list[str] = []
    for name, field in fields_of(cls).items():
        comment = f"{indent}# "
        meaning = meaning_of(cls, name)
        lines += textwrap.wrap(meaning, _WIDTH, initial_indent=comment, subsequent_indent=comment)
        values = literals(field.annotation)
        choices = f"  # one of {', '.join(values)}" if len(values) > 1 else ""
        lines.append(f"{indent}{name}: {_shown(_default(cls, name))}{choices}")
        for model in models_in(field.annotation):
            if model in above:
                continue
            lines.append(f"{indent}  # keys of {_tag(model) or model.__name__}:")
            inner = _lines(model, indent, (*above, model))
            lines += [f"{indent}  # {line.removeprefix(indent)}" for line in inner]
    return lines


def meaning_of(cls: type[Any], name: str) -> str:
    """The description of a key: `Attributes:` entry, or MEANINGS."""
    for owner in cls.__mro__:
        if owner is object or owner is BaseModel:
            break
        found = _meanings(owner).get(name) or MEANINGS.get(f"{owner.__name__}.{name}")
        if found:
            return found
    return "Selects this variant." if _is_tag(cls, name) else MEANINGS.get(name, "")


@functools.cache
def _meanings(cls: type) -> dict[str, str]:
    found: dict[str, str] = {}
    name = ""
    for line in inspect.cleandoc(cls.__doc__ or "").splitlines():
        entry = _ENTRY.match(line)
        if entry:
            name = entry[1]
            found[name] = entry[2]
        elif name and line.startswith("     "):
            found[name] += " " + line.strip()
        else:
            name = ""
    return found


def _default(cls: type[Any], name: str) -> Any:
    field = fields_of(cls)[name]
    return _REQUIRED if field.is_required() else field.get_default(call_default_factory=True)


def _shown(default: Any) -> str:
    if default is _REQUIRED:
        return "(required)"
    text = json.dumps(_plain(default))
    return text if len(text) <= _WIDTH else f"{text[:_WIDTH]} …"


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def default_text(cls: type[Any], name: str) -> str:
    """The default of a key in help; empty if there is none, or a long one."""
    default = _default(cls, name)
    if default is None or default is _REQUIRED:
        return ""
    if hasattr(default, "__pydantic_fields__"):
        return _tag(type(default)).partition(": ")[2]
    text = default if isinstance(default, str) else json.dumps(_plain(default))
    return text if len(text) <= _LONGEST_DEFAULT else ""


def variants_of(models: list[type[Any]]) -> tuple[str, list[str]]:
    """The key that selects one of these models, and its values; "" if there is none."""
    tags = [_tag(model).partition(": ") for model in models]
    keys = {key for key, _, _ in tags}
    return (keys.pop(), [value for _, _, value in tags]) if len(keys) == 1 else ("", [])


def literals(annotation: Any) -> list[str]:
    """The texts of a `Literal`."""
    parts = get_args(annotation)
    return [
        text for part in parts for text in ([part] if isinstance(part, str) else literals(part))
    ]


def _tag(model: type[Any]) -> str:
    """The key and value that select a variant, such as `kind: jsd`."""
    tags = (f"{name}: {_default(model, name)}" for name in fields_of(model) if _is_tag(model, name))
    return next(tags, "")


def _is_tag(cls: type[Any], name: str) -> bool:
    values = literals(fields_of(cls)[name].annotation)
    return len(values) == 1 and _default(cls, name) == values[0]
