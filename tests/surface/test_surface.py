"""The public surface, frozen: what users import and type. Add to it; never rename."""

import ast
import importlib
import inspect
import pkgutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any, get_args

import pytest
import typer.main
from pydantic import ValidationError
from typer.testing import CliRunner

import paceline
from paceline.cli.main import app
from paceline.core.rules import AnyRule, Lenient, Lossless, Lossy, Rule
from paceline.core.sampling import SamplingParams
from paceline.decode import SpeculativeDecoder
from support.models import tiny_model
from support.processes import COMMAND_LINE, finish, run_command, start

NAMES = {
    "paceline.core.sampling": "SamplingParams to_probs",
    "paceline.core.divergences": "forward_kl reverse_kl jsd tvd negative_log_acceptance",
    "paceline.core.rules": (
        "Lossless Lenient Lossy BiLDRule Chow ChowLog Diff DiffLog Opt OptLog "
        "TokenV1 TokenV2 TokenV3"
    ),
    "paceline.core.speed": (
        "block_efficiency_iid predicted_speedup mbsu break_even_acceptance best_gamma"
    ),
    "paceline.core.stats": "DecodeStats",
    "paceline.models": "load load_model wrap_model",
    "paceline.decode": (
        "AutoregressiveDecoder SpeculativeDecoder TokenCascade OracleCascade SequenceCascade "
        "BigLittleDecoder Generation TextGeneration Block Piece"
    ),
    "paceline.train": "align AlignConfig pretrain PretrainConfig",
    "paceline.tasks": (
        "Task TaskExample build_task write_examples Arithmetic Docstrings Pairs PlainText "
        "Translation Summarization Math GSMSymbolic Questions Code Chat"
    ),
    "paceline.measure": "measure measure_drafts MeasureConfig Measurement DraftComparison",
    "paceline.measure.perplexity": "perplexity PerplexityConfig Perplexity",
    "paceline.bench": "bench BenchConfig Grid read_rows",
    "paceline.bench.tune": "tune TuneConfig Tuned",
    "paceline.view": "write_report Report",
}

# A name ends in "=" and its default where it has one; "*": by name only from here on.
SIGNATURES = {
    "core.sampling:to_probs": "logits params",
    "core.divergences:forward_kl": "target_log_probs draft_log_probs",
    "core.divergences:reverse_kl": "target_log_probs draft_log_probs",
    "core.divergences:jsd": "target_log_probs draft_log_probs beta=0.5",
    "core.divergences:tvd": "target_log_probs draft_log_probs",
    "core.divergences:negative_log_acceptance": "target_log_probs draft_log_probs",
    "core.rules:Lenient": "kind='linear' epsilon=1.0",
    "core.rules:Lossy": "alpha beta=1.0",
    "core.rules:BiLDRule": "threshold",
    **{
        f"core.rules:{name}": "alpha"
        for name in (
            *("Chow", "ChowLog", "Diff", "DiffLog", "Opt", "OptLog"),
            *("TokenV1", "TokenV2", "TokenV3"),
        )
    },
    "core.speed:block_efficiency_iid": "acceptance gamma",
    "core.speed:predicted_speedup": "block_efficiency gamma cost_ratio",
    "core.speed:mbsu": "block_efficiency gamma parameter_ratio",
    "core.speed:break_even_acceptance": "gamma cost_ratio",
    "core.speed:best_gamma": "acceptance cost_ratio",
    "models:load_model": "path dtype='auto' device='auto'",
    "models:load": "path dtype='auto' device='auto' weights='auto'",
    "models:wrap_model": "hf_model tokenizer=None",
    "decode:AutoregressiveDecoder": "target sampling=None",
    "decode:SpeculativeDecoder": (
        "target draft rule=None gamma=5 sampling=None policy=None draft_sampling=None"
    ),
    "decode:SpeculativeDecoder.generate": (
        "self prompts max_new_tokens=128 seed=0 eos_token_ids=None"
    ),
    "decode:SpeculativeDecoder.stream": "self prompt max_new_tokens=128 seed=0 eos_token_ids=None",
    "decode:TokenCascade": "target draft alpha sampling=None",
    "decode:OracleCascade": "target draft rule sampling=None",
    "decode:SequenceCascade": "target draft alpha sampling=None",
    "decode:BigLittleDecoder": "target draft fallback rollback sampling=None",
    "train:align": "config",
    "train:pretrain": "config",
    "measure:measure": "config",
    "measure:measure_drafts": "config",
    "tasks:build_task": "chosen",
    "tasks:write_examples": "task split count path seed=0",
    "bench:bench": "config",
    "bench:read_rows": "folder context=None",
    "bench.score:score": "config",
    "bench.tune:tune": "config",
    "view:write_report": "run html=None",
}

