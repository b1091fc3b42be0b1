"""Variants that a configuration names: built-in ones by their tag, a user's own by `import:`.

`{rule: opt, alpha: 0.2}` is a built-in variant, `{import: mypackage.module:Name, alpha: 0.2}` a class
of the user's, found on the Python path or in the working directory. This is the only module that
resolves such a name.
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
    """The type of a field that holds one of the union's variants, or a user's own.

    A name alone stands for the variant with its defaults: `opt`, or `mypackage.module:Name`.

    Args:
        union: Pydantic models or dataclasses that the field `tag` tells apart.
        tag: That field.
        base: What a class of the user's has to derive from.
    """
    known = frozenset(get_args(union))

    def validate(value: Any, handler: Callable[[Any], Any]) -> Any:
        value = as_mapping(value, tag)
        if isinstance(value, dict) and IMPORT in value:
            return _made(cast("dict[str, Any]", value), base)
        if isinstance(value, base) and type(value) not in known:
            return value
        return handler(value)

    def serialize(value: Any, handler: Callable[[Any], Any], info: SerializationInfo) -> Any:
        return handler(value) if type(value) in known else _told(value, info.mode)

    told_apart = Annotated[union, Field(discriminator=tag)]
    return Annotated[told_apart, WrapValidator(validate), WrapSerializer(serialize)]


def as_mapping(value: Any, tag: str) -> Any:
    """A name alone as the mapping that it stands for, `package.module:Name` as an import."""
    if isinstance(value, str):
        value = {tag: value}
    if not isinstance(value, dict):
        return value
    given = cast("dict[str, Any]", value)
    name = given.get(tag)
    if not (isinstance(name, str) and ":" in name):
        return given
    return {IMPORT: name, **{key: part for key, part in given.items() if key != tag}}


def imported(place: str) -> Any:
    """What `package.module:Name` names.

    Raises:
        ValueError: It is not of that form, cannot be imported, or is not there.
    """
    module_name, colon, name = place.partition(":")
    if not (module_name and colon and name):
        raise ValueError(f"import wants package.module:Name, got {place!r}")
    folder = os.getcwd()  # noqa: PTH109 - as Python itself puts it there
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # the user's module may raise anything
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"{module_name} cannot be imported ({reason}); start from the directory that holds it, "
            "or put that on PYTHONPATH"
        ) from error
    try:
        return getattr(module, name)
    except AttributeError:
        raise ValueError(f"{module_name} ({module.__file__}) has no {name}") from None


def _made(value: Mapping[str, Any], base: type[Any]) -> Any:
    """An object of the user's class, made of the other keys."""
    place = value[IMPORT]
    found = imported(str(place))
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ValueError(f"{place} is not a class that derives from {base.__name__}")
    given = {key: part for key, part in value.items() if key != IMPORT}
    try:
        return TypeAdapter(found).validate_python(given)
    except ValidationError as error:
        raise ValueError(f"{place}: {describe(error)}") from None


def _told(value: Any, mode: str) -> dict[str, Any]:
    """The mapping that stands for an object of the user's."""
    kind = cast("type[Any]", type(value))
    fields = TypeAdapter(kind).dump_python(value, mode=cast("Any", mode))
    return {IMPORT: f"{kind.__module__}:{kind.__qualname__}", **fields}
