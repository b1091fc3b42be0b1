"""The plugin in a vLLM of fake modules: what it replaces, what it refuses, and its counter."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.config import to_yaml
from paceline.core.rules import Lossless, Rule, TokenV3
from paceline.decode.strategies import DecodingConfig, Speculative
from paceline.engines import vllm_plugin
from paceline.engines.vllm_plugin import register

RULE = '{"rule": "token_v3", "alpha": 0.3}'


def function_of(parameters: tuple[str, ...]) -> Callable[..., str]:
    scope: dict[str, Any] = {}
    exec(f"def rejection_sample({', '.join(parameters)}):\n    return 'vllm'", scope)
    return scope["rejection_sample"]


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Modules with vLLM's functions, by name."""
    modules: dict[str, Any] = {}
    for name, parameters in vllm_plugin._PARAMETERS.items():
        parts = name.split(".")
        for count in range(1, len(parts) + 1):
            part = ".".join(parts[:count])
            if part not in sys.modules or part == name:
                monkeypatch.setitem(sys.modules, part, ModuleType(part))
        modules[name] = sys.modules[name]
        modules[name].rejection_sample = function_of(parameters)
    return modules


def rules(modules: dict[str, Any]) -> list[Rule | None]:
    return [getattr(m.rejection_sample, "paceline_rule", None) for m in modules.values()]


