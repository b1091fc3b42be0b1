"""GGUF files of tiny models, written with the library gguf."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from transformers import PreTrainedModel

from support.models import tiny_hf, tiny_tokenizer

F32, F16, Q8_0 = 0, 1, 7  # general.file_type


def write_gguf(
    path: Path,
    hf: PreTrainedModel,
    *,
    file_type: int = F32,
    arch: str = "llama",
    vocabulary: Callable[[gguf.GGUFWriter], None] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    **keys: Any,
) -> Path:
    """A llama as llama.cpp keeps it: rotary pairs interleaved, tokenizer inside.

    `vocabulary` writes another tokenizer; `keys`: more keys of the architecture, with __ for a dot.
    """
    config = hf.config
    writer = gguf.GGUFWriter(path, arch)
    writer.add_file_type(file_type)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    for name, value in keys.items():
        add = {float: writer.add_float32, int: writer.add_uint32, str: writer.add_string}
        add[type(value)](f"{arch}.{name.replace('__', '.')}", value)
    for name, array in (tensors or {}).items():
        writer.add_tensor(name, array)
    (vocabulary or tiny_vocabulary)(writer)
    add_weights(writer, hf, file_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tiny_vocabulary(writer: gguf.GGUFWriter) -> None:
    tokenizer = tiny_tokenizer()
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in tokenizer.all_special_tokens else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in backend["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(1)


def add_weights(writer: gguf.GGUFWriter, hf: PreTrainedModel, file_type: int) -> None:
    config = hf.config
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in hf.state_dict().items():
        stem, suffix = name.rsplit(".", 1)
        array = weight.float().numpy()
        part = stem.rsplit(".", 1)[-1]
        if part in heads:
            out, into = array.shape
            array = array.reshape(heads[part], 2, out // heads[part] // 2, into)
            array = array.swapaxes(1, 2).reshape(out, into)
        if file_type == F16 and array.ndim == 2:
            array = array.astype(np.float16)
        kind = None
        if file_type == Q8_0 and array.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            array = gguf.quants.quantize(array, kind)
        writer.add_tensor(f"{names.get_name(stem)}.{suffix}", array, raw_dtype=kind)


BYTES = [chr(n) for n in (*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324))]
"""Byte-level characters of GPT-2, in the order of their ids."""


def byte_level(text: str) -> str:
    """Each byte of a text as its byte-level character."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [number for number in range(256) if number not in plain]
    names = dict(zip([*plain, *others], BYTES, strict=True))
    return "".join(names[byte] for byte in text.encode())


def substrings(texts: tuple[str, ...], width: int) -> tuple[list[str], list[str]]:
    """Tokens for all byte strings of these texts up to a width, and the merges that make them."""
    tokens, merges = list(BYTES), []
    for text in map(byte_level, texts):
        for size in range(2, width + 1):
            for start in range(len(text) - size + 1):
                token = text[start : start + size]
                if token not in tokens:
                    tokens.append(token)
                    merges.append(f"{token[:-1]} {token[-1]}")
    return tokens, merges


def byte_level_vocabulary(
    tokens: list[str],
    merges: list[str],
    *,
    pre: str | None = "gpt-2",
    special: dict[str, int] | None = None,
    **keys: Any,
) -> Callable[[gguf.GGUFWriter], None]:
    """Writes a byte-level BPE. `special` tokens have a type each and follow the others."""
    special = special or {}

    def write(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model(keys.pop("tokenizer_model", "gpt2"))
        if pre is not None:
            writer.add_tokenizer_pre(pre)
        writer.add_token_list([*tokens, *special])
        writer.add_token_types([1] * len(tokens) + list(special.values()))
        writer.add_token_merges(merges)
        for name, value in keys.items():
            getattr(writer, f"add_{name}")(value)

    return write


TEXTS = (
    "IT's it'S 1234567 <=> $3.14 `x`",
    "a  b\n\n  c\t\td  \n",
    "x=!!(1);\r\n\r\n//y_z",
    "ÉCOLEfin Don\u2019t fooBAR HTTPServer's",
    "日本語\u3000中文。東京,カナ",
    "e\u0301e\u0301 नमस्ते😀😀",
    "٣٤½² 한국어\u2003\u00a0w",
)
TOKENS, MERGES = substrings(TEXTS, 12)


def written(path: Path, *, pre: str | None = "qwen2", **keys: Any) -> Path:
    """A file whose special tokens follow those of `TOKENS`."""
    special = keys.pop("special", {"<|endoftext|>": 3})
    keys.setdefault("eos_token_id", len(TOKENS))
    sizes = {"num_hidden_layers": 1, "intermediate_size": 64}
    hf = tiny_hf("llama", vocab_size=len(TOKENS) + len(special), **sizes)
    words = byte_level_vocabulary(TOKENS, MERGES, pre=pre, special=special, **keys)
    return write_gguf(path, hf, vocabulary=words)
