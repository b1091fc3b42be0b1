"""Tiny random models and a tiny tokenizer, made in memory: tests download nothing."""

import functools
from functools import cache
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.normalizers import NFC
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BartConfig,
    BloomConfig,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MarianConfig,
    MBartConfig,
    MistralConfig,
    MT5Config,
    OPTConfig,
    PegasusConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    T5Config,
    UMT5Config,
)

from paceline.models import CausalModel, HfModel, prepare_for_decoding, wrap_model
from paceline.models.llama.cpu import NativeLlama, PromptPass

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

_CAPPED = {**LLAMA_LIKE, "final_logit_softcapping": 2.0}
_ROUTED = {**LLAMA_LIKE, "num_local_experts": 4, "num_experts_per_tok": 2}
_COMPRESSED = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "dim_model_base": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
SCALED: dict[str, tuple[Any, dict[str, Any]]] = {
    kind: (functools.partial(AutoConfig.for_model, kind), settings)
    for kind, settings in {
        "gemma2": {**_CAPPED, "sliding_window": 4, "query_pre_attn_scalar": 8},
        "nanochat": _CAPPED,
        "vaultgemma": {**_CAPPED, "sliding_window": 4, "query_pre_attn_scalar": 8},
        "granite": {**LLAMA_LIKE, "logits_scaling": 0.3},
        "granitemoe": {**_ROUTED, "logits_scaling": 6.0},
        "hyperclovax": {**LLAMA_LIKE, "logits_scaling": 0.25},
        "cohere": {**LLAMA_LIKE, "logit_scale": 0.3},
        "cohere2": {**LLAMA_LIKE, "logit_scale": 2.5, "sliding_window": 4},
        "minicpm3": _COMPRESSED,
    }.items()
}
"""Decoder-only models that cap or scale their logits, or scale what the head reads."""

