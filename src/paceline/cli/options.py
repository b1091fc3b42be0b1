"""Options made from the fields of a configuration, and their merge with its file.

Every field that one text can express is an option: `num_prompts` is --num-prompts. `Options` in the
annotation of a field gives further names, also to keys of a section. Help is the field's
description, completion its values.

Schemas import PyTorch, which takes seconds, so the settings of a schema are cached: help and
completion are immediate from the second time on.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import pkgutil
from contextlib import suppress
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args
from typing import get_origin as origin_of

import typer

import paceline
from paceline.cache import cached_text, keep_text
from paceline.cli.defaults import default_text, literals, meaning_of, variants_of
from paceline.config import (
    Options,
    apply_override,
    fields_of,
    models_in,
    read_value,
    read_yaml,
    set_key,
    validate,
)
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from paceline.config import StrictModel

    ConfigT = TypeVar("ConfigT", bound=StrictModel)

ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="YAML file of settings; options override it.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="key.subkey=value; overrides file and options.",
        autocompletion=lambda ctx, incomplete: complete_override(ctx, incomplete),
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check models, texts and paths only.")]
Resume = Annotated[bool, typer.Option("--resume", help="Resume a stopped run.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Tables = Annotated[
    bool, typer.Option("--table", help="Also print the tables, with the meaning of each column.")
]
Html = Annotated[
    Path | None, typer.Option("--html", help="Also write an HTML report to this file.")
]
Rows = Annotated[
    Path | None, typer.Option("--rows", help="Also write the result rows to this file (.jsonl).")
]
AllowImport = Annotated[
    list[str] | None,
    typer.Option(
        help="Python module that `import:` may name, in a file or on the command line.",
        rich_help_panel="Settings",
    ),
]
AllowProgram = Annotated[
    list[str] | None,
    typer.Option(
        help="Program that may be started, with options, as an engine.",
        rich_help_panel="Settings",
    ),
]

_TYPES: dict[str, Any] = {
    "flag": bool,
    "int": int,
    "float": float,
    "texts": list[str],
    "several": list[str],
}
_SCALARS: dict[type, str] = {bool: "flag", int: "int", float: "float", str: "text", Path: "path"}


SCHEMAS: dict[str, str] = {}
"""The schema, as `module:Class`, of each command that reads a file; all, once `main` is loaded.

`measure --engine` is measure-engine.
"""


def schema_of(kind: str) -> type[StrictModel]:
    """The configuration class of a command."""
    return pkgutil.resolve_name(SCHEMAS[kind])


class Setting(NamedTuple):
    """An option that sets a key of a configuration.

    Attributes:
        key: Such as `sampling.temperature`.
        names: Such as --temperature; none: an argument without a name.
        kind: What its text is: flag, int, float, text, path, texts, numbers, yaml, variant: the
            name of a variant, or its settings as YAML; or several: a text or more of them.
        tag: The key that selects a variant.
        values: Known values, for completion.
        is_main: In the short help: required, or with `Options`.
    """

    key: str
    names: list[str]
    kind: str
    tag: str
    values: list[str]
    help: str
    default: str
    is_main: bool

    @property
    def parameter(self) -> str:
        """The name of a function's parameter."""
        return self.key.replace(".", "__")

    def as_parameter(self, panel: str) -> inspect.Parameter:
        """The parameter of a function, as Typer reads it."""
        default = f" [default: {self.default}]" if self.default else ""
        values = f" One of {', '.join(self.values)}." if self.values else ""
        text = self.help + values + default
        described: dict[str, Any] = {"help": text, "show_default": False}
        if self.kind == "path":
            described["metavar"] = "<path>"
        if self.values:
            known = self.values
            described["autocompletion"] = lambda incomplete: _beginning(known, incomplete)
        if not self.names:
            info = typer.Argument(**described)
        else:
            names = sorted(self.names, key=len)  # help cuts a long line of names
            if self.kind == "flag":
                no = self.names[1:] or [self.names[0].replace("--", "--no-", 1)]
                names = [f"{self.names[0]}/{no[0]}"]
            panel_of = None if self.is_main else panel
            info = typer.Option(*names, rich_help_panel=panel_of, **described)
        annotation = Annotated[_TYPES.get(self.kind, str) | None, info]
        keyword = inspect.Parameter.KEYWORD_ONLY
        return inspect.Parameter(self.parameter, keyword, default=None, annotation=annotation)

    def value(self, text: Any) -> Any:
        """The value of the option, as it stands in a configuration; raises ConfigError."""
        name = self.names[0] if self.names else self.key
        if text == "" or (self.kind == "several" and "" in text):
            raise ConfigError(f"{name} is empty; give a value, or leave it out")
        if self.kind == "variant" and not text.startswith("{"):
            return {self.tag: text} if text in self.values else text
        if self.kind in {"variant", "yaml"}:
            return read_value(text, f"{name} {text!r}")
        if self.kind == "numbers":
            return read_value(f"[{text.strip().strip('[]')}]", f"{name} {text!r}")
        return text