OPTIONS = {
    "draft": "--target --layers --out",
    "align": "--target --draft --output --recipe --config --set --html --track",
    "measure": (
        "--target --draft --prompts --config --set --json --html --temperature --top-p --top-k "
        "--rows"
    ),
    "verify": (
        "--target --draft --prompts --config --set --json --html --temperature --top-p --top-k "
        "--self-test"
    ),
    "decode": (
        "--target --draft --prompt --prompt-file --gamma --max-new-tokens --temperature --top-p "
        "--top-k --repetition-penalty --seed --show --json --config --set"
    ),
    "play": "--target --draft --draft-weights --port",
    "analyze": "--target --draft --prompts --config --set --json --temperature --top-p --top-k",
    "pretrain": "--train --output --resume --config --set --html",
    "task": "--out --split --count --seed --set",
    "perplexity": "--model --text --config --set --json",
    "inspect": "--chat --json",
    "score": "--url --tokenizer --output --temperature --config --set --json",
    "bench": "--target --draft --output --max-seconds --config --set --html",
    "report": "--html",
    "tune": (
        "--target --draft --output --task --quality-floor --max-latency --temperature --for "
        "--config --set --json --html"
    ),
    "trajectory": "--target --run --output --plot --config --set --html",
    "validate": "--set",
    "env": "",
}


def find(name: str) -> Any:
    return pkgutil.resolve_name(f"paceline.{name}")


def parameters(function: Callable[..., Any]) -> list[str]:
    """Names with defaults, as in SIGNATURES."""
    written: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in written:
            written.append("*")
        has_default = parameter.default is not parameter.empty
        written.append(parameter.name + (f"={parameter.default!r}" if has_default else ""))
    return written


@pytest.mark.parametrize("module", NAMES)
def test_public_names_can_be_imported_from_where_they_are_documented(module: str):
    missing = [n for n in NAMES[module].split() if not hasattr(importlib.import_module(module), n)]
    assert missing == []


@pytest.mark.parametrize("function", SIGNATURES)
def test_public_signatures_begin_as_documented_and_what_was_added_may_be_left_out(function: str):
    documented, found = SIGNATURES[function].split(), parameters(find(function))
    added = found[len(documented) :]
    assert found[: len(documented)] == documented
    assert all("=" in name or name == "*" for name in added)


@pytest.mark.parametrize("rule", get_args(AnyRule))
@pytest.mark.parametrize("method", ["accept_probs", "residual", "induced_distribution", "pi"])
def test_rules_share_one_signature(rule: type[Rule], method: str):
    documented = ["self", "target_probs", "draft_probs", "*", "target_raw=None", "draft_raw=None"]
    assert parameters(getattr(rule, method)) == documented


def test_rules_take_their_parameters_by_position():
    assert Lossy(0.3) == Lossy(alpha=0.3, beta=1.0)
    assert Lossy(0.3, 1.5).beta == 1.5
    assert Lenient("square", 0.5) == Lenient(kind="square", epsilon=0.5)


@pytest.mark.parametrize(
    ("rule", "attribute"), [(Lossy(0.3), "alpha"), (Lenient("linear", 0.5), "epsilon")]
)
def test_rules_cannot_be_changed(rule: Rule, attribute: str):
    with pytest.raises(FrozenInstanceError):
        setattr(rule, attribute, 0.1)


def test_sampling_params_have_the_documented_defaults():
    params = SamplingParams(temperature=0.7)
    assert (params.temperature, params.top_p, params.top_k) == (0.7, 1.0, 0)
    assert (SamplingParams().temperature, params.repetition_penalty) == (1.0, 1.0)


def test_sampling_params_refuse_change_and_unknown_keys():
    with pytest.raises(ValidationError):
        SamplingParams().temperature = 0.5  # pyright: ignore
    with pytest.raises(ValidationError):
        SamplingParams.model_validate({"topk": 3})


def test_decoders_default_to_lossless_sampling_of_the_model_as_it_is():
    decoder = SpeculativeDecoder(tiny_model(seed=0), tiny_model(seed=1))
    assert decoder.rule == Lossless()
    assert decoder.gamma == 5
    assert decoder.sampling == SamplingParams()


