"""The plugin in a vLLM of fake modules: what it replaces and what it refuses."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.config import to_yaml
from paceline.core.rules import Lossless, Rule, TokenV3
from paceline.decode.strategies import DecodingConfig, Speculative
from paceline.engines import vllm_plugin
from paceline.engines.vllm_plugin import register
from support.fake_vllm import FakeVllm

RULE = '{"rule": "token_v3", "alpha": 0.3}'


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> FakeVllm:
    return FakeVllm(monkeypatch)


def rules(vllm: FakeVllm) -> list[Rule | None]:
    return [getattr(one, "paceline_rule", None) for one in vllm.functions()]


def test_without_the_variable_vllm_is_not_changed(vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch):
    for value in (None, "", "  "):
        if value is None:
            monkeypatch.delenv("PACELINE_RULE", raising=False)
        else:
            monkeypatch.setenv("PACELINE_RULE", value)
        register()
        assert rules(vllm) == [None] * 3


def test_vllm_gets_the_rule_once(vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PACELINE_RULE", RULE)
    register()
    assert rules(vllm) == [TokenV3(alpha=0.3)] * 3
    first = vllm.functions()
    register()
    assert vllm.functions() == first


@pytest.mark.parametrize("suffix", [".json", ".yaml"])
def test_a_file_of_tune_or_with_a_rule_is_read(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / f"decoding{suffix}"
    tuned = DecodingConfig(strategy=Speculative(rule=TokenV3(alpha=0.3), bonus="target"))
    texts = [to_yaml(tuned), RULE] if suffix == ".yaml" else [tuned.model_dump_json(), RULE]
    for text in texts:
        path.write_text(text)
        monkeypatch.setenv("PACELINE_RULE", str(path))
        vllm = FakeVllm(monkeypatch)
        register()
        assert rules(vllm) == [TokenV3(alpha=0.3)] * 3


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ('{"rule": "token_v9"}', "PACELINE_RULE is not a rule"),
        ('{"rule": "token_v3", "alpha": 7}', "PACELINE_RULE is not a rule"),
        ('{"rule": ', "PACELINE_RULE is not a rule"),
        ("/no/such/file.yaml", "/no/such/file.yaml is not a rule"),
    ],
)
def test_what_is_not_a_rule_ends_vllm_with_one_line(
    vllm: FakeVllm, given: str, match: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PACELINE_RULE", given)
    with pytest.raises(SystemExit, match=match):
        register()
    assert rules(vllm) == [None] * 3


def test_a_file_that_is_not_a_rule_is_named(
    vllm: FakeVllm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "notes.yaml"
    path.write_text("- one\n- two\n")
    monkeypatch.setenv("PACELINE_RULE", str(path))
    with pytest.raises(SystemExit, match=r"notes.yaml is not a rule"):
        register()


@pytest.mark.parametrize(("module", "path"), vllm_plugin._PARAMETERS)
def test_a_vllm_with_other_functions_ends_with_one_line(
    vllm: FakeVllm, module: str, path: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PACELINE_RULE", RULE)
    *classes, name = path.split(".")
    place = getattr(vllm[module], classes[0]) if classes else vllm[module]
    setattr(place, name, lambda something_new: None)
    refused = f"{path} of this vLLM takes no {', '.join(vllm_plugin._PARAMETERS[module, path])}"
    with pytest.raises(SystemExit, match=refused):
        register()
    delattr(place, name)
    with pytest.raises(SystemExit, match=refused):
        register()
    if classes:
        delattr(vllm[module], classes[0])
        with pytest.raises(SystemExit, match=refused):
            register()
    assert rules(vllm) == [None] * 3


def test_the_first_runner_is_refused_by_its_name(vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch):
    registered(RULE, monkeypatch)
    with pytest.raises(RuntimeError, match=r"this is the first .* set VLLM_USE_V2_MODEL_RUNNER=1"):
        vllm[vllm_plugin._FIRST].rejection_sample(torch.zeros(0), [0])


DRAFTED = torch.tensor([[1, 2]])
DRAFT, ROWS, ONES = torch.zeros(1, 2, 5), torch.zeros(3, 5), torch.ones(1)


def registered(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_RULE", rule)
    register()


def test_batches_are_judged_by_the_rule(vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch):
    registered('{"rule": "lossless"}', monkeypatch)
    kept = vllm.judge(DRAFTED, DRAFT, ROWS.clone(), ONES).tolist()
    assert kept[0][:2] == [1, 2], "p = q: every draft is kept"
    assert rules(vllm) == [Lossless()] * 3


def test_what_a_rule_cannot_have_is_one_line(vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch):
    registered(RULE, monkeypatch)
    assert vllm.judge(DRAFTED, DRAFT, ROWS.clone(), ONES).shape == (1, 3)
    tokens = vllm.judge(DRAFTED, None, ROWS.clone(), 0 * ONES)
    assert tokens.tolist() == [[0, -1, -1]], "argmax of equal logits is token 0, not draft 1"
    refused = r'token_v3 needs .*set "draft_sample_method": "prob'
    with pytest.raises(RuntimeError, match=refused):
        vllm.judge(DRAFTED, None, ROWS.clone(), ONES)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("synthetic_conditional_rates", torch.zeros(1)),
        ("use_block_verification", True),
        ("contexts", torch.zeros(3, 1)),
    ],
)
def test_other_ways_to_choose_tokens_are_refused(
    name: str, value: Any, vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch
):
    registered('{"rule": "lossless"}', monkeypatch)
    judge = vllm[vllm_plugin._JUDGE].rejection_sample
    with pytest.raises(RuntimeError, match=f"{name} .* decides which drafts are kept, and so does"):
        judge(*[torch.zeros(0)] * 11, **{name: value})


@pytest.mark.parametrize("rule", ['{"rule": "diff", "alpha": 0.1}', '{"rule": "lossless"}'])
def test_logits_of_a_sampler_that_hands_over_none_are_refused_if_the_rule_reads_them(
    rule: str, vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch
):
    registered(rule, monkeypatch)
    vllm[vllm_plugin._SAMPLER].Sampler.apply_sampling_params = lambda _, logits, *__: logits.clone()
    if "lossless" in rule:
        vllm.judge(DRAFTED, DRAFT, ROWS, ONES)
        return
    refused = "diff reads the target's logits before top-k and top-p, and the sampler"
    with pytest.raises(RuntimeError, match=refused):
        vllm.judge(DRAFTED, DRAFT, ROWS, ONES)


def test_a_step_without_drafts_copies_no_logits(vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch):
    registered(RULE, monkeypatch)
    vllm.judge(DRAFTED, DRAFT, ROWS.clone(), ONES)
    module = vllm[vllm_plugin._SAMPLER]
    sampler = module.Sampler()
    sampler.needs_logits_processing, sampler.top_p, sampler.penalty = True, 1.0, 0.0
    sampler.sampling_states = vllm[vllm_plugin._STATES].SamplingStates()
    sampler.sampling_states.temperature = SimpleNamespace(gpu=torch.full((1,), 0.5))
    copies: list[int] = []
    monkeypatch.setattr(torch.Tensor, "clone", lambda one, **_: copies.append(1) or one * 1)
    place = torch.zeros(1, dtype=torch.int64)
    given = (torch.ones(1, 5), place, place, place.numpy(), None, None, None, None)
    found = sampler.apply_sampling_params(*given, skip_top_k_top_p=True)
    assert found.tolist() == [[2.0] * 5]
    assert len(copies) == 1, "vLLM's own"