def _beginning(known: Iterable[str], incomplete: str) -> list[str]:
    return [value for value in known if value.startswith(incomplete)]


def complete_override(context: typer.Context, incomplete: str) -> list[str]:
    """The keys of a command's configuration with `=`; behind one, its values."""
    key, equals, _ = incomplete.partition("=")
    found: list[str] = []
    for schema in getattr(context.command, "schemas", {}).values():
        *above, last = key.split(".")
        try:
            owner = pkgutil.resolve_name(schema)
            if above:
                owner = _owner_of_keys(owner, above)
        except (ValueError, KeyError):
            continue
        start = ".".join([*above, ""]) if above else ""
        if not equals:
            found += [f"{start}{name}=" for name in fields_of(owner)]
        elif last in fields_of(owner):
            values = (_kind_of(annotation := fields_of(owner)[last].annotation) or ("", "", []))[2]
            found += [f"{key}={value}" for value in values or literals(annotation)]
    return _beginning(dict.fromkeys(found), incomplete)


def _owner_of_keys(cls: type[Any], keys: list[str]) -> type[Any]:
    """The class below these keys."""
    (below, *_) = models_in(fields_of(cls)[keys[0]].annotation)
    return below if len(keys) == 1 else _owner_of_keys(below, keys[1:])


def settings_of(schema: str) -> list[Setting]:
    """The settings of `module:Class`, from the cache if the sources have not changed."""
    name, mark = f"{schema.replace(':', '.')}.json", _mark_of_sources()
    with suppress(ValueError, TypeError, KeyError):
        cached = json.loads(cached_text("options", name) or "{}")
        if cached["mark"] == mark:
            return [Setting(*row) for row in cached["settings"]]
    settings = list(make_settings(pkgutil.resolve_name(schema)))
    keep_text("options", name, json.dumps({"mark": mark, "settings": settings}))
    return settings


def _mark_of_sources() -> str:
    files = sorted(Path(paceline.__file__).parent.rglob("*.py"))
    stats = [(str(path), path.stat().st_mtime_ns, path.stat().st_size) for path in files]
    return hashlib.sha256(repr((paceline.__version__, stats)).encode()).hexdigest()[:16]


def make_settings(cls: type[Any]) -> Iterator[Setting]:
    """A setting for each field that one text can express, and for each key named by `Options`."""
    for field, info in fields_of(cls).items():
        found = next((part for part in info.metadata if isinstance(part, Options)), None)
        marker = found or Options()
        below = {_option(name): key for name, key in marker.keys.items() if key}
        own = [_option(field), *(_option(name) for name, key in marker.keys.items() if not key)]
        is_main = info.is_required() or found is not None
        setting = _setting(cls, field, field, [] if marker.positional else own, is_main=is_main)
        if setting is not None and below.keys().isdisjoint(own):
            yield setting._replace(kind="several") if marker.several else setting
        for name, key in below.items():
            owner, last = _owner(info.annotation, key.split("."))
            more = (part for part in fields_of(owner)[last].metadata if isinstance(part, Options))
            own = [other for part in more for other, below_it in part.keys.items() if not below_it]
            names = [name, *map(_option, own)]
            setting = _setting(owner, last, f"{field}.{key}", names, is_main=True)
            assert setting is not None, f"{name}: no text is a value of {field}.{key}"
            default = setting.default if info.default is not None else ""
            yield setting._replace(help=f"{field}.{key}: {setting.help}", default=default)


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _owner(annotation: Any, keys: list[str]) -> tuple[type[Any], str]:
    """The class with the last of these keys."""
    (owner, *_) = [model for model in models_in(annotation) if keys[0] in fields_of(model)]
    if len(keys) == 1:
        return owner, keys[0]
    return _owner(fields_of(owner)[keys[0]].annotation, keys[1:])


