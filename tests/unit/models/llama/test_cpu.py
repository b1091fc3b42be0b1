"""The compiled pass: exact to the bit in any company, and silently absent where it must be."""

from collections.abc import Callable
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.core.block import DrawPlan, DrawRequest, Uniforms, VerifyRequest
from paceline.core.rule_base import with_bonus
from paceline.core.rules import Chow, Diff, Lenient, Lossless, Lossy, Rule, TokenV2
from paceline.core.sampling import SamplingParams, as_list
from paceline.decode import Confident, Generation, SpeculativeDecoder, speculative
from paceline.decode.block import draw, verify
from paceline.errors import SlowerWarning
from paceline.models import CausalModel, prepare_for_decoding, wrap_model
from paceline.models.contract import ModelSession, Texts
from paceline.models.hf.base import recorded_hidden_states
from paceline.models.llama.cpu import CompiledSession, NativeLlama
from paceline.models.llama.cpu_weights import can_copy
from paceline.native import compiled, library
from support.devices import NamedDevices
from support.models import TEXT, prepared, prepared_pair, read, reader, tiny_hf
from support.processes import threads
from support.rules import ALL_RULES, VerifiesInPyTorch, using

pytestmark = pytest.mark.skipif(compiled() is None, reason="no C compiler with OpenMP")
VOCABULARY = 61


def plainly(half: Callable[..., Any], *given: Any) -> Any:
    """As with sessions that take no whole request."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CompiledSession, "take_draw", ModelSession.take_draw)
        patch.setattr(CompiledSession, "take_verify", ModelSession.take_verify)
        return half(*given)


def texts_of(decoder: SpeculativeDecoder, prompts: list[list[int]]) -> list[Generation]:
    return decoder.generate(prompts, 14, seed=[*range(len(prompts))], eos_token_ids=[])


def plain_texts_of(decoder: SpeculativeDecoder, prompts: list[list[int]]) -> list[Generation]:
    """Pass by pass, and the rule in torch."""
    with using(VerifiesInPyTorch()):
        return plainly(texts_of, decoder, prompts)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The compiled calls that were made."""
    made: list[str] = []
    for name in ("draw", "verify"):
        whole = getattr(NativeLlama, name)

        def spy(*given: Any, name: str = name, whole: Any = whole, **named: Any) -> Any:
            made.append(name)
            return whole(*given, **named)

        monkeypatch.setattr(NativeLlama, name, spy)
    return made


def test_who_listens_hears_of_every_pass():
    model = prepared("llama")
    greedy = SamplingParams(temperature=0)
    session = model.start_session()
    with recorded_hidden_states(model) as recorded:
        session.prefill([TEXT[:3], TEXT[:1]])
        first = draw(session, DrawRequest([[TEXT[3]], [TEXT[1]]], DrawPlan(1, greedy)))
        two = draw(session, DrawRequest([[TEXT[4]], [TEXT[2]]], DrawPlan(2, greedy)))
        verify(session, VerifyRequest([5, 6], two, [2, 2], Lossless(), greedy))
    draw(session, DrawRequest([[7], [8]], DrawPlan(1, greedy)))
    assert [states.shape[1] for states in recorded] == [3, 1, 1, 1, 3]
    wanted = model.hidden(Texts(torch.tensor([TEXT[:5]])))[0]
    for got, there in zip(
        (recorded[0][0], recorded[1][0], recorded[2][0]),
        (wanted[:3], wanted[3:4], wanted[4:5]),
        strict=True,
    ):
        torch.testing.assert_close(got, there, rtol=1e-4, atol=1e-4)
    assert int(first.tokens_BG[0, 0]) == int((model.head_weight @ recorded[1][0, 0]).argmax())


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_token_has_the_same_logits_to_the_bit_in_any_block_and_batch(architecture: str):
    model = prepared(architecture)
    alone = read(model, [[token] for token in TEXT])
    for cuts in ([8, 4], [2] * 6, [3, 4, 5], [1, 7, 4]):
        ends = torch.tensor(cuts).cumsum(0).tolist()
        parts = [TEXT[end - size : end] for end, size in zip(ends, cuts, strict=True)]
        assert torch.equal(read(model, parts), alone), cuts
    session = model.start_session()
    session.prefill([TEXT[:2], TEXT[:4]])
    batch = session.extend(torch.tensor([TEXT[2:6], TEXT[4:8]]))
    assert torch.equal(batch[0], alone[2:6])
    assert torch.equal(batch[1], alone[4:8])


