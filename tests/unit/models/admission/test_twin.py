"""A tiny twin shows in a short text what its model does only after thousands of tokens.

Every mutant reads with the weights of the twin and with one setting lost, as a pass that ignores it
would. The reference is transformers' pass over the whole text.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    Cohere2Config,
    CohereConfig,
    Gemma2Config,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3MoeConfig,
)

from paceline.models import CausalModel
from paceline.models.admission.model import EXACT
from paceline.models.admission.trial import play
from paceline.models.admission.twin import tiny_twin
from paceline.models.hf.causal import HfDecoder

LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}
YARN |= {"original_max_position_embeddings": 32768}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
SHORT = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.5] * 48}
SHORT |= {"long_factor": [3.0] * 48, "original_max_position_embeddings": 4096}


def sets(**values: Any) -> Callable[[Any], None]:
    """A mutation of a configuration."""

    def change(hf: Any) -> None:
        for name, value in values.items():
            assert getattr(hf.config, name) != value, f"{name} would not change"
            setattr(hf.config, name, value)

    return change


def plain_rope(hf: Any) -> None:
    hf.config.rope_parameters = {"rope_type": "default", "rope_theta": 1e4}


def no_biases(hf: Any) -> None:
    biases = [weight for name, weight in hf.named_parameters() if name.endswith("bias")]
    assert biases
    for weight in biases:
        weight.data.zero_()


def tied_head(hf: Any) -> None:
    assert hf.lm_head.weight is not hf.model.embed_tokens.weight
    hf.lm_head.weight = hf.model.embed_tokens.weight


MUTANTS: dict[str, tuple[PreTrainedConfig, Callable[[Any], None]]] = {
    "a window is ignored": (MistralConfig(sliding_window=4096), sets(sliding_window=None)),
    "a window is invented": (MistralConfig(sliding_window=None), sets(sliding_window=5)),
    "a window of some layers is ignored": (
        Gemma2Config(), sets(layer_types=["full_attention"] * 2),
    ),
    "the scaling of Llama 3 is dropped": (LlamaConfig(rope_parameters=LLAMA3), plain_rope),
    "YaRN is dropped": (LlamaConfig(rope_parameters=YARN), plain_rope),
    "linear scaling is dropped": (LlamaConfig(rope_parameters=LINEAR), plain_rope),
    "LongRoPE is dropped": (Phi3Config(rope_parameters=SHORT), plain_rope),
    "biases are dropped": (Qwen2Config(), no_biases),
    "the cap of logits is dropped": (Gemma2Config(), sets(final_logit_softcapping=None)),
    "the cap of attention is dropped": (Gemma2Config(), sets(attn_logit_softcapping=None)),
    "the scale of logits is dropped": (GraniteConfig(logits_scaling=8.0), sets(logits_scaling=1.0)),
    "another scale of logits is dropped": (CohereConfig(), sets(logit_scale=1.0)),
    "a scale of embeddings is dropped": (
        GraniteConfig(embedding_multiplier=12.0), sets(embedding_multiplier=1.0),
    ),
    "positions are dropped in some layers": (
        Cohere2Config(), sets(layer_types=["full_attention"] * 4),
    ),
    "the head is tied by mistake": (LlamaConfig(), tied_head),
    "experts are weighted otherwise": (
        Qwen3MoeConfig(norm_topk_prob=True), sets(norm_topk_prob=False),
    ),
}  # fmt: skip


def in_full_size(config: PreTrainedConfig) -> Any:
    """The model without memory for its weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("name", MUTANTS)
def test_the_twin_catches(name: str):
    config, mutate = MUTANTS[name]
    twin: Any = tiny_twin(in_full_size(config))
    twin.set_attn_implementation("eager")  # SDPA ignores caps up to transformers 5.20
    assert play(CausalModel(twin)).largest < EXACT / 10, "the pass of transformers itself is right"
    mutant = copy.deepcopy(twin)
    mutate(mutant)
    again: Any = AutoModelForCausalLM.from_config(mutant.config, attn_implementation="eager").eval()
    again.load_state_dict(mutant.state_dict())
    if mutant.lm_head.weight is mutant.model.embed_tokens.weight:
        again.lm_head.weight = again.model.embed_tokens.weight
    assert play(CausalModel(twin).decoding_with(HfDecoder(again))).largest > 2 * EXACT


def test_a_twin_has_few_weights_every_kind_of_layer_and_the_ties_of_its_model():
    config = Gemma2Config(tie_word_embeddings=True)
    twin: Any = tiny_twin(in_full_size(config))
    assert sum(weight.numel() for weight in twin.parameters()) < 2_000_000
    assert twin.config.layer_types == ["sliding_attention", "full_attention"]
    assert twin.lm_head.weight is twin.model.embed_tokens.weight
    untied: Any = tiny_twin(in_full_size(LlamaConfig()))
    assert untied.lm_head.weight is not untied.model.embed_tokens.weight


def test_a_head_that_was_untied_after_loading_is_untied_in_the_twin():
    hf = in_full_size(Qwen2Config(tie_word_embeddings=True))
    hf.lm_head.weight = nn.Parameter(torch.empty_like(hf.lm_head.weight))
    twin: Any = tiny_twin(hf)
    assert twin.lm_head.weight is not twin.model.embed_tokens.weight


def test_a_twin_leaves_the_random_numbers_of_the_user_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    tiny_twin(in_full_size(LlamaConfig()))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("codegen", {}),  # a multiple of four heads
        ("bailing_hybrid", {}),  # sizes of linear attention
        ("gemma3n_text", {}),  # a list of sizes, one for each layer
        ("dots1", {"n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6}),
    ],
)
def test_classes_whose_sizes_depend_on_each_other_have_a_twin(name: str, settings: dict[str, Any]):
    if name not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {name}")
    twin: Any = tiny_twin(in_full_size(CONFIG_MAPPING[name](**settings)))
    assert sum(weight.numel() for weight in twin.parameters()) < 30_000_000
