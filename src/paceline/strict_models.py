"""Frozen pydantic models that refuse unknown keys, and what users read of wrong values.

Configurations and results derive from them; `paceline.config` reads and writes them.
"""

from __future__ import annotations

import difflib
import os
import re
import reprlib
from abc import ABCMeta, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, cast, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, model_validator

from paceline.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pydantic.fields import FieldInfo

HomePath = Annotated[
    Path,
    AfterValidator(lambda path: Path(os.path.expanduser(path))),  # noqa: PTH111 - as for a text
]
"""A path of a configuration: no shell replaces its `~` by the home directory."""
_UNKNOWN = {"extra_forbidden", "unexpected_keyword_argument"}
_SHOWN = 200  # characters of a key or a problem
_MOST_FAULTS = 5  # reported in one message
_MOST_KEYS = 12  # more are not listed for an unknown key
_ALIKE = 0.65  # for a suggestion

if TYPE_CHECKING:
    from abc import ABCMeta as RaisesConfigErrors

    from pydantic._internal._model_construction import ModelMetaclass as _ModelType
else:

    class RaisesConfigErrors(ABCMeta):
        """Metaclass: a call of the class, in Python, raises ConfigError for wrong values.

        Validation of plain values, as in `validate`, does not call classes: it is as before.
        """

        def __call__(cls, *args: Any, **values: Any) -> Any:
            try:
                return super().__call__(*args, **values)
            except ValidationError as error:
                raise ConfigError(describe(error, cls)) from None

    class _ModelType(RaisesConfigErrors, type(BaseModel)):
        """The metaclass of `StrictModel`."""


class StrictModel(BaseModel, metaclass=_ModelType):
    """Base class of configurations: immutable, and unknown keys are errors.

    In Python, wrong values are a ConfigError of one line.

    Attributes:
        computed: Keys of its JSON that its fields give; they are not read.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    computed: ClassVar[tuple[str, ...]] = ()

    @model_validator(mode="before")
    @classmethod
    def _has_the_default_variants(cls, values: Any) -> Any:
        """A section that does not say its kind, and fits that of the default, is of this kind."""
        if not isinstance(values, dict):
            return values
        read = cast("dict[str, Any]", values)
        found = {name: value for name, value in read.items() if name not in cls.computed}
        for name, field in cls.model_fields.items():
            given, default, tag = found.get(name), field.default, field.discriminator
            if not (isinstance(given, dict) and isinstance(default, StrictModel)):
                continue
            if isinstance(tag, str) and given.keys() <= type(default).model_fields.keys():
                found[name] = {tag: getattr(default, tag)} | given
        return found


class Result(StrictModel):
    """Base class of results, which have many rows: Python shows one in a line, by its summary."""

    @property
    @abstractmethod
    def summary(self) -> str:
        """The answer in words."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.summary}>"

    __str__ = __repr__


def describe(
    error: ValidationError,
    cls: type[BaseModel] | None = None,
    way_to_give: Callable[[str], str] | None = None,
) -> str:
    """Format pydantic's errors as one line; `cls` adds suggestions for unknown keys.

    `way_to_give`: as in `validate`.
    """
    found = error.errors()
    missing = [_key(fault, cls) for fault in found if fault["type"] == "missing"]
    faults = [_describe_missing(missing, way_to_give)] if missing else []
    faults += [_describe_fault(fault, cls) for fault in found if fault["type"] != "missing"]
    shown = faults[:_MOST_FAULTS]
    more = f"; and {len(faults) - len(shown)} more" if len(faults) > len(shown) else ""
    return ("; ".join(shown) + more).replace("\n", " ")


def _key(fault: Mapping[str, Any], cls: type[BaseModel] | None) -> str:
    first, *others = fault["loc"] or ("",)
    if isinstance(first, int) and cls is not None and not issubclass(cls, BaseModel):
        first = list(fields_of(cls))[first]  # an argument without a name
    return ".".join(str(part)[:_SHOWN] for part in (first, *others))


