"""The one mean over losses, by hand on four sequences."""

import pytest
import torch
from torch import Tensor

from paceline.core.divergences import Mean, count_units, token_weights

LOSS = torch.tensor([[1.0, 2.0, 3.0], [10.0, 99.0, 99.0], [4.0, 6.0, 99.0], [99.0, 99.0, 99.0]])
MASK = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [0, 0, 0]])
means = pytest.mark.parametrize("mean", ["sequence", "token"])


def mean_of(loss: Tensor, mask: Tensor, mean: Mean, total: Tensor | float | None = None) -> Tensor:
    """The weighted sum, as a step of training adds it up."""
    return (loss * token_weights(mask, mean=mean, total=total)).sum()


def test_the_sequence_mean_gives_every_sequence_one_voice():
    # means 2, 10, 5; the empty sequence has none
    assert float(mean_of(LOSS, MASK, "sequence")) == pytest.approx(17 / 3)


def test_the_token_mean_gives_every_token_one_voice():
    assert float(mean_of(LOSS, MASK, "token")) == pytest.approx(26 / 6)


def test_units_are_tokens_or_sequences_that_have_a_token():
    assert int(count_units(MASK, "token")) == 6
    assert int(count_units(MASK, "sequence")) == 3


@means
@pytest.mark.parametrize("kind", [torch.bool, torch.int64, torch.float32])
def test_any_kind_of_mask_means_the_same(mean: Mean, kind: torch.dtype):
    assert mean_of(LOSS, MASK.to(kind), mean) == mean_of(LOSS, MASK, mean)


@means
def test_dropping_a_masked_column_changes_nothing(mean: Mean):
    narrow = mean_of(LOSS[1:3, :2], MASK[1:3, :2], mean)
    assert narrow == mean_of(LOSS[1:3], MASK[1:3], mean)


# trl#6006: accumulation must not average the averages of uneven batches.
@means
@pytest.mark.parametrize("split", [1, 2, 3])
def test_two_part_batches_with_the_total_of_the_step_make_one_whole_batch(mean: Mean, split: int):
    whole_loss = LOSS.clone().requires_grad_()
    whole = mean_of(whole_loss, MASK, mean)
    whole.backward()
    parts_loss = LOSS.clone().requires_grad_()
    total = count_units(MASK, mean)
    parts: list[Tensor] = []
    for rows in (slice(None, split), slice(split, None)):
        parts.append(mean_of(parts_loss[rows], MASK[rows], mean, total=total))
        parts[-1].backward()
    assert float(sum(part.detach() for part in parts)) == pytest.approx(float(whole.detach()))
    assert whole_loss.grad is not None
    assert parts_loss.grad is not None
    assert torch.allclose(whole_loss.grad, parts_loss.grad, atol=1e-7)


@means
def test_the_total_may_be_a_plain_number(mean: Mean):
    total = float(count_units(MASK, mean))
    assert mean_of(LOSS, MASK, mean, total=total) == mean_of(LOSS, MASK, mean)


@means
def test_an_empty_part_of_a_step_adds_nothing(mean: Mean):
    assert float(mean_of(LOSS[3:], MASK[3:], mean, total=5)) == 0


@means
def test_a_batch_with_every_position_masked_is_an_error(mean: Mean):
    with pytest.raises(ValueError, match="every position is masked") as caught:
        mean_of(LOSS, torch.zeros_like(MASK), mean)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="every position is masked"):
        mean_of(LOSS, MASK, mean, total=0)


@means
def test_weights_sum_to_one_over_a_batch_and_vanish_where_masked(mean: Mean):
    weights = token_weights(MASK, mean=mean)
    assert float(weights.sum()) == pytest.approx(1)
    assert (weights[MASK == 0] == 0).all()
