"""Figures of a draft that draws at settings of its own: those of what it really proposes."""

import math

import pytest

from paceline.config import validate
from paceline.core.block import Drafted, DrawRequest
from paceline.core.rules import Diff, Lossless, Rule, TokenV3
from paceline.core.sampling import SamplingParams
from paceline.core.stats import DecodeStats
from paceline.decode import SpeculativeDecoder
from paceline.decode.block import draw
from paceline.errors import ConfigError
from paceline.measure import latency
from paceline.measure.acceptance import PairTexts, score_texts
from paceline.measure.analysis import analyze_rules
from paceline.measure.latency import PassTimer
from paceline.measure.measurement import MeasureConfig, measure_models
from paceline.models.contract import ModelSession
from paceline.results import FIGURES
from support import exact
from support.fakes import TableModel

GREEDY = SamplingParams(temperature=0)


def pair() -> tuple[TableModel, TableModel]:
    return TableModel.random(6, 2, seed=4), TableModel.random(6, 2, seed=5, spread=1.5)


def config(**values: object) -> MeasureConfig:
    return MeasureConfig.model_validate(
        {"target": "t", "draft": "d", "prompts": "p.txt", "timed_prompts": 0, **values}
    )


@pytest.mark.parametrize(
    "drafts",
    [exact.Shaping(temperature=0), exact.Shaping(temperature=0.4), exact.Shaping(top_k=2)],
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
        p = shaping(target.log_probs(text).tolist(), text)
        q = proposal(draft.log_probs(text).tolist(), text)
        overlap = math.fsum(map(min, p, q))
        assert scores.acceptance_BT[0, place] == pytest.approx(overlap, abs=1e-6)
        survival = min(1.0, q[token] / p[token])
        assert scores.survival_BT[0, place] == pytest.approx(survival, abs=1e-6)
        if drafts.temperature == 0:
            assert scores.acceptance_BT[0, place] == pytest.approx(p[q.index(1.0)], abs=1e-6)


@pytest.mark.slow
def test_greedy_drafts_measure_as_they_decode():
    """Blocks of 400 texts of 60 tokens at T=1; the tolerance is 4 standard errors."""
    target, draft = pair()
    asked = config(
        num_prompts=400,
        max_new_tokens=60,
        gammas=(3,),
        batch_size=400,
        draft_sampling={"temperature": 0},
    )
    found = measure_models(target, draft, [[1, 2]] * 400, asked)
    alpha, greedy = map(found.figure, ("expected_acceptance", "greedy_draft_acceptance"))
    assert alpha.value == pytest.approx(greedy.value, abs=1e-6)
    decoder = SpeculativeDecoder(target, draft, gamma=3, draft_sampling=GREEDY)
    generations = decoder.generate([[1, 2]] * 400, 60)
    stats = sum((text.stats for text in generations), DecodeStats())
    tau = FIGURES["block_efficiency"].value
    assert tau(found.blocks[0]) == pytest.approx(stats.block_efficiency, abs=0.04)
    sampled = asked.model_copy(update={"draft_sampling": None})
    other = tau(measure_models(target, draft, [[1, 2]] * 400, sampled).blocks[0])
    assert abs(other - stats.block_efficiency) > 0.1


def test_timed_requests_draft_as_the_figures_say():
    target, draft = pair()
    asked = config(
        max_new_tokens=40, gammas=(2,), timed_prompts=12, draft_sampling={"temperature": 0}
    )
    found = measure_models(target, draft, [[1, 2]] * 12, asked)
    assert found.requests is not None
    decoder = SpeculativeDecoder(target, draft, gamma=2, draft_sampling=GREEDY)
    stats = sum(
        (decoder.generate([[1, 2]], 40, asked.seed + row)[0].stats for row in range(12)),
        DecodeStats(),
    )
    assert FIGURES["acceptance_rate"].value(found.requests) == stats.acceptance_rate


@pytest.mark.slow
@pytest.mark.parametrize("rule", [Lossless(), Diff(0.1), TokenV3(0.4)], ids=str)
@pytest.mark.parametrize("drafts_at", [0.0, 0.5])
def test_a_rule_is_predicted_to_do_what_it_does_with_such_drafts(rule: Rule, drafts_at: float):
    """32 texts of 100 tokens at T=0.8, gamma 2; within four standard errors, about."""
    target, draft = pair()
    sampling, drafts = SamplingParams(temperature=0.8), SamplingParams(temperature=drafts_at)
    decoder = SpeculativeDecoder(target, draft, rule, 2, sampling, draft_sampling=drafts)
    prompts = [[token % 6] for token in range(32)]
    found = decoder.generate(prompts, 100, eos_token_ids=[])
    stats = sum((one.stats for one in found), DecodeStats())
    texts = [one.tokens for one in found]
    written = PairTexts(target, draft, prompts, texts, sampling, drafts, max_new_tokens=100)
    ((_, row),) = analyze_rules(written, [rule], (2,))
    spread = 4 * 0.5 / math.sqrt(stats.num_examined)
    assert FIGURES["expected_rejection_rate"].value(row) == pytest.approx(
        stats.rejection_rate, abs=spread
    )
    spread = 4 * 1 / math.sqrt(stats.num_blocks)
    assert FIGURES["block_efficiency"].value(row) == pytest.approx(
        stats.block_efficiency, abs=spread
    )


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


def test_a_penalty_of_the_drafts_own_is_one_line_before_anything_is_loaded():
    given = {"target": "t", "draft": "d", "prompts": "p.txt"}
    with pytest.raises(ConfigError, match="leave it out") as caught:
        validate(MeasureConfig, {**given, "draft_sampling": {"repetition_penalty": 1.2}})
    assert "\n" not in str(caught.value)
