"""Heads: of models that scale or cap their logits, and of drafts that propose few tokens."""

import json
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from paceline.errors import UnsupportedModelError, UsageError
from paceline.models import load_model, wrap_model
from paceline.models.drafts.layers import subset_layers
from paceline.models.drafts.restricted_head import likeliest_tokens
from paceline.models.drafts.save import save_draft
from paceline.models.hf.base import recorded_hidden_states
from paceline.models.hf.logit_map import logit_map
from support.checkpoints import fails
from support.models import (
    CONFIGS,
    ENCODER_DECODERS,
    LLAMA_LIKE,
    SCALED,
    limit_vocabulary,
    tiny_hf,
    tiny_model,
)

TEXT = [5, 6, 7, 9, 12, 30, 4, 4, 21]


def wanted_and_got(hf: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """Logits of a text by transformers, and by the head from hidden states."""
    model: Any = wrap_model(hf)
    batch = model.trial_batch(TEXT)
    with torch.no_grad():
        return model.plain_logits(batch), model.head.logits(model.hidden(batch))


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [
        *product([*SCALED, *CONFIGS, *ENCODER_DECODERS], [torch.float32]),
        *product([*SCALED, "llama", "t5", "marian"], [torch.bfloat16]),
    ],
    ids=str,
)
def test_the_head_makes_the_logits_of_transformers(architecture: str, dtype: torch.dtype):
    hf = tiny_hf(architecture).to(dtype)
    cap = getattr(hf.config, "final_logit_softcapping", None)
    assert logit_map(hf).cap == cap
    wanted, got = wanted_and_got(hf)
    assert cap is None or float(wanted.abs().max()) > 0.9 * cap, "the cap changes these logits"
    apart = 1e-5 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(got, wanted, rtol=0, atol=apart * float(wanted.abs().max()))


def test_a_body_under_another_name_than_the_class_says():
    sizes: dict[str, Any] = {"num_local_experts": 2, "intermediate_size_mlp": 48}
    config = AutoConfig.for_model("llama4_text", vocab_size=61, **LLAMA_LIKE, **sizes)
    hf: Any = AutoModelForCausalLM.from_config(config).eval()
    assert hf.base_model is hf
    wanted, got = wanted_and_got(hf)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cap", [0.5, 4.0, 30.0, 50.0])
def test_a_cap_is_found_that_small_logits_do_not_reach(cap: float):
    hf = tiny_hf("gemma2", final_logit_softcapping=cap, initializer_range=0.02)
    model = wrap_model(hf)
    assert model.head.cap == pytest.approx(cap, rel=1e-6)
    with torch.no_grad():
        hf.get_output_embeddings().weight *= 100  # pyright: ignore
    wanted, got = wanted_and_got(hf)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("architecture", "scale"), [("granite", 1 / 0.3), ("cohere2", 2.5)])
def test_a_bias_of_the_head_is_scaled_with_its_product(architecture: str, scale: float):
    hf = tiny_hf(architecture)
    assert logit_map(hf).output_scale == pytest.approx(scale, rel=1e-6)
    assert logit_map(tiny_hf("minicpm3")).input_scale == pytest.approx(8 / 32)
    head: Any = hf.get_output_embeddings()
    head.bias = nn.Parameter(torch.linspace(-1, 1, 61))
    wanted, got = wanted_and_got(hf)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("architecture", ["gemma2", "granite", "cohere", "minicpm3"])
def test_recorded_states_are_those_that_the_head_reads(architecture: str):
    model = wrap_model(tiny_hf(architecture))
    with recorded_hidden_states(model) as recorded, torch.no_grad():
        logits_NV = model.start_session().prefill([TEXT])
        got = model.head.logits(recorded[0])[0, -1:]
    torch.testing.assert_close(got, logits_NV, rtol=1e-5, atol=1e-5)