_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
EXPERTS: dict[str, tuple[Any, dict[str, Any]]] = {
    kind: (functools.partial(AutoConfig.for_model, kind), settings)
    for kind, settings in {
        "qwen3_moe": {**LLAMA_LIKE, **_EXPERTS, "num_experts": 4},
        "gpt_oss": {**_ROUTED, "sliding_window": 4},
        "deepseek_v3": {
            **_COMPRESSED,
            **_EXPERTS,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    }.items()
}
"""Mixtures of experts: plain, with windows and attention sinks, with compressed keys."""

_LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
_STATE_SPACE = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8}
HYBRIDS: dict[str, tuple[Any, dict[str, Any]]] = {
    kind: (functools.partial(AutoConfig.for_model, kind), settings)
    for kind, settings in {
        "qwen3_next": {**LLAMA_LIKE, **_LINEAR},
        "qwen3_5_text": {**LLAMA_LIKE, **_LINEAR},
        "lfm2": {**LLAMA_LIKE, "layer_types": ["conv", "full_attention"] * 2},
        "nemotron_h": {
            **{name: LLAMA_LIKE[name] for name in LLAMA_LIKE if name != "num_hidden_layers"},
            "layers_block_type": ["mamba", "moe", "attention", "moe"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "n_groups": 2,
            "ssm_state_size": 8,
            "chunk_size": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "moe_shared_expert_intermediate_size": 16,
        },
        "mamba": {"hidden_size": 32, "num_hidden_layers": 4, "initializer_range": 0.3},
        "jamba": {
            **LLAMA_LIKE,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 4,
            "mamba_d_state": 8,
        },
        "bamba": {
            **LLAMA_LIKE,
            **_STATE_SPACE,
            "attn_layer_indices": [1],
            "mamba_chunk_size": 8,
        },
    }.items()
}
"""Decoder-only models with states that cannot be rolled back."""

_T5_LIKE = {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 3,
    "num_decoder_layers": 3,
    "num_heads": 4,
    # buckets that distances in the tests' texts fall into
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16,
    "decoder_start_token_id": 2,
    "initializer_factor": 1.3,  # so that texts depend on their sources
}
_GATED = {**_T5_LIKE, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
BART_LIKE = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "init_std": 0.3,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
    "tie_word_embeddings": False,
}
ENCODER_DECODERS: dict[str, tuple[type, dict[str, Any]]] = {
    "t5": (T5Config, {**_T5_LIKE, "feed_forward_proj": "relu"}),
    "t5_v1_1": (T5Config, _GATED),
    "mt5": (MT5Config, _GATED),
    "umt5": (UMT5Config, _GATED),
    "bart": (BartConfig, BART_LIKE),
    "mbart": (MBartConfig, BART_LIKE),
    "marian": (MarianConfig, {**BART_LIKE, "init_std": 1.0}),
    "pegasus": (PegasusConfig, BART_LIKE),
}
"""T5 has a tied head, whose input it scales; the others have heads of their own."""


def tiny_hf(architecture: str = "llama", *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A random transformers model of 61 tokens and few layers; the same seed, the same weights."""
    config_class, settings = {**CONFIGS, **SCALED, **EXPERTS, **HYBRIDS, **ENCODER_DECODERS}[
        architecture
    ]
    defaults = {"vocab_size": 61, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    config = config_class(**{**defaults, **settings, **overrides})
    kind = AutoModelForSeq2SeqLM if architecture in ENCODER_DECODERS else AutoModelForCausalLM
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        capped = getattr(config, "attn_logit_softcapping", None)  # SDPA drops it up to 5.20
        model = kind.from_config(config, attn_implementation="eager" if capped else None)
        if settings.get("tie_word_embeddings") is False:
            _untie_head(model)
    return model.eval()


def _untie_head(model: Any) -> None:
    """Random weights of their own: transformers ties these heads whatever the config says.

    It leaves them alone when it loads weights that differ.
    """
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(0.4 * torch.randn_like(head.weight))
    if hasattr(model, "final_logits_bias"):  # of BART and its relatives, with a text's end likely
        model.final_logits_bias.normal_()
        model.final_logits_bias[:, 1] = 4.5


def tiny_model(architecture: str = "llama", *, seed: int = 0, **overrides: Any) -> HfModel:
    """The same, wrapped and without a tokenizer."""
    return wrap_model(tiny_hf(architecture, seed=seed, **overrides))


def tiny_tokenizer(
    *, extra_tokens: tuple[str, ...] = (), composes: bool = False
) -> PreTrainedTokenizerFast:
    """Byte-level BPE of 266 tokens that reads any text; ids 0, 1, 2 are bos, eos and pad.

    `composes` characters (NFC), as the tokenizer of Qwen 2.
    """
    tokens = [*SPECIAL_TOKENS, *sorted(ByteLevel.alphabet())]
    tokens += ["".join(pair) for pair in _MERGES]
    vocabulary = {token: number for number, token in enumerate([*tokens, *extra_tokens])}
    backend = Tokenizer(BPE(vocab=vocabulary, merges=list(_MERGES)))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.decoder = ByteLevelDecoder()
    if composes:
        backend.normalizer = NFC()
    bos, eos, pad = SPECIAL_TOKENS
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=bos, eos_token=eos, pad_token=pad
    )


def tiny_pair(architecture: str = "llama", **overrides: Any) -> tuple[HfModel, HfModel]:
    """Target and draft with one tokenizer: different random weights, the draft of two layers."""
    tokenizer = tiny_tokenizer(composes=architecture == "qwen2")
    width = {"vocab_size": len(tokenizer)}
    fewer = {"num_hidden_layers": 2}
    if architecture in ENCODER_DECODERS:
        known = ENCODER_DECODERS[architecture][1]
        fewer = {name: 2 for name in ("num_decoder_layers", "decoder_layers") if name in known}
    target = tiny_hf(architecture, seed=0, **width, **overrides)
    draft = tiny_hf(architecture, seed=1, **fewer, **width, **overrides)
    return wrap_model(target, tokenizer), wrap_model(draft, tokenizer)


def generated(hf: Any, prompt: list[int], count: int, **options: Any) -> list[int]:
    """The new tokens of transformers' greedy generate() for this prompt alone."""
    ids, options = torch.tensor([prompt]), {"do_sample": False, **options}
    found = hf.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, **options)
    return found[0, 1 if hf.config.is_encoder_decoder else len(prompt) :].tolist()


TEXT = [7, 3, 30, 12, 9, 44, 8, 51, 2, 17, 23, 5]


def prepared(architecture: str = "llama", **overrides: Any) -> CausalModel:
    """With weights that bfloat16 holds, so that there is a compiled pass where there can be one."""
    hf = tiny_hf(architecture, **overrides).bfloat16().float()
    return prepare_for_decoding(wrap_model(hf))


@cache
def prepared_pair(num_draft_layers: int = 2) -> tuple[CausalModel, CausalModel]:
    """A target and a draft for many tests, which leave them as they are."""
    return prepared(seed=0), prepared(seed=0, num_hidden_layers=num_draft_layers)


def reader(model: CausalModel) -> NativeLlama | None:
    """Its compiled pass, or None."""
    return model.decoder.native if isinstance(model.decoder, PromptPass) else None


def read(model: CausalModel, parts: list[list[int]]) -> torch.Tensor:
    """Logits after every token of one text that is read in these parts, [N, V]."""
    session = model.start_session()
    return torch.cat([session.extend(torch.tensor([part]))[0] for part in parts])
