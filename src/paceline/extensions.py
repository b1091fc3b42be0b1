"""Resolve configured variants: built-in ones by their tag, user-defined ones by `import:`.

`{rule: opt, alpha: 0.2}` is a built-in variant. `{import: mypackage.module:Name, alpha: 0.2}` is a
user's class, importable from the Python path or the working directory.

A module is imported only if the user permits it: `import:` stands on the command line, or
--allow-import or PACELINE_IMPORTS names the module. Without permission, a configuration is refused,
and results that are read keep the name and the settings of the variant.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import symtable
import sys
import types
from functools import cache
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeVar, cast, get_args

from pydantic import BaseModel, Field, TypeAdapter, ValidationError, WrapSerializer, WrapValidator
from pydantic.fields import FieldInfo

from paceline.config import describe
from paceline.core.rules import AnyRule, Rule
from paceline.errors import first_line
from paceline.permissions import IMPORTS, Given, Origin, allow, allowed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from importlib.machinery import ModuleSpec

    from pydantic import SerializationInfo, ValidationInfo

IMPORT = "import"
Variant = TypeVar("Variant")


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
    """Import `package.module:Name`; a path from the command line permits its module.

    Raises:
        ValueError: the form is wrong, the module is not permitted or cannot be imported, or it
            lacks the name.
    """
    module_name, name = _parts(path)
    if isinstance(path, Given):
        allow(IMPORTS, module_name)
    if not is_permitted(module_name):
        raise ValueError(
            f"{path} is code, which a file may not run by itself; if you trust it, add "
            f"--allow-import {module_name}, or set {IMPORTS}={module_name}"
        )
    try:
        _check_before_import(module_name, name)
        module = importlib.import_module(module_name)
    except _RefusedError:
        raise
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


_IMPORTED: dict[type[Any], None] = {}


def imported_variants(base: type[Variant]) -> list[type[Variant]]:
    """The users' classes that configurations of this process have named, in that order."""
    return [kind for kind in _IMPORTED if issubclass(kind, base)]


class _RefusedError(ValueError):
    """A module that is not imported."""


def _parts(path: str) -> tuple[str, str]:
    module_name, _, name = path.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), *name.split("."))):
        raise ValueError(f"import wants package.module:Name, got {path!r}")
    return module_name, name


def is_permitted(module_name: str) -> bool:
    """True if the user permits the module, or a package that it is in."""
    return any(f"{module_name}.".startswith(f"{name}.") for name in allowed(IMPORTS))


def _check_before_import(module_name: str, name: str) -> None:
    """Refuse a module of Python's own, a directory without __init__.py, and one without the name.

    No code of the module runs. A module that is nowhere else is looked for in the working directory
    from then on, as are the modules that it imports.
    """
    top, *inner = module_name.split(".")
    if top in sys.stdlib_module_names:
        raise _RefusedError(f"{module_name} is part of Python; name a module of your own")
    if module_name in sys.modules:
        return
    folder = os.getcwd()  # noqa: PTH109 - a str, as sys.path holds
    if importlib.util.find_spec(top) is None and folder not in sys.path:
        sys.path.append(folder)
    spec = importlib.util.find_spec(top)
    places = [] if spec is None else spec.submodule_search_locations or []
    if spec is not None and spec.origin is None and os.path.join(folder, top) in places:  # noqa: PTH118
        raise _RefusedError(
            f"{top} is a directory without __init__.py, such as one of results; add that file, or "
            "run from the directory that contains the module"
        )
    for part in inner:
        if spec is None or spec.submodule_search_locations is None:
            return  # the import says what is missing
        spec = PathFinder.find_spec(f"{spec.name}.{part}", spec.submodule_search_locations)
    source = _source_of(spec)
    if "import *" not in source and "__getattr__" not in source:
        names = symtable.symtable(source, module_name, "exec").get_identifiers()
        if source and name not in names:
            raise _RefusedError(f"{module_name} ({spec and spec.origin}) has no {name}")


def _source_of(spec: ModuleSpec | None) -> str:
    """Source of a module; empty if it has none."""
    get_source = getattr(spec and spec.loader, "get_source", None)
    return "" if spec is None or get_source is None else get_source(spec.name) or ""


def _build(value: Mapping[str, Any], base: type[Any], origin: Any) -> Any:
    path = value[IMPORT]
    given = {key: part for key, part in value.items() if key != IMPORT}
    if not isinstance(path, str):
        raise ValueError(f"import wants package.module:Name, got {path!r}")
    if origin is Origin.RESULTS and not is_permitted(_parts(path)[0]):
        return _named(path, given, base)
    found = imported(path)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ValueError(f"{path} is not a class that derives from {base.__name__}")
    _IMPORTED[found] = None
    try:
        return TypeAdapter(found).validate_python(given)
    except ValidationError as error:
        raise ValueError(f"{path}: {describe(error)}") from None


class Named:
    """Mixin of a variant that results name: its settings without its code, to compare and show."""

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(repr(self))

    def __repr__(self) -> str:
        settings = ", ".join(f"{key}={value!r}" for key, value in vars(self).items())
        return f"{type(self).__qualname__}({settings})"


def _named(path: str, settings: dict[str, Any], base: type[Any]) -> Any:
    if issubclass(base, BaseModel):  # rows and manifests that are read hold none
        raise ValueError(f"{path} is not imported")
    for key in settings:
        if not key.isidentifier() or key.startswith("_") or hasattr(base, key):
            raise ValueError(f"{path} has a setting {key!r}, which is no name of a field")
    variant = object.__new__(_named_class(path, tuple(settings), base))
    vars(variant).update(settings)
    return variant


@cache
def _named_class(path: str, keys: tuple[str, ...], base: type[Any]) -> type[Any]:
    module_name, name = _parts(path)
    fields = {key: FieldInfo(annotation=cast("Any", object)) for key in keys}
    body = {"__module__": module_name, "__qualname__": name, "__pydantic_fields__": fields}
    kind = types.new_class(name, (Named, base), exec_body=lambda space: space.update(body))
    kind.__abstractmethods__ = frozenset()  # pyright: ignore[reportAttributeAccessIssue]
    return kind


def _serialized(value: Any, mode: str) -> dict[str, Any]:
    kind = cast("type[Any]", type(value))
    path = f"{kind.__module__}:{kind.__qualname__}"
    if isinstance(value, Named):
        return {IMPORT: path, **vars(value)}
    return {IMPORT: path, **TypeAdapter(kind).dump_python(value, mode=cast("Any", mode))}


if TYPE_CHECKING:
    RuleChoice: TypeAlias = Rule
else:
    RuleChoice = variants(AnyRule, "rule", Rule)
    """A field of a configuration: a built-in rule, or `{import: package.module:Name, ...}`."""