def _describe_missing(keys: Sequence[str], way_to_give: Callable[[str], str] | None) -> str:
    """What is said of all keys without a value."""
    fault = f"{in_words(keys)} {'is' if len(keys) == 1 else 'are'} missing"
    if way_to_give is None:
        return f"{fault}; give {'it' if len(keys) == 1 else 'them'}"
    ways = in_words([way_to_give(key) for key in keys])
    return f"{fault}; give {ways}, or the key{'s' * (len(keys) > 1)} in a file (--config)"


def in_words(names: Sequence[str]) -> str:
    """`a, b and c`."""
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def _describe_fault(fault: Mapping[str, Any], cls: type[BaseModel] | None) -> str:
    where = _key(fault, cls)
    message = fault["msg"].removeprefix("Value error, ")
    if fault["type"] in _UNKNOWN:
        return f"{where}: unknown key{_advice(fault['loc'], cls)}"
    if fault["type"] == "union_tag_not_found":
        tag = fault.get("ctx", {}).get("discriminator", "kind").strip("'")
        message = f"no variant is selected; set {where}.{tag}"
    if fault["type"] == "union_tag_invalid":
        return f"{where}: {_unknown_tag(fault['ctx'])}"
    if not where:  # the message of a model validator names the keys itself
        return message
    says_it = fault["type"] == "value_error" and isinstance(fault["input"], dict)
    if says_it:
        return f"{where}: {message}"
    got = "" if "url" in fault["loc"] else f" (got {shown(fault['input'])})"
    return f"{where}: {message}{got}"


def masked(text: str) -> str:
    """The text without what stands before an @: it may be the password of a URL."""
    return re.sub(r".*@", "***@", text, flags=re.DOTALL)


def shown(value: Any) -> str:
    """A value in an error message."""
    return masked(reprlib.repr(value) if "@" not in repr(value) else "***@")


def _unknown_tag(context: Mapping[str, str]) -> str:
    known = [tag.strip("' ") for tag in context["expected_tags"].split(",")]
    close = difflib.get_close_matches(context["tag"], known, n=1, cutoff=_ALIKE)
    wanted = f"did you mean {close[0]}?" if close else f"wanted one of {', '.join(known)}"
    return f"unknown {context['discriminator'].strip(chr(39))} {context['tag']!r}; {wanted}"


def _advice(loc: Sequence[Any], cls: type[BaseModel] | None) -> str:
    """Suggest keys on the same level."""
    if cls is None:
        return ""
    siblings = _keys_at(cls, loc[:-1])
    if close := difflib.get_close_matches(str(loc[-1]), siblings, n=1, cutoff=_ALIKE):
        return f"; did you mean {close[0]}?"
    return f"; known keys are {', '.join(siblings)}" if len(siblings) <= _MOST_KEYS else ""


def models_in(annotation: Any) -> list[type[Any]]:
    """All configuration classes in a type annotation."""
    if isinstance(annotation, type):
        found = cast("type[Any]", annotation)
        return [found] if hasattr(found, "__pydantic_fields__") else []
    return [found for part in get_args(annotation) for found in models_in(part)]


def fields_of(model: type[Any]) -> dict[str, FieldInfo]:
    """The fields of a pydantic model or a pydantic dataclass."""
    return model.__pydantic_fields__


def _keys_at(cls: type[BaseModel], loc: Sequence[Any]) -> list[str]:
    """The known keys at an error location, which may contain tags of variants."""
    models: list[type[Any]] = [cls]
    for part in loc:
        known = [fields_of(model)[part] for model in models if part in fields_of(model)]
        inner = [found for field in known for found in models_in(field.annotation)]
        named = [model for model in models if part in _tags(model)]
        models = inner or named or models
    return sorted({key for model in models for key in fields_of(model)})


def _tags(model: type[Any]) -> set[str]:
    """The values of a variant's tag field, such as `jsd`."""
    defaults = [field.default for field in fields_of(model).values()]
    return {default for default in defaults if isinstance(default, str)}
