"""Logits to probabilities and drawing from them, at ties and ends; in general: `property/`."""

import math

import pytest
import torch
from pydantic import ValidationError

from paceline.core.sampling import (
    SamplingParams,
    _keep_top_p,
    apply_repetition_penalty,
    mark_seen,
    sample,
    to_probs,
)
from paceline.native.kernels import NativeBackend


def logs(*probs: float) -> torch.Tensor:
    return torch.tensor([math.log(p) if p else -math.inf for p in probs])


def shaped(probs: list[float], **params: float) -> list[float]:
    return to_probs(logs(*probs), SamplingParams.model_validate(params)).tolist()


def test_by_default_a_model_is_sampled_as_it_is():
    assert SamplingParams() == SamplingParams(temperature=1, top_k=0, top_p=1, repetition_penalty=1)


def test_temperature_zero_puts_all_mass_on_the_first_of_equal_maxima():
    logits = torch.tensor([[0.5, 2.0, 2.0, 1.0], [3.0, -1.0, 3.0, 3.0]])
    expected = [[0.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]]
    assert to_probs(logits, SamplingParams(temperature=0)).tolist() == expected


def test_temperature_zero_ignores_top_k_and_top_p():
    params = SamplingParams(temperature=0, top_k=2, top_p=0.1)
    assert to_probs(logs(0.3, 0.4, 0.3), params).tolist() == [0, 1, 0]


@pytest.mark.parametrize("k", [1, 2, 3])
def test_top_k_keeps_exactly_k_where_tokens_tie(k: int):
    probs = to_probs(torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0]), SamplingParams(top_k=k))
    assert sorted(probs.tolist(), reverse=True) == pytest.approx([1 / k] * k + [0] * (5 - k))


@pytest.mark.parametrize(
    ("top_p", "expected"),
    [
        (1e-9, [1, 0, 0, 0]),
        (0.5, [1, 0, 0, 0]),  # 0.5 is reached by the first token alone
        (0.51, [2 / 3, 0, 1 / 3, 0]),
        (0.75, [2 / 3, 0, 1 / 3, 0]),
        (0.76, [4 / 7, 1 / 7, 2 / 7, 0]),  # of two equal tokens the first one fills the set
        (0.875, [4 / 7, 1 / 7, 2 / 7, 0]),
        (0.9, [0.5, 0.125, 0.25, 0.125]),
        (1.0, [0.5, 0.125, 0.25, 0.125]),
    ],
)
def test_top_p_keeps_the_smallest_set_of_likeliest_tokens_that_reaches_it(
    top_p: float, expected: list[float]
):
    assert shaped([0.5, 0.125, 0.25, 0.125], top_p=top_p) == pytest.approx(expected, abs=1e-6)


def test_one_possible_token_gets_all_mass():
    logits = torch.tensor([-math.inf, -math.inf, -5.0])
    for temperature in (0.0, 0.3, 1.0, 9.0):
        probs = to_probs(logits, SamplingParams(temperature=temperature, top_k=2, top_p=0.5))
        assert probs.tolist() == [0, 0, 1]


@pytest.mark.parametrize("temperature", [1.0, 1e-3, 1e-20, 1e-40, 1e-46, 5e-324])
def test_huge_logits_and_tiny_temperatures_stay_finite(temperature: float):
    logits = torch.tensor([[3e38, -3e38, 2.9e38], [1e4, 0.0, -1e4], [0.0, -1.0, -math.inf]])
    probs = to_probs(logits, SamplingParams(temperature=temperature, top_p=0.9))
    assert torch.allclose(probs.sum(-1), torch.ones(3))
    assert (probs[:2] == torch.tensor([1.0, 0.0, 0.0])).all()


def test_equal_likeliest_tokens_share_the_mass_at_a_tiny_temperature():
    probs = to_probs(torch.tensor([1.0, 2.0, 2.0]), SamplingParams(temperature=1e-30))
    assert probs.tolist() == [0, 0.5, 0.5]


