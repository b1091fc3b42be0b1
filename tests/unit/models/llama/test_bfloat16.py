"""Models in bfloat16 on a CPU: compiled passes for few tokens, torch for many; copies to write."""

import gc
import weakref
from copy import deepcopy

import pytest
import torch

from paceline.core.sampling import SamplingParams
from paceline.data.sources import sample_completions
from paceline.models import prepare_for_decoding, wrap_model
from paceline.models.hf.cache import RoomyCache
from paceline.models.llama.cpu import NativeLlama
from paceline.models.llama.cpu_weights import NativeWeights
from paceline.models.prepare import training_writer
from paceline.native import compiled
from support.models import TEXT, prepared, read, reader, tiny_hf

pytestmark = pytest.mark.skipif(compiled() is None, reason="no C compiler with OpenMP")


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_model_in_bfloat16_reads_few_tokens_as_its_float32_copy_and_many_nearly_so(
    architecture: str, monkeypatch: pytest.MonkeyPatch
):
    """Nearly so are all tokens with rounded activations, too."""
    hf = tiny_hf(architecture).bfloat16()
    model, copy = prepare_for_decoding(wrap_model(hf)), prepared(architecture)
    rounded = prepare_for_decoding(wrap_model(hf), activations="bfloat16")
    for each in (model, copy, rounded):
        monkeypatch.setattr(reader(each), "most_tokens", 8)
    few, many, both = ([TEXT[:5], TEXT[5:7]], [TEXT * 4], [TEXT * 2, TEXT[:3], TEXT, TEXT[:2]])
    assert torch.equal(read(model, few), read(copy, few))
    for each, parts in ((model, many), (model, both), (rounded, few)):
        got, wanted = read(each, parts), read(copy, parts)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, wanted, rtol=0, atol=0.05 * float(wanted.abs().max()))
    assert model.hf is hf
    assert hf.dtype == torch.bfloat16


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_a_model_in_training_writes_with_its_weights_as_they_are(architecture: str):
    hf = tiny_hf(architecture)
    writing = training_writer(wrap_model(hf))
    prompts = [TEXT[:2], TEXT[3:6]]  # short enough for the compiled pass on every processor
    texts: list[list[list[int]]] = []
    for _ in range(2):
        rounded = deepcopy(hf)
        for weight in (weight for weight in rounded.parameters() if weight.ndim == 2):
            weight.data = weight.data.bfloat16().float()
        copy = prepare_for_decoding(wrap_model(rounded))
        for sampling in (SamplingParams(), SamplingParams(top_k=5)):
            written, wanted = (
                sample_completions(
                    model, prompts, [3, 4], 20, sampling=sampling, eos_token_ids=[int(TEXT[3])]
                )
                for model in (writing, copy)
            )
            assert written == wanted
            texts.append(written)
        with torch.no_grad():
            for weight in hf.parameters():
                weight += 0.3 * torch.randn_like(weight)
    assert texts[:2] != texts[2:]


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_prompts_beyond_the_compiled_pass_are_read_by_the_model_itself(architecture: str):
    model = wrap_model(tiny_hf(architecture, max_position_embeddings=512))
    prompts = [TEXT * 20, TEXT * 19]
    writing = training_writer(model).start_session()
    assert torch.equal(writing.prefill(prompts), model.start_session().prefill(prompts))


def test_a_copy_goes_with_its_session():
    # a step's loss needs the memory; what waits for the collector is there at the peak
    kinds = {NativeLlama, NativeWeights, RoomyCache}
    gc.collect()
    others = [found for found in gc.get_objects() if type(found) in kinds]
    hf = tiny_hf("llama")
    session = training_writer(wrap_model(hf)).start_session()
    session.prefill([TEXT])
    made = [weakref.ref(found) for found in gc.get_objects() if type(found) in kinds]
    made = [copy for copy in made if not any(copy() is other for other in others)]
    assert {type(copy()) for copy in made} == kinds
    gc.disable()
    try:
        del session
        assert [copy() for copy in made] == [None] * len(made)
    finally:
        gc.enable()


def test_a_model_that_cannot_be_copied_writes_as_it_reads():
    hf = tiny_hf("gpt2")
    writing = training_writer(wrap_model(hf))
    wanted = wrap_model(hf).start_session().prefill([TEXT])
    assert torch.equal(writing.start_session().prefill([TEXT]), wanted)