@pytest.mark.parametrize("rule", [Lossless(), Lenient("linear", 0.5)], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_target_on_the_host_verifies_what_a_draft_on_a_card_proposes(
    rule: Rule, temperature: float, monkeypatch: pytest.MonkeyPatch
):
    target, draft = prepared_pair()
    sampling, prompts = SamplingParams(temperature=temperature), [TEXT[:4], TEXT[2:9]]
    decoder = SpeculativeDecoder(target, draft, rule, 3, sampling)
    wanted = texts_of(decoder, prompts)
    card = torch.device("cuda:0")
    monkeypatch.setattr(speculative, "draw", lambda *given: draw(*given).to(card))
    with NamedDevices():
        assert texts_of(decoder, prompts) == wanted
    if rule.exact and sampling.greedy:
        settings = {"max_new_tokens": 14, "do_sample": False, "eos_token_id": None}
        (whole,) = target.hf.generate(torch.tensor(prompts[:1]), **settings).tolist()  # pyright: ignore
        assert whole == prompts[0] + wanted[0].tokens


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("texts", [[TEXT[:5]], [TEXT[:2], TEXT[3:9]]])
def test_threads_change_no_bit(count: int, texts: list[list[int]]):
    """Also where their number changes between the passes of a session."""
    target, draft = prepared_pair()
    decoder = SpeculativeDecoder(target, draft, gamma=3, sampling=SamplingParams(temperature=0.9))
    wanted, session = texts_of(decoder, texts), target.start_session()
    first, block = session.prefill(texts), torch.tensor([TEXT[2:6]] * len(texts))
    second = session.extend(block)
    with threads(count):
        assert texts_of(decoder, texts) == wanted
        other = target.start_session()
        assert torch.equal(other.prefill(texts), first)
    assert torch.equal(other.extend(block), second)


def sessions(model: CausalModel, texts: list[list[int]]) -> tuple[ModelSession, ModelSession]:
    """Two of the same model that have read the same texts."""
    both = model.start_session(), model.start_session()
    for session in both:
        session.prefill(texts)
        session.vocab_size = VOCABULARY - 9  # as where the other model knows fewer tokens
    return both


def same(ours: Tensor | None, plain: Tensor | None) -> bool:
    return ours is plain if ours is None or plain is None else torch.equal(ours, plain)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("texts", [[TEXT[:5]], [TEXT[:2], TEXT[3:9]]])
@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("after_last", [False, True])
def test_drawing_ahead_is_drawing_pass_by_pass(
    temperature: float, texts: list[list[int]], calls: list[str], *, raw: bool, after_last: bool
):
    """At temperature 0 with numbers to draw with, and without, where the likeliest tokens count."""
    compiled_one, plain_one = sessions(prepared_pair()[0], texts)
    sampling = SamplingParams(temperature=temperature)
    rng = torch.Generator().manual_seed(4)
    for count, gamma in ((1, 3), (2, 4), (1, 1), (2, 12)):
        new = [TEXT[:count]] * len(texts)
        uniforms = as_list(torch.rand(len(texts), gamma, generator=rng, dtype=torch.float64))
        draws = uniforms if temperature or gamma < 4 else None
        plan = DrawPlan(gamma, sampling, after_last=after_last, raw=raw)
        request = DrawRequest(new, plan, draws)
        got, wanted = draw(compiled_one, request), plainly(draw, plain_one, request)
        assert torch.equal(got.tokens_BG, wanted.tokens_BG)
        assert (got.probs_BPV is None) == (draws is None)
        assert (got.raw_BPV is None) == (not raw or temperature == 1)
        for ours, plain in zip(got[1:], wanted[1:], strict=True):
            assert same(ours, plain)
        assert compiled_one.lengths == plain_one.lengths
    newest_B1 = torch.tensor([[9]] * len(texts))
    assert torch.equal(compiled_one.extend(newest_B1), plain_one.extend(newest_B1))
    assert calls == ["draw"] * 4


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_draft_of_no_tokens_is_the_distribution_behind_what_was_read(
    temperature: float, calls: list[str]
):
    compiled_one, plain_one = sessions(prepared_pair()[0], [TEXT[:5], TEXT[2:4]])
    plan = DrawPlan(0, SamplingParams(temperature=temperature), after_last=True, raw=True)
    request = DrawRequest([[7, 8], [9, 10]], plan, [[], []])
    got, wanted = draw(compiled_one, request), plainly(draw, plain_one, request)
    for ours, plain in zip(got, wanted, strict=True):
        assert ours is not None
        assert same(ours, plain)
    assert compiled_one.lengths == plain_one.lengths
    nothing = draw(compiled_one, request._replace(plan=DrawPlan(0, plan.sampling)))
    assert nothing.tokens_BG.shape == (2, 0)
    assert compiled_one.lengths == plain_one.lengths
    assert calls == ["draw"]


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("texts", [[TEXT[:5]], [TEXT[:2], TEXT[3:9]]])
def test_judging_ahead_is_judging_pass_by_pass(
    temperature: float, texts: list[list[int]], calls: list[str]
):
    sampling = SamplingParams(temperature=temperature)
    rng = torch.Generator().manual_seed(4)
    batch, gamma = len(texts), 3
    kept: set[int] = set()
    target, other = prepared_pair(1)
    for seed in range(12):
        draft = other if seed % 2 else target
        compiled_one, plain_one = sessions(target, texts)
        drawing, accepting, choosing = as_list(
            torch.rand(3, batch, gamma, generator=rng, dtype=torch.float64)
        )
        newest = [seed] * batch
        drafting, _ = sessions(draft, texts)
        rows = [[token] for token in newest]
        numbers = drawing if temperature else None
        drafted = draw(drafting, DrawRequest(rows, DrawPlan(gamma, sampling), numbers))
        draws = Uniforms(accepting, [numbers[0] for numbers in choosing])
        request = VerifyRequest(
            newest,
            drafted,
            [gamma, 2][:batch],
            Lossless(),
            sampling,
            draws if temperature else None,
        )
        got, wanted = verify(compiled_one, request), plainly(verify, plain_one, request)
        assert got == wanted
        kept |= set(got.num_accepted)
        assert compiled_one.lengths == plain_one.lengths
        newest_B1 = torch.tensor(rows)
        assert torch.equal(compiled_one.extend(newest_B1), plain_one.extend(newest_B1))
    assert len(kept) > 1
    assert calls == ["draw", "verify"] * 12


class OwnRule(Lossless):
    """May do anything: only its type tells."""


def compiled_calls(rule: Rule) -> set[str]:
    """C knows the lossless rule; under others it draws, and returns the target's logits."""
    return {"draw", "verify"} if rule == Lossless() else {"draw"}


NUCLEUS = SamplingParams(temperature=0.8, top_p=0.7)
# of target and draft
TEMPERATURES = (
    *((0.0, None), (0.7, None), (1.0, 0.0), (0.0, 1.0)),
    *((0.6, 1.0), (1.0, 0.6), (0.6, 1.3)),
)


@pytest.mark.parametrize(
    ("rule", "sampling", "drafts", "expected"),
    [
        (Lossless(), SamplingParams(), None, {"draw", "verify"}),
        (Lenient("linear", 0.5), SamplingParams(), None, {"draw"}),
        (OwnRule(), SamplingParams(), None, {"draw"}),
        (Chow(0.5), SamplingParams(temperature=0, top_k=5), None, {"draw"}),
        (with_bonus(Chow(0.5), "target"), SamplingParams(), None, {"draw"}),
        (Lossless(), SamplingParams(top_k=5), None, set()),
        (Chow(0.5), SamplingParams(top_p=0.9), None, set()),
        (Lossless(), SamplingParams(repetition_penalty=1.3), None, set()),
        (Chow(0.5), SamplingParams(temperature=0, repetition_penalty=1.3), None, set()),
        (Lossless(), SamplingParams(), NUCLEUS, {"verify"}),
        (Lossless(), NUCLEUS, SamplingParams(temperature=0), {"draw"}),
    ],
)
def test_only_what_the_compiled_calls_know_is_given_to_them(
    rule: Rule,
    sampling: SamplingParams,
    drafts: SamplingParams | None,
    expected: set[str],
    calls: list[str],
):
    """And the text is that of the plain sessions, whoever makes it."""
    target, draft = prepared_pair(1)
    decoder = SpeculativeDecoder(target, draft, rule, 3, sampling, draft_sampling=drafts)
    got = texts_of(decoder, [TEXT[:4]])
    assert set(calls) == expected
    assert got == plain_texts_of(decoder, [TEXT[:4]])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "temperature"),
    # at 1 every rule gets the same distribution twice
    [
        *zip(ALL_RULES, cycle([0.7, 0.0]), strict=False),
        *product([Lossless(), Lossy(0.3, "tuned"), Diff(0.1)], [0.0, 0.7, 1.0]),
    ],
    ids=str,
)
def test_under_every_rule_a_text_is_that_of_the_plain_sessions(
    rule: Rule, temperature: float, calls: list[str]
):
    target, draft = prepared_pair()
    sampling = SamplingParams(temperature=temperature)
    for prompts, gamma in (([TEXT[:4]], 4), ([TEXT[:4], TEXT[2:9], TEXT[5:6]], 1)):
        decoder = SpeculativeDecoder(target, draft, rule, gamma, sampling)
        got = texts_of(decoder, prompts)
        assert set(calls) == compiled_calls(rule)
        made = len(calls)
        assert got == plain_texts_of(decoder, prompts)
        assert len(calls) == made
        if temperature:
            accepted = [row.stats.acceptance_rate for row in got]
            assert max(accepted) > 0


