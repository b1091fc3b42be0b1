"""Configuration: frozen pydantic models, read from YAML, changed by `a.b=c`.

One schema serves the YAML file, the overrides and the run's manifest. This module knows the
mechanism only; each configuration stands beside what it configures.
"""

from __future__ import annotations

import reprlib
from typing import TYPE_CHECKING, Any, TypeVar, cast

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from paceline.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


class StrictModel(BaseModel):
    """A configuration that cannot be changed after it is made and knows every key it is given."""

    model_config = ConfigDict(frozen=True, extra="forbid")


ConfigT = TypeVar("ConfigT", bound=StrictModel)


def load_config(
    cls: type[ConfigT], path: Path | None = None, overrides: Sequence[str] = ()
) -> ConfigT:
    """Read `path` (YAML), apply overrides of the form `a.b=c`, and validate.

    Raises:
        ConfigError: the file cannot be read, an override is malformed, or a value is wrong.
    """
    values = read_yaml(path) if path is not None else {}
    for override in overrides:
        apply_override(values, override)
    return validate(cls, values)


def validate(cls: type[ConfigT], values: dict[str, Any]) -> ConfigT:
    """Build `cls` from plain values; every fault of the user is one line."""
    try:
        return cls.model_validate(values)
    except ValidationError as error:
        raise ConfigError(describe(error)) from None


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML mapping."""
    try:
        loaded: object = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"no configuration file at {path}; check the path") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the configuration {path}: {error}") from None
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{path} is not valid YAML: {reason}") from None
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        kind = type(loaded).__name__
        raise ConfigError(f"{path} holds a {kind}; a configuration is a mapping of keys to values")
    return cast("dict[str, Any]", loaded)


def apply_override(values: dict[str, Any], override: str) -> None:
    """Set `a.b=c` in a nested mapping; c is read as YAML, so 3, true and [1, 2] are typed."""
    dotted, equals, text = override.partition("=")
    keys = dotted.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"override {override!r} is not of the form key.subkey=value")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(
            f"the value in override {override!r} is not valid YAML; quote it"
        ) from None
    set_key(values, keys, value, f"override {override!r}")


def set_key(values: dict[str, Any], keys: Sequence[str], value: Any, source: str) -> None:
    """Set a value deep in nested mappings, which are made where there are none.

    Raises:
        ConfigError: something that is no mapping is in the way; `source` says who asked.
    """
    node = values
    for key in keys[:-1]:
        child = node.get(key)
        if child is None:
            child = node[key] = {}
        if not isinstance(child, dict):
            raise ConfigError(
                f"{source}: {key} holds a value ({reprlib.repr(child)}), not further keys; write it "
                "as a mapping"
            )
        node = cast("dict[str, Any]", child)
    node[keys[-1]] = value


def describe(error: ValidationError) -> str:
    """One line for all that pydantic found."""
    return "; ".join(_describe_fault(fault) for fault in error.errors()).replace("\n", " ")


def _describe_fault(fault: Mapping[str, Any]) -> str:
    where = ".".join(str(part) for part in fault["loc"])
    message = fault["msg"].removeprefix("Value error, ")
    if fault["type"] == "union_tag_not_found":
        tag = fault.get("ctx", {}).get("discriminator", "kind").strip("'")
        message = f"which one is meant is not said; give {where}.{tag} as well"
    if not where:  # a fault of the whole, whose message names the keys
        return message
    got = "" if fault["type"] == "missing" else f" (got {reprlib.repr(fault['input'])})"
    return f"{where}: {message}{got}"


def to_yaml(config: StrictModel) -> str:
    """The resolved configuration as YAML that `load_config` reads back to an equal one."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
