"""One teacher-forced pass tells what every rule would do, and decoding does it."""

import math

import numpy as np
import pytest
import torch

from paceline.config import validate
from paceline.core.block import Drafted, DrawRequest
from paceline.core.rule_base import Bonus, Position, TargetBonus, with_bonus
from paceline.core.rules import (
    BiLDRule,
    Chow,
    ChowLog,
    Diff,
    DiffLog,
    Lenient,
    Lossless,
    Lossy,
    Opt,
    OptLog,
    Rule,
    TokenV1,
    TokenV2,
    TokenV3,
)
from paceline.core.sampling import SamplingParams
from paceline.core.stats import DecodeStats
from paceline.decode import AutoregressiveDecoder, SpeculativeDecoder
from paceline.decode.block import draw
from paceline.measure import latency
from paceline.measure.acceptance import PairTexts, score_texts
from paceline.measure.analysis import AnalyzeConfig, analyze_models, analyze_rules, rule_effect
from paceline.measure.latency import PassTimer
from paceline.measure.measurement import MeasureConfig, measure_models
from paceline.models.contract import ModelSession
from paceline.results import FIGURES
from support import exact
from support.fakes import TableModel

REJECTED, TAU = (FIGURES[name].value for name in ("expected_rejection_rate", "block_efficiency"))
BINARY: list[Rule] = [
    *(BiLDRule(1.9), Chow(0.5), ChowLog(1.2), Diff(0.05)),
    *(DiffLog(0.05), Opt(0.2), OptLog(0.3)),
]
RULES: list[Rule] = [
    *BINARY,
    *(Lossless(), Lenient("linear", 0.5), Lenient("exponential", 0.4), Lossy(0.4)),
    *(Lossy(0.4, "tuned"), TokenV1(0.3), TokenV2(0.3), TokenV3(0.5)),
]
rules = pytest.mark.parametrize("rule", RULES, ids=str)


def tables(size: int = 8) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return (1.3 * torch.randn(2, size, size, generator=generator, dtype=torch.float64)).softmax(-1)


def positions(count: int = 30, size: int = 8) -> tuple[Position, torch.Tensor]:
    """Distributions before each token of a text, and these tokens."""
    generator = torch.Generator().manual_seed(5)
    probs = (1.5 * torch.randn(4, count, size, generator=generator)).softmax(-1)
    return Position(*probs), torch.randint(size, (count,), generator=generator)


