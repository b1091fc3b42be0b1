"""Masks of a parallel draft in training: one packed pass, as one pass for each anchor."""

import math
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from paceline.core.sampling import SamplingParams
from paceline.data.collate import TokenRow, collate
from paceline.errors import UsageError
from paceline.measure.acceptance import PairTexts, score_texts
from paceline.models import HfModel, load_model, wrap_model
from paceline.models.hf.draft_vocabulary import write_draft_vocabulary
from paceline.rng import named_generator
from paceline.train import align
from paceline.train.evaluation import AgreementEvaluator
from paceline.train.parallel import (
    BlockPlaces,
    Parallel,
    Places,
    among_trained,
    draw_places,
    mask_token_of,
    packed_hidden,
    place_weights,
    prepare_for_masks,
)
from support.models import tiny_hf, tiny_model, tiny_pair, tiny_tokenizer
from support.runs import align_config, losses, write_pair

MASK = 60
ROWS = [
    TokenRow([7, 3, 30, 12, 9, 44, 8, 51, 17, 23], 3),
    TokenRow([5, 9, 9, 40], 1),
    TokenRow([11, 13, 6, 2, 33, 21, 19], 2),
]
SETTINGS = Parallel(num_tokens=4, anchors=3, weighting="constant")


def drawn(settings: Parallel = SETTINGS) -> tuple[Any, Places]:
    batch = collate(ROWS)
    places = draw_places(batch.mask_BT, settings, lambda row: named_generator(0, "row", row), 0)
    return batch, places


def blocks_of(places: Places) -> list[tuple[int, int, int]]:
    """Row, anchor and number of each mask."""
    found = places.real.nonzero().tolist()
    return [(b, int(places.anchors_BM[b, m]), int(places.places_BM[b, m])) for b, m in found]


def test_masks_are_behind_trained_positions_and_predict_trained_ones():
    batch, places = drawn()
    blocks = blocks_of(places)
    for row, anchor, number in blocks:
        assert batch.mask_BT[row, anchor : anchor + number + 1].all()
        assert number == 1 or (row, anchor, number - 1) in blocks
    for row in range(3):
        anchors = {anchor for own, anchor, _ in blocks if own == row}
        assert len(anchors) == min(3, int(batch.mask_BT[row].sum()) - 1)
    # COD: all anchors keep their first mask, and about half of the next ones
    fewer = [
        sum(number == wanted for _, _, number in blocks_of(drawn_with(0.5, seed)))
        for wanted in (1, 2)
        for seed in range(40)
    ]
    assert set(fewer[:40]) == {8}
    whole = sum(number == 2 for _, _, number in blocks)
    assert abs(sum(fewer[40:]) / 40 - whole / 2) < 4 * math.sqrt(whole / 4 / 40)


def drawn_with(kept: float, seed: int) -> Places:
    settings = SETTINGS.model_copy(update={"kept": kept})
    batch = collate(ROWS)
    return draw_places(batch.mask_BT, settings, lambda row: named_generator(seed, row), 0)


def float64(architecture: str) -> HfModel:
    model = tiny_model(architecture)
    model.hf.double()
    model.mask_token = MASK
    return model


def gradients(model: HfModel, loss: Tensor) -> list[Tensor]:
    weights = [weight for weight in model.hf.parameters() if weight.requires_grad]
    found = torch.autograd.grad(loss, weights, allow_unused=True)
    return [torch.zeros_like(w) if g is None else g for w, g in zip(weights, found, strict=True)]


def one_by_one(model: HfModel, batch: Any, places: Places) -> list[Tensor]:
    """Hidden states of each mask, from plain passes over a text and its masks."""
    found: list[Tensor] = []
    for row, anchor, number in blocks_of(places):
        text = [*ROWS[row].tokens[: anchor + 1], *[MASK] * number]
        body: Any = model.hf.base_model
        found.append(body(input_ids=torch.tensor([text])).last_hidden_state[0, -1])
    return found


# norms of Llama and Qwen compute in float32, whatever the weights
@pytest.mark.parametrize(
    ("architecture", "rounding"), [("gpt2", 1e-12), ("llama", 1e-5), ("qwen3", 1e-5)]
)
def test_the_packed_pass_has_the_states_and_gradients_of_a_pass_for_each_anchor(
    architecture: str, rounding: float
):
    model, (batch, places) = float64(architecture), drawn()
    text_BTD, masks_BMD = packed_hidden(model, batch, places)
    weights = torch.randn(len(blocks_of(places)), text_BTD.shape[-1], dtype=torch.float64)
    alone = one_by_one(model, batch, places)
    torch.testing.assert_close(masks_BMD[places.real], torch.stack(alone), atol=1e-10, rtol=0)
    plain_BTD = model.hidden(batch)
    trained = batch.mask_BT
    torch.testing.assert_close(text_BTD[trained], plain_BTD[trained], atol=1e-10, rtol=0)
    packed = gradients(model, (masks_BMD[places.real] * weights).sum())
    wanted = gradients(model, (torch.stack(alone) * weights).sum())
    for one, other in zip(packed, wanted, strict=True):
        torch.testing.assert_close(
            one, other, atol=rounding * max(1.0, float(other.abs().max())), rtol=0
        )


