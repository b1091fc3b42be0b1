"""Configurations, read from YAML files and `key.subkey=value` overrides."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar, cast

import yaml
from pydantic import ValidationError

from paceline.errors import ConfigError
from paceline.permissions import Origin, check_consent
from paceline.places import neighbour, shipped
from paceline.strict_models import HomePath as HomePath
from paceline.strict_models import Result as Result
from paceline.strict_models import StrictModel as StrictModel
from paceline.strict_models import describe as describe
from paceline.strict_models import fields_of as fields_of
from paceline.strict_models import masked as masked
from paceline.strict_models import models_in as models_in
from paceline.strict_models import shown as shown

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path


_TAG = "tag:yaml.org,2002:"
_SHOWN = 200  # characters of a key or a problem
_TAGS_BELOW = {"tasks": "path", "scored_tasks": "task"}  # whose keys are names of the user
_TAGS = {"objective": "kind", **{key: key for key in ("engine", "task", "rule", "policy")}}


class Options:
    """Option names of a field on the command line, as metadata of its annotation.

    Every field that one text can express is an option without this; see `cli.options`. The short
    help has required fields, and those with this.

    Attributes:
        keys: Keys below the field by option name; an empty key is the field itself.
            `Options("temperature")` on a section makes its key `temperature` the option
            --temperature; `Options(gamma="")` gives the field the second name --gamma. That of a
            field that is true or false means false. A last underscore is left out.
        positional: The field is an argument without a name.
        several: The option may be given several times; the key then has the list of its values.
    """

    def __init__(
        self, *keys: str, positional: bool = False, several: bool = False, **names: str
    ) -> None:
        self.keys = {key: key for key in keys} | {
            name.rstrip("_"): key for name, key in names.items()
        }
        self.positional = positional
        self.several = several


ConfigT = TypeVar("ConfigT", bound=StrictModel)


def load_config(
    cls: type[ConfigT], path: Path | None = None, overrides: Sequence[str] = ()
) -> ConfigT:
    """Read `path` (YAML), apply overrides of the form `a.b=c`, and validate.

    Raises:
        ConfigError: the file cannot be read, an override is malformed, or a value is wrong.
    """
    values = read_yaml(path) if path is not None else {}
    given: dict[str, Any] = {}
    for override in overrides:
        apply_override(values, override)
        apply_override(given, override)
    return validate(cls, values, path, given=given)


def validate(
    cls: type[ConfigT],
    values: dict[str, Any],
    path: Path | None = None,
    way_to_give: Callable[[str], str] | None = None,
    given: Mapping[str, Any] | None = None,
) -> ConfigT:
    """Build `cls` from plain values, read from `path`; report all errors in one line.

    `way_to_give`: how the user gives a key that is missing, such as `--draft`. `given`: the part of
    the values that the command line names, and not a file; see `permissions`.
    """
    try:
        check_consent(values, given)
        return cls.model_validate(values, context=Origin.CONFIGURATION)
    except ValidationError as error:
        fault = describe(error, cls, way_to_give)
    except ConfigError as error:
        fault = str(error)
    except RecursionError:
        fault = "a value is nested in itself or too deeply; write its value"
    raise ConfigError(fault if path is None else f"{path}: {fault}")


def read_result(cls: type[ConfigT], path: Path, command: str) -> ConfigT:
    """Read the JSON output of a Paceline command; `command` is named in errors.

    Raises:
        ConfigError: the file cannot be read or has another format.
    """
    try:
        values = read_json(path, f"name a file that `{command}` wrote")
        return cls.model_validate(values, context=Origin.RESULTS)
    except ValidationError as error:
        raise ConfigError(
            f"{path} is not what `{command}` writes ({describe(error)}); run it again"
        ) from None


def read_json(path: Path, advice: str = "run the command again") -> Any:
    """Read a JSON file, which may begin with a byte order mark; `advice` ends an error's message.

    Raises:
        ConfigError: the file cannot be read or is not JSON.
    """
    try:
        return json.loads(path.read_text("utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); {advice}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON ({error}); {advice}") from None


def read_json_mapping(path: Path) -> dict[str, Any]:
    """Read a JSON object that Paceline wrote; raises ConfigError."""
    found = read_json(path)
    if not isinstance(found, dict):
        raise ConfigError(f"{path} is not what Paceline writes; run the command again")
    return cast("dict[str, Any]", found)


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML mapping; an empty file is an empty mapping.

    Paths such as `configs/align/quick.yaml` need no clone; see `places.shipped`.
    """
    try:
        text = shipped(path).read_text("utf-8")
    except FileNotFoundError:
        known = f"check the path{neighbour(path)}"
        raise ConfigError(f"no configuration file at {path}; {known}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the configuration {path}: {error}") from None
    loaded = parse_yaml(text, str(path))
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        kind = type(loaded).__name__
        raise ConfigError(f"{path} holds a {kind}; a configuration is a mapping of keys to values")
    return cast("dict[str, Any]", loaded)


