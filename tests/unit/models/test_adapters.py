"""Adapters: merged as peft computes them, or one line that says what to do."""

from itertools import product
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from paceline.models import load_model
from paceline.models.inspection import inspect_model
from paceline.models.loading import fingerprint, load_tokenizer
from paceline.places import TEMPLATES
from support.checkpoints import edit, fails
from support.models import LLAMA_LIKE, save_tiny, tiny_hf, tiny_tokenizer

TEXT = torch.tensor([[5, 6, 7, 8, 9]])
pytestmark = [  # what peft says when it makes adapters
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`"),
]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))


def logits(hf: Any) -> torch.Tensor:
    with torch.inference_mode():
        options = {"decoder_input_ids": TEXT} if hf.config.is_encoder_decoder else {}
        return hf(input_ids=TEXT, **options).logits


def trained(hf: Any, settings: Any) -> tuple[Any, torch.Tensor]:
    """The model with a random adapter, by peft, and its logits."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(5)
    model = peft.get_peft_model(hf, settings).eval()
    for name, weight in model.named_parameters():
        if weight.requires_grad and "magnitude" not in name:
            weight.data.add_(0.3 * torch.randn_like(weight))
    return model, logits(model)


def kinds() -> dict[str, Any]:
    peft = pytest.importorskip("peft")
    both = {"target_modules": ["q_proj", "down_proj"], "r": 4, "lora_alpha": 8}
    return {
        "LoRA": peft.LoraConfig(**both),
        "rank-stabilised LoRA": peft.LoraConfig(**both, use_rslora=True),
        "DoRA": peft.LoraConfig(**both, use_dora=True),
        "LoRA of the embedding": peft.LoraConfig(target_modules=["embed_tokens"], r=4),
        "LoRA of a head": peft.LoraConfig(target_modules=["lm_head", "v_proj"], r=4),
        "a head of its own": peft.LoraConfig(**both, modules_to_save=["lm_head"]),
        "IA3": peft.IA3Config(
            target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]
        ),
        "rows of some tokens": peft.LoraConfig(
            target_modules=["q_proj"], r=4, trainable_token_indices=[5, 7]
        ),
        "LoHa": peft.LoHaConfig(target_modules=["q_proj"], r=4),
    }


OF_ENDS = ("LoRA of the embedding", "LoRA of a head", "a head of its own", "rows of some tokens")
KINDS = ("LoRA", "rank-stabilised LoRA", "DoRA", *OF_ENDS, "IA3", "LoHa")


@pytest.mark.parametrize(("kind", "tied"), [*product(KINDS, [False]), *product(OF_ENDS, [True])])
def test_logits_are_those_of_peft(tmp_path: Path, kind: str, *, tied: bool):
    hf = save_tiny(tmp_path / "base", tie_word_embeddings=tied)
    plain = logits(hf)
    model, wanted = trained(hf, kinds()[kind])
    assert float((wanted - plain).abs().max()) > 0.1
    place = tmp_path / "alone"
    model.save_pretrained(place)
    edit(place / "adapter_config.json", base_model_name_or_path=str(tmp_path / "base"))
    found = load_model(place, dtype="float32")
    torch.testing.assert_close(logits(found.hf), wanted, atol=2e-5, rtol=1e-4)
    assert found.tokenizer is not None
    assert inspect_model(place).num_parameters == found.num_parameters


def test_an_adapter_of_a_t5_in_a_bin_file_is_merged(tmp_path: Path):
    peft = pytest.importorskip("peft")
    hf = tiny_hf("t5_v1_1")
    hf.save_pretrained(tmp_path / "m")
    model, wanted = trained(hf, peft.LoraConfig(target_modules=["q", "wo"], r=4))
    model.save_pretrained(tmp_path / "adapter", safe_serialization=False)
    assert (tmp_path / "adapter" / "adapter_model.bin").exists()
    edit(tmp_path / "adapter" / "adapter_config.json", base_model_name_or_path=str(tmp_path / "m"))
    found = load_model(tmp_path / "adapter", dtype="float32")
    torch.testing.assert_close(logits(found.hf), wanted, atol=2e-5, rtol=1e-4)


def lora(folder: Path, target: str, **changes: Any) -> Path:
    """The directory of a LoRA as a trainer leaves it."""
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(target_modules=["q_proj"], r=4)
    model, _ = trained(tiny_hf("llama", vocab_size=266), settings)
    model.save_pretrained(folder)
    (folder / "optimizer.pt").write_bytes(b"state")
    edit(folder / "adapter_config.json", **{"base_model_name_or_path": target} | changes)
    return folder


def test_what_cannot_be_merged_is_one_line(tmp_path: Path):
    save_tiny(tmp_path / "base")
    good = str(tmp_path / "base")
    fails(lora(tmp_path / "a", "nobody/nothing"), "cannot be read")
    fails(lora(tmp_path / "b", str(lora(tmp_path / "other", good))), "an adapter of another")
    fails(lora(tmp_path / "c", good, target_modules=["nothing"]), "peft cannot merge", "base")
    fails(lora(tmp_path / "d", good, peft_type="OTHER"), "peft cannot merge")
    fails(lora(tmp_path / "e", good, target_modules=["q_proj", "v_proj"]), "does not fit", "v_proj")
    other = LlamaConfig(vocab_size=266, **LLAMA_LIKE | {"hidden_size": 64})
    LlamaForCausalLM(other).save_pretrained(tmp_path / "wide")
    fails(lora(tmp_path / "f", str(tmp_path / "wide")), "peft cannot merge", "wide")
    fails(lora(tmp_path / "j", good, r=5), "peft cannot merge", "base")
    fails(lora(tmp_path / "k", good, rank_pattern={"q_proj": 5}), "peft cannot merge", "base")
    (lora(tmp_path / "g", good) / "adapter_model.safetensors").unlink()
    fails(tmp_path / "g", "peft cannot merge")
    for key in ("megatron_config", "adapters"):
        fails(lora(tmp_path / key, good, **{key: {"a": "b"}}), f"sets {key}, which names code")


def test_an_adapter_is_merged_once_and_again_if_it_changes(tmp_path: Path):
    save_tiny(tmp_path / "base")
    folder = lora(tmp_path / "a", str(tmp_path / "base"))
    first = fingerprint(folder)
    (merged,) = (tmp_path / "cache" / "merged").glob("a-*[0-9a-f]")
    assert not (merged / "optimizer.pt").exists()
    assert fingerprint(folder) == first
    assert len(list((tmp_path / "cache" / "merged").glob("a-*[0-9a-f]"))) == 1
    edit(folder / "adapter_config.json", lora_alpha=99)
    assert fingerprint(folder) != first


def test_an_adapter_without_peft_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    monkeypatch.setattr("paceline.models.loading.find_spec", lambda name: None)
    fails(tmp_path, "holds an adapter", "pip install 'peft>=")


def test_an_adapter_with_added_tokens_is_to_be_merged_by_its_user(tmp_path: Path):
    peft = pytest.importorskip("peft")
    save_tiny(tmp_path / "base")
    hf: Any = LlamaForCausalLM.from_pretrained(tmp_path / "base")
    hf.resize_token_embeddings(270, mean_resizing=False)
    model, _ = trained(hf, peft.LoraConfig(target_modules=["q_proj"], r=4))
    model.save_pretrained(tmp_path / "adapter")
    fails(tmp_path / "adapter", "peft cannot merge")


def test_a_tokenizer_is_that_of_the_adapter_or_that_of_the_base(tmp_path: Path):
    """Not the template, special tokens or added tokens of one with the vocabulary of the other."""
    save_tiny(tmp_path / "base")
    (tmp_path / "base" / "chat_template.jinja").write_text("BASE")
    (tmp_path / "base" / TEMPLATES).mkdir()
    (tmp_path / "base" / TEMPLATES / "tool_use.jinja").write_text("TOOLS")
    edit(tmp_path / "base" / "special_tokens_map.json", eos_token="a")
    folder = lora(tmp_path / "adapter", str(tmp_path / "base"))
    found: Any = load_tokenizer(folder)
    assert found.chat_template == {"default": "BASE", "tool_use": "TOOLS"}
    tiny_tokenizer().save_pretrained(folder)
    edit(folder / "tokenizer_config.json", chat_template="OWN", eos_token="b")
    found, wanted = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert found.chat_template == wanted.chat_template == "OWN"
    assert found.special_tokens_map == wanted.special_tokens_map


def test_the_base_is_that_of_the_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    place = tmp_path / "hub" / "models--someone--base"
    (place / "refs").mkdir(parents=True)
    for name, commit, seed in (("main", "0" * 40, 0), ("old", "1" * 40, 1)):
        (place / "refs" / name).write_text(commit)
        tiny_hf("llama", vocab_size=266, seed=seed).save_pretrained(place / "snapshots" / commit)
    folder = lora(tmp_path / "adapter", "someone/base", revision="old")
    wanted = load_file(place / "snapshots" / ("1" * 40) / "model.safetensors")
    found = load_model(folder, dtype="float32").hf.state_dict()
    assert torch.equal(found["lm_head.weight"], wanted["lm_head.weight"])