@rules
def test_an_effect_is_that_of_the_rules_vectors_token_by_token(rule: Rule):
    at, tokens_T = positions()
    effect = rule_effect(rule, at, tokens_T)
    for place in range(30):
        p, q, p_raw, q_raw = (part[place] for part in at)
        raw = {"target_raw": p_raw, "draft_raw": q_raw}
        accept = rule.accept_at(Position.of(p, q, **raw)).tolist()
        induced = rule.induced_at(Position.of(p, q, **raw)).tolist()
        p, q, token = p.tolist(), q.tolist(), int(tokens_T[place])
        rejection = math.fsum(b * (1 - a) for a, b in zip(accept, q, strict=True))
        assert float(effect.rejection_T[place]) == pytest.approx(rejection, abs=1e-5)
        survival = q[token] * accept[token] / induced[token] if induced[token] else 0.0
        assert float(effect.survival_T[place]) == pytest.approx(survival, abs=1e-4)
        assert float(effect.tvd_T[place]) == pytest.approx(exact.tvd(p, induced), abs=1e-5)
        kl = math.fsum(a * math.log(a / b) for a, b in zip(p, induced, strict=True))
        assert float(effect.kl_T[place]) == pytest.approx(kl, abs=1e-4)
        surprisal = exact.surprise(induced, p_raw.tolist())
        assert float(effect.surprisal_T[place]) == pytest.approx(surprisal, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "bonus", "temperature", "drafts_at"),
    [
        *((rule, "rule", 0.7, None) for rule in RULES),
        *((rule, "target", 1.0, None) for rule in RULES if not rule.exact),  # which has one bonus
        *((rule, "rule", 0.0, None) for rule in (Lossless(), Lenient("linear", 0.5), Chow(0.5))),
        *((rule, "rule", 0.8, 0.0) for rule in (Lossless(), Diff(0.1), TokenV3(0.4))),
        *((rule, "rule", 0.8, 0.5) for rule in (Lossless(), Diff(0.1), TokenV3(0.4))),
    ],
    ids=str,
)
def test_on_its_own_text_a_rule_is_predicted_to_do_what_it_then_does(
    rule: Rule, temperature: float, bonus: Bonus, drafts_at: float | None
):
    """32 texts of 100 tokens, gamma 2; within four standard errors, about.

    At temperature 0 texts run in circles and drafted places are not a fair sample of all: a plain
    mean over the text is off there.
    """
    target, draft = (TableModel(values) for values in tables())
    sampling = SamplingParams(temperature=temperature)
    drafts = None if drafts_at is None else SamplingParams(temperature=drafts_at)
    decoder = SpeculativeDecoder(
        target, draft, rule, 2, sampling, bonus=bonus, draft_sampling=drafts
    )
    prompts = [[token] for token in range(8)] * 4
    found = decoder.generate(prompts, 100, eos_token_ids=[])
    stats = sum((one.stats for one in found), DecodeStats())
    texts = [one.tokens for one in found]
    served = with_bonus(rule, bonus)
    written = PairTexts(target, draft, prompts, texts, sampling, drafts, max_new_tokens=100)
    ((_, row),) = analyze_rules(written, [served], (2,))
    # a token is rejected or not, a block has up to two accepted: deviations of 1/2 and 1 at most
    spread = 4 * 0.5 / math.sqrt(stats.num_examined) if temperature else 0.02
    tau_spread = 4 * 1 / math.sqrt(stats.num_blocks) if temperature else 0.02
    assert REJECTED(row) == pytest.approx(stats.num_recovered / stats.num_examined, abs=spread)
    assert TAU(row) == pytest.approx(stats.block_efficiency, abs=tau_spread)


@pytest.mark.parametrize("rule", [Lenient("linear", 0.1), Lossy(0.9), Lossy(0.9, "tuned")], ids=str)
def test_a_loose_rule_changes_greedy_text_at_temperature_0_and_not_at_top_k_1(rule: Rule):
    """At top-k 1 the target's distribution is one-hot, too."""
    target, draft = (TableModel(values) for values in tables())
    texts = [[5, 1, 0, 3], [2, 2, 7, 4]]
    settings = [SamplingParams(top_k=1), SamplingParams(temperature=0)]
    changed = [
        analyze_rules(PairTexts(target, draft, [[0], [1]], texts, one), [rule], (2,))[0]
        for one in settings
    ]
    (top_k, _), (greedy, _) = changed
    assert FIGURES["output_tvd"].value(top_k) == 0
    assert FIGURES["output_tvd"].value(greedy) > 0
    assert REJECTED(changed[1][1]) < REJECTED(changed[0][1])
    decoded = [
        SpeculativeDecoder(target, draft, rule, 2, one).generate([[0], [1]], 12, eos_token_ids=[])
        for one in settings
    ]
    alone = AutoregressiveDecoder(target, settings[1]).generate([[0], [1]], 12, eos_token_ids=[])
    assert [one.tokens for one in decoded[0]] == [one.tokens for one in alone]
    assert [one.tokens for one in decoded[1]] != [one.tokens for one in alone]


def test_a_lossless_rule_is_at_no_distance_and_drafting_alone_at_all_of_it():
    target, draft = (TableModel(values) for values in tables())
    rules = [Lossless(), Chow(1.0)]
    texts = PairTexts(target, draft, [[1]], [[2, 3, 4, 5, 6]], SamplingParams())
    (lossless, *_), (alone, *blocks) = analyze_rules(texts, rules, gammas=(1, 2, 3, 4))
    assert FIGURES["output_tvd"].value(lossless) == pytest.approx(0, abs=1e-6)
    assert FIGURES["output_kl"].value(lossless) == pytest.approx(0, abs=1e-6)
    assert REJECTED(blocks[0]) == pytest.approx(0, abs=1e-6)
    p, q = tables()
    distances = [exact.tvd(p[before], q[before]) for before in (1, 2, 3, 4, 5)]
    assert FIGURES["output_tvd"].value(alone) == pytest.approx(math.fsum(distances) / 5, abs=1e-6)
    # alone drafts the first token, too: 4 tokens and 1 in blocks of 3, all 5 in a block of 4
    assert TAU(blocks[2]) == pytest.approx(5 / 2)
    assert TAU(blocks[3]) == pytest.approx(5)