def parse_yaml(text: str, source: str, advice: str = "correct it") -> Any:
    """The value of YAML text; `source` names its origin in errors. No other reader reads YAML.

    Raises:
        ConfigError: it is not valid.
    """
    try:
        return yaml.load(text, _Loader)
    except Exception as error:  # values such as 2024-13-01 and !!bool x raise whatever Python does
        # the error's own text quotes the file, which may hold a password
        mark = getattr(error, "problem_mark", None)
        place = "" if mark is None else f" in line {mark.line + 1}, column {mark.column + 1}"
        deep = isinstance(error, RecursionError)
        usual = "it is nested too deeply" if deep else "a value that its type does not have"
        problem = str(getattr(error, "problem", None) or usual)[:_SHOWN]
        raise ConfigError(f"{source} is not valid YAML ({problem}{place}); {advice}") from None


class _Loader(yaml.SafeLoader):
    """Safe loader that rejects repeated keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != f"{_TAG}merge":
                if key.value in keys:
                    raise yaml.MarkedYAMLError(
                        problem=f"the key {key.value[:_SHOWN]} is given twice",
                        problem_mark=key.start_mark,
                    )
                keys.add(key.value)
                if key.tag == f"{_TAG}float":
                    key.tag = f"{_TAG}str"  # a name, such as that of a learning rate
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Safe dumper that quotes what `_Loader` would read as a number."""


# PyYAML reads YAML 1.1, where 1e-2 is a text
for _reader in (_Loader, _Dumper):
    _reader.add_implicit_resolver(  # pyright: ignore
        f"{_TAG}float", re.compile(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)[eE][-+]?\d+$"), [*"-+.0123456789"]
    )
# a name such as 2026-11-26
_Loader.add_constructor(f"{_TAG}timestamp", _Loader.construct_scalar)  # pyright: ignore


def apply_override(values: dict[str, Any], override: str) -> None:
    """Set `a.b=c` in a nested mapping; c is parsed as YAML, so 3, true and [1, 2] are typed."""
    dotted, equals, text = override.partition("=")
    keys = dotted.strip().split(".")
    source = f"override {masked(override)!r}"
    if not equals or not all(keys):
        raise ConfigError(f"{source} is not of the form key.subkey=value")
    set_key(values, keys, read_value(text, source), source)


def read_value(text: str, source: str) -> Any:
    """Parse a YAML value of the command line; `source` names its option in errors.

    Raises:
        ConfigError: it is not valid YAML.
    """
    return parse_yaml(text, f"the value in {source}", "quote it")


def set_key(values: dict[str, Any], keys: Sequence[str], value: Any, source: str) -> None:
    """Set a value in nested mappings; missing ones are created. `source` is named in errors.

    A text given by its path alone, or a variant given by its name, becomes a mapping.

    Raises:
        ConfigError: a key on the path holds a value that is not a mapping.
    """
    node = values
    for above, key in pairwise(["", *keys[:-1]]):
        child = node.get(key)
        if child is None:
            child = node[key] = {}
        elif isinstance(child, str):
            tag = _TAGS_BELOW.get(above) or _TAGS.get(key, "path")
            child = node[key] = {tag: child}
        if not isinstance(child, dict):
            raise ConfigError(
                f"{source}: {key} holds a value ({shown(child)}), not further keys; write it as a "
                "mapping"
            )
        node = cast("dict[str, Any]", child)
    node[keys[-1]] = value


def to_yaml(config: StrictModel) -> str:
    """Dump the resolved configuration as YAML; `load_config` restores it."""
    return dump_yaml(config.model_dump(mode="json"))


def dump_yaml(values: Mapping[str, Any], *, allow_unicode: bool = False) -> str:
    """The YAML text of plain values; `parse_yaml` restores them."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=allow_unicode)
