"""`paceline inspect` shows what a user has to know of a model, and fails where a check fails."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertLMHeadModel

from support.data import write_lines
from support.models import save_tiny, tiny_hf, tiny_tokenizer
from support.texts import Run, succeeded

CHATML = (
    "{% for m in messages %}<bos>{{ m.role }}\n{{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<bos>assistant\n{% endif %}"
)


CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "the"}]}


def facts_of(run: Run, *arguments: Any, code: int = 0) -> dict[str, Any]:
    found, out, err = run("inspect", *arguments, "--json")
    assert found == code, err
    return json.loads(out)


def saved(directory: Path, architecture: str, template: str | None = None) -> Path:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    save_tiny(directory, architecture, tokenizer)
    return directory


def test_sizes_and_stop_tokens_are_those_that_transformers_built(run: Run, tmp_path: Path):
    llama = facts_of(run, saved(tmp_path / "llama", "llama"))["facts"]
    assert llama["stop tokens"] == "1 '<eos>'"
    assert llama["vocabulary"] == "266 tokens, 266 rows of logits"
    assert llama["context"] == "64 tokens"
    t5 = facts_of(run, saved(tmp_path / "t5", "t5"))["facts"]
    assert t5["decoder prompt"] == "2 '<pad>'"


def test_the_trained_part_of_a_chat_is_marked(run: Run, tmp_path: Path):
    model = saved(tmp_path / "model", "llama", template=CHATML)
    write_lines(tmp_path / "chat.jsonl", CHAT)
    (example,) = facts_of(run, model, "--prompts", tmp_path / "chat.jsonl")["examples"]
    assert example["given"] == "<bos>user\na<eos>\n<bos>assistant\n"
    assert example["trained"] == "the<eos>"
    out = succeeded(run, "inspect", model, "--prompts", tmp_path / "chat.jsonl")
    assert "<bos>assistant\n[[the<eos>]]" in out
    short = succeeded(run, "inspect", model)
    assert re.search(r"exports +vllm, sglang, llamacpp, transformers\n", short)
    assert "as the model gets it:\n<bos>user\nWhat is 2+2?<eos>\n<bos>assistant\n" in short
    assert "[[" not in short


def test_a_model_with_a_state_says_so(run: Run, tmp_path: Path):
    save_tiny(tmp_path, "qwen3_next")
    found = facts_of(run, tmp_path)
    assert "rolled back by snapshots" in found["facts"]["sessions"]


def test_a_model_that_fails_its_check_ends_with_1(run: Run, tmp_path: Path):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"intermediate_size": 48, "max_position_embeddings": 64}
    BertLMHeadModel(BertConfig(vocab_size=61, **sizes)).save_pretrained(tmp_path)
    found = facts_of(run, tmp_path, code=1)
    (fault,) = found["faults"]
    assert "bert cannot be decoded" in fault


def test_a_type_of_16_bits_is_shown(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PACELINE_PRECISION", "bfloat16")
    hf = tiny_hf("llama", vocab_size=266).to(torch.bfloat16)
    hf.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    facts = facts_of(run, tmp_path)["facts"]
    count = sum(weight.numel() for weight in hf.parameters())
    assert facts["parameters"] == f"{count:,}, run in bfloat16"