@pytest.mark.parametrize(
    "rule",
    [
        Lossless(),
        Lenient("linear", 0.999999),
        with_bonus(Lenient("linear", 0.999999), "target"),
        with_bonus(TokenV3(0.0), "target"),
    ],
    ids=str,
)
def test_the_first_token_is_a_drafted_position_but_of_an_exact_rule_or_in_vllm(rule: Rule):
    """All rules do the same at each position; the draft is wrong after the prompt alone."""
    target = torch.full((3, 3), 1 / 3, dtype=torch.float64)
    draft = target.clone()
    draft[0] = torch.tensor([0.0, 0.0, 1.0])
    models = [TableModel(table) for table in (target, draft)]
    texts = [[1, 2, 1, 2, 1, 2]] * 4
    written = PairTexts(*models, [[0]] * 4, texts, SamplingParams(), max_new_tokens=6)
    ((_, row),) = analyze_rules(written, [rule], (1,))
    if rule.exact or isinstance(rule, TargetBonus):  # 5 positions behind the first token: 2 + 2 + 1
        assert REJECTED(row) == pytest.approx(0, abs=1e-5)
        assert TAU(row) == pytest.approx(5 / 3, rel=1e-5)
    else:  # judged: the first, which is never the draft's here; then as above
        # 6 tokens in 1 + 3 blocks of which 3 were judged; acceptance at the first is 1/3
        assert REJECTED(row) == pytest.approx((2 / 3) / 3, rel=1e-5)
        assert TAU(row) == pytest.approx((4 + 1 / 3 + 2) / 4, rel=1e-5)


def test_texts_of_one_token_are_no_blocks_of_an_exact_rule():
    target, draft = (TableModel(values) for values in tables())
    texts = PairTexts(target, draft, [[1]], [[2]], SamplingParams())
    ((_, row),) = analyze_rules(texts, [Lossless()], (2,))
    assert math.isnan(REJECTED(row))
    assert (row.sums["calls"], row.totals["drafted_per_block"]) == ((0,), 0)


def test_analyze_predicts_for_vllm_too():
    """Under a rule that is all but lossless, the first token is then the target's, as there."""
    target, draft = (TableModel(values) for values in tables())
    rules = [{"rule": "lossless"}, {"rule": "lenient", "epsilon": 0.999999}]
    given = {"target": "t", "draft": "d", "prompts": "p", "rules": rules, "gammas": [2]}
    given |= {"max_new_tokens": 9, "pass_repeats": 1, "sampling": {"temperature": 1.0}}
    taus: dict[str, list[float]] = {}
    for bonus in ("rule", "target"):
        config = validate(AnalyzeConfig, given | {"bonus": bonus})
        found = analyze_models(target, draft, [[0], [1], [2]], config)
        rows = [row for row in found.rows if row.has(gamma=2, bonus=bonus)]
        assert [row.setting["label"] for row in rows] == ["lossless", "lenient linear 0.999999"]
        taus[bonus] = [np.sum(row.sums["emitted"]) / np.sum(row.sums["calls"]) for row in rows]
    assert taus["target"][1] == pytest.approx(taus["target"][0], rel=1e-4)
    assert taus["rule"][1] != pytest.approx(taus["rule"][0], rel=1e-4)


@pytest.mark.parametrize("limits", [(40, 20), (20, 40)])
def test_texts_end_with_the_shorter_context_whichever_prompt_is_the_first(limits: tuple[int, int]):
    """A prompt of 17 tokens leaves 3 of 20, fewer than a block of gamma 5 needs."""
    models = [
        TableModel(values, max_length=limit) for values, limit in zip(tables(), limits, strict=True)
    ]
    given = {"target": "t", "draft": "d", "prompts": "p", "gammas": [1, 5]}
    given |= {"max_new_tokens": 12, "pass_repeats": 1, "sampling": {"temperature": 0.0}}
    config, prompts = validate(AnalyzeConfig, given), [[1] * 17, [2, 3, 4, 5]]
    found, turned = (analyze_models(*models, order, config) for order in (prompts, prompts[::-1]))
    assert found.rows[0].sums["tokens"] == (3, 12)
    for row, other in zip(found.rows, turned.rows, strict=True):
        assert row.setting == other.setting
        for name, values in row.sums.items():
            assert values == pytest.approx(other.sums[name][::-1])


