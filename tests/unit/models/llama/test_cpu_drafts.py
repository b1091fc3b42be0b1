"""Compiled halves of a block that draw at settings of their own: the text of the plain sessions."""

import pytest

from paceline.core.rules import Diff, Lossless, Lossy, Rule
from paceline.core.sampling import SamplingParams
from paceline.decode import Confident, SpeculativeDecoder
from paceline.native import compiled
from support.compiled import plain_texts_of, texts_of
from support.models import TEXT, prepared_pair

pytestmark = pytest.mark.skipif(compiled() is None, reason="no C compiler with OpenMP")


@pytest.mark.parametrize("rule", [Lossless(), Lossy(0.4), Lossy(0.4, "tuned"), Diff(0.05)], ids=str)
@pytest.mark.parametrize(
    ("temperature", "drafts_at"), [(1.0, 0.0), (0.0, 1.0), (0.6, 1.0), (1.0, 0.6), (0.6, 1.3)]
)
def test_each_half_of_a_block_has_its_own_temperature(
    rule: Rule, temperature: float, drafts_at: float, calls: list[str]
):
    target, draft = prepared_pair()
    sampling, drafts = (SamplingParams(temperature=one) for one in (temperature, drafts_at))
    for prompts in ([TEXT[:4]], [TEXT[:4], TEXT[2:9], TEXT[5:6]]):
        decoder = SpeculativeDecoder(
            target, draft, rule, 3, sampling, policy=Confident(0.2), draft_sampling=drafts
        )
        got = texts_of(decoder, prompts)
        assert set(calls) == ({"draw", "verify"} if rule == Lossless() else {"draw"})
        assert got == plain_texts_of(decoder, prompts)


def test_a_half_that_the_compiled_calls_do_not_know_is_left_to_torch_alone(calls: list[str]):
    target, draft = prepared_pair()
    nucleus = SamplingParams(temperature=0.8, top_p=0.7)
    for sampling, drafts, expected in (
        (SamplingParams(), nucleus, {"verify"}),
        (nucleus, SamplingParams(temperature=0), {"draw"}),
    ):
        calls.clear()
        decoder = SpeculativeDecoder(target, draft, None, 3, sampling, draft_sampling=drafts)
        got = texts_of(decoder, [TEXT[:4]])
        assert set(calls) == expected
        assert got == plain_texts_of(decoder, [TEXT[:4]])
