"""The compiled pass as every level of this processor runs it."""

import pytest
import torch

from paceline.models.hf.cache import RoomyCache
from paceline.models.hf.causal import HfDecoder
from paceline.models.llama.cpu import NativeLlama
from paceline.models.llama.int8 import rounded_copy
from paceline.native import compiled
from paceline.native.library import library_with
from support.models import tiny_hf
from support.processes import LEVEL_FLAGS

pytestmark = pytest.mark.skipif(compiled() is None, reason="no C compiler with OpenMP")
VOCABULARY = 61


@pytest.mark.slow
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
    text = torch.arange(native.most_tokens)[None] * 7 % VOCABULARY
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
