"""What a GGUF file says about positions, biases, stop tokens and the tokenizer is the model's."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from tokenizers import Regex, pre_tokenizers

from paceline.errors import ExportError, UsageError
from paceline.export import export
from paceline.models import load_model
from paceline.models.gguf.vocabulary import RULES, name_of
from support.configs import small
from support.models import tiny_hf
from support.runs import write_pair

TOKENS = torch.tensor([[number * 37 % 260 for number in range(60)]])
LENGTHS = {"factor": 4.0, "original_max_position_embeddings": 16}
ROPES = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "linear by the old name": {"type": "linear", "factor": 4.0},
    "llama3": {"rope_type": "llama3", **LENGTHS, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
}


UNEVEN = ROPES["llama3"] | {"high_freq_factor": 8.0, "rope_theta": 10_000.0}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, **LENGTHS}


def exported(folder: Path, architecture: str = "llama", **changes: Any) -> tuple[Any, Any, Path]:
    """A model of transformers, its export as read back, and the file."""
    write_pair(folder, architecture=architecture)
    hf: Any = tiny_hf(architecture, vocab_size=266, **changes)
    for name, weight in hf.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(weight, std=0.5, generator=torch.Generator().manual_seed(1))
    hf.save_pretrained(folder / "draft")
    changed = {"model": str(folder / "draft"), "to": "llamacpp"}
    path = export(small("export", folder, folder / "out", **changed)).path
    return hf, load_model(path, dtype="float32"), path


def value(path: Path, key: str) -> Any:
    field = gguf.GGUFReader(path).get_field(key)
    return None if field is None else field.contents()


@torch.no_grad()
def assert_same(hf: Any, read: Any) -> None:
    torch.testing.assert_close(read.hf(TOKENS).logits, hf(TOKENS).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ROPES)
def test_scaled_positions_are_in_the_file_itself(kind: str, tmp_path: Path):
    rope = ROPES[kind] | {"rope_theta": 10_000.0}
    hf, read, path = exported(tmp_path, rope_parameters=rope)
    context = 64 * 4 if "linear" in kind else 16 * 4
    assert value(path, "llama.context_length") == read.max_length == context
    assert_same(hf, read)
    ours, theirs = read.hf.model.rotary_emb, hf.model.rotary_emb
    torch.testing.assert_close(ours.inv_freq, theirs.inv_freq)
    assert ours.attention_scaling == pytest.approx(theirs.attention_scaling)


@pytest.mark.parametrize(
    ("architecture", "changes", "said"),
    [
        ("llama", {"rope_parameters": YARN}, "rope_type=yarn are not supported as"),
        ("llama", {"rope_parameters": UNEVEN}, "not Llama 3's"),
        # llama.cpp's Qwen3 has biases of queries, keys and values alone
        ("qwen3", {"attention_bias": True}, r"layers\.0\.self_attn\.o_proj\.bias"),
        ("mistral", {"sliding_window": 4}, r"ignores the sliding window of 4 .* \(--to vllm\)"),
    ],
)
def test_what_llama_cpp_would_not_compute_is_refused(
    architecture: str, changes: dict[str, Any], said: str, tmp_path: Path
):
    with pytest.raises((ExportError, UsageError), match=said):
        exported(tmp_path, architecture, **changes)


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [("llama", {"attention_bias": True, "mlp_bias": True}), ("qwen2", {})],
)
def test_biases_are_in_the_file(architecture: str, changes: dict[str, Any], tmp_path: Path):
    hf, read, path = exported(tmp_path, architecture, **changes)
    assert_same(hf, read)
    names = {tensor.name for tensor in gguf.GGUFReader(path).tensors}
    assert {"blk.0.attn_q.bias", "blk.1.attn_k.bias"} <= names


def test_stop_tokens_beside_eos_have_keys(tmp_path: Path):
    _, read, path = exported(tmp_path, eos_token_id=[1, 7, 9])
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    assert [value(path, key) for key in keys] == [1, 7, 9]
    assert read.eos_token_ids == (1, 7, 9)


def settings(*parts: pre_tokenizers.PreTokenizer) -> dict[str, Any]:
    return json.loads(pre_tokenizers.Sequence(list(parts)).__getstate__())


SHORT, REST = "(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"\s*[\r\n]+|\s+(?!\S)|\s+"
LETTERS, OTHERS = r"[^\r\n\p{L}\p{N}]?\p{L}+", r" ?[^\s\p{L}\p{N}]+[\r\n]*"
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False)
FAMILIES = {  # as in the tokenizer.json of these models
    "gpt-2": ((WORDS,), False),
    "smollm": ((pre_tokenizers.Digits(individual_digits=True), WORDS), False),
    "qwen2": ((rf"{SHORT}|{LETTERS}|\p{{N}}|{OTHERS}|{REST}", BYTES), False),
    "llama-bpe": ((rf"{SHORT}|{LETTERS}|\p{{N}}{{1,3}}|{OTHERS}|{REST}", BYTES), True),
    "dbrx": ((rf"{SHORT}|{LETTERS}|\p{{N}}{{1,3}}|{OTHERS}|{REST}", BYTES), False),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_pre_tokenizers_of_known_models_have_llama_cpps_name(name: str):
    parts, ignore_merges = FAMILIES[name]
    splits = [
        pre_tokenizers.Split(Regex(each), "isolated") if isinstance(each, str) else each
        for each in parts
    ]
    assert name_of(settings(*splits), ignore_merges=ignore_merges) == name


@pytest.mark.parametrize("name", RULES)
def test_a_rule_that_was_read_is_written_by_a_name_that_means_the_same(name: str):
    known = RULES[name]
    written = json.loads(known.pre_tokenizer.__getstate__())
    again = name_of(written, ignore_merges=known.ignore_merges)
    assert again is not None
    assert RULES[again] == known


@pytest.mark.parametrize(
    "parts",
    [
        (pre_tokenizers.Split(Regex(r"\p{N}{1,2}"), "isolated"), BYTES),
        (pre_tokenizers.Split(Regex(r"\p{N}"), "merged_with_previous"), WORDS),
        (pre_tokenizers.ByteLevel(add_prefix_space=True),),
        (pre_tokenizers.Whitespace(), BYTES),
        (WORDS, pre_tokenizers.Digits(individual_digits=True)),
    ],
)
def test_other_pre_tokenizers_have_no_name(parts: tuple[pre_tokenizers.PreTokenizer, ...]):
    assert name_of(settings(*parts), ignore_merges=False) is None


def test_a_window_in_the_config_of_a_llama_has_no_effect_as_in_transformers(tmp_path: Path):
    hf, read, path = exported(tmp_path, sliding_window=4)
    assert_same(hf, read)
    assert value(path, "llama.attention.sliding_window") is None
