"""Which sessions a model gets: those that give transformers' logits, whatever its name says."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BambaConfig,
    BertConfig,
    BertLMHeadModel,
    DogeConfig,
    LEDConfig,
    M2M100Config,
    PreTrainedConfig,
)

from paceline.core.sampling import SamplingParams
from paceline.decode import AutoregressiveDecoder, SpeculativeDecoder
from paceline.errors import UnsupportedModelError
from paceline.models import prepare_for_decoding, wrap_model
from paceline.models.admission import model as results
from paceline.models.admission.model import admit, twin_of
from paceline.models.admission.trial import Comparison, play
from paceline.models.admission.twin import tiny_twin
from paceline.models.hf.seq2seq import Seq2SeqModel
from support.models import BART_LIKE, HYBRIDS, generated, tiny_hf, tiny_model

GREEDY = SamplingParams(temperature=0)
SMALL: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
# Mamba and Jamba start again from an empty state if they read several tokens behind others
KINDS = dict.fromkeys(HYBRIDS, "recurrent") | {"mamba": "stateful", "jamba": "stateful"}


def random_model(config: PreTrainedConfig) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        hf = AutoModelForCausalLM.from_config(config).eval()
        for weight in hf.parameters():
            if weight.ndim > 1:
                weight.data.mul_(4.0)
    return hf


PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [12, 13], list(range(20, 32))]


@pytest.mark.parametrize(("kind", "sessions"), KINDS.items())
def test_a_model_that_cannot_roll_back_decodes_as_generate_and_takes_no_draft(
    kind: str, sessions: str
):
    hf = tiny_hf(kind)
    model = wrap_model(hf)
    assert model.sessions == sessions
    texts = AutoregressiveDecoder(model, GREEDY).generate(
        PROMPTS, 12, eos_token_ids=[], batch_size=2
    )
    wanted = [generated(hf, p, 12, eos_token_id=None, pad_token_id=2) for p in PROMPTS]
    assert [text.tokens for text in texts] == wanted
    with pytest.raises(UnsupportedModelError, match="state that cannot be rolled back"):
        SpeculativeDecoder(model, model)
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
    hf = random_model(DogeConfig(**SMALL, keep_window_size=4))
    with pytest.raises(UnsupportedModelError, match="doge cannot be decoded"):
        wrap_model(hf)


def test_a_model_whose_tokens_see_later_ones_is_refused():
    sizes = {name: SMALL[name] for name in SMALL if name != "num_key_value_heads"}
    hf = BertLMHeadModel(BertConfig(**sizes)).eval()
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
