"""What the file says, what an option says, and which of them holds."""

import itertools
import os
import shlex
import subprocess
import sys
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from paceline.cli.main import SCHEMAS, app, schema_of
from paceline.cli.options import build, complete_override, make_settings, settings_of
from paceline.config import apply_override, validate
from paceline.core.rules import Lossless, Opt, Rule
from paceline.decode.strategies import DecodingConfig, Speculative
from paceline.measure import MeasureConfig
from paceline.tasks import build_task

COMMANDS = typer.main.get_command(app).commands  # pyright: ignore


@pytest.mark.parametrize("kind", SCHEMAS)
def test_every_plain_field_of_a_schema_is_an_option_of_its_command(kind: str):
    """As pydantic's own JSON schema lists them: texts, numbers and truth values."""
    command = COMMANDS["measure" if kind.startswith("measure-") else kind]
    offered = {option for parameter in command.params for option in parameter.opts}
    fields = schema_of(kind).model_json_schema(mode="validation")["properties"]
    plain = {
        name
        for name, field in fields.items()
        if {part.get("type") for part in field.get("anyOf", [field])}
        <= {"string", "integer", "number", "boolean", "null"}
    }
    plain -= {"model"} if kind == "export" else set()  # an argument without a name
    assert {f"--{name.replace('_', '-')}" for name in plain} - offered == set()


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        (("--gammas", "1,2"), "gammas", (1, 2)),
        (("--gammas", "[3]"), "gammas", (3,)),
        (("--gammas", "1e1"), "gammas", (10,)),
        (("--top-p", "0.9"), "sampling.top_p", 0.9),
        (("--draft-temperature", "0"), "draft_sampling.temperature", 0),
        (("--prompts", "a: b.txt"), "prompts.path", "a: b.txt"),
        (("--dtype", "float32"), "dtype", "float32"),
        (("--num-prompts", "3", "--set", "num_prompts=4"), "num_prompts", 4),
    ],
    ids=str,
)
def test_an_option_sets_its_key(
    words: tuple[str, ...], key: str, value: Any, monkeypatch: pytest.MonkeyPatch
):
    built: list[Any] = []
    monkeypatch.setattr("paceline.measure.MeasureConfig.check", lambda self, _: built.append(self))
    given = ("measure", "--target", "t", "--draft", "d", "--prompts", "p", "--dry-run", *words)
    assert CliRunner().invoke(app, given).exit_code == 0
    assert attrgetter(key)(built[0]) == value


def test_options_of_a_result_give_its_settings_again(monkeypatch: pytest.MonkeyPatch):
    built: list[Any] = []
    monkeypatch.setattr("paceline.measure.MeasureConfig.check", lambda self, _: built.append(self))
    prompts = {"path": "a b.jsonl", "split": "test", "prompt_field": "x.y"}
    prompts |= {"chat_template_kwargs": {"enable_thinking": False, "name": "it's"}}
    values = {"target": "t", "draft": "d", "prompts": prompts, "sampling": {"top_p": 0.9}}
    known = validate(MeasureConfig, values | {"max_prompt_tokens": 8, "chat": True})
    found = CliRunner().invoke(app, ["measure", *shlex.split(known.as_options), "--dry-run"])
    assert (found.exit_code, built) == (0, [known]), found.output


def test_one_method_of_an_engine_is_a_list_of_one(monkeypatch: pytest.MonkeyPatch):
    built: list[Any] = []
    config = "paceline.measure.speculators.SpeculatorsConfig"
    monkeypatch.setattr(f"{config}.check", lambda self, _: built.append(self))
    method = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}'
    given = ("measure", "--target", "t", "--draft", "d", "--prompts", "p", "--engine", "vllm")
    found = CliRunner().invoke(app, [*given, "--speculative-config", method, "--dry-run"])
    assert (found.exit_code, built[0].speculative_config) == (0, (method,)), found.output


@pytest.mark.parametrize(
    ("word", "rule"), [("lossless", Lossless()), ("{rule: opt, alpha: 0.2}", Opt(0.2))], ids=str
)
def test_a_variant_is_named_or_written_as_yaml(word: str, rule: Rule):
    (setting,) = [s for s in make_settings(DecodingConfig) if s.names == ["--rule"]]
    built = build(DecodingConfig, None, None, chosen={setting.key: setting.value(word)})
    assert isinstance(built.strategy, Speculative)
    assert built.strategy.rule == rule


def program(*words: str, cache: Path, **variables: str) -> str:
    """Output of the command line, and whether it loaded PyTorch.

    A collection of all that imports make, for each quarter that it grows by, would take long.
    """
    text = (
        "import gc, sys, paceline.cli.main as cli\n"
        f"sys.argv = ['paceline', *{words}]\n"
        "try: cli.main()\n"
        "except SystemExit: pass\n"
        "assert gc.get_stats()[2]['collections'] < 2\n"
        "print('torch' in sys.modules)"
    )
    environment = {**os.environ, "PACELINE_CACHE": str(cache), **variables}
    command = [sys.executable, "-c", text]
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return run.stdout


@pytest.mark.slow
def test_help_and_completion_of_a_command_load_pytorch_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    first, second = (program("measure", "--help", cache=tmp_path) for _ in range(2))
    assert first.endswith("True\n")
    assert second == first.removesuffix("True\n") + "False\n"
    words = {"COMP_WORDS": "paceline measure --dtype fl", "COMP_CWORD": "3"}
    found = program(cache=tmp_path, _PACELINE_COMPLETE="complete_bash", **words)
    assert found.split() == ["float32", "float16", "False"]
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    cached = tmp_path / "options" / "paceline.measure.MeasureConfig.json"
    kept = cached.read_text()
    cached.write_text(kept.replace('"mark": "', '"mark": "x'))  # of other sources
    settings_of(SCHEMAS["measure"])
    assert cached.read_text() == kept


@pytest.mark.parametrize("name", COMMANDS)
def test_the_short_help_has_at_most_60_lines_and_the_long_one_every_option(name: str):
    texts = [CliRunner().invoke(app, [name, option]).output for option in ("-h", "--help-all")]
    assert len(texts[0].splitlines()) <= 60
    if SCHEMAS.get(name):
        shown = [option.opts[0] for option in COMMANDS[name].params if option.opts[0][:2] == "--"]
        assert [option for option in shown if option[:12] not in texts[1]] == []
        assert len(texts[1]) > len(texts[0])


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("sampling.temp", ["sampling.temperature="]),
        ("draft_w", ["draft_weights="]),
        ("draft_weights=i", ["draft_weights=int8"]),
        ("nothing.at", []),
    ],
)
def test_keys_and_values_of_set_are_completed(typed: str, offered: list[str]):
    context = SimpleNamespace(command=COMMANDS["measure"])
    assert complete_override(context, typed) == offered  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("kind", SCHEMAS)
def test_every_path_of_a_configuration_may_be_at_home(kind: str):
    fields = schema_of(kind).model_fields
    assert not [n for n, one in fields.items() if one.annotation is Path and not one.metadata]


def test_a_task_of_the_guide_can_be_made():
    """surface/test_site.py builds the configurations of the other commands."""
    text = (Path(__file__).parents[3] / "docs/guides/tasks.md").read_text().replace("\\\n", " ")
    lines = [line for block in text.split("```")[1::2] for line in block.splitlines()]
    made = [shlex.split(line) for line in lines if line.startswith("paceline task ")]
    assert made
    for words in made:
        values: dict[str, Any] = {"task": words[2]}
        for name, value in itertools.pairwise(words):
            if name == "--set":
                apply_override(values, value)
        assert build_task(values).task == words[2]
