"""Rules on vLLM's tensors: pairs of tokens by enumeration, in its second runner's layout.

Each test draws N = 20,000 blocks of two drafts at once, with a fixed seed, and compares the first
two tokens with the exact joint distribution (a rejected first draft ends the block). A right
sampler fails a case by chance with probability below 1e-4; there are 65 cases. Mutants fail.
"""

import math
from collections import Counter, defaultdict
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch

from paceline.core.rules import Lenient, Lossless, Lossy, Rule, TokenV2, TokenV3
from paceline.decode.strategies import DecodingConfig, Speculative
from paceline.engines import vllm_rules
from paceline.engines.vllm_plugin import RawLogits, register
from paceline.engines.vllm_rules import rejection_sample
from support import exact
from support.exact import AIMS, Vectors, aimed_vectors, chi_square_p_value, lenient_at_0, lossy_at_0
from support.fake_vllm import FakeVllm, keep_top_p
from support.rules import stating

N = 20_000
V = 5
TEMPERATURE = 0.8
TARGET = torch.tensor([[2.0, 1.2, 0.3, -0.5, 0.1], [0.2, 1.9, 0.8, -1.0, 0.4], [1.0, 0, 0, 0, 0]])
DRAFT = torch.tensor([[0.9, 1.8, 0.1, 0.3, -0.4], [1.2, 0.7, 1.1, -0.2, 0.0]])
Pairs = dict[tuple[int, ...], float]


class Setting(NamedTuple):
    """What a request asks for; the penalty is added to the target's logits."""

    temperature: float = TEMPERATURE
    top_p: float = 1.0
    penalty: tuple[float, ...] = (0.0,) * V


def probs(logits: torch.Tensor, temperature: float) -> list[list[float]]:
    return (logits.double() / temperature).softmax(-1).tolist()


def cascade(name: str, alpha: float) -> Vectors:
    return aimed_vectors(AIMS[name](alpha))


RULES: dict[str, tuple[Rule, Vectors]] = {
    "lossless": (Lossless(), exact.near(exact.lossless)),
    "lenient": (Lenient(kind="linear", epsilon=0.5), exact.near(exact.lenient("linear", 0.5))),
    "square": (Lenient(kind="square", epsilon=0.6), exact.near(exact.lenient("square", 0.6))),
    "exponential": (Lenient("exponential", 0.5), exact.near(exact.lenient("exponential", 0.5))),
    "lossy": (Lossy(alpha=0.3), exact.near(exact.lossy(0.3))),
    **{
        name: (stating(name, alpha), cascade(name, alpha))
        for name, alpha in {
            "tuned": 0.3,
            "bild": 2.1,
            "chow": 0.6,
            "chow_log": 1.35,
            "diff": 0.1,
            "diff_log": 0.25,
            "opt": 0.2,
            "opt_log": 0.4,
            "token_v1": 0.3,
            "token_v2": 0.3,
            "token_v3": 0.5,
        }.items()
    },
}
READ_RAW = ["bild", "diff", "diff_log", "opt", "opt_log", "token_v1", "token_v2"]
"""Rules that the sum of the target's probabilities changes; token_v3 compares their ratio."""


def expected(
    name: str, *, one_hot: bool = False, setting: Setting | None = None, filtered: bool = False
) -> Pairs:
    """The joint distribution of the first two tokens; -1: there is no second one.

    `filtered`: confidences of the filtered target, renormalised, which no rule states.
    """
    temperature, top_p, penalty = setting or Setting()
    penalised = TARGET + torch.tensor(penalty)
    p, p_raw = probs(penalised, temperature), probs(penalised, 1.0)
    p = [exact.Shaping(top_p=top_p)([math.log(x) for x in row], ()) for row in p]
    if filtered:
        p_raw = [exact.Shaping(1 / temperature)([log(x) for x in row], ()) for row in p]
    q, q_raw = probs(DRAFT, temperature), probs(DRAFT, 1.0)
    if one_hot:
        q = q_raw = [[float(chance == max(row)) for chance in row] for row in q]
    pairs: Pairs = defaultdict(float)
    judged = [RULES[name][1](p[i], q[i], p_raw[i], q_raw[i]) for i in range(2)]
    kept = [[a * b for a, b in zip(q[i], judged[i][0], strict=True)] for i in range(2)]
    second = [kept[1][v] + (1 - math.fsum(kept[1])) * judged[1][1][v] for v in range(V)]
    for v in range(V):
        pairs[v, -1] += (1 - math.fsum(kept[0])) * judged[0][1][v]
        for w in range(V):
            pairs[v, w] += kept[0][v] * second[w]
    return pairs


