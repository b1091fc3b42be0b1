"""Narrower T5s: exact where nothing that counts is lost, rightly chosen, saved and loaded."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.errors import UsageError
from paceline.models import HfModel, load_model, wrap_model
from paceline.models.drafts.save import save_draft
from paceline.models.drafts.subclone import Width, measure_importance, subclone, width_of
from tiny import tiny_hf, tiny_model, tiny_tokenizer

SOURCES = [[5, 9, 3, 7, 11, 20, 30, 4, 8], [], [12, 40]]
T5_LIKE = ["t5", "t5_v1_1", "mt5", "umt5"]


def logits_of(model: HfModel) -> torch.Tensor:
    with torch.inference_mode():
        return model.plain_logits(model.trial_batch([9, 4, 33], SOURCES[0]))


def narrowed(target: HfModel, width: Width) -> HfModel:
    return subclone(target, width, measure_importance(target, target, SOURCES))


def blocks_of(hf: Any) -> list[Any]:
    return [*hf.encoder.block, *hf.decoder.block]


def attentions_of(hf: Any) -> list[Any]:
    own = [block.layer[0].SelfAttention for block in blocks_of(hf)]
    return [*own, *(block.layer[1].EncDecAttention for block in hf.decoder.block)]


@pytest.mark.parametrize("architecture", T5_LIKE)
def test_a_draft_as_wide_as_its_target_is_its_target(architecture: str):
    target = tiny_model(architecture)
    draft = narrowed(target, width_of(target))
    assert torch.equal(logits_of(draft), logits_of(target))


@pytest.mark.parametrize("architecture", T5_LIKE)
def test_channels_that_carry_nothing_are_the_ones_to_go_and_nothing_changes(architecture: str):
    """A tied head divides by the root of the hidden size: scale has to make up for that, too."""
    hf: Any = tiny_hf(architecture)
    silent = [3, 4, 17, 30, 31, 8, 9, 10]
    with torch.no_grad():
        hf.get_input_embeddings().weight[:, silent] = 0
        for attention in attentions_of(hf):
            attention.o.weight[silent] = 0
        for block in blocks_of(hf):
            block.layer[-1].DenseReluDense.wo.weight[silent] = 0
    target = wrap_model(hf)
    draft = narrowed(target, width_of(target)._replace(hidden=24))
    assert draft.hf.config.d_model == 24
    torch.testing.assert_close(logits_of(draft), logits_of(target), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("architecture", T5_LIKE)
def test_heads_that_carry_nothing_go_with_their_position_biases(architecture: str):
    hf: Any = tiny_hf(architecture)
    with torch.no_grad():
        num_own = len(blocks_of(hf))
        for index, attention in enumerate(attentions_of(hf)):
            # heads of cross-attention may differ from layer to layer
            for head in (1, 2) if index < num_own else (0, index % 2 + 1):
                attention.o.weight[:, 8 * head : 8 * head + 8] = 0
    target = wrap_model(hf)
    draft = narrowed(target, width_of(target)._replace(num_heads=2))
    with torch.no_grad():
        for attention in attentions_of(hf):
            attention.o.weight *= math.sqrt(2)
    torch.testing.assert_close(logits_of(draft), logits_of(target), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("architecture", ["t5", "t5_v1_1"])
def test_inner_channels_that_carry_nothing_go_and_the_others_grow(architecture: str):
    hf: Any = tiny_hf(architecture)
    outs = [block.layer[-1].DenseReluDense.wo for block in blocks_of(hf)]
    with torch.no_grad():
        for index, out in enumerate(outs):
            out.weight[:, index : index + 16] = 0
    target = wrap_model(hf)
    draft = narrowed(target, width_of(target)._replace(inner=32))
    with torch.no_grad():
        for out in outs:
            out.weight *= math.sqrt(48 / 32)
    torch.testing.assert_close(logits_of(draft), logits_of(target), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("architecture", ["t5", "t5_v1_1"])
def test_a_narrow_draft_is_saved_and_loaded(architecture: str, tmp_path: Path):
    tokenizer = tiny_tokenizer()
    target = wrap_model(tiny_hf(architecture, vocab_size=len(tokenizer)), tokenizer)
    target.hf.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    draft = narrowed(target, Width(16, 32, 2))
    assert draft.num_parameters < target.num_parameters / 2
    save_draft(draft, tmp_path / "target", tmp_path / "draft")
    again = load_model(tmp_path / "draft", dtype="float32")
    assert torch.equal(logits_of(again), logits_of(draft))


@pytest.mark.parametrize(
    ("width", "message"),
    [
        (Width(33, 48, 4), "hidden of the draft is 33; wanted 1 to the target's 32"),
        (Width(32, 0, 4), "inner of the draft is 0"),
        (Width(32, 48, 5), "num_heads of the draft is 5; wanted 1 to the target's 4"),
    ],
)
def test_widths_that_cannot_be_are_refused(width: Width, message: str):
    target = tiny_model("t5")
    with pytest.raises(UsageError, match=message):
        narrowed(target, width)


def test_no_text_is_refused():
    target = tiny_model("t5")
    with pytest.raises(UsageError, match="got no text to rank"):
        measure_importance(target, target, [[]])