@pytest.mark.parametrize(
    "broken",
    [
        # a mask sees the next token of the text; positions off by one; no mask sees another
        lambda given: (given[0], given[1] | _next_token(given[1]), given[2]),
        lambda given: (given[0], given[1], given[2] + (given[0] == MASK)),
        lambda given: (given[0], given[1] & _not_others(given[0]), given[2]),
    ],
)
def test_broken_packed_passes_are_caught(broken: Any):
    model, (batch, places) = float64("llama"), drawn()
    under = type(model).hidden_under
    alone = torch.stack(one_by_one(model, batch, places))

    def mutant(self: Any, *given: Tensor) -> Tensor:
        return under(self, *broken(given))

    with patch.object(type(model), "hidden_under", mutant):
        _, masks_BMD = packed_hidden(model, batch, places)
    assert (masks_BMD[places.real] - alone).abs().max() > 1e-4


def _next_token(sees_BWW: Tensor) -> Tensor:
    """The column behind the last of the text that a mask sees."""
    width = collate(ROWS).tokens_BT.shape[1]
    text = sees_BWW[:, width:, :width]
    more = torch.zeros_like(sees_BWW)
    more[:, width:, 1:width] = text[:, :, :-1]
    return more


def _not_others(tokens_BW: Tensor) -> Tensor:
    is_mask = tokens_BW == MASK
    same = torch.eye(tokens_BW.shape[1], dtype=torch.bool)
    return ~(is_mask[:, :, None] & is_mask[:, None]) | same


def test_weights_of_places_are_worked_out_by_hand():
    """Two anchors: one with three masks, one with a single mask at the end of its text."""
    mask_BT = torch.tensor([[True] * 4, [False, True, True, False]])
    places = Places(torch.tensor([[0, 0, 0], [1, 0, 0]]), torch.tensor([[1, 2, 3], [1, 0, 0]]))
    weights_BT = mask_BT.float() / 8
    blocks = among_trained(places, mask_BT, weights_BT, SETTINGS)
    assert blocks.sources_K.tolist() == [1, 2, 3, 5]
    assert blocks.weights_K.tolist() == [0.5, 0.5, 0.5, 0.25]
    # six trained positions, then the masks 6 to 9
    assert blocks.tables_AG.tolist() == [[0, 6, 7, 8], [4, 9, -1, -1]]
    acceptance, survival, confidence = (torch.arange(10) * step for step in (0.05, 0.1, 0.02))

    def weights(weighting: Any, **settings: Any) -> list[float]:
        how = Parallel(num_tokens=4, weighting=weighting, **settings)
        given = acceptance, survival, confidence
        return place_weights(how, blocks, lambda: given).tolist()

    assert weights("constant") == [1, 1, 1, 1]
    assert weights("geometric", decay=0.5) == [0.5, 0.25, 0.125, 0.5]
    assert weights("confidence") == pytest.approx([0, 0, 0, 0.08])
    survival[0], confidence[0] = 1.0, 1.0
    assert weights("confidence") == pytest.approx([1, 0.12, 0.12 * 0.14, 0.08])
    # of the first mask: 1 + a_2 + a_2 a_3; it is reached if the anchor's own token survives
    assert weights("efficiency") == pytest.approx(
        [1 + 0.35 + 0.35 * 0.4, 0.6 * (1 + 0.4), 0.6 * 0.7, 0.4]
    )
    # a place behind another is there in half of the passes: twice as much where it is
    assert weights("efficiency", kept=0.5) == pytest.approx(
        [1 + 0.35 / 0.5 + 0.35 * 0.4 / 0.25, 0.6 * (1 + 0.4 / 0.5), 0.6 * 0.7, 0.4]
    )


