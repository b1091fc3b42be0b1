"""`verify` compares with transformers: sessions that are wrong in themselves do not pass.

The mutants are targets whose sessions compute another model than `hf` does. Their own decoder
agrees with itself, so a comparison with it passes.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.core.sampling import SamplingParams
from paceline.measure.losslessness import VerifyConfig, reference_greedy, verify_models
from paceline.models import wrap_model
from paceline.models.hf.base import HfModel
from paceline.models.hf.causal import HfDecoder
from support.models import tiny_hf

PROMPTS = [[5, 6, 7, 9, 11, 4, 8], [8, 9, 10], [12, 3, 14, 9, 5]] * 5


def config(**values: Any) -> VerifyConfig:
    given: dict[str, Any] = {"num_prompts": 15, "batch_size": 5, "max_new_tokens": 12} | values
    return VerifyConfig(target="t", draft="d", prompts={"path": "p"}, num_cells=4, **given)  # pyright: ignore[reportArgumentType]


class SessionsAlone:
    """A model that offers its sessions only, so that verify has to compare with them."""

    def __init__(self, model: HfModel) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def another_hf(changes: dict[str, Any], kind: str) -> Any:
    """The weights of `tiny_hf(kind)` under another configuration."""
    first = tiny_hf(kind, seed=0)
    other = type(first)(type(first.config).from_dict(first.config.to_dict() | changes))
    other.load_state_dict(first.state_dict())
    return other.eval()


class Shifted(HfDecoder):
    """Positions twice as far apart as they are."""

    def __call__(self, tokens_BN: Tensor, cache: Any, ends_B: Tensor | None, keep: int) -> Tensor:
        first = cache.get_seq_length()
        places_N = 2 * torch.arange(first, first + tokens_BN.shape[1])
        return self.hf(
            input_ids=tokens_BN,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=keep,
            position_ids=places_N[None].expand(len(tokens_BN), -1),
        ).logits


def invented_window(hf: Any) -> HfDecoder:
    return HfDecoder(another_hf({"sliding_window": 3}, "mistral"))


def dropped_scaling(hf: Any) -> HfDecoder:
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    return HfDecoder(another_hf({"rope_parameters": rope}, "llama"))


MUTANTS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "positions": ("llama", Shifted),
    "window": ("mistral", invented_window),
    "rope scaling": ("llama", dropped_scaling),
}


@pytest.mark.parametrize("mutant", MUTANTS)
@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=0.7, top_p=0.9)])
def test_a_target_whose_sessions_are_wrong_fails_although_it_agrees_with_itself(
    mutant: str, sampling: SamplingParams
):
    kind, wrong = MUTANTS[mutant]
    model, draft = (wrap_model(tiny_hf(kind, seed=seed)) for seed in (0, 1))
    broken = model.decoding_with(wrong(model.hf))
    # texts one by one: the mutants know no ragged batches
    settings = config(sampling=sampling, batch_size=1, num_prompts=5, max_new_tokens=14)
    itself: Any = SessionsAlone(broken)
    before = verify_models(broken, draft, PROMPTS, settings, reference=itself)
    assert before.greedy.passed
    assert before.distribution.counts["impossible"] == 0
    found = verify_models(broken, draft, PROMPTS, settings, reference=broken)
    assert not found.greedy.passed
    assert not found.passed


KINDS = ["llama", "mistral", "gpt2", "t5", "bart"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_right_sessions_pass(kind: str, penalty: float):
    """n of at most 88 tokens in 4 cells; each fails once in 10,000 seeds."""
    model, draft = (wrap_model(tiny_hf(kind, seed=seed)) for seed in (0, 1))
    sampling = SamplingParams(temperature=0.8, top_p=0.95, repetition_penalty=penalty)
    settings = config(sampling=sampling, self_test=True, num_prompts=8)
    found = verify_models(model, draft, PROMPTS, settings)
    assert found.greedy.passed, found.greedy.first_difference
    assert found.greedy.counts["identical"] + found.greedy.counts["ties"] == 8
    assert found.distribution.passed
    assert "transformers" in found.reference


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("llama", {"suppress_tokens": [3, 9], "bad_words_ids": [[5]]}),
        ("llama", {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2, "num_beams": 3}),
        ("llama", {"bad_words_ids": [[5], [6, 7]], "temperature": 0.1, "do_sample": True}),
        ("llama", {"return_dict_in_generate": True, "output_scores": True}),
        ("llama", {"prompt_lookup_num_tokens": 3, "cache_implementation": "static"}),
        ("llama", {"num_return_sequences": 3, "do_sample": True}),
        ("t5", {"suppress_tokens": [3, 9]}),
        ("bart", {"forced_bos_token_id": 6, "forced_eos_token_id": 2, "num_beams": 4}),
        ("bart", {"min_length": 9, "forced_eos_token_id": 2, "no_repeat_ngram_size": 3}),
    ],
)
@pytest.mark.filterwarnings("ignore:the generation config")
def test_settings_of_a_model_are_those_that_paceline_applies(kind: str, settings: dict[str, Any]):
    pair = [tiny_hf(kind, seed=seed) for seed in (0, 1)]
    for hf in pair:
        for name, value in settings.items():
            setattr(hf.generation_config, name, value)
    model, draft = map(wrap_model, pair)
    kept = model.hf.generation_config.to_dict()
    found = verify_models(model, draft, PROMPTS, config())
    assert found.greedy.passed, found.greedy.first_difference
    assert model.hf.generation_config.to_dict() == kept


def test_a_text_may_end_with_the_context():
    model = wrap_model(tiny_hf("llama", seed=0))
    room = model.max_length
    assert room is not None
    prompts = [[5] * (room - 3), [6, 7, 8]]
    settings = 9, SamplingParams(), model.vocab_size
    lengths = [len(reference_greedy(model, prompt, *settings)) for prompt in prompts]
    assert lengths == [3, 9]
    found = verify_models(
        model, model, [[5] * (room - 8), *PROMPTS], config(max_new_tokens=20, gamma=2)
    )
    assert found.greedy.passed, found.greedy.first_difference