# transformers#47932, DeepSpec#31: what is scored must be what was sampled, to the bit.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=0.7, top_k=50),
        SamplingParams(top_p=0.9),
        SamplingParams(temperature=1.3, top_k=40, top_p=0.8),
        SamplingParams(temperature=0),
    ],
)
def test_equal_logits_give_equal_bits_in_any_batch_shape(
    dtype: torch.dtype, params: SamplingParams
):
    generator = torch.Generator().manual_seed(0)
    # Few distinct values in 16 bits: ties at the edge of top-k and top-p are certain.
    logits = (3 * torch.randn(997, generator=generator)).round(decimals=1).to(dtype)
    alone = to_probs(logits, params)
    assert alone.dtype == torch.float32
    others = torch.randn(3, 4, 997, generator=generator).to(dtype)
    others[1, 2] = logits
    assert torch.equal(to_probs(others, params)[1, 2], alone)
    assert torch.equal(to_probs(others[:, 2], params)[1], alone)
    assert torch.equal(to_probs(others[1], params)[2], alone)


def test_shaping_leaves_the_logits_as_they_were():
    logits = torch.tensor([1.0, 2.0, 3.0])
    to_probs(logits, SamplingParams(temperature=0.5, top_k=2, top_p=0.5))
    apply_repetition_penalty(logits, torch.tensor([True, True, True]), 2.0)
    assert logits.tolist() == [1, 2, 3]


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["temperature", "repetition_penalty"])
def test_sampling_parameters_are_finite(name: str, value: float):
    """Limits: `unit/test_config.py`."""
    with pytest.raises(ValidationError):
        SamplingParams.model_validate({name: value})


def test_the_penalty_divides_positive_and_multiplies_negative_logits_of_seen_tokens():
    logits = torch.tensor([[2.0, -2.0, 1.0, 0.0, -math.inf], [2.0, -2.0, 1.0, 0.0, 3.0]])
    seen = torch.tensor([[True, True, False, True, True], [False] * 5])
    expected = [[1.0, -4.0, 1.0, 0.0, -math.inf], [2.0, -2.0, 1.0, 0.0, 3.0]]
    assert apply_repetition_penalty(logits, seen, 2.0).tolist() == expected


def test_seen_tokens_grow_position_by_position():
    seen_BV = torch.tensor([[True, False, False, False], [False, False, False, False]])
    seen_BNV = mark_seen(torch.tensor([[2, 2, 1], [3, 0, 3]]), seen_BV)
    rows = [[{i for i, on in enumerate(at) if on} for at in row] for row in seen_BNV.tolist()]
    assert rows == [[{0}, {0, 2}, {0, 2}, {0, 1, 2}], [set(), {3}, {0, 3}, {0, 3}]]
    assert seen_BV.tolist() == [[True, False, False, False], [False] * 4]


@pytest.mark.parametrize(
    ("uniform", "token"),
    [(0.0, 1), (0.2499, 1), (0.25, 3), (0.4999, 3), (0.5, 4), (1 - 2**-53, 4)],
)
def test_a_uniform_picks_the_token_whose_interval_holds_it(uniform: float, token: int):
    probs = torch.tensor([[0.0, 0.25, 0.0, 0.25, 0.5, 0.0]])
    assert sample(probs, torch.tensor([uniform], dtype=torch.float64)).tolist() == [token]


def test_a_uniform_next_to_one_draws_the_last_token_that_has_mass():
    # float32 sums of a third each end below or above 1; the point may land on the total itself.
    probs = torch.tensor([[1 / 3, 1 / 3, 1 / 3, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0, 0.0]])
    for uniforms in (torch.full((2,), 1 - 2**-53).double(), torch.full((2,), 1 - 2**-24)):
        assert sample(probs, uniforms).tolist() == [2, 0]


@pytest.mark.parametrize("scale", [0.5, 2.0, 8.0])
@pytest.mark.parametrize("top_p", [0.1, 0.9, 0.95, 0.9995, 0.999999])
def test_the_compiled_nucleus_is_the_sorted_one(scale: float, top_p: float):
    """Few entries are sorted there; that must be all that the nucleus can need, ties included."""
    rng = torch.Generator().manual_seed(0)
    logits = torch.cat([torch.randn(6, 5000, generator=rng) * scale, torch.zeros(1, 5000)])
    logits[1, ::3] = -torch.inf
    logits[2] = logits[2].round()  # many equals
    probs = logits.softmax(-1)
    sorted_ = _keep_top_p(probs, top_p)
    compiled_ = probs.clone()
    if NativeBackend().keep_top_p(compiled_, top_p) is None:
        pytest.skip("no C compiler with OpenMP")
    assert torch.equal(compiled_ > 0, sorted_ > 0)
    torch.testing.assert_close(compiled_, sorted_, rtol=1e-5, atol=1e-9)
