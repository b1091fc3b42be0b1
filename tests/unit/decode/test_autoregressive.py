"""The baseline against a loop in Python floats that draws the same uniforms."""

import math

import pytest
import torch

from paceline.core.sampling import SamplingParams
from paceline.decode import AutoregressiveDecoder
from paceline.rng import named_generator
from support.fakes import TableModel

PROMPTS = [[1], [2, 0, 3, 3], [4, 1]]


def target(**options: object) -> TableModel:
    return TableModel.random(6, order=2, seed=1, spread=1.5, **options)  # pyright: ignore


def loop(
    model: TableModel, prompt: list[int], count: int, seed: int, *, penalty: float
) -> list[int]:
    """Temperature 0.8, then the three likeliest tokens, one token at a time."""
    rng = named_generator(seed, "choose")
    text = list(prompt)
    for _ in range(count):
        logits = model.log_probs(text).tolist()
        logits = [x * penalty if v in text else x for v, x in enumerate(logits)]
        weights = [math.exp(x / 0.8) for x in logits]
        third = sorted(weights)[-3]
        weights = [w if w >= third else 0.0 for w in weights]
        point = float(torch.rand(1, generator=rng, dtype=torch.float64)) * sum(weights)
        token = 0
        while point >= weights[token]:
            point -= weights[token]
            token += 1
        text.append(token)
    return text[len(prompt) :]


@pytest.mark.parametrize("penalty", [1.0, 1.5])
def test_sampling_equals_a_loop_with_the_same_uniforms(penalty: float):
    sampling = SamplingParams(temperature=0.8, top_k=3, repetition_penalty=penalty)
    found = AutoregressiveDecoder(target(), sampling).generate(PROMPTS, 30, seed=[5, 6, 5])
    expected = [
        loop(target(), prompt, 30, seed, penalty=penalty)
        for prompt, seed in zip(PROMPTS, (5, 6, 5), strict=True)
    ]
    assert [generation.tokens for generation in found] == expected


def test_greedy_decoding_takes_the_likeliest_token_each_time():
    found = AutoregressiveDecoder(target(), SamplingParams(temperature=0)).generate(PROMPTS, 20)
    for prompt, generation in zip(PROMPTS, found, strict=True):
        text = list(prompt)
        for token in generation.tokens:
            assert token == int(target().log_probs(text).argmax())
            text.append(token)
        assert len(generation.tokens) == 20


def test_greedy_decoding_does_not_depend_on_the_seed_and_sampling_does():
    for temperature, texts in ((0.0, 1), (1.0, 8)):
        decoder = AutoregressiveDecoder(target(), SamplingParams(temperature=temperature))
        found = decoder.generate([[1, 2]] * 8, 30, seed=3)
        assert len({tuple(generation.tokens) for generation in found}) == texts


def test_row_i_of_an_integer_seed_has_the_seed_plus_i():
    decoder = AutoregressiveDecoder(target())
    assert decoder.generate(PROMPTS, 15, seed=7) == decoder.generate(PROMPTS, 15, seed=[7, 8, 9])


def test_every_token_takes_one_pass_and_is_counted_once():
    model = target()
    (generation,) = AutoregressiveDecoder(model).generate([[1]], 12)
    stats = generation.stats
    assert (stats.num_prefill_tokens, stats.num_bonus, stats.num_blocks) == (1, 11, 11)
    assert (stats.num_drafted, stats.num_accepted, stats.num_recovered) == (0, 0, 0)
    assert stats.block_efficiency == 1
    assert math.isnan(stats.acceptance_rate)
    assert model.num_passes == stats.num_target_calls + 1


def test_the_batch_goes_on_only_as_long_as_its_longest_row():
    # Token 5 ends a text; the rows end at different times and leave.
    model = target(eos_token_ids=(5,))
    found = AutoregressiveDecoder(model).generate([[1, 2]] * 6, 200, seed=0)
    lengths = {len(generation.tokens) for generation in found}
    assert len(lengths) > 1
    assert model.num_passes == max(lengths)
    for generation in found:
        assert generation.tokens.index(5) == len(generation.tokens) - 1
        assert generation.stop_reason == "eos"


def test_streaming_gives_the_tokens_of_generate_one_at_a_time():
    decoder = AutoregressiveDecoder(target(), SamplingParams(temperature=0.9))
    blocks = list(decoder.stream([2, 1], 9, seed=4))
    (generation,) = decoder.generate([[2, 1]], 9, seed=4)
    assert [block.tokens for block in blocks] == [(token,) for token in generation.tokens]
    assert [block.sources for block in blocks] == [("prefill",)] + [("bonus",)] * 8