def log(x: float) -> float:
    return math.log(x) if x else -math.inf


def drafted(temperature: float) -> torch.Tensor:
    """Two drafts of each request, [N, 2]."""
    rng = torch.Generator().manual_seed(1)
    q = torch.tensor(probs(DRAFT, temperature))
    return torch.stack([torch.multinomial(row, N, True, generator=rng) for row in q], 1)


def p_value(tokens: torch.Tensor, exact: Pairs) -> float:
    return chi_square_p_value(Counter(map(tuple, tokens[:, :2].tolist())), exact)


def in_vllm(
    monkeypatch: pytest.MonkeyPatch,
    rule: Rule,
    setting: Setting | None = None,
    *,
    one_hot: bool = False,
) -> torch.Tensor:
    """Through vLLM's functions as the plugin leaves them; `one_hot`: greedy drafts, no logits."""
    temperature, top_p, penalty = setting or Setting()
    vllm = FakeVllm(monkeypatch)
    monkeypatch.setenv(
        "PACELINE_RULE", DecodingConfig(strategy=Speculative(rule=rule)).model_dump_json()
    )
    register()
    return vllm.judge(
        DRAFT.argmax(-1).expand(N, 2) if one_hot else drafted(temperature),
        None if one_hot else DRAFT.expand(N, 2, V),
        TARGET.repeat(N, 1),
        torch.full((N,), temperature),
        top_p=top_p,
        penalty=torch.tensor(penalty),
    )


@pytest.mark.parametrize("name", ["lossless", "lenient"])
def test_pairs_after_greedy_drafts_follow_the_rule(name: str, monkeypatch: pytest.MonkeyPatch):
    """Without draft probabilities the draft's distribution is one-hot."""
    tokens = in_vllm(monkeypatch, RULES[name][0], one_hot=True)
    assert p_value(tokens, expected(name, one_hot=True)) > 1e-4


SETTINGS = [
    Setting(1.0, 0.6),
    Setting(),
    Setting(0.7, 0.8, (-0.8, 0.0, 0.4, 0.0, 0.0)),
    Setting(0.15),
]


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        (name, setting)
        for name in RULES
        for place, setting in enumerate(SETTINGS)
        if place or name not in READ_RAW
    ],
    ids=str,
)
def test_pairs_follow_the_rule_with_filters_penalties_and_at_low_temperatures(
    name: str, setting: Setting, monkeypatch: pytest.MonkeyPatch
):
    tokens = in_vllm(monkeypatch, RULES[name][0], setting)
    assert p_value(tokens, expected(name, setting=setting)) > 1e-4


