"""Configurations: frozen pydantic models, read from YAML files and `key.subkey=value` overrides."""

from __future__ import annotations

import contextlib
import difflib
import json
import math
import re
import reprlib
from abc import ABCMeta
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from paceline.errors import ConfigError, PacelineError, first_line
from paceline.permissions import Origin, given, without_consent

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence
    from pathlib import Path

    from pydantic.fields import FieldInfo

_UNKNOWN = {"extra_forbidden", "unexpected_keyword_argument"}
_KEYS_OF_A_TEXT = frozenset({"split", "subset", "prompt_field", "completion_field", "limit"})
_TAG = "tag:yaml.org,2002:"
_LARGEST = 2**63
_LARGEST_FILE = 1 << 20  # bytes of a configuration
_MOST_NODES = 100_000  # values of a configuration, each as often as aliases repeat it
_LONGEST_NUMBER = 10_000  # characters in YAML
_SHOWN = 200  # characters of a key or a problem
_MOST_FAULTS = 5  # reported in one message
_MOST_KEYS = 12  # more are not listed for an unknown key
_ALIKE = 0.8  # of a key on another level, for a suggestion; `max_seconds` is not `start_seconds`


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
    def summary(self) -> str:
        """The answer in words."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.summary}>"

    __str__ = __repr__


class Options:
    """Option names of a field on the command line, as metadata of its annotation.

    Every field that one text can express is an option without this; see `cli.options`.

    Attributes:
        keys: Keys below the field by option name; an empty key is the field itself.
            `Options("temperature")` on a section makes its key `temperature` the option
            --temperature; `Options(gamma="")` gives the field the second name --gamma. A last
            underscore is left out.
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
    for override in overrides:
        apply_override(values, override)
    return validate(cls, values, path)


def validate(
    cls: type[ConfigT],
    values: dict[str, Any],
    path: Path | None = None,
    way_to_give: Callable[[str], str] | None = None,
) -> ConfigT:
    """Build `cls` from plain values, read from `path`; report all errors in one line.

    `way_to_give`: how the user gives a key that is missing, such as `--draft`.
    """
    try:
        _refuse_extremes(values)
        return cls.model_validate(values, context=Origin.CONFIGURATION)
    except ValidationError as error:
        fault = describe(error, cls, way_to_give)
    except ConfigError as error:
        fault = str(error)
    raise ConfigError(fault if path is None else f"{path}: {fault}")


_DEEPEST = 64  # nested values; YAML may refer to a value inside of itself


def _refuse_extremes(value: Any, where: str = "", depth: int = 0) -> None:
    """Raise ConfigError for numbers that no key can use: NaN, infinity, and beyond 64 bits."""
    if depth > _DEEPEST:
        raise ConfigError(f"{where[:60]} is nested in itself or too deeply; write its value")
    if isinstance(value, dict):
        for key, part in cast("dict[Any, Any]", value).items():
            _refuse_extremes(part, f"{where}.{key}" if where else str(key), depth + 1)
    elif isinstance(value, list | tuple):
        for at, part in enumerate(cast("Sequence[Any]", value)):
            _refuse_extremes(part, f"{where}.{at}", depth + 1)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{where} is {value}; give a finite number")
    elif isinstance(value, int) and abs(value) >= _LARGEST:
        shown = value if value.bit_length() < 256 else "a number"  # Python prints only 4300 digits
        raise ConfigError(f"{where} is {shown}, which is too large; give a number below 2^63")


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


@contextlib.contextmanager
def as_written(path: Path) -> Generator[None]:
    """Turn what Python raises for values that no command writes into a one-line ConfigError.

    For code that makes something of what is in files, and of nothing else.
    """
    try:
        yield
    except (PacelineError, ImportError, MemoryError):
        raise
    except Exception as error:
        fault = f"{type(error).__name__}: {first_line(error)}"
        raise ConfigError(
            f"{path} holds values that Paceline does not write ({fault}); run the command again"
        ) from error


