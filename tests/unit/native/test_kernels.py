"""The compiled draws and verified blocks equal those of torch, one by one."""

import pytest
import torch
from torch import Tensor

from paceline.core.block import Drafted, Uniforms, Verified, verify
from paceline.core.rules import Lossless
from paceline.core.sampling import SamplingParams, likeliest, sample, to_probs
from paceline.native import compiled
from support.processes import threads
from support.rules import PYTORCH, using

pytestmark = pytest.mark.skipif(compiled() is None, reason="no C compiler with OpenMP")
SIZES = [1, 3, 255, 256, 257, 1000, 49152]


@pytest.fixture
def rng() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def distributions(*shape: int, rng: torch.Generator, sharp: float = 3.0) -> Tensor:
    """Some of their tokens have no mass."""
    logits = sharp * torch.randn(shape, generator=rng)
    holes = torch.rand(shape, generator=rng) < 0.3
    holes[..., 0] = False
    return logits.masked_fill(holes, -torch.inf).softmax(-1)


@pytest.mark.parametrize("vocab_size", SIZES)
def test_draws_equal_those_of_torch(
    vocab_size: int, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
):
    probs_BV = distributions(64, vocab_size, rng=rng)
    uniforms_B = torch.rand(64, generator=rng)
    uniforms_B[:3] = torch.tensor([0.0, 1 - 2**-24, 0.5])
    got_B = sample(probs_BV, uniforms_B)
    with using(PYTORCH):
        assert got_B.tolist() == sample(probs_BV, uniforms_B).tolist()
    with threads(3):
        assert got_B.tolist() == sample(probs_BV, uniforms_B).tolist()
    assert bool((probs_BV.gather(1, got_B[:, None]) > 0).all())


@pytest.mark.parametrize("vocab_size", [5, 256, 700])
@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-24, 1 - 2**-53])
def test_no_draw_leaves_the_support(vocab_size: int, uniform: float):
    for token in (0, vocab_size // 2, vocab_size - 1):
        probs_BV = torch.zeros(1, vocab_size)
        probs_BV[0, token] = 1e-30
        uniforms_B = torch.tensor([uniform], dtype=torch.float64)
        assert int(sample(probs_BV, uniforms_B)) == token


def test_a_distribution_that_is_not_a_number_is_no_token():
    with pytest.raises(AssertionError, match="contains NaN"):
        sample(torch.full((1, 300), torch.nan), torch.tensor([0.5]))


def verified(rule: Lossless, case: dict[str, Tensor]) -> Verified:
    drafted = Drafted(case["drafted"], case["draft"])
    uniforms = Uniforms(case["accept"], case["next"])
    return verify(drafted, case["num_drafted"], case["target"], rule, uniforms)


@pytest.mark.parametrize("gamma", [0, 1, 4])
@pytest.mark.parametrize("vocab_size", [3, 257, 1000])
def test_verified_blocks_equal_those_of_torch(
    gamma: int, vocab_size: int, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
):
    batch = 50
    draft = distributions(batch, gamma, vocab_size, rng=rng, sharp=1.0)
    target = distributions(batch, gamma + 1, vocab_size, rng=rng, sharp=1.0)
    target[::7, :gamma] = draft[::7]  # nothing exceeds, and all is kept
    drafted = torch.zeros(batch, gamma, dtype=torch.int64)
    for position in range(gamma):
        drafted[:, position] = sample(
            draft[:, position].contiguous(), torch.rand(batch, generator=rng)
        )
    case = {
        "drafted": drafted,
        "num_drafted": torch.randint(gamma + 1, (batch,), generator=rng),
        "draft": draft,
        "target": target,
        "accept": torch.rand(batch, gamma, generator=rng),
        "next": torch.rand(batch, generator=rng),
    }
    got = verified(Lossless(), case)
    with using(PYTORCH):
        wanted = verified(Lossless(), case)
    with threads(3):
        assert verified(Lossless(), case).next_tokens.tolist() == got.next_tokens.tolist()
    assert got.num_accepted.tolist() == wanted.num_accepted.tolist()
    assert got.next_tokens.tolist() == wanted.next_tokens.tolist()


@pytest.mark.parametrize("vocab_size", [1, 15, 16, 17, 1000])
def test_the_likeliest_token_is_the_first_of_the_largest(vocab_size: int, rng: torch.Generator):
    few_values = torch.randint(-3, 4, (3, 5, vocab_size), generator=rng).float()
    logits = torch.where(few_values < -1, -torch.inf, few_values)
    firsts = (logits == logits.amax(-1, keepdim=True)).int().argmax(-1)
    assert likeliest(logits).tolist() == firsts.tolist()


@pytest.mark.parametrize("temperature", [1.0, 0.3, 4.0, 1e-30, 1e-60, 1e60])
@pytest.mark.parametrize("vocab_size", SIZES)
def test_probabilities_equal_those_of_torch(
    vocab_size: int, temperature: float, rng: torch.Generator
):
    logits = 5 * torch.randn(3, vocab_size, generator=rng)
    logits[:, 1::3] = -torch.inf
    logits[1, 0] = 300.0
    got = to_probs(logits, SamplingParams(temperature=temperature))
    centred = logits.double() - logits.double().amax(-1, keepdim=True)
    wanted = (centred / temperature).softmax(-1)
    # a float32 number near -80 is 4e-6 away from the next, and so is its exponential
    assert torch.allclose(got.double(), wanted, rtol=2e-5, atol=1e-30)
    assert torch.allclose(got.double().sum(-1), torch.ones(3).double(), atol=1e-6)
    assert not bool((got[:, 1::3] > 0).any())
