"""The one mean over losses, by hand on four sequences."""

import math

import pytest
import torch
from torch import Tensor

from paceline.core.divergences import Mean, count_units, reduce_loss, token_weights

LOSS = torch.tensor([[1.0, 2.0, 3.0], [10.0, 99.0, 99.0], [4.0, 6.0, 99.0], [99.0, 99.0, 99.0]])
MASK = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [0, 0, 0]])
means = pytest.mark.parametrize("mean", ["sequence", "token"])


def test_the_sequence_mean_gives_every_sequence_one_voice():
    # means 2, 10, 5; the empty sequence has none
    assert float(reduce_loss(LOSS, MASK, mean="sequence")) == pytest.approx(17 / 3)


def test_the_token_mean_gives_every_token_one_voice():
    assert float(reduce_loss(LOSS, MASK, mean="token")) == pytest.approx(26 / 6)


def test_units_are_tokens_or_sequences_that_have_a_token():
    assert int(count_units(MASK, "token")) == 6
    assert int(count_units(MASK, "sequence")) == 3


@means
@pytest.mark.parametrize("kind", [torch.bool, torch.int64, torch.float32])
def test_any_kind_of_mask_means_the_same(mean: Mean, kind: torch.dtype):
    assert reduce_loss(LOSS, MASK.to(kind), mean=mean) == reduce_loss(LOSS, MASK, mean=mean)


@means
@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, 1e30])
def test_a_masked_position_never_counts_whatever_it_holds(mean: Mean, junk: float):
    clean = torch.where(MASK.bool(), LOSS, 0.0)
    dirty = torch.where(MASK.bool(), LOSS, junk).requires_grad_()
    value = reduce_loss(dirty, MASK, mean=mean)
    assert value == reduce_loss(clean, MASK, mean=mean)
    value.backward()
    assert dirty.grad is not None
    assert torch.isfinite(dirty.grad).all()
    assert (dirty.grad[MASK == 0] == 0).all()


@means
def test_dropping_a_masked_column_changes_nothing(mean: Mean):
    narrow = reduce_loss(LOSS[1:3, :2], MASK[1:3, :2], mean=mean)
    assert narrow == reduce_loss(LOSS[1:3], MASK[1:3], mean=mean)


# trl#6006: accumulation must not average the averages of uneven batches.
@means
@pytest.mark.parametrize("split", [1, 2, 3])
def test_two_part_batches_with_the_total_of_the_step_make_one_whole_batch(mean: Mean, split: int):
    whole_loss = LOSS.clone().requires_grad_()
    whole = reduce_loss(whole_loss, MASK, mean=mean)
    whole.backward()
    parts_loss = LOSS.clone().requires_grad_()
    total = count_units(MASK, mean)
    parts: list[Tensor] = []
    for rows in (slice(None, split), slice(split, None)):
        parts.append(reduce_loss(parts_loss[rows], MASK[rows], mean=mean, total=total))
        parts[-1].backward()
    assert float(sum(part.detach() for part in parts)) == pytest.approx(float(whole.detach()))
    assert whole_loss.grad is not None
    assert parts_loss.grad is not None
    assert torch.allclose(whole_loss.grad, parts_loss.grad, atol=1e-7)


@means
def test_the_total_may_be_a_plain_number(mean: Mean):
    total = float(count_units(MASK, mean))
    assert reduce_loss(LOSS, MASK, mean=mean, total=total) == reduce_loss(LOSS, MASK, mean=mean)


@means
def test_an_empty_part_of_a_step_adds_nothing(mean: Mean):
    assert float(reduce_loss(LOSS[3:], MASK[3:], mean=mean, total=5)) == 0


@means
def test_a_batch_with_every_position_masked_is_an_error(mean: Mean):
    with pytest.raises(ValueError, match="every position is masked") as caught:
        reduce_loss(LOSS, torch.zeros_like(MASK), mean=mean)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="every position is masked"):
        reduce_loss(LOSS, MASK, mean=mean, total=0)


@means
def test_weights_sum_to_one_over_a_batch_and_vanish_where_masked(mean: Mean):
    weights = token_weights(MASK, mean=mean)
    assert float(weights.sum()) == pytest.approx(1)
    assert (weights[MASK == 0] == 0).all()
