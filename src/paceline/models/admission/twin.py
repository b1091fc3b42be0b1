"""Builds a tiny twin of a model: same class and settings, few layers, random weights.

A sliding window of 4,096 tokens or a RoPE scaling beyond 8,192 does not show in a short text. In
the twin both begin after a few tokens, so a pass that ignores or invents one gives other logits.
Biases, norms, soft caps, logit scales, tied heads and kinds of layers are those of the model.
"""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Any, Literal

import torch

from paceline.models.hf.architectures import (
    is_tied,
    kind_of,
    nested_configs,
    outer_lists,
    ropes_of,
    shorten_config,
    untie_head,
)
from paceline.rng import named_generator

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

Shape = Literal["free", "square", "wide"]

WINDOW = 5
ORIGINAL_LENGTH = 8
"""Length from which the twin's RoPE scaling applies, in tokens."""
CONTEXT = 64
VOCABULARY = 96
_SWITCH_LENGTH = 32  # RoPE that switches its factors at this length: texts stay below it
_MOST_LAYERS = 8
_ATTEMPTS: tuple[Shape, ...] = ("free", "square", "wide")
_LARGEST = 80_000_000  # weights
_WIDTH = 64

_VALUES: dict[str, int] = {
    **dict.fromkeys(
        ("sliding_window", "sliding_window_size", "window_size", "attention_window_size",
         "attention_chunk_size", "local_attention", "keep_window_size", "index_topk"), WINDOW),
    **dict.fromkeys(
        ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length",
         "max_source_positions", "max_target_positions", "model_max_length"), CONTEXT),
    **dict.fromkeys(
        ("intermediate_size", "n_inner", "ffn_dim", "d_ff", "dff", "dim_ff", "ffn_hidden_size",
         "encoder_ffn_dim", "decoder_ffn_dim", "moe_intermediate_size", "intermediate_size_mlp",
         "shared_expert_intermediate_size", "shared_intermediate_size", "d_inner",
         "shared_experts_intermediate_size", "expert_ffn_hidden_size", "dense_intermediate_size",
         "moe_shared_expert_intermediate_size"), 48),
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(
        ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group"), 1),
    **dict.fromkeys(
        ("linear_num_heads", "linear_num_key_heads", "linear_num_value_heads"), 2),
    "index_n_heads": 16,  # with fewer, sums of ReLU are 0 for several tokens, and choices are ties
    **dict.fromkeys(("q_lora_rank", "o_lora_rank", "encoder_hash_byte_group_vocab"), 32),
    **dict.fromkeys(
        ("linear_head_dim", "linear_key_head_dim", "linear_value_head_dim",
         "hidden_size_per_layer_input", "mamba_chunk_size", "chunk_size", "ple_embed_dim"), 16),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "decoder_vocab_size",
                     "unpadded_vocab_size"), VOCABULARY),
}  # fmt: skip
_LISTED = {"intermediate_size": 48, "attention_window": 4}  # of each layer
# logits of a random model are 1 to 7: a larger cap would not show, a smaller one makes them equal
_CAPS = {"final_logit_softcapping", "attn_logit_softcapping", "attention_logit_cap"}
_CAPS |= {"attn_logit_cap", "logits_soft_cap", "final_logits_soft_cap"}
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads")
_HEADS += ("encoder_attention_heads", "decoder_attention_heads", "swa_num_attention_heads")
_HEADS += ("num_encoder_attention_heads", "num_decoder_attention_heads")
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads")
_HIDDEN = ("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "emb_dim", "embedding_dim")
_HIDDEN += ("cross_attention_hidden_size", "lru_width")
_HEAD_SIZES = ("head_dim", "d_kv", "kv_lora_rank", "attention_head_size", "dim_head", "d_head")


def tiny_twin(hf: PreTrainedModel, *, seed: int = 0) -> PreTrainedModel | None:
    """A random model of the same class whose settings have the same effect on short texts.

    Its weights are float32 on the CPU. None if a tiny model of this class cannot be built.
    """
    for shape in _ATTEMPTS:
        try:
            with torch.random.fork_rng(devices=[]):
                config = tiny_config(hf, shape)
                with torch.device("meta"):
                    size = type(hf)(copy.deepcopy(config)).num_parameters()
                if size > _LARGEST:
                    continue
                twin: Any = type(hf)._from_config(config, dtype=torch.float32).eval()
                _keep_ties(hf, twin)
                _randomize(twin, seed)
                _read_once(twin)
        except Exception:  # classes check their configurations in many ways
            continue
        return twin
    return None


def tiny_config(hf: PreTrainedModel, shape: Shape = "free") -> PreTrainedConfig:
    """The model's configuration with small sizes.

    Args:
        hf: The model.
        shape: How the hidden size follows the heads: "free" where the size of a head is a setting
            of its own, "square" for heads x head size, "wide" for no change.
    """
    config = copy.deepcopy(hf.config)
    layers = _kept_layers(hf)
    for part in nested_configs(config):
        _shrink(part, shape)
        shorten_config(part, layers)
        if vars(part).get("num_kv_shared_layers"):
            part.num_kv_shared_layers = len(layers) // 2
    return config


def _shrink(config: Any, shape: Shape) -> None:
    found = dict(vars(config))
    _shrink_values(config, found)
    _shrink_ropes(config)
    sizes = {name: value for name, value in found.items() if isinstance(value, int)}
    heads, keys, width, head_size = (
        next((sizes[name] for name in names if name in sizes), None)
        for names in (_HEADS, _KEY_HEADS, _HIDDEN, _HEAD_SIZES)
    )
    if shape == "wide" or width is None:
        return
    if heads is None:
        for name in sizes.keys() & set(_HIDDEN):
            setattr(config, name, _WIDTH)
        return
    fewer_keys = min(keys or heads, 2 if shape == "free" else 4)
    fewer = min(heads, fewer_keys * max(1, heads // (keys or heads)), 8)
    hidden = fewer * (head_size or width // heads)
    if shape == "free" and head_size is not None:
        hidden = _WIDTH
    for names, value in ((_HEADS, fewer), (_KEY_HEADS, fewer_keys), (_HIDDEN, hidden)):
        for name in sizes.keys() & set(names):
            setattr(config, name, value)
    _fit_recurrence(config, sizes, hidden)


def _shrink_values(config: Any, found: dict[str, Any]) -> None:
    """Sizes that do not depend on each other, caps, and ids of special tokens."""
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "decoder_start_token_id": 2}
    ids |= {"forced_bos_token_id": 3, "pard_token": 4, "ptd_token_id": 4}
    for name, value in found.items():
        if name in _CAPS and value:
            setattr(config, name, 4.0)
        if isinstance(value, list) and name in _LISTED:
            setattr(config, name, [_LISTED[name]] * len(value))
        if not isinstance(value, int) or isinstance(value, bool):
            continue
        if name in _VALUES and value > 0:
            setattr(config, name, min(value, _VALUES[name]))
        elif name in ids and value >= VOCABULARY:
            setattr(config, name, ids[name])


def _fit_recurrence(config: Any, sizes: dict[str, int], hidden: int) -> None:
    """Sizes of Mamba and linear attention layers: heads x head size = expansion x hidden size."""
    for heads, size, expansion in (
        ("mamba_n_heads", "mamba_d_head", "mamba_expand"),
        ("num_heads", "head_dim", "expand"),
        ("mamba_num_heads", "mamba_head_dim", "expand"),
        ("n_mamba_heads", "mamba_headdim", "mamba_expand"),
    ):
        if {heads, size} <= sizes.keys() and hasattr(config, expansion):
            setattr(config, size, 16)
            setattr(config, heads, int(getattr(config, expansion) * hidden) // 16)
    if "mamba_d_ssm" in sizes:
        config.mamba_d_ssm = config.mamba_n_heads * config.mamba_d_head
    for name in ("n_groups", "mamba_n_groups"):
        if name in sizes:
            setattr(config, name, min(sizes[name], 2))


def _shrink_ropes(config: Any) -> None:
    name = "original_max_position_embeddings"
    for rope in ropes_of(config):
        if name in rope:
            rope[name] = _SWITCH_LENGTH if rope.get("rope_type") == "longrope" else ORIGINAL_LENGTH
    if isinstance(getattr(config, name, None), int):
        setattr(config, name, _SWITCH_LENGTH)


def _kept_layers(hf: PreTrainedModel) -> list[int]:
    """The smallest number of leading layers that have every kind; the first of each if too many."""
    first: set[int] = {0, 1}
    for layers in outer_lists(hf):
        kinds = [kind_of(layer) for layer in layers]
        first |= {kinds.index(kind) for kind in kinds}
    shares = getattr(hf.config.get_text_config(decoder=True), "num_kv_shared_layers", 0)
    needed = max(first) + 1
    if shares:
        return list(range(min(2 * needed, 2 * _MOST_LAYERS)))
    return list(range(needed)) if needed <= _MOST_LAYERS else sorted(first)[:_MOST_LAYERS]


def _keep_ties(hf: Any, twin: Any) -> None:
    """Tie the head if that of the model is tied, whatever the configuration says."""
    if not is_tied(hf):
        untie_head(twin)
        return
    head, embedding = twin.get_output_embeddings(), twin.get_input_embeddings()
    if head.weight.shape == embedding.weight.shape:
        head.weight = embedding.weight


@torch.inference_mode()
def _read_once(twin: Any) -> None:
    """Raise what the model raises for a short text."""
    tokens = torch.arange(3, 9)[None]
    source = {"decoder_input_ids": tokens} if twin.config.is_encoder_decoder else {}
    if not bool(twin(input_ids=tokens, use_cache=False, **source).logits.isfinite().all()):
        raise ArithmeticError("logits that are not finite")


@torch.no_grad()
def _randomize(twin: PreTrainedModel, seed: int) -> None:
    """Weights that make every part matter: biases and norms are not neutral either."""
    rng = named_generator(seed, "tiny twin")
    biases = (part for part in twin.named_buffers() if part[0].endswith("final_logits_bias"))
    for name, weight in [*twin.named_parameters(), *biases]:
        if not weight.is_floating_point():
            continue
        noise = torch.randn(weight.shape, generator=rng)
        if name.endswith("dt_bias"):
            # steps inside the limits, which Nemotron-H and Zamba 2 apply to prompts alone
            weight.copy_(1 + 0.3 * noise)
        elif weight.ndim < 2 or "bias" in name:
            weight += 0.3 * noise
        elif "A_log" not in name:
            is_table = any(part in name for part in ("embed", "wte", "shared"))
            weight.copy_(noise * (0.7 if is_table else 1.2 / math.sqrt(weight.shape[-1])))
        # values that float16 and bfloat16 hold exactly, as those of 16-bit checkpoints
        weight.copy_((weight * 256).round().div(256).bfloat16())