def read_json_mapping(path: Path) -> dict[str, Any]:
    """Read a JSON object that Paceline wrote; raises ConfigError."""
    found = read_json(path)
    if not isinstance(found, dict):
        raise ConfigError(f"{path} is not what Paceline writes; run the command again")
    return cast("dict[str, Any]", found)


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML mapping of at most 1 MiB; an empty file is an empty mapping."""
    try:
        with path.open("rb") as stream:
            content = stream.read(_LARGEST_FILE + 1)
        text = content.decode()
    except FileNotFoundError:
        raise ConfigError(f"no configuration file at {path}; check the path") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the configuration {path}: {error}") from None
    if len(content) > _LARGEST_FILE:
        raise ConfigError(f"{path} has more than {_LARGEST_FILE:,} bytes; name a configuration")
    loaded = parse_yaml(text, str(path))
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        kind = type(loaded).__name__
        raise ConfigError(f"{path} holds a {kind}; a configuration is a mapping of keys to values")
    return without_consent(cast("dict[str, Any]", loaded))


def parse_yaml(text: str, source: str, advice: str = "correct it") -> Any:
    """The value of YAML text; `source` names its origin in errors. No other reader reads YAML.

    Raises:
        ConfigError: it is not valid, or has more than `_MOST_NODES` values with those of aliases.
    """
    try:
        return yaml.load(text, _Loader)
    except _RefusedError as error:
        raise ConfigError(f"{source}: {error}") from None
    except Exception as error:  # values such as 2024-13-01 and !!bool x raise whatever Python does
        # the error's own text quotes the file, which may hold a password
        mark = getattr(error, "problem_mark", None)
        place = "" if mark is None else f" in line {mark.line + 1}, column {mark.column + 1}"
        deep = isinstance(error, RecursionError)
        usual = "it is nested too deeply" if deep else "a value that its type does not have"
        problem = str(getattr(error, "problem", None) or usual)[:_SHOWN]
        raise ConfigError(f"{source} is not valid YAML ({problem}{place}); {advice}") from None


class _RefusedError(yaml.YAMLError):
    """YAML that is valid but not read, with a line of its own."""


class _Loader(yaml.SafeLoader):
    """Safe loader that rejects repeated keys and counts values, those of an alias each time."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._num_nodes = 0
        self._sizes: dict[yaml.Node, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node:
        is_alias = bool(self.check_event(yaml.AliasEvent))  # pyright: ignore
        before = self._num_nodes
        node = cast("yaml.Node", super().compose_node(parent, index))
        if is_alias and node not in self._sizes:
            raise _RefusedError("a value is nested in itself; write its value")
        self._num_nodes += self._sizes[node] if is_alias else 1
        if self._num_nodes > _MOST_NODES:
            raise _RefusedError(f"it has more than {_MOST_NODES:,} values; name a configuration")
        self._sizes.setdefault(node, self._num_nodes - before)
        return node

    def short_number(self, node: yaml.ScalarNode) -> int | float:
        if len(node.value) > _LONGEST_NUMBER:  # 1:1:1 is a number to the base of 60
            raise _RefusedError(f"a number has more than {_LONGEST_NUMBER:,} characters")
        is_int = node.tag == f"{_TAG}int"
        return self.construct_yaml_int(node) if is_int else self.construct_yaml_float(node)

    def refuse_type(self, node: yaml.Node) -> None:
        raise _RefusedError(
            f"{node.tag.removeprefix(_TAG)[:_SHOWN]} in it is no type of a value; write a text"
        )

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != f"{_TAG}merge":
                line = key.start_mark.line + 1
                if key.value in lines:
                    raise _RefusedError(
                        f"the key {key.value[:_SHOWN]} is given twice, in line "
                        f"{lines[key.value]} and in line {line}; keep one"
                    )
                lines[key.value] = line
        return super().construct_mapping(node, deep)


for _kind in ("binary", "set", "omap", "pairs"):
    _Loader.add_constructor(_TAG + _kind, _Loader.refuse_type)
for _kind in ("int", "float"):
    _Loader.add_constructor(_TAG + _kind, _Loader.short_number)
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
    return given(parse_yaml(text, f"the value in {source}", "quote it"))


def set_key(values: dict[str, Any], keys: Sequence[str], value: Any, source: str) -> None:
    """Set a value in nested mappings; missing ones are created. `source` is named in errors.

    A text given by its path alone becomes a mapping if a key of a text follows, such as `limit`.

    Raises:
        ConfigError: a key on the path holds a value that is not a mapping.
    """
    node = values
    for key in keys[:-1]:
        child = node.get(key)
        if child is None:
            child = node[key] = {}
        elif isinstance(child, str) and keys[-1] in _KEYS_OF_A_TEXT:
            child = node[key] = {"path": child}
        if not isinstance(child, dict):
            raise ConfigError(
                f"{source}: {key} holds a value ({shown(child)}), not further keys; write it as a "
                "mapping"
            )
        node = cast("dict[str, Any]", child)
    node[keys[-1]] = value


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
    if isinstance(first, int) and cls is not None:  # an argument without a name
        first = list(fields_of(cls))[first]
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
    close = difflib.get_close_matches(context["tag"], known, n=1)
    wanted = f"did you mean {close[0]}?" if close else f"wanted one of {', '.join(known)}"
    return f"unknown {context['discriminator'].strip(chr(39))} {context['tag']!r}; {wanted}"


def _advice(loc: Sequence[Any], cls: type[BaseModel] | None) -> str:
    """Suggest keys on the same level or below."""
    if cls is None:
        return ""
    name = str(loc[-1])
    siblings = _keys_at(cls, loc[:-1])
    close = difflib.get_close_matches(name, siblings, n=1)
    if not close:
        deep = {path.rpartition(".")[2]: path for path in reversed(_paths(cls))}
        close = [deep[key] for key in difflib.get_close_matches(name, deep, n=1, cutoff=_ALIKE)]
    if close:
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


def _paths(cls: type[Any], prefix: str = "") -> list[str]:
    """The path `a.b.c` of every key, top level first."""
    here = [prefix + key for key in fields_of(cls)]
    deeper = [
        path
        for key, field in fields_of(cls).items()
        for model in models_in(field.annotation)
        for path in _paths(model, f"{prefix}{key}.")
    ]
    return list(dict.fromkeys([*here, *deeper]))


def to_yaml(config: StrictModel) -> str:
    """Dump the resolved configuration as YAML; `load_config` restores it."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
