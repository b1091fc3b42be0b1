"""Resolve configured variants: built-in ones by their tag, user-defined ones by `import:`.

`{rule: opt, alpha: 0.2}` is a built-in variant. `{import: mypackage.module:Name, alpha: 0.2}` is a
user's class, importable from the Python path or the working directory.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

from pydantic import Field, TypeAdapter, ValidationError, WrapSerializer, WrapValidator

from paceline.config import describe

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pydantic import SerializationInfo

IMPORT = "import"


def variants(union: Any, tag: str, base: type[Any]) -> Any:
    """The type of a configuration field that holds a built-in or user-defined variant.

    A bare name selects the variant with its defaults: `opt`, or `mypackage.module:Name`.

    Args:
        union: The built-in pydantic models or dataclasses.
        tag: The field that discriminates between them.
        base: Base class that user-defined variants must derive from.
    """
    known = frozenset(get_args(union))

    def validate(value: Any, handler: Callable[[Any], Any]) -> Any:
        value = as_mapping(value, tag)
        if isinstance(value, dict) and IMPORT in value:
            return _build(cast("dict[str, Any]", value), base)
        if isinstance(value, base) and type(value) not in known:
            return value
        return handler(value)

    def serialize(value: Any, handler: Callable[[Any], Any], info: SerializationInfo) -> Any:
        return handler(value) if type(value) in known else _serialized(value, info.mode)

    tagged = Annotated[union, Field(discriminator=tag)]
    return Annotated[tagged, WrapValidator(validate), WrapSerializer(serialize)]


def as_mapping(value: Any, tag: str) -> Any:
    """Expand a bare name to a mapping: the tag, or an import for `package.module:Name`."""
    if isinstance(value, str):
        value = {tag: value}
    if not isinstance(value, dict):
        return value
    given = cast("dict[str, Any]", value)
    name = given.get(tag)
    if not (isinstance(name, str) and ":" in name):
        return given
    return {IMPORT: name, **{key: part for key, part in given.items() if key != tag}}


def imported(path: str) -> Any:
    """Import `package.module:Name`.

    Raises:
        ValueError: the form is wrong, the module cannot be imported, or it lacks the name.
    """
    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name):
        raise ValueError(f"import wants package.module:Name, got {path!r}")
    folder = os.getcwd()  # noqa: PTH109 - a str, as sys.path holds
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # the user's module may raise anything
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"{module_name} cannot be imported ({reason}); run from the directory that contains it "
            "or add that directory to PYTHONPATH"
        ) from error
    try:
        return getattr(module, name)
    except AttributeError:
        raise ValueError(f"{module_name} ({module.__file__}) has no {name}") from None


def _build(value: Mapping[str, Any], base: type[Any]) -> Any:
    path = value[IMPORT]
    found = imported(str(path))
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ValueError(f"{path} is not a class that derives from {base.__name__}")
    given = {key: part for key, part in value.items() if key != IMPORT}
    try:
        return TypeAdapter(found).validate_python(given)
    except ValidationError as error:
        raise ValueError(f"{path}: {describe(error)}") from None


def _serialized(value: Any, mode: str) -> dict[str, Any]:
    kind = cast("type[Any]", type(value))
    fields = TypeAdapter(kind).dump_python(value, mode=cast("Any", mode))
    return {IMPORT: f"{kind.__module__}:{kind.__qualname__}", **fields}
