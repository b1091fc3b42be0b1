"""The plugin in a vLLM of fake modules: what it replaces and what it refuses."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.config import to_yaml
from paceline.core.rules import Lossless, Rule, TokenV3
from paceline.decode.strategies import DecodingConfig, Speculative
from paceline.engines import vllm_plugin
from paceline.engines.vllm_plugin import register
from paceline.engines.vllm_rules import rejection_sample
from support.fake_vllm import FakeVllm

RULE = '{"rule": "token_v3", "alpha": 0.3}'


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> FakeVllm:
    return FakeVllm(monkeypatch)


def registered(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_RULE", rule)
    register()


def rules(vllm: FakeVllm) -> list[Rule | None]:
    return [getattr(one, "paceline_rule", None) for one in vllm.functions()]


def test_without_the_variable_vllm_is_not_changed(vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("PACELINE_RULE", raising=False)
    register()
    for value in ("", "  "):
        registered(value, monkeypatch)
    assert rules(vllm) == [None] * 3


def test_vllm_gets_the_rule_once(vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch):
    registered(RULE, monkeypatch)
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
        vllm = FakeVllm(monkeypatch)
        registered(str(path), monkeypatch)
        assert rules(vllm) == [TokenV3(alpha=0.3)] * 3


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ('{"rule": "token_v9"}', "PACELINE_RULE is not a rule"),
        ('{"rule": "token_v3", "alpha": 7}', "PACELINE_RULE is not a rule"),
        ('{"rule": ', "PACELINE_RULE is not a rule"),
        ("/no/such/file.yaml", "/no/such/file.yaml is not a rule"),
        ("FOLDER/notes.yaml", r"notes.yaml is not a rule"),
    ],
)
def test_what_is_not_a_rule_ends_vllm_with_one_line(
    vllm: FakeVllm, given: str, match: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "notes.yaml").write_text("- one\n- two\n")
    with pytest.raises(SystemExit, match=match):
        registered(given.replace("FOLDER", str(tmp_path)), monkeypatch)
    assert rules(vllm) == [None] * 3


@pytest.mark.parametrize(("module", "path"), vllm_plugin._PARAMETERS)
def test_a_vllm_with_other_functions_ends_with_one_line(
    vllm: FakeVllm, module: str, path: str, monkeypatch: pytest.MonkeyPatch
):
    *classes, name = path.split(".")
    place = getattr(vllm[module], classes[0]) if classes else vllm[module]
    setattr(place, name, lambda something_new: None)
    refused = f"{path} of this vLLM takes no {', '.join(vllm_plugin._PARAMETERS[module, path])}"
    with pytest.raises(SystemExit, match=refused):
        registered(RULE, monkeypatch)
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


V = 7
COUNTS = [2, 0, 3, 1, 3, 0]
TEMPERATURES = [0.0, 1.0, 0.7, 0.0, 0.0, 0.5]
RULES = [Lossless(), TokenV3(alpha=0.5)]


def logits(*shape: int, seed: int = 0) -> Tensor:
    return 2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Requests:
    """Six requests and the rows of their drafts."""

    def __init__(self, *, all_greedy: bool = False) -> None:
        self.target = logits(sum(COUNTS), V)
        self.draft = logits(sum(COUNTS), V, seed=1)
        self.bonus = torch.tensor([[6], [5], [4], [3], [2], [1]], dtype=torch.int32)
        # most drafts are the target's argmax
        guesses = torch.randint(V, (sum(COUNTS),), generator=torch.Generator().manual_seed(2))
        lucky = torch.tensor([1, 0, 1, 1, 0, 1, 1, 1, 1], dtype=torch.bool)
        self.drafted = torch.where(lucky, self.target.argmax(-1), guesses).to(torch.int32)
        self.temperature = torch.tensor([0.0] * 6 if all_greedy else TEMPERATURES)

    def judged(self, rule: Rule, seeds: Tensor, keep: list[int] | None = None) -> list[list[int]]:
        """Each request's rows with a bonus row behind them; request i is at place 9 - i."""
        keep = list(range(6)) if keep is None else keep
        rows, sampled, places, steps, pos = [], [], [], [], []
        draft = torch.zeros(10, 3, V)
        starts = torch.tensor([0, *COUNTS]).cumsum(0).tolist()
        for request in keep:
            first, count = starts[request], COUNTS[request]
            bonus = torch.full((1, V), -9.0)
            bonus[0, int(self.bonus[request])] = 9.0
            rows += [self.target[first : first + count], bonus]
            sampled += [0, *self.drafted[first : first + count].tolist()]
            places += [9 - request] * (count + 1)
            steps += range(count + 1)
            pos += range(20 + request, 21 + request + count)
            draft[9 - request, :count] = self.draft[first : first + count]
        temperature = torch.zeros(10)
        temperature[[9 - request for request in range(6)]] = self.temperature
        bounds = torch.tensor([0, *[COUNTS[request] + 1 for request in keep]]).cumsum(0)
        tokens, counts = rejection_sample(
            rule,
            torch.cat(rows),
            draft,
            torch.tensor(sampled, dtype=torch.int32),
            bounds.to(torch.int32),
            torch.tensor(pos),
            torch.tensor(places, dtype=torch.int32),
            torch.tensor(steps),
            temperature,
            seeds,
            3,
        )
        assert (tokens.dtype, counts.dtype) == (torch.int64, torch.int32)
        found = shortened(tokens)
        assert [len(row) for row in found] == counts.tolist()
        return found

    def greedy(self, request: int) -> list[int]:
        """By a plain loop: drafts while they are the argmax, then the argmax or the bonus."""
        first = sum(COUNTS[:request])
        text: list[int] = []
        for row in range(first, first + COUNTS[request]):
            best = int(self.target[row].argmax())
            text.append(best)
            if best != int(self.drafted[row]):
                return text
        return [*text, int(self.bonus[request])]