def test_the_command_line_has_every_documented_command_and_option():
    commands = typer.main.get_command(app).commands  # pyright: ignore
    assert set(OPTIONS) <= set(commands)
    for verb, options in OPTIONS.items():
        offered = {option for parameter in commands[verb].params for option in parameter.opts}
        assert set(options.split()) <= offered, verb


def test_every_option_explains_itself():
    commands = typer.main.get_command(app).commands  # pyright: ignore
    options = [(verb, option) for verb in OPTIONS for option in commands[verb].params]
    assert [(verb, one.name) for verb, one in options if not getattr(one, "help", None)] == []


def test_help_does_not_wait_for_torch():
    """No clock: a command line that loads none of these answers in a fraction of a second."""
    heavy = "torch transformers accelerate datasets scipy numpy pandas huggingface_hub"
    program = (
        "import sys, typer.main, paceline.cli.main as cli; typer.main.get_command(cli.app); "
        f"print(*sorted(set({heavy.split()}) & set(sys.modules)))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == ""


OFFERED = (
    "BiLDRule Chow ChowLog Diff DiffLog Lenient Lossless Lossy Opt OptLog TokenV1 TokenV2 TokenV3 "
    "SamplingParams AutoregressiveDecoder SpeculativeDecoder TokenCascade OracleCascade "
    "SequenceCascade BigLittleDecoder Adaptive Confident FixedLength Generation TextGeneration "
    "Block Piece load load_model prepare_for_decoding wrap_model AlignConfig align "
    "PretrainConfig pretrain MeasureConfig Measurement measure_draft measure_drafts VerifyConfig "
    "verify_losslessness AnalyzeConfig analyze BenchConfig run_bench TuneConfig tune ExportConfig "
    "export_draft load_rows write_report"
)


def imported_for_type_checkers() -> dict[str, Any]:
    """Names in the TYPE_CHECKING block of the package, with the module that each comes from."""
    block, _ = [  # the other one hides `__getattr__` from them
        node for node in ast.parse(inspect.getsource(paceline)).body if isinstance(node, ast.If)
    ]
    return {
        # only a name that is imported as itself is public to a type checker
        name.asname: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for name in node.names
        if name.name == name.asname
    }


def test_the_package_offers_what_people_need_and_type_checkers_see_the_same_names():
    packages = {name for name, home in imported_for_type_checkers().items() if home == "paceline"}
    offered = imported_for_type_checkers().keys() - packages
    assert set(OFFERED.split()) <= offered
    assert offered == set(paceline.__all__)
    public = {name for name in dir(paceline) if not name.startswith("__")}
    assert public == offered | packages | {"errors"}
    for name, home in imported_for_type_checkers().items():
        module = importlib.import_module(home)
        assert getattr(paceline, name) is getattr(module, name), name
        assert name not in packages or getattr(module, name).__name__ == f"paceline.{name}"
    with pytest.raises(AttributeError, match="no attribute 'teacher'"):
        paceline.teacher  # noqa: B018


def test_verbs_that_are_named_as_a_package_are_offered_under_a_name_of_their_own():
    """`paceline.measure` is the package whatever was imported before."""
    program = (
        "import paceline; before = paceline.measure, paceline.export, paceline.bench; "
        "verbs = paceline.measure_draft, paceline.export_draft, paceline.run_bench; "
        "print(*(found.__name__ for found in (*before, paceline.measure, *verbs)))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    packages = "paceline.measure paceline.export paceline.bench paceline.measure"
    assert run.stdout.split() == [*packages.split(), "measure", "export", "bench"]


@pytest.mark.parametrize(("word", "code"), [("--version", 0), ("no-such-command", 2)])
def test_the_package_is_the_command_with_its_output_and_exit_codes(word: str, code: int):
    command = [sys.executable, "-m", "paceline", word]
    module = subprocess.run(command, capture_output=True, text=True, check=False)
    program = run_command(Path.cwd(), word)
    assert (module.returncode, program.returncode) == (code, code)
    assert module.stdout == program.stdout


@pytest.mark.parametrize(
    "arguments",
    [["no-such-command"], ["decode"], ["measure", "--no-such-option"], ["validate", "poem", "x"]],
    ids=" ".join,
)
def test_wrong_usage_exits_with_2(arguments: list[str]):
    assert CliRunner().invoke(app, arguments).exit_code == 2


def test_an_error_is_one_line_on_stderr_and_an_exit_code(tmp_path: Any):
    run = finish(start(COMMAND_LINE, "validate", "align", "missing.yaml", cwd=tmp_path))
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.startswith("paceline: no configuration file at ")
    assert run.stderr.count("\n") == 1
