"""Which sessions a model gets: those that give transformers' logits, whatever its name says.

A tiny twin shows in a short text what its model does only after thousands of tokens. Every mutant
reads with the weights of the twin and with one setting lost, as a pass that ignores it would. The
reference is transformers' pass over the whole text.
"""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from record_architectures import add_noise
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BambaConfig,
    BertConfig,
    BertLMHeadModel,
    Cohere2Config,
    CohereConfig,
    DogeConfig,
    Gemma2Config,
    GraniteConfig,
    LEDConfig,
    LlamaConfig,
    M2M100Config,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3MoeConfig,
)

from paceline.core.sampling import SamplingParams
from paceline.decode import AutoregressiveDecoder, SpeculativeDecoder
from paceline.errors import UnsupportedModelError
from paceline.models import CausalModel, prepare_for_decoding, wrap_model
from paceline.models.admission import model as results
from paceline.models.admission.model import EXACT, admit, twin_of
from paceline.models.admission.trial import Comparison, play
from paceline.models.admission.twin import tiny_twin
from paceline.models.hf.causal import HfDecoder
from paceline.models.hf.seq2seq import Seq2SeqModel
from support.models import BART_LIKE, HYBRIDS, LLAMA_LIKE, generated, tiny_hf, tiny_model

GREEDY = SamplingParams(temperature=0)
IDS = {"vocab_size": 61, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
# Mamba and Jamba start again from an empty state if they read several tokens behind others
KINDS = dict.fromkeys(HYBRIDS, "recurrent") | {"mamba": "stateful", "jamba": "stateful"}


PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [12, 13], list(range(20, 32))]


@pytest.mark.parametrize(("kind", "sessions"), KINDS.items())
def test_a_model_with_a_state_decodes_as_generate_with_and_without_a_draft(
    kind: str, sessions: str
):
    """The draft is the same model with noise, so some of its tokens are accepted."""
    hf, noisy = tiny_hf(kind), tiny_hf(kind)
    add_noise(noisy, 0)
    model, draft = wrap_model(hf), wrap_model(noisy)
    assert model.sessions == sessions
    wanted = [generated(hf, p, 12, eos_token_id=None, pad_token_id=2) for p in PROMPTS]
    decoders = [SpeculativeDecoder(model, draft, gamma=n, sampling=GREEDY) for n in (1, 4)]
    for decoder in (AutoregressiveDecoder(model, GREEDY), *decoders):
        for size in (1, 2, 3):
            texts = decoder.generate(PROMPTS, 12, eos_token_ids=[], batch_size=size)
            assert [text.tokens for text in texts] == wanted
    assert prepare_for_decoding(model).sessions == sessions


def test_a_model_that_mixes_up_rows_of_a_batch_reads_them_one_by_one():
    """LED pads its sources to whole windows."""
    sizes = {"attention_window": 4, "max_encoder_position_embeddings": 64}
    config = LEDConfig(**BART_LIKE | sizes, max_decoder_position_embeddings=64, vocab_size=61)
    hf = AutoModelForSeq2SeqLM.from_config(config).eval()
    model = wrap_model(hf)
    assert model.sessions == "rows"
    decoder = SpeculativeDecoder(model, model, gamma=3, sampling=GREEDY)
    texts = decoder.generate(PROMPTS, 10, eos_token_ids=[])
    wanted = [generated(hf, p, 10, eos_token_id=None, num_beams=1) for p in PROMPTS]
    assert [text.tokens for text in texts] == wanted


def test_a_model_whose_cache_gives_other_logits_is_refused():
    """Doge, in transformers 5.23: generate() gives other texts with its cache than without."""
    torch.manual_seed(0)
    config = DogeConfig(**LLAMA_LIKE, **IDS, keep_window_size=4)
    with pytest.raises(UnsupportedModelError, match="doge cannot be decoded"):
        wrap_model(AutoModelForCausalLM.from_config(config).eval())


def test_a_model_whose_tokens_see_later_ones_is_refused():
    sizes = {name: LLAMA_LIKE[name] for name in LLAMA_LIKE if name != "num_key_value_heads"}
    hf = BertLMHeadModel(BertConfig(**sizes, **IDS)).eval()
    with pytest.raises(UnsupportedModelError, match=r"bert cannot be decoded.*causal"):
        wrap_model(hf)


def test_a_hidden_state_outside_of_the_cache_is_refused_whatever_the_model_is_called():
    hf = tiny_hf("llama")
    seen: list[int] = []

    def remember(_module: object, _args: object, _kwargs: object) -> None:
        seen.append(0)
        hf.get_input_embeddings().weight.data += 0.05 * len(seen)

    hf.register_forward_pre_hook(remember, with_kwargs=True)
    with pytest.raises(UnsupportedModelError, match="llama cannot be decoded"):
        wrap_model(hf)


def test_a_known_result_is_used_until_files_or_settings_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    monkeypatch.setattr(results, "_known", {})
    model = tiny_model("llama")
    first = admit(model, "files of today")
    assert first.twin is not None
    assert first.num_positions > 40
    kept = sorted((tmp_path / "admission").iterdir())
    assert len(kept) == 2, "the twin, and the model's own weights"
    passes: list[str] = []
    trials = "paceline.models.admission.model"
    for name in ("play", "play_briefly"):
        monkeypatch.setattr(f"{trials}.{name}", lambda *_, **__: passes.append("trial"))
    monkeypatch.setattr(results, "_known", {})  # as in another process
    assert admit(model, "files of today") == first
    assert passes == []
    with pytest.raises(AttributeError):
        admit(model, "other files")
    assert passes == ["trial"]


def test_a_cache_that_cannot_be_used_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "file"))
    model = tiny_model("llama", rms_norm_eps=2e-6)
    assert admit(model, "files").sessions == "batch"
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    (tmp_path / "admission").mkdir()
    key = results.key_of(model, "weights", "files", str(model.dtype))
    (tmp_path / "admission" / f"{key}.json").write_text(json.dumps([1]))
    monkeypatch.setattr(results, "_known", {})
    assert admit(model, "files").sessions == "batch"


def test_a_language_token_that_becomes_small_is_not_padding():
    """NLLB's language ids are far beyond the twin's vocabulary; 256033 % 96 is its padding."""
    config = M2M100Config(**BART_LIKE | {"vocab_size": 256100, "pad_token_id": 1})
    with torch.device("meta"):
        full = AutoModelForSeq2SeqLM.from_config(config)
    twin = twin_of(Seq2SeqModel(full, decoder_prompt=(2, 256033)))
    assert twin is not None
    assert twin.decoder_prompt is not None
    assert twin.hf.config.pad_token_id not in twin.decoder_prompt
    assert play(twin).largest < 1e-4


def test_layers_of_a_kind_that_comes_late_are_in_the_twin():
    config = BambaConfig(num_hidden_layers=32, attn_layer_indices=[9, 18, 27])
    with torch.device("meta"):
        full = AutoModelForCausalLM.from_config(config)
    twin: Any = tiny_twin(full)
    assert any(getattr(layer, "self_attn", None) is not None for layer in twin.model.layers)
    assert len(twin.model.layers) <= 8


def test_a_token_that_a_session_excludes_for_no_reason_is_a_difference():
    wanted = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    got = wanted.clone()
    got[:, 2] = -torch.inf
    model = tiny_model("llama", vocab_size=5, pad_token_id=None)
    found = Comparison.of(model)
    found.add(wanted, got, "here")
    assert found.largest == torch.inf
    banned = Comparison(allowed_V=torch.tensor([True, True, False, True, True]))
    banned.add(wanted, got, "here")
    assert banned.largest == 0


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