def test_efficiency_weights_are_the_derivative_of_tokens_per_block():
    """With survival equal to acceptance: of 1 + a_1 + a_1 a_2 + a_1 a_2 a_3, by autograd."""
    mask_BT = torch.ones(1, 5, dtype=torch.bool)
    places = Places(torch.tensor([[1, 1]]), torch.tensor([[1, 2]]))
    settings = Parallel(num_tokens=3, weighting="efficiency")
    blocks = among_trained(places, mask_BT, torch.ones(1, 5), settings)
    a_X = torch.rand(7, dtype=torch.float64).requires_grad_()
    chain = a_X[torch.tensor([1, 5, 6])]
    (slopes_X,) = torch.autograd.grad(1 + chain.cumprod(0).sum(), a_X)
    scores = a_X.detach(), a_X.detach(), a_X.detach()
    found = place_weights(settings, blocks, lambda: scores)
    torch.testing.assert_close(found.double(), slopes_X[5:])


def test_places_are_weighed_by_the_acceptance_of_what_a_draft_may_propose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The TVD of a step, which counts that acceptance, is the mean of 1 - acceptance."""
    folder, seen = write_pair(tmp_path / "pair"), dict[str, Tensor]()
    write_draft_vocabulary(folder / "draft", torch.arange(0, 200, 2))

    def weigh(settings: Parallel, blocks: BlockPlaces, scores: Any) -> Tensor:
        seen["acceptance"] = scores()[0]
        return place_weights(settings, blocks, scores)

    def weighted(self: BlockPlaces, weights_X: Tensor, of_places_K: Tensor) -> Tensor:
        seen["weights"] = whole(self, weights_X, of_places_K)
        return seen["weights"]

    whole = BlockPlaces.weighted
    monkeypatch.setattr("paceline.train.loss.place_weights", weigh)
    monkeypatch.setattr(BlockPlaces, "weighted", weighted)
    settings = {"num_tokens": 3, "anchors": 8, "mask_token": MASK}
    changes = {"objective": "tvd", "num_steps": 1}
    run = align(align_config(folder, tmp_path / "run", parallel=settings, **changes))
    (loss,) = losses(run)
    assert loss == pytest.approx(float(seen["weights"] @ (1 - seen["acceptance"])), rel=1e-4)


def test_a_run_leaves_a_draft_that_names_its_mask(tmp_path: Path):
    folder = write_pair(tmp_path / "pair")
    settings = {"num_tokens": 3, "anchors": 8, "mask_token": MASK}
    run = align(align_config(folder, tmp_path / "run", parallel=settings, num_steps=6))
    assert len(losses(run)) == 6
    made = load_model(run / "draft")
    assert made.mask_token == made.hf.config.pard_token == MASK


def test_a_token_without_a_meaning_is_found_or_asked_for():
    _, draft = tiny_pair()
    with pytest.raises(UsageError, match=r"set parallel\.mask_token"):
        mask_token_of(draft, SETTINGS)
    assert mask_token_of(draft, SETTINGS.model_copy(update={"mask_token": 9})) == 9
    with pytest.raises(UsageError, match=r"mask_token is 999, wanted one of 266 embeddings"):
        mask_token_of(draft, SETTINGS.model_copy(update={"mask_token": 999}))
    wide = wrap_model(tiny_hf(vocab_size=300), tiny_tokenizer())
    assert mask_token_of(wide, SETTINGS) == 266


@pytest.mark.parametrize("architecture", ["mamba", "t5", "bloom"])
def test_drafts_that_read_no_masks_are_refused_by_name(architecture: str):
    with pytest.raises(UsageError, match=r"is not trained with masks"):
        prepare_for_masks(tiny_model(architecture), SETTINGS, 8)


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_the_evaluated_efficiency_is_that_of_sessions_that_draft_in_parallel(architecture: str):
    target, draft = tiny_pair(architecture)
    draft.mask_token = MASK
    rows = [TokenRow([7, 3, 30, 12, 9, 44, 8, 51, 17, 23], 3), TokenRow([5, 9, 9, 40, 7, 9], 1)]
    sizes = {"gamma": 3, "vocab_size": target.vocab_size, "max_new_tokens": 9}
    sampling = SamplingParams(temperature=0.7)
    found = AgreementEvaluator(target, rows, sampling, **sizes).evaluate(draft)
    prompts = [list(row.tokens[: row.trained_from]) for row in rows]
    texts = [list(row.tokens[row.trained_from :]) for row in rows]
    of = PairTexts(target, draft, prompts, texts, sampling, max_new_tokens=9, gamma=3)
    scores = score_texts(of)
    tokens_B, blocks_B = scores.tokens_and_blocks(3, torch.tensor([9]))
    wanted = float(tokens_B.sum() / blocks_B.sum())
    assert found["parallel_block_efficiency"] == pytest.approx(wanted, abs=1e-5)
    assert abs(found["block_efficiency"] - wanted) > 1e-4