def _setting(
    cls: type[Any], field: str, key: str, names: list[str], *, is_main: bool
) -> Setting | None:
    annotation = fields_of(cls)[field].annotation
    found = _kind_of(annotation)
    if found is None:
        return None
    kind, tag, values = found
    return Setting(
        key,
        names,
        kind,
        tag,
        values or literals(annotation),
        meaning_of(cls, field),
        default_text(cls, field),
        is_main,
    )


def _kind_of(annotation: Any) -> tuple[str, str, list[str]] | None:
    """Kind, tag and variants of a field's value; None if one text cannot express it."""
    members = _members(annotation)
    models = models_in(annotation)
    if any(origin_of(member) in {dict, list} for member in members):
        return None
    if models and all(origin_of(member) is not tuple for member in members):
        tag, names = variants_of(models)
        if tag:
            return "variant", tag, [] if str in members else names
        return ("text", "", []) if len(models) == 1 and _takes_text(models[0]) else None
    if len(members) == 1 and origin_of(members[0]) is tuple:
        parts = {_scalar(part) for part in _members(get_args(members[0])[0])}
        if parts <= {"int", "float"}:
            return "numbers", "", []
        return "texts" if parts <= {"text", "path"} else "yaml", "", []
    first, *others = {_scalar(member) for member in members}
    return first if not others else "yaml", "", []


def _members(annotation: Any) -> list[Any]:
    """The types of a union, without None."""
    if origin_of(annotation) is Annotated:
        return _members(get_args(annotation)[0])
    if origin_of(annotation) in {Union, UnionType}:
        return [member for part in get_args(annotation) for member in _members(part)]
    return [] if annotation is NoneType else [annotation]


def _scalar(annotation: Any) -> str:
    if origin_of(annotation) is Literal and all(isinstance(v, str) for v in get_args(annotation)):
        return "text"
    return _SCALARS.get(annotation, "yaml")


def _takes_text(model: type[Any]) -> bool:
    with suppress(ValueError):
        return bool(model.model_validate("text"))
    return False


def build(
    cls: type[ConfigT],
    config: Path | None,
    overrides: Sequence[str] | None,
    chosen: Mapping[str, Any] | None = None,
    *,
    resume: bool = False,
) -> ConfigT:
    """Build a configuration from the file, then the options, then `--set`; the last value wins.

    `chosen` has the values of options by key. To `resume` without a file, that of the run in
    `output` is taken.
    """
    chosen = chosen or {}
    values = read_yaml(config) if config is not None else {}
    if "recipe" in chosen:
        for key in ("objective", "fixed_fraction", "draft_fraction"):
            values.pop(key, None)  # the recipe sets it, not the file
    if resume and config is None:
        values = _settings_of_run(chosen, overrides or ())
    given: dict[str, Any] = {}
    for named in (values, given):
        for key, value in chosen.items():
            set_key(named, key.split("."), value, f"option {key}")
        for override in overrides or ():
            apply_override(named, override)
    place = None if overrides or chosen else config
    return validate(cls, values, place, lambda key: _way_to_give(cls, key), given)


def _way_to_give(cls: type[Any], key: str) -> str:
    """How a command line gives a key that is missing."""
    ways = {
        setting.key: setting.names[0] if setting.names else f"the argument {key.upper()}"
        for setting in make_settings(cls)
    }
    if key in ways:
        return ways[key]
    if key not in fields_of(cls):  # of a section, of an entry of a list, or of a variant
        return f"its {key.rpartition('.')[2]}"
    inner = [fields_of(model) for model in models_in(fields_of(cls)[key].annotation)]
    needed = [name for name, field in inner[0].items() if field.is_required()] if inner else []
    path = ".".join([key, *needed[:1]])
    return ways.get(path, f"--set {path}=...")


def _settings_of_run(chosen: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """The configuration of the run in the `output` of the options."""
    from paceline.records import RunDirectory

    named = {"output": chosen["output"]} if "output" in chosen else {}
    for override in overrides:
        if override.startswith("output="):
            apply_override(named, override)
    if "output" not in named:
        raise ConfigError("--resume without --config needs --output, the directory of the run")
    output = Path(named["output"]).expanduser()
    check_resumable(output)
    manifest = RunDirectory(output).read_manifest() or {}
    return manifest.get("config", {}) | named


def check_resumable(output: Path) -> None:
    """Raise ConfigError if there is no run to resume: a mistyped path would train from scratch."""
    from paceline.records import RunDirectory

    if not RunDirectory(output).manifest.exists():
        raise ConfigError(
            f"--resume: {output} holds no run; name the directory of the stopped run, or remove "
            "--resume to start a new one"
        )
