"""What sessions do besides reading like a plain pass, as in tests/property/test_session.py."""

import pytest
import torch

from paceline.errors import ContextLengthError, PromptError
from paceline.models import prepare_for_decoding, wrap_model
from paceline.native import compiled
from support.models import reader, tiny_hf, tiny_model

PROMPTS = [[3, 4, 5, 6, 7, 8], [9], [10, 11, 12]]


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=3e-5)


def test_one_by_one_equals_a_block_equals_a_prompt():
    model, text = tiny_model("llama"), [5, 6, 7, 8, 9, 10, 11, 12]
    prompt, block, single = (model.start_session() for _ in range(3))
    wanted = prompt.prefill([text])[0]
    close(block.extend(torch.tensor([text]))[0, -1], wanted)
    for token in text:
        last = single.extend(torch.tensor([[token]]))
    close(last[0, -1], wanted)


@pytest.mark.parametrize("architecture", ["qwen3", "t5", "bart"])
def test_rows_may_be_repeated_and_reordered(architecture: str):
    model = tiny_model(architecture)
    session = model.start_session()
    session.prefill(PROMPTS)
    session.keep_rows([2, 1, 2])
    logits_BNV = session.extend(torch.tensor([[1], [2], [3]]))
    lengths: list[int] = []
    for row, (prompt, token) in enumerate((([10, 11, 12], 1), ([9], 2), ([10, 11, 12], 3))):
        alone = model.start_session()
        alone.prefill([prompt])
        close(logits_BNV[row], alone.extend(torch.tensor([[token]]))[0])
        lengths += alone.lengths
    assert session.lengths == lengths


def test_a_session_emptied_whole_starts_afresh():
    model = tiny_model("gpt2")
    session = model.start_session()
    session.prefill([[1, 2, 3], [4]])
    session.rollback([3, 1])
    logits_BNV = session.extend(torch.tensor([[7, 8], [9, 10]]))
    close(logits_BNV[0, -1], model.start_session().prefill([[7, 8]])[0])


def test_a_text_longer_than_the_context_is_refused_with_both_numbers():
    session = tiny_model("llama", max_position_embeddings=8).start_session()
    with pytest.raises(ContextLengthError, match="9 tokens, but the model's context holds 8"):
        session.prefill([[1], list(range(9))])
    session = tiny_model("llama", max_position_embeddings=8).start_session()
    session.prefill([[1] * 7])
    with pytest.raises(ContextLengthError, match="9 tokens"):
        session.extend(torch.tensor([[1, 2]]))
    session.extend(torch.tensor([[1]]))
    assert session.lengths == [8]


def test_an_empty_prompt_is_refused():
    with pytest.raises(PromptError, match="at least one token"):
        tiny_model("llama").start_session().prefill([[1], []])


def test_a_session_reads_without_dropout_while_the_model_trains():
    hf = tiny_hf("gpt2", resid_pdrop=0.5, embd_pdrop=0.5).train()
    model = wrap_model(hf)
    first, second = (model.start_session().prefill([[1, 2, 3]]) for _ in range(2))
    assert torch.equal(first, second)
    assert hf.training


def test_logits_are_float32_and_as_wide_as_the_vocabulary_whatever_the_model_computes_in():
    model = wrap_model(tiny_hf("llama").to(torch.bfloat16))
    logits_BV = model.start_session().prefill([[1, 2]])
    assert (logits_BV.dtype, logits_BV.shape) == (torch.float32, (1, 61))


def test_prepared_models_read_what_the_library_reads_through_windows_biases_and_norms():
    layers = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 4}
    text = list(range(3, 40))
    for architecture, overrides in (
        ("qwen2", {"use_sliding_window": True, **layers}),
        ("qwen3", {"use_sliding_window": True, "attention_bias": True, **layers}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}),
    ):
        hf = tiny_hf(architecture, **overrides).bfloat16().float()
        for name, weight in hf.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(weight)
        prepared = prepare_for_decoding(wrap_model(hf))
        compilable = "attention_bias" not in overrides
        assert (reader(prepared) is not None) == (compilable and compiled() is not None)
        with torch.inference_mode():
            wanted = hf(input_ids=torch.tensor([text])).logits[0]
        session = prepared.start_session()
        close(session.prefill([text[:20]])[0], wanted[19])
        close(session.extend(torch.tensor([text[20:32]]))[0], wanted[20:32])
        close(session.extend(torch.tensor([text[32:]]))[0], wanted[32:])