def test_without_the_variable_vllm_is_not_changed(
    vllm: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    for value in (None, "", "  "):
        if value is None:
            monkeypatch.delenv("PACELINE_RULE", raising=False)
        else:
            monkeypatch.setenv("PACELINE_RULE", value)
        register()
        assert rules(vllm) == [None, None]


def test_both_runners_get_the_rule_once(vllm: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PACELINE_RULE", RULE)
    register()
    assert rules(vllm) == [TokenV3(alpha=0.3)] * 2
    first = [m.rejection_sample for m in vllm.values()]
    register()
    assert [m.rejection_sample for m in vllm.values()] == first


@pytest.mark.parametrize("suffix", [".json", ".yaml"])
def test_a_file_of_tune_or_with_a_rule_is_read(
    vllm: dict[str, Any], tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / f"decoding{suffix}"
    tuned = DecodingConfig(strategy=Speculative(rule=TokenV3(alpha=0.3)))
    texts = [to_yaml(tuned), RULE] if suffix == ".yaml" else [tuned.model_dump_json(), RULE]
    for text in texts:
        path.write_text(text)
        monkeypatch.setenv("PACELINE_RULE", str(path))
        for name, parameters in vllm_plugin._PARAMETERS.items():
            vllm[name].rejection_sample = function_of(parameters)
        register()
        assert rules(vllm) == [TokenV3(alpha=0.3)] * 2


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ('{"rule": "token_v9"}', "PACELINE_RULE is not a rule"),
        ('{"rule": "token_v3", "alpha": 7}', "PACELINE_RULE is not a rule"),
        ('{"rule": ', "PACELINE_RULE is not a rule"),
        ("/no/such/file.yaml", "names /no/such/file.yaml, which cannot be read"),
    ],
)
def test_what_is_not_a_rule_ends_vllm_with_one_line(
    vllm: dict[str, Any], given: str, match: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PACELINE_RULE", given)
    with pytest.raises(SystemExit, match=match) as caught:
        register()
    assert "\n" not in str(caught.value)
    assert rules(vllm) == [None, None]


def test_a_file_that_is_not_a_rule_is_named(
    vllm: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "notes.yaml"
    path.write_text("- one\n- two\n")
    monkeypatch.setenv("PACELINE_RULE", str(path))
    with pytest.raises(SystemExit, match=r"notes.yaml is not a rule"):
        register()


@pytest.mark.parametrize("name", vllm_plugin._PARAMETERS)
def test_a_vllm_with_other_functions_ends_with_one_line(
    vllm: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PACELINE_RULE", RULE)
    vllm[name].rejection_sample = function_of(("draft_token_ids", "something_new"))
    with pytest.raises(SystemExit, match=r"takes draft_token_ids, something_new, which Paceline"):
        register()
    del vllm[name].rejection_sample
    with pytest.raises(SystemExit, match=r"takes nothing, which Paceline does not know"):
        register()


def test_values_of_requests_are_repeated_for_their_tokens():
    values = torch.tensor([0.0, 0.7, 2.0])
    found = vllm_plugin.expand_batch_to_tokens(values, torch.tensor([2, 2, 5]), 5, 0, 1)
    assert found.tolist() == [1.0, 1.0, 2.0, 2.0, 2.0]
    assert vllm_plugin.expand_batch_to_tokens(values.int(), torch.tensor([0, 1, 1]), 1).dtype == (
        torch.int32
    )


def first_runner_arguments(*, all_greedy: bool, draft: bool = True) -> tuple[Any, ...]:
    metadata = SimpleNamespace(
        temperature=None if all_greedy else torch.ones(1), all_greedy=all_greedy, generators={}
    )
    probs = torch.full((2, 5), 0.2) if draft else None
    target, bonus = torch.zeros(2, 5), torch.tensor([[4]], dtype=torch.int32)
    drafted = torch.tensor([1, 2], dtype=torch.int32)
    return drafted, [2], 2, torch.tensor([2]), probs, target, bonus, metadata


def test_calls_are_counted_and_judged_by_the_rule(
    vllm: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setenv("PACELINE_RULE", '{"rule": "lossless"}')
    monkeypatch.setattr(vllm_plugin, "counter", vllm_plugin.Counter())
    register()
    sample = vllm["vllm.v1.sample.rejection_sampler"].rejection_sample
    with caplog.at_level("INFO", logger="vllm.paceline"):
        tokens = sample(*first_runner_arguments(all_greedy=False))
        assert tokens.tolist() == [[1, 2, 4]], "p = q: every draft is kept"
        sample(*first_runner_arguments(all_greedy=True))
    assert vllm_plugin.counter.num_calls == 2
    assert caplog.text.count("judged") == 1
    assert isinstance(sample.paceline_rule, Lossless)


def test_a_batch_that_lost_its_draft_probabilities_follows_the_target(
    vllm: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setenv("PACELINE_RULE", '{"rule": "token_v3", "alpha": 0.9}')
    monkeypatch.setattr(vllm_plugin, "counter", vllm_plugin.Counter())
    register()
    sample = vllm["vllm.v1.sample.rejection_sampler"].rejection_sample
    given = first_runner_arguments(all_greedy=False)
    assert sample(*given).tolist() == [[1, 2, 4]], "the rule keeps these drafts"
    lost = list(first_runner_arguments(all_greedy=False, draft=False))
    lost[5] = torch.tensor([[0.0, -99, -99, -99, -99]] * 2)
    for _ in range(2):
        assert sample(*lost).tolist() == [[0, -1, -1]], "which the target cannot write"
    assert vllm_plugin.counter.num_without_draft == 2
    assert caplog.text.count("no draft probabilities for a batch") == 1
    none = list(first_runner_arguments(all_greedy=False, draft=False))
    none[0], none[1], none[5] = torch.zeros(0, dtype=torch.int32), [0], torch.zeros(0, 5)
    assert sample(*none)[0, 0] == 4, "a step without drafts"


def test_what_a_rule_cannot_have_is_one_line(vllm: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PACELINE_RULE", RULE)
    monkeypatch.setattr(vllm_plugin, "counter", vllm_plugin.Counter())
    register()
    sample = vllm["vllm.v1.sample.rejection_sampler"].rejection_sample
    refused = r'token_v3 needs .*set "draft_sample_method": "prob'
    without = first_runner_arguments(all_greedy=False, draft=False)
    for _ in range(vllm_plugin._MOST_WITHOUT_DRAFT):  # drafts of greedy batches before
        sample(*without)
    with pytest.raises(RuntimeError, match=refused):
        sample(*without)
    sample(*first_runner_arguments(all_greedy=True, draft=False))
    with pytest.raises(RuntimeError, match="synthetic decides which drafts are kept, and so does"):
        sample(*first_runner_arguments(all_greedy=False), synthetic_mode=True)
    other = vllm["vllm.v1.worker.gpu.spec_decode.rejection_sampler"].rejection_sample
    rows = [torch.zeros(3, 5), torch.zeros(1, 2, 5), torch.tensor([0, 1, 2]), torch.tensor([0, 3])]
    rows += [torch.arange(3), torch.tensor([0]), torch.zeros(3, dtype=torch.int64), torch.arange(3)]
    given = (*rows, torch.ones(1), torch.tensor([7]), 2)
    tokens, counts = other(*given)
    assert (tokens.shape, counts.tolist()) == ((1, 3), [3])
    greedy = (rows[0], None, *given[2:-3], torch.zeros(1), *given[-2:])
    assert other(*greedy)[1].tolist() == [1], "argmax of equal logits is token 0, not draft 1"
    with pytest.raises(RuntimeError, match=refused):
        other(rows[0], None, *given[2:])
    with pytest.raises(RuntimeError, match="rejection_sample_method block decides"):
        other(*given, use_block_verification=True)
    with pytest.raises(RuntimeError, match="a watermark decides"):
        other(*given, contexts=torch.zeros(3, 1))