@pytest.mark.parametrize("name", READ_RAW)
def test_confidences_are_of_the_whole_target_and_those_of_the_filtered_one_are_rejected(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    """The mutant takes no copy of the logits."""
    setting = SETTINGS[0]
    right, wrong = (expected(name, setting=setting, filtered=each) for each in (False, True))
    tokens = in_vllm(monkeypatch, RULES[name][0], setting)
    assert p_value(tokens, right) > 1e-4
    assert p_value(tokens, wrong) < 1e-4
    monkeypatch.setattr(RawLogits, "_reads", lambda *_, any_greedy: False)
    tokens = in_vllm(monkeypatch, RULES[name][0], setting)
    assert p_value(tokens, right) < 1e-4
    assert p_value(tokens, wrong) > 1e-4


def test_logits_before_the_penalty_are_rejected(monkeypatch: pytest.MonkeyPatch):
    """What is copied is the target that the decoder calls raw: penalised."""
    penalised = Setting(1.0, 1.0, (-2.5, 0.0, 0.0, 0.0, 0.0))
    tokens = in_vllm(monkeypatch, TokenV2(0.3), penalised)
    assert p_value(tokens, expected("token_v2", setting=penalised)) > 1e-4
    penalty = torch.tensor(penalised.penalty)
    given = vllm_rules._Rows.position

    def unpenalised(rows: Any, rule: Rule) -> Any:
        return given(rows._replace(raw_NV=rows.raw_NV - penalty), rule)

    monkeypatch.setattr(vllm_rules._Rows, "position", unpenalised)
    tokens = in_vllm(monkeypatch, TokenV2(0.3), penalised)
    assert p_value(tokens, expected("token_v2", setting=penalised)) < 1e-4


@pytest.mark.parametrize("fault", ["rule", "other rule", "residual", "stream"])
def test_a_fault_is_rejected(fault: str, monkeypatch: pytest.MonkeyPatch):
    """Another rule; a recovered token from the whole target; one stream for two purposes.

    Then the uniform that rejected a draft would also choose the token that replaces it.
    """
    rule: Rule = Lossless()
    if fault.endswith("rule"):
        rule = TokenV3(0.9) if fault == "other rule" else Lenient("linear", 0.8)
    elif fault == "residual":
        monkeypatch.setattr(Lossless, "residual_at", lambda _self, at: at.target)
    else:
        monkeypatch.setattr(vllm_rules, "_DRAW", vllm_rules._ACCEPT)
    name = "token_v3" if fault == "other rule" else "lossless"
    assert p_value(in_vllm(monkeypatch, rule), expected(name)) < 1e-4


GREEDY_RULES: dict[str, tuple[Rule, Any]] = {
    "linear": (Lenient(kind="linear", epsilon=0.3), lenient_at_0("linear", 0.3)),
    "square": (Lenient(kind="square", epsilon=0.5), lenient_at_0("square", 0.5)),
    "exponential": (Lenient(kind="exponential", epsilon=0.4), lenient_at_0("exponential", 0.4)),
    "lossy": (Lossy(alpha=0.7, beta=2.0), lossy_at_0(0.7)),
    "tuned": (Lossy(alpha=0.7, beta="tuned"), lossy_at_0(0.7)),
    "strict": (Lenient(epsilon=1.0), lossy_at_0(0.0)),
    "token_v3": (TokenV3(alpha=0.9), lossy_at_0(0.0)),
}


def wanted_at_0(vectors: Any, first: int, second: int) -> list[int]:
    """The tokens of a greedy request; 9: the bonus token."""
    tokens: list[int] = []
    for place, drafted in enumerate((first, second)):
        accept, recover = vectors(probs(TARGET, 1.0)[place], [1.0] * V)
        if not accept[drafted]:
            return [*tokens, recover.index(1.0)]
        tokens.append(drafted)
    return [*tokens, 9]


@pytest.mark.parametrize("name", GREEDY_RULES)
def test_greedy_requests_follow_the_rule(name: str):
    """With draft logits, which do not matter; every second request samples, and top-p cuts."""
    rule, vectors = GREEDY_RULES[name]
    pairs = [pair for pair in product(range(V), range(V)) for _ in range(2)]
    count = len(pairs)
    temperatures = torch.tensor([0.0, 0.8] * (count // 2))
    divisor = torch.where(temperatures == 0, 1.0, temperatures)[:, None, None]
    found, counts = rejection_sample(
        rule,
        keep_top_p((TARGET / divisor).flatten(0, 1), 0.5),
        DRAFT.expand(count, 2, V),
        torch.tensor([(3, *pair) for pair in pairs], dtype=torch.int32).flatten(),
        3 * torch.arange(count + 1, dtype=torch.int32),
        torch.arange(3).repeat(count) + 40,
        torch.arange(count, dtype=torch.int32).repeat_interleave(3),
        torch.arange(3).repeat(count),
        temperatures,
        torch.arange(count),
        2,
        raw_logits=TARGET.repeat(count, 1),
    )
    bonus = int(TARGET[2].argmax())
    for pair, row, kept in zip(pairs[::2], found[::2].tolist(), counts[::2].tolist(), strict=True):
        wanted = [bonus if token == 9 else token for token in wanted_at_0(vectors, *pair)]
        assert row[:kept] == wanted


def test_bonus_tokens_are_the_targets(monkeypatch: pytest.MonkeyPatch):
    tokens = in_vllm(monkeypatch, Lossy(alpha=0.3))
    bonus = tokens[(tokens >= 0).all(-1), 2]
    p = probs(TARGET, TEMPERATURE)[2]
    exact = {(v,): p[v] for v in range(V)}
    assert len(bonus) > 5_000
    assert chi_square_p_value(Counter((v,) for v in bonus.tolist()), exact) > 1e-4
