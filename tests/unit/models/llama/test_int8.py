"""Drafts in 8 bits a weight: rounded once, and then every road reads the same model."""

import pytest
import torch
from torch import nn

from paceline.errors import UsageError
from paceline.models import prepare_for_decoding, wrap_model
from paceline.models.contract import Texts
from paceline.models.hf.cache import RoomyCache
from paceline.models.hf.causal import HfDecoder
from paceline.models.llama.cpu import NativeLlama
from paceline.models.llama.cpu_weights import round_rows, rounded_copy
from paceline.native import compiled
from paceline.native.library import library_with
from support.models import reader, tiny_hf, tiny_model
from support.processes import LEVEL_FLAGS


def test_a_row_is_rounded_to_half_a_step_and_to_what_float16_holds():
    weight = torch.randn(7, 32, generator=torch.Generator().manual_seed(1))
    weight[3] = 0
    numbers, scales = round_rows(weight)
    assert numbers.dtype == torch.int8
    rounded = numbers * scales[:, None]
    assert bool(((rounded - weight).abs() <= scales[:, None] / 2 + 1e-7).all())
    # no step is an eighth coarser than 127 of them to the largest weight
    assert bool((numbers.abs().amax(1)[[0, 1, 2, 4, 5, 6]] >= 127 * 8 / 9 - 0.5).all())
    assert torch.equal(rounded.half().float(), rounded), "float16 holds them"


def test_a_rounded_copy_leaves_the_model_and_the_embeddings_alone():
    hf = tiny_hf("qwen2")  # ties its head to the embeddings
    before = {name: weight.clone() for name, weight in hf.named_parameters()}
    rounded = rounded_copy(hf)
    assert all(torch.equal(weight, before[name]) for name, weight in hf.named_parameters())
    assert torch.equal(rounded.get_input_embeddings().weight, hf.get_input_embeddings().weight)
    changed = [
        not torch.equal(new.weight, old.weight)
        for new, old in zip(rounded.modules(), hf.modules(), strict=True)
        if isinstance(old, nn.Linear)
    ]
    assert len(changed) == 4 * 7 + 1
    assert all(changed)


@pytest.mark.skipif(compiled() is None, reason="no C compiler with OpenMP")
def test_what_is_scored_is_what_is_read():
    tokens = [5, 9, 30, 2, 44, 7]
    vocabulary = torch.tensor([7, 3, 60, 9, 41])
    for limit in (None, vocabulary):
        hf = tiny_hf("qwen3").bfloat16().float()
        model = prepare_for_decoding(wrap_model(hf, draft_vocabulary=limit), "int8")
        assert reader(model) is not None
        with torch.inference_mode():
            scored = model.hidden(Texts(torch.tensor([tokens])))[0] @ model.head_weight.T
            plain = hf(input_ids=torch.tensor([tokens])).logits[0]
        if limit is not None:
            hidden = torch.ones(61, dtype=torch.bool).index_fill_(0, limit, value=False)
            scored, plain = (logits.masked_fill(hidden, -torch.inf) for logits in (scored, plain))
        session = model.start_session()
        read = torch.cat(
            [
                session.extend(torch.tensor([tokens[:2]])),
                session.extend(torch.tensor([tokens[2:]])),
            ],
            1,
        )[0]
        torch.testing.assert_close(read, scored, rtol=1e-4, atol=1e-4)
        finite = plain.isfinite()
        assert float((read - plain)[finite].abs().max()) > 1e-3, "nothing was rounded"


def test_where_8_bits_are_impossible_it_says_so(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(UsageError, match=r"this is a gpt2 in .* on cpu"):
        prepare_for_decoding(tiny_model("gpt2"), "int8")
    monkeypatch.setattr("paceline.models.llama.cpu_weights.compiled", lambda: None)
    with pytest.raises(UsageError, match="C compiler"):
        prepare_for_decoding(wrap_model(tiny_hf().bfloat16().float()), "int8")


@pytest.mark.slow
@pytest.mark.skipif(compiled() is None, reason="no C compiler with OpenMP")
@pytest.mark.parametrize("level", LEVEL_FLAGS)
@pytest.mark.parametrize("int8", [False, True])
def test_a_pass_of_any_number_of_tokens_gives_the_same_logits_to_the_bit_on_every_processor(
    level: str, *, int8: bool
):
    """Up to the last token before transformers takes over, whose logits are nearly the same."""
    library = library_with(LEVEL_FLAGS[level])
    hf = tiny_hf().bfloat16().float()
    native = NativeLlama(hf, None, int8=int8, library=library)
    plain = HfDecoder(rounded_copy(hf) if int8 else hf)
    text = torch.arange(native.most_tokens)[None] * 7 % 61
    with torch.inference_mode():
        whole = plain(text, RoomyCache(), None, 0)
    close = 1e-4 * float(whole.abs().max())
    cache = RoomyCache()
    alone = torch.cat(
        [native(text[:, i : i + 1], cache, [i + 1], 1) for i in range(text.shape[1])], 1
    )
    torch.testing.assert_close(alone, whole, rtol=0, atol=close)
    for count in (2, 3, 5, 7, 9, 12, 13, 17, 25, 31, 64, native.most_tokens):
        got = native(text[:, :count], RoomyCache(), [count], 0)
        assert torch.equal(got, alone[:, :count]), count
