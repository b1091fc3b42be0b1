"""The plugin in a vLLM of fake modules: what it replaces, what it refuses, and its counter."""

from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.config import to_yaml
from paceline.core.rules import Chow, Lenient, Lossless, Lossy, Rule, TokenV3
from paceline.decode.strategies import DecodingConfig, Speculative
from paceline.engines import vllm_plugin
from paceline.engines.vllm_plugin import expand_batch_to_tokens, register
from support.fake_vllm import FakeVllm, settings_of

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
        assert rules(vllm) == [None] * 6


def test_both_runners_get_the_rule_once(vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PACELINE_RULE", RULE)
    register()
    assert rules(vllm) == [TokenV3(alpha=0.3)] * 6
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
        assert rules(vllm) == [TokenV3(alpha=0.3)] * 6


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
    vllm: FakeVllm, given: str, match: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PACELINE_RULE", given)
    with pytest.raises(SystemExit, match=match) as caught:
        register()
    assert "\n" not in str(caught.value)
    assert rules(vllm) == [None] * 6


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
    setattr(place, name, lambda draft_token_ids, something_new: None)
    with pytest.raises(SystemExit, match=r"takes draft_token_ids, something_new, which Paceline"):
        register()
    delattr(place, name)
    refused = f"{path} of this vLLM takes nothing, which Paceline does not know"
    with pytest.raises(SystemExit, match=refused):
        register()
    if classes:
        delattr(vllm[module], classes[0])
        with pytest.raises(SystemExit, match=refused):
            register()
    assert rules(vllm) == [None] * 6


def test_values_of_requests_are_repeated_for_their_tokens():
    values = torch.tensor([0.0, 0.7, 2.0])
    found = expand_batch_to_tokens(values, torch.tensor([2, 2, 5]), 5, 0, 1)
    assert found.tolist() == [1.0, 1.0, 2.0, 2.0, 2.0]
    assert expand_batch_to_tokens(values.int(), torch.tensor([0, 1, 1]), 1).dtype == (torch.int32)


DRAFTED = torch.tensor([[1, 2]])
SAMPLED, GREEDY = settings_of(torch.ones(1)), settings_of(None)
PROBS = torch.full((2, 5), 0.2)
ONLY_0 = torch.tensor([[0.0, -99, -99, -99, -99]] * 2)


def registered(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_RULE", rule)
    register()


def by_first(
    vllm: FakeVllm, settings: Any, probs: torch.Tensor | None, target: torch.Tensor | None = None
) -> list[list[int]]:
    """A block of two drafts; 0 is the bonus token."""
    logits = torch.zeros(2, 5) if target is None else target
    return vllm.judge_first(DRAFTED, probs, logits, settings).tolist()


def test_calls_are_counted_and_judged_by_the_rule(
    vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    registered('{"rule": "lossless"}', monkeypatch)
    with caplog.at_level("INFO", logger="vllm.paceline"):
        assert by_first(vllm, SAMPLED, PROBS) == [[1, 2, 0]], "p = q: every draft is kept"
        by_first(vllm, GREEDY, PROBS)
    assert vllm_plugin.counter.num_calls == 2
    assert caplog.text.count("judged") == 1
    assert rules(vllm) == [Lossless()] * 6


LOST = [TokenV3(alpha=0.9), Chow(alpha=0.0), Lossy(alpha=0.9), Lenient("square", 0.01)]


@pytest.mark.parametrize("rule", LOST, ids=str)
def test_a_batch_that_lost_its_draft_probabilities_follows_the_target(
    rule: Rule,
    vllm: FakeVllm,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    """Under every rule; a greedy request in that batch needs no draft."""
    registered(DecodingConfig(strategy=Speculative(rule=rule)).model_dump_json(), monkeypatch)
    assert by_first(vllm, SAMPLED, PROBS) == [[1, 2, 0]], "the rule keeps these drafts"
    half = torch.tensor([[0.6, 0.4, 0, 0, 0]] * 2).log()
    firsts = [by_first(vllm, SAMPLED, None, half)[0][0] for _ in range(400)]
    assert 0.3 < firsts.count(1) / 400 < 0.5, "0.4, and not min(1, f(p))"
    assert vllm_plugin.counter.num_without_draft == 400
    assert caplog.text.count("no draft probabilities for a batch") == 1
    none = vllm.judge_first(DRAFTED[:, :0], None, torch.zeros(0, 5), SAMPLED)
    assert none.tolist() == [[0]], "a step without drafts"
    mixed = settings_of(torch.tensor([1.0, 0.0]))
    near = torch.tensor([[0.6, 0.4, 0, 0, 0]] * 4).log()
    drafts = torch.tensor([[0, 0], [1, 1]])
    kept = vllm.judge_first(drafts, None, near, mixed)[1].tolist()
    assert kept == ([0, -1, -1] if rule.uses_confidence else [1, 1, 0])


@pytest.mark.parametrize("alpha", [0.5, 0.9])
def test_greedy_drafts_are_judged_by_a_rule_without_confidences(
    vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch, alpha: float
):
    """q is one-hot there: p(y) / (1 - alpha) of the drafts are kept, and not p(y)."""
    registered(f'{{"rule": "lossy", "alpha": {alpha}}}', monkeypatch)
    target = torch.tensor([[0.76, 0.24, 0, 0, 0]] * 2).log()
    firsts = [by_first(vllm, SAMPLED, None, target)[0][0] for _ in range(400)]
    assert firsts.count(1) / 400 == pytest.approx(min(1, 0.24 / (1 - alpha)), abs=0.1)
    assert vllm_plugin.counter.num_without_draft == 0


def test_drafting_shows_that_drafts_have_probabilities(
    vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch
):
    """Before the first batch is judged."""
    registered('{"rule": "lossy", "alpha": 0.9}', monkeypatch)
    vllm.draft(torch.zeros(3, 5), GREEDY)
    assert not vllm_plugin.counter.saw_draft
    vllm.draft(torch.zeros(1, 5), SAMPLED)
    assert by_first(vllm, SAMPLED, None, ONLY_0) == [[0, -1, -1]]


def is_deferred(monkeypatch: pytest.MonkeyPatch, alpha: float, temperature: float) -> bool:
    """By Chow's rule: one token of the draft at 0 and 50,000 at -11, so that max q is 0.545."""
    vllm = FakeVllm(monkeypatch)
    registered(f'{{"rule": "chow", "alpha": {alpha}}}', monkeypatch)
    settings = settings_of(torch.tensor([temperature]))
    target, draft = torch.full((1, 50_001), -99.0), torch.full((1, 50_001), -11.0)
    target[0, 7], draft[0, 0] = 0.0, 0.0
    _, probs = vllm.draft(draft, settings)
    found = vllm.judge_first(torch.zeros(1, 1), probs, target, settings).tolist()
    assert found in ([[7, -1]], [[0, 0]]), "the target's token, or the draft's and a bonus token"
    return found == [[7, -1]]


@pytest.mark.parametrize("temperature", [0.01, 0.1, 0.15, 0.7])
def test_confidences_of_a_draft_at_a_low_temperature_are_those_before_it(
    monkeypatch: pytest.MonkeyPatch, temperature: float
):
    """Its probabilities in float32 are 0 for exp(-110) at 0.1."""
    assert is_deferred(monkeypatch, 0.4, temperature), "0.545 < 1 - 0.4"
    assert not is_deferred(monkeypatch, 0.5, temperature)


def test_probabilities_in_place_of_logarithms_are_caught(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(vllm_plugin, "_drafter", lambda original: lambda *given: original(*given))
    assert is_deferred(monkeypatch, 0.4, 0.7)
    assert not is_deferred(monkeypatch, 0.4, 0.1), "max q is rounded to 1"


def test_what_a_rule_cannot_have_is_one_line(vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch):
    registered(RULE, monkeypatch)
    refused = r'token_v3 needs .*set "draft_sample_method": "prob'
    for _ in range(vllm_plugin._MOST_WITHOUT_DRAFT):  # drafts of greedy batches before
        by_first(vllm, SAMPLED, None)
    with pytest.raises(RuntimeError, match=refused):
        by_first(vllm, SAMPLED, None)
    by_first(vllm, GREEDY, None)
    ones, rows = torch.ones(1), torch.zeros(3, 5)
    assert vllm.judge_second(DRAFTED, torch.zeros(1, 2, 5), rows, ones).shape == (1, 3)
    tokens = vllm.judge_second(DRAFTED, None, rows, 0 * ones)
    assert tokens.tolist() == [[0, -1, -1]], "argmax of equal logits is token 0, not draft 1"
    with pytest.raises(RuntimeError, match=refused):
        vllm.judge_second(DRAFTED, None, rows, ones)


def test_other_ways_to_choose_tokens_are_refused(vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch):
    registered('{"rule": "lossless"}', monkeypatch)
    first, second = (vllm[name].rejection_sample for name in (vllm_plugin._V1, vllm_plugin._V2))
    given = [torch.zeros(0)] * 20
    with pytest.raises(RuntimeError, match="synthetic decides which drafts are kept, and so does"):
        first(*given[:8], synthetic_mode=True)
    with pytest.raises(RuntimeError, match="synthetic decides"):
        second(*given[:11], given[0])
    with pytest.raises(RuntimeError, match="rejection_sample_method block decides"):
        second(*given[:11], use_block_verification=True)
    with pytest.raises(RuntimeError, match="a watermark decides"):
        second(*given[:11], contexts=torch.zeros(3, 1))


@pytest.mark.parametrize("rule", ['{"rule": "diff", "alpha": 0.1}', '{"rule": "lossless"}'])
def test_logits_of_a_sampler_that_hands_over_none_are_refused_if_the_rule_reads_them(
    rule: str, vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch
):
    registered(rule, monkeypatch)
    vllm[vllm_plugin._V1].apply_sampling_constraints = lambda logits, *_: logits.clone()
    vllm[vllm_plugin._SAMPLER].Sampler.apply_sampling_params = lambda _, logits, *__: logits.clone()
    draft, rows = torch.zeros(1, 2, 5), torch.zeros(3, 5)
    if "lossless" in rule:
        assert by_first(vllm, SAMPLED, PROBS) == [[1, 2, 0]]
        vllm.judge_second(DRAFTED, draft, rows, torch.ones(1))
        return
    refused = "diff reads the target's logits before top-k and top-p, and the sampler"
    with pytest.raises(RuntimeError, match=refused):
        by_first(vllm, SAMPLED, PROBS)
    with pytest.raises(RuntimeError, match=refused):
        vllm.judge_second(DRAFTED, draft, rows, torch.ones(1))


def test_a_step_without_drafts_copies_no_logits(vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch):
    registered(RULE, monkeypatch)
    vllm.judge_second(DRAFTED, torch.zeros(1, 2, 5), torch.zeros(3, 5), torch.ones(1))
    module = vllm[vllm_plugin._SAMPLER]
    sampler = module.Sampler()
    sampler.needs_logits_processing, sampler.top_p, sampler.penalty = True, 1.0, 0.0
    sampler.sampling_states = vllm[vllm_plugin._STATES].SamplingStates()
    sampler.sampling_states.temperature = settings_of(torch.ones(1), top_p=1.0)
    sampler.sampling_states.temperature.gpu = torch.full((1,), 0.5)
    copies: list[int] = []
    monkeypatch.setattr(torch.Tensor, "clone", lambda one, **_: copies.append(1) or one * 1)
    place = torch.zeros(1, dtype=torch.int64)
    given = (torch.ones(1, 5), place, place, place.numpy(), None, None, None, None)
    found = sampler.apply_sampling_params(*given, skip_top_k_top_p=True)
    assert found.tolist() == [[2.0] * 5]
    assert len(copies) == 1, "vLLM's own"