def pair() -> tuple[TableModel, TableModel]:
    return TableModel.random(6, 2, seed=4), TableModel.random(6, 2, seed=5, spread=1.5)


def config(**values: object) -> MeasureConfig:
    return MeasureConfig.model_validate(
        {"target": "t", "draft": "d", "prompts": "p.txt", "timed_prompts": 0, **values}
    )


@pytest.mark.parametrize(
    "drafts",
    [exact.Shaping(), *(exact.Shaping(at) for at in (0, 0.4)), exact.Shaping(top_k=2)],
    ids=str,
)
@pytest.mark.parametrize("penalty", [1.0, 1.4])
def test_scores_are_those_of_the_proposal_token_by_token(drafts: exact.Shaping, penalty: float):
    target, draft = pair()
    sampling = SamplingParams(temperature=0.8, repetition_penalty=penalty)
    shaping = exact.Shaping(temperature=0.8, repetition_penalty=penalty)
    proposal = exact.Shaping(drafts.temperature, drafts.top_k, repetition_penalty=penalty)
    given = SamplingParams(temperature=drafts.temperature, top_k=drafts.top_k)
    prompt, completion = [1, 2], [3, 0, 5, 1]
    scores = score_texts(PairTexts(target, draft, [prompt], [completion], sampling, given))
    for place, token in enumerate(completion):
        text = prompt + completion[:place]
        of_target, of_draft = (model.log_probs(text).tolist() for model in (target, draft))
        p, q = shaping(of_target, text), proposal(of_draft, text)
        overlap = math.fsum(map(min, p, q))
        assert scores.acceptance_BT[0, place] == pytest.approx(overlap, abs=1e-6)
        survival = min(1.0, q[token] / p[token])
        assert scores.survival_BT[0, place] == pytest.approx(survival, abs=1e-6)
        greedy = p[q.index(max(q))]
        assert scores.greedy_draft_BT[0, place] == pytest.approx(greedy, abs=1e-6)
        agrees = of_target.index(max(of_target)) == of_draft.index(max(of_draft))
        assert bool(scores.agreement_BT[0, place]) == agrees


def test_timed_requests_draft_as_the_figures_say():
    target, draft = pair()
    asked = config(
        max_new_tokens=40, gammas=(2,), timed_prompts=12, draft_sampling={"temperature": 0}
    )
    found = measure_models(target, draft, [[1, 2]] * 12, asked)
    assert found.requests is not None
    decoder = SpeculativeDecoder(
        target, draft, gamma=2, draft_sampling=SamplingParams(temperature=0)
    )
    stats = sum(
        (decoder.generate([[1, 2]], 40, asked.seed + row)[0].stats for row in range(12)),
        DecodeStats(),
    )
    assert FIGURES["acceptance_rate"].value(found.requests) == stats.acceptance_rate


@pytest.mark.parametrize(
    ("temperature", "drafts_at", "q"), [(1.0, 0.0, True), (0.0, 0.0, False), (0.0, 1.0, True)]
)
def test_passes_are_timed_with_the_settings_of_each_model(
    temperature: float, drafts_at: float, q: bool, monkeypatch: pytest.MonkeyPatch
):
    """`q`: whether drafting states distributions; decoding does only where they are judged."""
    drawn: list[tuple[float, bool]] = []

    def spy(session: ModelSession, request: DrawRequest) -> Drafted:
        if request.plan.num_tokens == 3:
            drawn.append((request.plan.sampling.temperature, request.uniforms is not None))
        return draw(session, request)

    monkeypatch.setattr(latency, "draw", spy)
    at = SamplingParams(temperature=temperature), SamplingParams(temperature=drafts_at)
    PassTimer(*pair(), [1, 2], [3], *at).time_once()
    assert set(drawn) == {(drafts_at, q)}
