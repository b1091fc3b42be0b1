"""A draft that proposes few tokens: which, what its sessions say, what is saved and refused."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Olmo2Config

from paceline.core.sampling import spread
from paceline.errors import UsageError
from paceline.models import load_model, wrap_model
from paceline.models.drafts.layers import subset_layers
from paceline.models.drafts.restricted_head import count_tokens, likeliest_tokens, limit_vocabulary
from paceline.models.drafts.save import save_draft
from support.checkpoints import fails
from support.models import CONFIGS, LLAMA_LIKE, tiny_hf, tiny_model

KEPT = torch.tensor([1, 4, 5, 9, 30])


def test_tokens_are_counted_over_all_texts():
    assert count_tokens([[1, 1, 3], [], [3, 0]], 5).tolist() == [1, 2, 0, 2, 0]


def test_the_tokens_that_the_target_expects_most_are_kept_likeliest_first():
    target = tiny_model("llama")
    texts = [[5, 9, 3], [7, 11]]
    mass_V = torch.zeros(target.vocab_size)
    for text in texts:
        logits = target.hf(input_ids=torch.tensor([text])).logits[0]
        mass_V += logits.softmax(-1).sum(0).detach() / 5
    mass_V[[3, 5, 7, 9, 11]] += 0.3 / 5
    always = list(target.eos_token_ids)
    wanted = [token for token in mass_V.argsort(descending=True).tolist() if token not in always]
    found = likeliest_tokens(target, texts, 12).tolist()
    assert found == always + wanted[: 12 - len(always)]


def test_answers_of_an_encoder_decoder_are_ranked_behind_their_sources():
    target = tiny_model("t5")
    assert target.decoder_prompt is not None
    sources, answers = [[5, 6, 7], [8, 9]], [[4, 11], [12, 30, 40]]
    mass_V = torch.zeros(target.vocab_size)
    for source, answer in zip(sources, answers, strict=True):
        decoded = torch.tensor([[*target.decoder_prompt, *answer[:-1]]])
        logits = target.hf(input_ids=torch.tensor([source]), decoder_input_ids=decoded).logits[0]
        mass_V += logits.softmax(-1).sum(0).detach() / 5
    mass_V[[4, 11, 12, 30, 40]] += 0.3 / 5
    always = list(target.eos_token_ids)
    wanted = [token for token in mass_V.argsort(descending=True).tolist() if token not in always]
    found = likeliest_tokens(target, answers, 12, sources).tolist()
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


def test_logits_are_spread_over_all_tokens():
    whole = spread(torch.tensor([[1.0, 2.0]]), torch.tensor([0, 3]), 5)
    assert whole.tolist() == [[1, -torch.inf, -torch.inf, 2, -torch.inf]]


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


def test_a_layer_subset_of_a_model_with_few_tokens_proposes_all_of_them_again():
    target = wrap_model(tiny_model("llama").hf, draft_vocabulary=KEPT)
    assert subset_layers(target, [0]).draft_vocabulary is None


def test_an_architecture_that_has_to_prove_itself_may_propose_few_tokens():
    config = Olmo2Config(**LLAMA_LIKE, vocab_size=61, pad_token_id=2)
    model = wrap_model(AutoModelForCausalLM.from_config(config).eval(), draft_vocabulary=KEPT)
    logits_V = model.start_session().prefill([[5, 9, 3]])[0]
    assert logits_V.isfinite().nonzero().flatten().tolist() == sorted(KEPT.tolist())