def shortened(tokens: Tensor) -> list[list[int]]:
    """Without the -1 behind each text."""
    rows = [[token for token in row if token >= 0] for row in tokens.tolist()]
    for row, full in zip(rows, tokens.tolist(), strict=True):
        assert full[: len(row)] == row
        assert set(full[len(row) :]) <= {-1}
    return rows


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("all_greedy", [False, True])
def test_greedy_requests_follow_the_targets_argmax(rule: Rule, all_greedy: bool):
    requests = Requests(all_greedy=all_greedy)
    found = requests.judged(rule, torch.arange(10))
    for request, text in enumerate(found):
        assert 1 <= len(text) <= COUNTS[request] + 1
        if requests.temperature[request] == 0:
            assert text == requests.greedy(request)
        if not COUNTS[request]:
            assert text == [int(requests.bonus[request])]
    assert len({len(text) for text in found}) > 2


def test_a_request_depends_on_its_own_seed_and_rows_alone():
    requests = Requests()
    seeds = torch.arange(10) * 7919
    together = requests.judged(TokenV3(alpha=0.5), seeds)
    for request in range(6):
        assert requests.judged(TokenV3(alpha=0.5), seeds, [request]) == [together[request]]
    assert requests.judged(TokenV3(alpha=0.5), seeds, [4, 2]) == [together[4], together[2]]
    others = [requests.judged(TokenV3(alpha=0.5), seeds + n)[2] for n in range(1, 20)]
    assert len({tuple(text) for text in [together[2], *others]}) > 2


def of_one_request(target: Tensor, draft: Tensor, given: list[int]) -> tuple[Tensor, Tensor]:
    """Tokens and counts of a request with one drafted token."""
    numbers = ([0, 2], [7, 8], [0, 0], [0, 1])
    settings = (torch.tensor(given), *map(torch.tensor, numbers), torch.ones(1), torch.tensor([11]))
    return rejection_sample(Lossless(), target, draft, *settings, 1)


def test_a_draft_that_is_not_valid_is_rejected_and_replaced_by_a_token_of_the_target():
    target = torch.full((2, V), -30.0)
    target[:, 4] = 0.0
    draft = torch.zeros(1, 1, V)
    draft[0, 0, 4] = 30.0  # its residual would never give token 4
    tokens, counts = of_one_request(target, draft, [1, -1])
    assert tokens.tolist() == [[4, -1]]
    assert counts.tolist() == [1]


def test_a_target_with_padded_logits_never_gives_padding():
    target = torch.zeros(2, V + 3)
    target[:, V:] = 50.0
    tokens, _ = of_one_request(target, torch.zeros(1, 1, V), [1, 2])
    assert int(tokens.max()) < V
