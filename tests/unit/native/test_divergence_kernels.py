"""Losses and slopes of the library against autograd in float64."""

import math
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from pydantic import TypeAdapter
from torch import Tensor

from paceline.core.fused import Head, chunked_loss
from paceline.native import compiled
from paceline.native.kernels import losses_and_slopes
from paceline.train.objectives import (
    Compared,
    Objective,
    as_terms,
    native_terms,
    token_losses,
)
from support.processes import threads

pytestmark = pytest.mark.skipif(compiled() is None, reason="no C compiler with OpenMP")

KINDS = ["forward_kl", "reverse_kl", "jsd", "tvd", "negative_log_acceptance", "cross_entropy"]
OBJECTIVES = [
    *KINDS,
    {"kind": "jsd", "beta": 0.1},
    [{"kind": "forward_kl", "weight": 0.3}, "tvd", {"kind": "cross_entropy", "weight": 2.5}],
    KINDS,
]


def parsed(objective: object) -> list[Objective]:
    return [TypeAdapter(Objective).validate_python(term) for term in as_terms(objective)]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def expected(
    terms: list[Objective], target: Tensor, draft: Tensor, labels: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    draft = draft.double().requires_grad_()
    logs = target.double().log_softmax(-1), draft.log_softmax(-1)
    losses = token_losses(terms, Compared(*logs, labels))
    (losses * weights.double()).sum().backward()
    assert draft.grad is not None
    return losses.detach(), draft.grad


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_part_of_a_vocabulary_is_held_against_the_whole_target(
    objective: object, dtype: torch.dtype
):
    """The first 203 of 300 tokens; what is left of the target stands in the normalisers."""
    terms, labels, weights = parsed(objective), torch.arange(9), torch.arange(9.0) / 9
    target, draft = (3 * normal(9, width, seed=width).to(dtype) for width in (300, 203))
    whole_C = target.double().logsumexp(-1)
    q = draft.double().requires_grad_()
    p = target.double()[:, :203]
    log_coverage_C = p.logsumexp(-1) - whole_C
    compared = Compared(p.log_softmax(-1), q.log_softmax(-1), labels, log_coverage_C=log_coverage_C)
    wanted = token_losses(terms, compared)
    (wanted * weights.double()).sum().backward()
    assert q.grad is not None
    got = losses_and_slopes(
        native_terms(terms), target[:, :203], draft, labels, weights, whole_C.float()
    )
    torch.testing.assert_close(got.double(), wanted.detach(), rtol=1e-5, atol=1e-5)
    rounded = 2**-8 if dtype == torch.bfloat16 else 1e-5
    assert float((draft - q.grad).abs().max()) <= rounded * max(1.0, float(q.grad.abs().max()))


def check(terms: list[Objective], target: Tensor, draft: Tensor, tolerance: float) -> None:
    rows, vocab_size = draft.shape
    labels = torch.arange(rows) % vocab_size
    weights = torch.arange(rows, dtype=torch.float32) / rows
    losses, slopes = expected(terms, target, draft, labels, weights)
    written = draft.clone()
    got = losses_and_slopes(native_terms(terms), target, written, labels, weights)
    with threads(3):
        several = draft.clone()
        losses_of_several = losses_and_slopes(native_terms(terms), target, several, labels, weights)
    assert torch.equal(losses_of_several, got)
    assert torch.equal(several, written)
    for mine, wanted in ((got, losses), (written, slopes)):
        close = tolerance * max(1.0, float(wanted.abs().max()))
        assert float((mine - wanted).abs().max()) <= close


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
@pytest.mark.parametrize(
    ("vocab_size", "spread"),
    [*product([1, 2, 7, 8, 31, 256, 1003], [3.0]), *product([31, 1003], [0.1, 20.0])],
)
def test_losses_and_slopes_are_those_of_autograd(objective: object, vocab_size: int, spread: float):
    target, draft = (spread * normal(9, vocab_size, seed=seed).float() for seed in (1, 2))
    check(parsed(objective), target, draft, 1e-5 if spread > 10 else 3e-6)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
def test_in_bfloat16_the_slopes_alone_are_rounded(objective: object):
    target, draft = (3 * normal(9, 203, seed=seed).bfloat16() for seed in (1, 2))
    check(parsed(objective), target, draft, 2**-8)
    terms, labels = parsed(objective), torch.arange(9)
    wide = draft.float()
    losses = losses_and_slopes(native_terms(terms), target.float(), wide, labels, torch.ones(9))
    assert torch.equal(
        losses_and_slopes(native_terms(terms), target, draft, labels, torch.ones(9)), losses
    )
    assert torch.equal(draft, wide.bfloat16())


@pytest.mark.parametrize("objective", KINDS[:5])
def test_tokens_that_one_of_the_models_cannot_draw_have_no_part(objective: str):
    target, draft = (normal(5, 40, seed=seed).float() for seed in (1, 2))
    target[:, ::3] = -torch.inf
    if objective in ("forward_kl", "reverse_kl"):  # infinite where only one of them can
        draft[:, ::3] = -torch.inf
    else:
        draft[:, 1::3] = -torch.inf
    terms = parsed(objective)
    labels, weights = torch.zeros(5, dtype=torch.int64), torch.ones(5)
    losses, slopes = expected(terms, target, draft, labels, weights)
    got = losses_and_slopes(native_terms(terms), target, draft, labels, weights)
    torch.testing.assert_close(got.double(), losses, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(draft.double(), slopes.nan_to_num(0.0), rtol=1e-4, atol=1e-6)


def test_a_draft_that_is_its_target_gets_no_push():
    logits = 4 * normal(6, 77).float()
    for objective in KINDS[:5]:
        draft = logits.clone()
        labels = torch.zeros(6, dtype=torch.int64)
        losses = losses_and_slopes(
            native_terms(parsed(objective)), logits, draft, labels, torch.ones(6)
        )
        assert float(losses.abs().max()) < 1e-6
        assert float(draft.abs().max()) < 3e-7


def test_an_overlap_of_e_to_the_minus_200_still_has_a_slope():
    target, draft = torch.zeros(1, 2), torch.tensor([[0.0, -200.0]])
    target[0, 0] = -200.0
    terms, labels = parsed("negative_log_acceptance"), torch.zeros(1, dtype=torch.int64)
    losses, slopes = expected(terms, target, draft, labels, torch.ones(1))
    got = losses_and_slopes(native_terms(terms), target, draft, labels, torch.ones(1))
    assert float(got) == pytest.approx(200 - math.log(2), abs=1e-3)
    torch.testing.assert_close(got.double(), losses)
    torch.testing.assert_close(draft.double(), slopes, rtol=1e-5, atol=1e-5)


def test_what_is_no_number_is_no_number_in_its_row_alone():
    target, draft = normal(3, 20, seed=1).float(), normal(3, 20, seed=2).float()
    draft[1, 4] = torch.nan
    labels = torch.zeros(3, dtype=torch.int64)
    losses = losses_and_slopes(
        native_terms(parsed("forward_kl")), target, draft, labels, torch.ones(3)
    )
    assert losses.isfinite().tolist() == [True, False, True]
    assert draft.isfinite().all(1).tolist() == [True, False, True]


@pytest.mark.parametrize("chunk_size", [1, 4, 23])
@pytest.mark.parametrize("needs", ["all", "hidden", "head"])
def test_chunks_have_the_gradients_of_the_whole(chunk_size: int, needs: str):
    terms = parsed(["reverse_kl", {"kind": "tvd", "weight": 0.5}])
    target = 2 * normal(23, 31, seed=3).float()[:, :29]
    labels, weights = torch.arange(23), normal(23, seed=4).abs().float()

    def parts(dtype: torch.dtype) -> list[Tensor]:
        made = [normal(23, 8), normal(31, 8, seed=1), normal(31, seed=2)]
        wanted = {"all": (1, 1, 1), "hidden": (1, 0, 0), "head": (0, 1, 1)}[needs]
        return [
            part.to(dtype).requires_grad_(bool(want))
            for part, want in zip(made, wanted, strict=True)
        ]

    def loss_of_chunk(hidden: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        logits = head.projected(hidden)[:, :29].detach().contiguous()
        scores = target[rows], logits, labels[rows], weights[rows]
        return losses_and_slopes(native_terms(terms), *scores), logits

    hidden, *_ = ours = parts(torch.float32)
    head = Head(*ours[1:])
    sizes = {"chunk_size": chunk_size, "vocab_size": 29, "part_size": 10}
    loss = chunked_loss(hidden, head, loss_of_chunk, weights, **sizes)
    (3 * loss).backward()
    plain = parts(torch.float64)
    logs = F.linear(*plain)[:, :29].log_softmax(-1)
    compared = Compared(target.double().log_softmax(-1), logs, labels)
    wanted = (token_losses(terms, compared) * weights).sum()
    (3 * wanted).backward()
    assert float(loss.detach()) == pytest.approx(float(wanted.detach()), rel=1e-6)
    for got, whole in zip(ours, plain, strict=True):
        assert (got.grad is None) == (whole.grad is None)
        if got.grad is not None:
            torch.testing.assert_close(got.grad.double(), whole.grad, rtol=1e-5, atol=1e-5)
