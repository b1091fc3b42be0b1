"""Configuration from YAML and overrides; every fault of the user is one line."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field, ValidationError

from paceline.cli.main import SCHEMAS, schema_of
from paceline.config import (
    HomePath,
    StrictModel,
    apply_override,
    dump_yaml,
    load_config,
    parse_yaml,
    to_yaml,
    validate,
)
from paceline.core.rules import AnyRule, Lenient, Lossless, Lossy
from paceline.core.sampling import SamplingParams
from paceline.data import CorpusConfig
from paceline.errors import ConfigError
from support.configs import small


class Sgd(StrictModel):
    kind: Literal["sgd"] = "sgd"
    lr: float = Field(default=0.1, gt=0)


class Adam(StrictModel):
    kind: Literal["adam"] = "adam"
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)


class Run(StrictModel):
    name: str = "run"
    steps: int = 10
    optim: Annotated[Sgd | Adam, Field(discriminator="kind")] = Sgd()
    rule: Annotated[AnyRule, Field(discriminator="rule")] = Lossless()
    temperatures: tuple[float, ...] = (1.0,)
    note: str | None = None


class Needy(StrictModel):
    target: Path
    optim: Annotated[Sgd | Adam, Field(discriminator="kind")]


def load(tmp_path: Path, text: str, *overrides: str) -> Run:
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return load_config(Run, path, overrides)


def fault(tmp_path: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, *overrides)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_a_file_sets_what_it_names_and_an_empty_one_nothing(tmp_path: Path):
    config = load(tmp_path, "steps: 3\noptim: {kind: adam, lr: 1e-4}\n")
    assert config == Run(steps=3, optim=Adam(lr=1e-4))
    assert load(tmp_path, "") == Run()
    assert load(tmp_path, "# nothing but a comment\n") == Run()


def test_a_section_without_its_kind_is_of_the_kind_of_the_default(tmp_path: Path):
    assert load(tmp_path, "optim: {lr: 1}").optim == Sgd(lr=1)
    assert load(tmp_path, "", "optim.lr=1") == Run(optim=Sgd(lr=1))
    assert load(tmp_path, "optim: {kind: adam}", "optim.lr=1").optim == Adam(lr=1)
    said = "optim: no variant is selected; set optim.kind"
    assert said in fault(tmp_path, "optim: {betas: [0.9, 0.9]}")


def test_overrides_win_over_the_file_and_the_last_one_over_the_others(tmp_path: Path):
    config = load(
        tmp_path, "steps: 3\noptim: {kind: sgd, lr: 5}\n", "steps=4", "optim.lr=0.5", "steps=6"
    )
    assert config == Run(steps=6, optim=Sgd(lr=0.5))


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("optim={kind: sgd, lr: 1e-3}", Run(optim=Sgd(lr=0.001))),
        ("temperatures=[0, 0.3]", Run(temperatures=(0.0, 0.3))),
        ("note=null", Run(note=None)),
        ("note=a=b", Run(note="a=b")),
        ("name='007'", Run(name="007")),
        ("optim={kind: adam}", Run(optim=Adam())),
        ("rule={rule: lossy, alpha: 0.3}", Run(rule=Lossy(0.3))),
        ("rule.rule=lenient rule.epsilon=0.5", Run(rule=Lenient("linear", 0.5))),
        ("rule=lenient rule.epsilon=0.5", Run(rule=Lenient("linear", 0.5))),
    ],
)
def test_the_value_of_an_override_is_yaml(override: str, expected: Run):
    keys = override.split() if " rule." in override else [override]
    assert load_config(Run, overrides=keys) == expected


@pytest.mark.parametrize("secret", ["http://user:SECRET@host", "u:SEC RET@h", "http://u:SEC/RET@h"])
@pytest.mark.parametrize(
    "override", ["steps={}", "steps:{}", "note=[{}]", "note={{a: '{}'", "temperatures.x={}"]
)
def test_no_error_shows_the_password_of_a_url(tmp_path: Path, override: str, secret: str):
    said = fault(tmp_path, "temperatures: 1.0", override.format(secret))
    assert not any(part in said for part in ("SEC", "RET", "user"))
    text = fault(tmp_path, f"note: {secret}\nsteps: [1")
    assert not any(part in text for part in ("SEC", "RET", "user"))


NO_VALUE = "(a value that its type does not have)"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("step: 3", "step: unknown key; did you mean steps?"),
        ("steps: many", "steps: Input should be a valid integer"),
        ("optim: {kind: sgd, lr: -1}", "optim.sgd.lr: Input should be greater than 0 (got -1)"),
        ("optim: {kind: lion}", "optim: unknown kind 'lion'; wanted one of sgd, adam"),
        ("optim: {kind: adan}", "optim: unknown kind 'adan'; did you mean adam?"),
        ("- 1\n- 2", "holds a list; a configuration is a mapping"),
        ("just text", "holds a str; a configuration is a mapping"),
        ("a: b: c", "is not valid YAML"),
        ("steps: many\nname: 3\nextra: 1", "steps: ... name: ... extra: "),
        ("steps: &a [*a]", "a value is nested in itself"),
        ("steps: " + "[" * 1000, "not valid YAML (it is nested too deeply)"),
        ("steps: " + "9" * 5000, f"not valid YAML {NO_VALUE}"),
        ("note: !!bool x", f"not valid YAML {NO_VALUE}"),
        ('note: !!int ""', f"not valid YAML {NO_VALUE}"),
        ("note: !!python/object/apply:os.getpid []", "could not determine a constructor"),
        ("steps: 1\nname: a\nsteps: 2", "steps is given twice in line 3"),
    ],
    ids=range(16),
)
def test_a_wrong_file_is_one_line_that_says_where_and_what(tmp_path: Path, text: str, said: str):
    line = fault(tmp_path, text)
    assert all(part in line for part in said.split(" ... "))


@pytest.mark.parametrize(
    ("override", "said"),
    [
        *(
            (wrong, f"override {wrong!r} is not of the form key.subkey=value")
            for wrong in ("steps", "=3", "optim..lr=3", ".steps=3", "steps.=3")
        ),
        ("steps.more=1", "steps holds a value (3), not further keys"),
        ("note=[1, 2", "the value in override 'note=[1, 2' is not valid YAML ... ; quote it"),
        ("name=", "name: Input should be a valid string"),
        ("rule={rule: lossy, alpha: 0.3, beta: 0.1}", "beta must be at least 1 - alpha = 0.7"),
    ],
)
def test_a_wrong_override_is_named(tmp_path: Path, override: str, said: str):
    line = fault(tmp_path, "steps: 3", override)
    assert all(part in line for part in said.split(" ... "))


def test_what_is_missing_or_cannot_be_read_is_named(tmp_path: Path):
    (tmp_path / "latin.yaml").write_bytes("name: caf\xe9".encode("latin-1"))
    for schema, name, overrides, said in (
        (Needy, None, (), r"^target and optim are missing; give them$"),
        (Needy, None, ("target=a", "optim.lr=1"), "no variant is selected; set optim.kind"),
        (Run, "absent.yaml", (), r"no configuration file at .*absent.yaml; check the path"),
        (Run, "", (), "cannot read the configuration"),
        (Run, "latin.yaml", (), "cannot read the configuration"),
    ):
        with pytest.raises(ConfigError, match=said):
            load_config(schema, None if name is None else tmp_path / name, overrides)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: SamplingParams(temperature=-1), r"^temperature: .* \(got -1\)$"),
        (lambda: SamplingParams(topk=3), "^topk: unknown key; did you mean top_k"),  # pyright: ignore
        (lambda: SamplingParams(echo=1), "; known keys are repetition_penalty, "),  # pyright: ignore
        (lambda: Lenient("cubic", 0.5), r"^kind: .* \(got 'cubic'\)$"),  # pyright: ignore
        (lambda: Needy(target="a"), "^optim is missing; give it$"),  # pyright: ignore
    ],
)
def test_wrong_values_in_python_are_a_config_error_of_one_line(made: Any, said: str):
    with pytest.raises(ConfigError, match=said):
        made()


def test_a_configuration_is_frozen_and_knows_all_its_keys():
    with pytest.raises(ValidationError, match="frozen"):
        Run().steps = 3
    with pytest.raises(ValidationError, match="Extra inputs"):
        Run.model_validate({"stepz": 3})


@pytest.mark.slow
@settings(deadline=None, derandomize=True)
@given(
    st.builds(
        Run,
        name=st.text(max_size=12),
        steps=st.integers(-(10**9), 10**9),
        optim=st.one_of(
            st.builds(Sgd, lr=st.floats(1e-12, 1e12)),
            st.builds(
                Adam, lr=st.floats(-1e9, 1e9), betas=st.tuples(st.floats(0, 1), st.floats(0, 1))
            ),
        ),
        rule=st.sampled_from([Lossless(), Lossy(0.3), Lenient("square", 0.4)]),
        temperatures=st.lists(st.floats(0, 2), max_size=3).map(tuple),
        note=st.sampled_from([None, "", "yes", "1e-3", "null", "2026-01-01", "a: b", "ü\n\t'\""]),
    )
)
def test_what_is_written_is_read_back_equal(tmp_path_factory: pytest.TempPathFactory, config: Run):
    path = tmp_path_factory.mktemp("config") / "run.yaml"
    path.write_text(to_yaml(config), encoding="utf-8")
    assert load_config(Run, path) == config


def test_a_key_below_that_of_a_text_completes_its_path_and_below_nothing_makes_a_mapping():
    values: dict[str, object] = {"data": {"train": "c.jsonl"}, "sampling": None, "objective": "jsd"}
    apply_override(values, "data.train.chat_template_kwargs.enable_thinking=false")
    thinking = {"enable_thinking": False}
    apply_override(values, "sampling.temperature=0.5")
    apply_override(values, "objective.beta=0.3")
    assert values == {
        "data": {"train": {"path": "c.jsonl", "chat_template_kwargs": thinking}},
        "sampling": {"temperature": 0.5},
        "objective": {"kind": "jsd", "beta": 0.3},
    }


@pytest.mark.parametrize("text", ["1e-2", "1E5", "1.5e3", ".5e-1", "-2e+3", "1_0e2"])
def test_a_number_needs_no_dot(text: str):
    assert parse_yaml(text, "it") == float(text)


@pytest.mark.parametrize("text", ["1e", "e5", "1e-2x", "1e2e3", "'1e-2'"])
def test_what_only_looks_like_a_number_is_a_text(text: str):
    """And so is every key."""
    assert parse_yaml("{1e-4: 1e-4, 0.5: 0.5}", "it") == {"1e-4": 1e-4, "0.5": 0.5}
    assert parse_yaml(text, "it") == text.strip("'")
    assert parse_yaml(dump_yaml({"key": text}), "it") == {"key": text}


def test_home_is_found_in_a_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Places(StrictModel):
        output: HomePath
        runs: tuple[HomePath, ...] = ()

    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "c.yaml").write_text("output: ~/run\nruns: [~/a, b]\n")
    found = load_config(Places, tmp_path / "c.yaml")
    assert found == Places(output=tmp_path / "run", runs=(tmp_path / "a", Path("b")))
    assert CorpusConfig.model_validate("~/text.jsonl").path == f"{tmp_path}/text.jsonl"


Wrong = tuple[str, Any]


def wrong_values(schema: dict[str, Any], of: dict[str, Any], depth: int = 0) -> Iterator[Wrong]:
    """The key of each limit in a JSON schema, and a value beyond it as it stands in its section."""
    if "$ref" in schema and depth < 6:
        schema = of[schema["$ref"].rpartition("/")[2]]
    for part in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        yield from wrong_values(part, of, depth + 1)
    limits = {"exclusiveMinimum": 0, "exclusiveMaximum": 0, "minimum": -1, "maximum": 1}
    yield from (("", schema[name] + by) for name, by in limits.items() if name in schema)
    if "enum" in schema:
        yield "", "no such word"
    for key, value in wrong_values(schema["items"], of, depth + 1) if "items" in schema else ():
        yield key, [value]
    if "properties" in schema:
        kinds = {key: one["const"] for key, one in schema["properties"].items() if "const" in one}
        yield "no_such_key", kinds | {"no_such_key": 1}
        for name, one in schema["properties"].items():
            for key, value in wrong_values(one, of, depth + 1):
                yield key or name, kinds | {name: value}


@pytest.mark.parametrize("kind", SCHEMAS)
def test_every_value_beyond_a_limit_of_a_schema_is_refused_by_its_key(kind: str, tmp_path: Path):
    """By pydantic's own schema of each configuration, sections and kinds of sections included."""
    known = small(kind, tmp_path, tmp_path / "out").model_dump(mode="json", exclude_unset=True)
    schema = schema_of(kind).model_json_schema()
    found = list(wrong_values(schema, schema.get("$defs", {})))
    assert len(found) > 3
    for key, value in found:
        with pytest.raises(ConfigError, match=rf"{key}|and \d+ more$"):
            validate(schema_of(kind), known | value)
