"""The draft without a model: what it proposes, by hand and against a search of strings."""

from typing import Any

import pytest
import torch

from paceline.core.sampling import SamplingParams
from paceline.decode import SpeculativeDecoder
from paceline.decode.ngram import NgramDraft, continuation
from paceline.models.contract import Model
from support.fakes import TableModel
from support.models import generated, tiny_hf, tiny_model

GREEDY = SamplingParams(temperature=0)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ([], None),
        ([4], None),
        ([4, 4], 4),
        ([1, 2, 3], None),
        ([1, 2, 9, 1], 2),
        ([5, 1, 2, 9, 6, 1, 2, 7, 8, 1, 2], 7),  # the last of two places
        ([5, 1, 2, 9, 6, 1, 2, 7, 5, 1, 2], 9),  # the longer match goes before the last one
        ([1, 2, 3, 4, 9, 2, 3, 4, 8, 1, 2, 3, 4], 8),  # of four tokens, three count
    ],
)
def test_what_followed_the_same_tokens(text: list[int], wanted: int | None):
    assert continuation(text) == wanted


def test_it_is_what_a_search_of_strings_finds():
    rng = torch.Generator().manual_seed(0)
    for length in (2, 3, 8, 30, 90) * 4:
        text = "".join("abcd"[i] for i in torch.randint(4, (length,), generator=rng).tolist())
        wanted = None
        for size in (3, 2, 1):
            place = text.rfind(text[-size:], 0, -1) if len(text) > size else -1
            if place >= 0:
                wanted = ord(text[place + size])
                break
        assert continuation(list(map(ord, text))) == wanted


def decoded(target: Model, sampling: SamplingParams, prompts: list[list[int]]) -> Any:
    decoder = SpeculativeDecoder(target, NgramDraft(target), gamma=4, sampling=sampling)
    return decoder.generate(prompts, 24, eos_token_ids=(), batch_size=2)


def test_greedy_texts_are_those_of_generate():
    hf, target = tiny_hf("llama"), tiny_model("llama")
    prompts = [[5, 6, 7, 5, 6], list(range(10, 30)), [9]]
    texts = decoded(target, GREEDY, prompts)
    assert [text.tokens for text in texts] == [generated(hf, p, 24) for p in prompts]
    assert sum(text.stats.num_accepted for text in texts) > 0


def test_nothing_is_drafted_without_a_match():
    target = TableModel(torch.eye(9).roll(1, 1))
    text = decoded(target, GREEDY, [[0]])[0]
    assert text.tokens == [*range(1, 9), *range(9), *range(7)]
    # a pass for each token until one comes back, then blocks of 4 and a bonus token
    assert (text.stats.num_drafted, text.stats.num_accepted) == (12, 12)
    assert text.stats.accepted_histogram == (8, 0, 0, 0, 3)


def test_a_text_of_an_encoder_decoder_may_repeat_its_source():
    target = tiny_model("t5_v1_1")
    session = NgramDraft(target).start_session()
    source = [7, 8, 9, 11]
    session.prefill([source])
    assert session.lengths == [1]
    assert session.extend(torch.tensor([[8]]))[0, -1].argmax() == 9
    session.rollback([1])
    assert session.extend(torch.tensor([[9]]))[0, -1].argmax() == 11
    assert bool((session.extend(torch.tensor([[30]]))[0, -1] == 0).all())