@pytest.mark.parametrize("rule", [Lenient("linear", 0.5), Diff(0.05), TokenV2(0.1)], ids=str)
def test_of_tokens_that_are_as_likely_temperature_0_takes_the_first(rule: Rule, calls: list[str]):
    pair: list[CausalModel] = []
    for layers in (4, 2):
        hf = tiny_hf(num_hidden_layers=layers).bfloat16().float()
        head = hf.get_parameter("lm_head.weight").data
        head[31:] = head[:30]
        pair.append(prepare_for_decoding(wrap_model(hf)))
    decoder = SpeculativeDecoder(pair[0], pair[1], rule, 3, SamplingParams(temperature=0))
    (got,) = texts_of(decoder, [TEXT[:4]])
    assert set(calls) == compiled_calls(rule)
    assert max(got.tokens) <= 30
    assert [got] == plain_texts_of(decoder, [TEXT[:4]])


@pytest.mark.parametrize(
    "overrides",
    [
        {"attention_bias": True},  # Llama then has one behind the attention, too
        {"mlp_bias": True},
        {"intermediate_size": 40},
        {"head_dim": 12},
    ],
)
def test_what_it_cannot_read_is_left_to_transformers(overrides: dict[str, Any]):
    assert reader(prepared()) is not None
    assert reader(prepared(**overrides)) is None


