"""A vocabulary on another family's model: rows by hand, and the same model under other numbers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import PhiConfig, PhiForCausalLM, PreTrainedTokenizerFast

from paceline.errors import UnsupportedModelError
from paceline.models import load_model, wrap_model
from paceline.models.compatibility import check_same_vocabulary
from paceline.models.drafts.transplant import transplant
from support.models import save_tiny, tiny_hf, tiny_model, tiny_tokenizer
from support.texts import byte_tokenizer


def renumbered(tokenizer: Any) -> tuple[PreTrainedTokenizerFast, torch.Tensor]:
    """The same tokens under other ids, and the old id of each new one; special tokens stay."""
    values = json.loads(tokenizer.backend_tokenizer.to_str())
    old = values["model"]["vocab"]
    rng = torch.Generator().manual_seed(0)
    order = [*range(3), *(3 + torch.randperm(len(old) - 3, generator=rng)).tolist()]
    new_of = {before: after for after, before in enumerate(order)}
    values["model"]["vocab"] = {token: new_of[number] for token, number in old.items()}
    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(values)),
        **{name: getattr(tokenizer, name) for name in ("bos_token", "eos_token", "pad_token")},
    )
    return made, torch.tensor(order)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gpt2"])
def test_the_same_tokens_under_other_ids_give_the_same_model(architecture: str):
    """Heads of their own and tied ones."""
    tokenizer = tiny_tokenizer()
    other, order = renumbered(tokenizer)
    donor_hf: Any = tiny_hf(architecture, vocab_size=len(tokenizer))
    donor_hf.config.pard_token = 7  # a token of the donor's vocabulary
    target_hf = tiny_hf("llama", hidden_size=48, vocab_size=len(tokenizer))
    donor, target = wrap_model(donor_hf, tokenizer), wrap_model(target_hf, other)
    draft = transplant(donor, target)
    assert check_same_vocabulary(target, draft) == len(tokenizer)
    assert not hasattr(draft.hf.config, "pard_token")
    text = "the other thinner animal"
    ids, old = (torch.tensor([made(text)["input_ids"]]) for made in (other, tokenizer))
    assert torch.equal(order[ids], old)
    with torch.inference_mode():
        got, wanted = draft.hf(ids).logits, donor_hf(old).logits
    torch.testing.assert_close(got, wanted[..., order])
    assert donor_hf.get_input_embeddings().weight.shape[0] == len(tokenizer)


def test_a_token_that_the_donor_lacks_is_the_mean_of_its_pieces():
    """Both read bytes, so the names in the files say which tokens are the same."""
    ours, theirs = byte_tokenizer(""), tiny_tokenizer()
    donor_hf: Any = tiny_hf("llama", vocab_size=len(theirs))
    target = wrap_model(tiny_hf("gpt2", vocab_size=len(ours)), ours)
    draft = transplant(wrap_model(donor_hf, theirs), target)
    known, hf = theirs.get_vocab(), draft.hf
    roles = {ours.bos_token: theirs.bos_token, ours.eos_token: theirs.eos_token}
    for part in ("get_input_embeddings", "get_output_embeddings"):
        old, new = (getattr(model, part)().weight for model in (donor_hf, hf))
        for name, token in ours.get_vocab().items():
            if name in roles or name in known:
                assert torch.equal(new[token], old[known[roles.get(name, name)]])
            else:
                text = ours.convert_tokens_to_string([name])
                pieces = theirs(text)["input_ids"]
                assert len(pieces) > 1
                torch.testing.assert_close(new[token], old[pieces].mean(0))
    assert hf.config.vocab_size == len(ours)
    assert draft.eos_token_ids == target.eos_token_ids


def test_one_token_of_several_roles_and_biases_of_a_head():
    """As of SmolLM2, whose end of text is the padding, and Phi, whose head has a bias."""
    ours, theirs = byte_tokenizer(""), tiny_tokenizer()
    ours.pad_token = ours.bos_token = ours.eos_token
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = PhiConfig(**sizes, num_attention_heads=2, vocab_size=len(theirs))
    donor_hf: Any = PhiForCausalLM(config).eval()
    donor_hf.lm_head.bias.data.normal_()
    target = wrap_model(tiny_hf("gpt2", vocab_size=len(ours)), ours)
    draft = transplant(wrap_model(donor_hf, theirs), target)
    head: Any = draft.hf.get_output_embeddings()
    table = draft.hf.get_input_embeddings().weight
    old = donor_hf.get_input_embeddings().weight
    assert torch.equal(table[ours.eos_token_id], old[theirs.eos_token_id])
    same = ours.get_vocab()["A"], theirs.get_vocab()["A"]
    assert head.bias[same[0]] == donor_hf.lm_head.bias[same[1]]


def test_encoder_decoders_are_refused():
    target = wrap_model(tiny_hf("llama", vocab_size=266), tiny_tokenizer())
    with pytest.raises(UnsupportedModelError, match="t5 is an encoder-decoder"):
        transplant(tiny_model("t5"), target)


def test_the_command_writes_a_draft_with_the_targets_tokenizer(tmp_path: Path):
    from paceline.models.drafts.save import save_draft
    from paceline.train.initial_draft import DraftConfig, make_draft

    save_tiny(tmp_path / "target", "llama", byte_tokenizer(""))
    save_tiny(tmp_path / "donor", "gpt2")
    paths = {name: str(tmp_path / name) for name in ("target", "donor", "out")}
    config = DraftConfig.model_validate(paths)
    target = load_model(paths["target"])
    save_draft(make_draft(config, target), config.target, config.out)
    found = load_model(paths["out"])
    assert found.hf.config.model_type == "gpt2"
    assert check_same_vocabulary(target, found) == target.vocab_size
    both = [Path(paths[name], "tokenizer.json").read_bytes() for name in ("target", "out")]
    assert both[0] == both[1]
    for more in ({"layers": (0,)}, {"params": 0.5}, {"hidden_size": 8, "text": "x"}):
        with pytest.raises(ValueError, match="got both donor and"):
            DraftConfig.model_validate(paths | more)