UNKNOWN = {
    "clamped": lambda logits: logits.clamp(max=5.0),
    "another bend": lambda logits: 5 * torch.sin(logits / 5),
    "normalised": lambda logits: logits.log_softmax(-1),
    "one token only": lambda logits: logits * torch.linspace(1, 2, logits.shape[-1]),
    "scaled behind the cap": lambda logits: 2 * torch.tanh(logits) + 0.1 * logits,
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_any_other_function_is_refused_by_name(name: str):
    hf = tiny_hf()

    def change(_hf: nn.Module, _inputs: object, output: Any) -> None:
        output.logits = UNKNOWN[name](output.logits)

    hf.register_forward_hook(change)
    model = wrap_model(hf)
    with pytest.raises(UnsupportedModelError, match="llama computes logits from hidden states in"):
        _ = model.head


def test_a_head_that_reads_something_else_is_refused():
    hf = tiny_hf()
    head: Any = hf.get_output_embeddings()
    head.register_forward_pre_hook(lambda _head, inputs: (inputs[0].relu(),))
    with pytest.raises(UnsupportedModelError, match="which only decoding supports"):
        _ = wrap_model(hf).head


KEPT = torch.tensor([1, 4, 5, 9, 30])


@pytest.mark.parametrize(
    ("architecture", "sources", "texts"),
    [("llama", None, [[5, 9, 3], [7, 11]]), ("t5", [[5, 6, 7], [8, 9]], [[4, 11], [12, 30, 40]])],
)
def test_the_tokens_that_the_target_expects_most_are_kept_likeliest_first(
    architecture: str, sources: list[list[int]] | None, texts: list[list[int]]
):
    """Answers of an encoder-decoder are ranked behind their sources."""
    target = tiny_model(architecture)
    mass_V = torch.zeros(target.vocab_size)
    for source, text in zip(sources or texts, texts, strict=True):
        given = {"input_ids": torch.tensor([source])}
        if sources is not None:
            decoded = [*(target.decoder_prompt or ()), *text[:-1]]
            given["decoder_input_ids"] = torch.tensor([decoded])
        mass_V += target.hf(**given).logits[0].softmax(-1).sum(0).detach() / 5
    mass_V[sorted(token for text in texts for token in text)] += 0.3 / 5
    always = list(target.eos_token_ids)
    wanted = [token for token in mass_V.argsort(descending=True).tolist() if token not in always]
    found = likeliest_tokens(target, texts, 12, sources).tolist()
    assert found == always + wanted[: 12 - len(always)]


def test_only_so_many_positions_are_read_but_all_texts_are_counted():
    target = tiny_model("llama")
    texts = [[5] * 30, *([[9] * 4] * 20)]
    few = likeliest_tokens(target, texts, 8, num_tokens=1)
    assert {5, 9} <= set(few.tolist())


@pytest.mark.parametrize(
    ("texts", "size", "said"),
    [([[1]], 0, "wanted at least 1"), ([[1]], 9999, "of 9999 tokens"), ([[], []], 5, "no text")],
)
def test_a_size_or_text_that_cannot_be_is_refused(texts: list[list[int]], size: int, said: str):
    with pytest.raises(UsageError, match=said):
        likeliest_tokens(tiny_model("llama"), texts, size)


@pytest.mark.parametrize("architecture", CONFIGS)
def test_sessions_give_the_same_logits_for_those_tokens_and_no_chance_to_the_others(
    architecture: str,
):
    hf = tiny_hf(architecture)
    whole, few = wrap_model(hf), wrap_model(hf, draft_vocabulary=KEPT)
    wanted = _read(whole)
    outside = torch.ones(whole.vocab_size, dtype=torch.bool).index_fill(0, KEPT, value=False)
    for got, logits in zip(_read(few), wanted, strict=True):
        assert bool((got[..., outside] == -torch.inf).all())
        torch.testing.assert_close(got[..., KEPT], logits[..., KEPT], rtol=1e-5, atol=1e-5)


def _read(model):
    session = model.start_session()
    first = session.prefill([[5, 9, 3], [7]])
    session.rollback([1, 0])
    return first, session.extend(torch.tensor([[6, 2], [8, 4]]))


def test_a_saved_draft_still_proposes_only_these_and_is_whole_for_everyone_else(
    model_directory: Path, tmp_path: Path
):
    target = load_model(model_directory, dtype="float32")
    draft = limit_vocabulary(subset_layers(target, [0, 3]), target, [[5, 5, 6]], 12)
    assert draft.draft_vocabulary is not None
    assert subset_layers(draft, [0]).draft_vocabulary is None
    save_draft(draft, model_directory, tmp_path / "draft")
    stored = json.loads((tmp_path / "draft" / "draft_vocabulary.json").read_text())
    assert stored == {"tokens": draft.draft_vocabulary.tolist()}
    again = load_model(tmp_path / "draft", dtype="float32")
    assert again.draft_vocabulary is not None
    assert torch.equal(again.draft_vocabulary, draft.draft_vocabulary)
    assert set(target.eos_token_ids) <= set(again.draft_vocabulary.tolist())
    assert again.head_weight.shape == target.head_weight.shape


@pytest.mark.parametrize("text", ["{", "[]", '{"tokens": [2, 2]}', '{"tokens": [1, 9999]}'])
def test_a_damaged_file_is_one_clear_line(text: str, model_directory: Path):
    (model_directory / "draft_vocabulary.json").write_text(text)
    fails(model_directory, "draft_vocabulary.json is damaged: wanted")


@pytest.mark.parametrize("tokens", [torch.tensor([5, 5, 7]), torch.tensor([-1, 5]), [5, 7]])
def test_a_list_that_is_none_is_one_clear_line(tokens: torch.Tensor):
    hf = tiny_hf("llama")
    wrap = partial(wrap_model, draft_vocabulary=tokens)
    said = fails(hf, "wanted a tensor of distinct token ids", error=UsageError, load=wrap)
    assert said.endswith(f"below {hf.config.vocab_size}")
