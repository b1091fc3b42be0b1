"""Tiny random models and a tiny tokenizer, made in memory: tests download nothing."""

from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from paceline.models import CausalModel, wrap_model

SPECIAL_TOKENS = ("<bos>", "<eos>", "<pad>")
_MERGES = (("t", "h"), ("th", "e"), ("Ġ", "the"), ("i", "n"), ("a", "n"), ("Ġ", "a"), ("e", "r"))

LLAMA_LIKE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
_GPT_LIKE = {"n_embd": 32, "n_layer": 4, "n_head": 4, "initializer_range": 0.3}

CONFIGS: dict[str, tuple[type, dict[str, Any]]] = {
    "llama": (LlamaConfig, LLAMA_LIKE),
    "qwen2": (Qwen2Config, {**LLAMA_LIKE, "tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, LLAMA_LIKE),
    # windows shorter than the texts of the tests
    "mistral": (MistralConfig, {**LLAMA_LIKE, "sliding_window": 5}),
    "gemma3_text": (
        Gemma3TextConfig,
        {
            **LLAMA_LIKE,
            "sliding_window": 4,
            "query_pre_attn_scalar": 8,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "gpt2": (GPT2Config, {**_GPT_LIKE, "n_positions": 64}),
    "bloom": (BloomConfig, {**_GPT_LIKE, "hidden_size": 32}),
    "gpt_neox": (
        GPTNeoXConfig,
        {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "max_position_embeddings": 64,
            "initializer_range": 0.3,
        },
    ),
    "opt": (
        OPTConfig,
        {
            "hidden_size": 32,
            "ffn_dim": 48,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "max_position_embeddings": 64,
            "word_embed_proj_dim": 32,
            "init_std": 0.3,
        },
    ),
}


def tiny_hf(architecture: str = "llama", *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A random transformers model of four layers and 61 tokens; the same seed, the same weights."""
    config_class, settings = CONFIGS[architecture]
    defaults = {"vocab_size": 61, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    config = config_class(**{**defaults, **settings, **overrides})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    return model.eval()


def tiny_model(architecture: str = "llama", *, seed: int = 0, **overrides: Any) -> CausalModel:
    """The same, wrapped and without a tokenizer."""
    return wrap_model(tiny_hf(architecture, seed=seed, **overrides))


def tiny_tokenizer(*, extra_tokens: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    """Byte-level BPE of 266 tokens that reads any text; ids 0, 1, 2 are bos, eos and pad."""
    tokens = [*SPECIAL_TOKENS, *sorted(ByteLevel.alphabet())]
    tokens += ["".join(pair) for pair in _MERGES]
    vocabulary = {token: number for number, token in enumerate([*tokens, *extra_tokens])}
    backend = Tokenizer(BPE(vocab=vocabulary, merges=list(_MERGES)))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.decoder = ByteLevelDecoder()
    bos, eos, pad = SPECIAL_TOKENS
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=bos, eos_token=eos, pad_token=pad
    )


def tiny_pair(architecture: str = "llama", **overrides: Any) -> tuple[CausalModel, CausalModel]:
    """Target and draft with one tokenizer: different random weights, the draft of two layers."""
    tokenizer = tiny_tokenizer()
    width = {"vocab_size": len(tokenizer)}
    target = tiny_hf(architecture, seed=0, **width, **overrides)
    draft = tiny_hf(architecture, seed=1, num_hidden_layers=2, **width, **overrides)
    return wrap_model(target, tokenizer), wrap_model(draft, tokenizer)