def test_weights_that_bfloat16_would_round_are_left_alone():
    hf = tiny_hf().bfloat16().float()
    assert can_copy(hf)
    hf.get_parameter("model.layers.1.mlp.down_proj.weight").data[3, 3] += 2**-20
    assert not can_copy(hf)


@pytest.mark.slow
def test_without_a_compiler_models_read_through_transformers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    wanted = read(prepared(), [TEXT])
    monkeypatch.setattr(library, "kernels_library", lambda _: None)
    monkeypatch.setenv("CC", "false")
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    compiled.cache_clear()
    try:
        with pytest.warns(SlowerWarning, match="install a C compiler"):
            model = prepared()
        assert reader(model) is None
        torch.testing.assert_close(read(model, [TEXT]), wanted)
    finally:
        compiled.cache_clear()
    assert list((tmp_path / "native").iterdir()) == []


@pytest.mark.parametrize(
    ("rule", "temperature", "drafts_at"),
    [
        *((Lossless(), *temperatures) for temperatures in TEMPERATURES),
        *((Lossy(0.4, "tuned"), *temperatures) for temperatures in TEMPERATURES[::2]),
        *((Diff(0.05), *temperatures) for temperatures in TEMPERATURES[1::2]),
    ],
    ids=str,
)
def test_a_draft_that_stops_where_it_is_unsure_is_compiled_at_its_own_temperature_too(
    rule: Rule, temperature: float, drafts_at: float | None, calls: list[str]
):
    target, draft = prepared_pair()
    sampling, policy = SamplingParams(temperature=temperature), Confident(0.2)
    drafts = None if drafts_at is None else SamplingParams(temperature=drafts_at)
    for prompts in ([TEXT[:4]], [TEXT[:4], TEXT[2:9], TEXT[5:6]]):
        decoder = SpeculativeDecoder(
            target, draft, rule, 3, sampling, policy, draft_sampling=drafts
        )
        got = texts_of(decoder, prompts)
        assert set(calls) == compiled_calls(rule)
        assert got == plain_texts_of(decoder, prompts)
