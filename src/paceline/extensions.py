"""Resolve configured variants: built-in ones by their tag, user-defined ones by `import:`.

`{rule: opt, alpha: 0.2}` is a built-in variant. `{import: mypackage.module:Name, alpha: 0.2}` is a
user's class, importable from the Python path or the working directory.

A module is imported only if --allow-import or PACELINE_IMPORTS names it. Without that, a
configuration is refused, and a rule, policy or task in results stays a dictionary.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, cast, get_args

from pydantic import Field, TypeAdapter, ValidationError, WrapSerializer, WrapValidator

from paceline.config import describe
from paceline.core.rules import AnyRule, Rule
from paceline.errors import first_line
from paceline.permissions import IMPORTS, Origin, allowed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pydantic import SerializationInfo, ValidationInfo

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

    def validate(value: Any, handler: Callable[[Any], Any], info: ValidationInfo) -> Any:
        value = as_mapping(value, tag)
        if isinstance(value, dict) and IMPORT in value:
            return _build(cast("dict[str, Any]", value), base, info.context)
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
        ValueError: the form is wrong, the module is not permitted or cannot be imported, or it
            lacks the name.
    """
    module_name, name = _parts(path)
    if not is_permitted(module_name):
        raise ValueError(
            f"{path} is code, which needs permission; if you trust it, add --allow-import "
            f"{module_name}, or set {IMPORTS}={module_name}"
        )
    folder = os.getcwd()  # noqa: PTH109 - a str, as sys.path holds
    try:
        top = module_name.partition(".")[0]
        if top not in sys.modules and importlib.util.find_spec(top) is None:
            sys.path += [] if folder in sys.path else [folder]
        module = importlib.import_module(module_name)
    except Exception as error:  # the user's module may raise anything
        reason = first_line(error)
        raise ValueError(
            f"{module_name} cannot be imported ({reason}); run from the directory that contains it "
            "or add that directory to PYTHONPATH"
        ) from error
    try:
        return getattr(module, name)
    except AttributeError:
        raise ValueError(f"{module_name} ({module.__file__}) has no {name}") from None


def _parts(path: str) -> tuple[str, str]:
    module_name, _, name = path.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), *name.split("."))):
        raise ValueError(f"import wants package.module:Name, got {path!r}")
    return module_name, name


def is_permitted(module_name: str) -> bool:
    """True if the user permits the module, or a package that it is in."""
    return any(f"{module_name}.".startswith(f"{name}.") for name in allowed(IMPORTS))


def _build(value: Mapping[str, Any], base: type[Any], origin: Any) -> Any:
    path = value[IMPORT]
    given = {key: part for key, part in value.items() if key != IMPORT}
    if not isinstance(path, str):
        raise ValueError(f"import wants package.module:Name, got {path!r}")
    if origin is Origin.RESULTS and not is_permitted(_parts(path)[0]):
        return value
    found = imported(path)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ValueError(f"{path} is not a class that derives from {base.__name__}")
    try:
        return TypeAdapter(found).validate_python(given)
    except ValidationError as error:
        raise ValueError(f"{path}: {describe(error)}") from None


def _serialized(value: Any, mode: str) -> dict[str, Any]:
    if isinstance(value, dict):  # of results
        return cast("dict[str, Any]", value)
    kind = cast("type[Any]", type(value))
    path = f"{kind.__module__}:{kind.__qualname__}"
    return {IMPORT: path, **TypeAdapter(kind).dump_python(value, mode=cast("Any", mode))}


if TYPE_CHECKING:
    RuleChoice: TypeAlias = Rule
else:
    RuleChoice = variants(AnyRule, "rule", Rule)
    """A field of a configuration: a built-in rule, or `{import: package.module:Name, ...}`."""
