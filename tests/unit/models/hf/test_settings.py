"""Settings of generation_config.json: the text of generate(), or a warning that names them."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from paceline.core.sampling import SamplingParams
from paceline.decode import AutoregressiveDecoder, SpeculativeDecoder
from paceline.models import load_model, prepare_for_decoding, wrap_model
from support.models import CONFIGS, tiny_hf

GREEDY = SamplingParams(temperature=0)
NEW = 12
PROMPT = [9, 17, 23, 9, 17, 30, 9, 41]
PLAIN: dict[str, list[int]] = {}


def generated(hf: Any, **options: Any) -> list[int]:
    """The new tokens of generate(), by the model's own generation config."""
    given = torch.tensor([PROMPT])
    found = hf.generate(
        given, attention_mask=torch.ones_like(given), max_new_tokens=NEW, pad_token_id=2, **options
    )[0].tolist()
    return found[1:] if hf.config.is_encoder_decoder else found[len(PROMPT) :]


def plain(architecture: str) -> list[int]:
    if architecture not in PLAIN:
        PLAIN[architecture] = generated(tiny_hf(architecture))
    return PLAIN[architecture]


def settings_of(architecture: str) -> dict[str, Any]:
    """Settings that change this model's text: they are made from the text without them."""
    text = plain(architecture)
    first, second, third = text[:3]
    return {
        "repetition_penalty": 3.0,
        "encoder_repetition_penalty": 9.0,
        "no_repeat_ngram_size": 1,
        "encoder_no_repeat_ngram_size": 1,
        "suppress_tokens": [first, second],
        "begin_suppress_tokens": [first],
        "bad_words_ids": [[first], [third]],
        "bad_words_ids of two": [[first], [first, second], [second, third]],
        "sequence_bias": {(first,): -1e9},
        "min_length": NEW + (len(PROMPT) if architecture in CONFIGS else 0),
        "min_new_tokens": NEW,
        "forced_eos_token_id": 5,
        "forced_eos_token_id in a list": [5],
        "forced_eos_token_id of two": [5, 6],
        "exponential_decay_length_penalty": (1, 9.0),
        "num_beams": 3,
    }


NAMES = list(settings_of("llama"))


@pytest.mark.parametrize("architecture", ["llama", "t5_v1_1"])
@pytest.mark.parametrize("name", NAMES)
def test_a_setting_gives_the_text_of_generate_or_is_named(architecture: str, name: str):
    hf: Any = tiny_hf(architecture)
    attribute, value = name.split()[0], settings_of(architecture)[name]
    if attribute in ("min_length", "min_new_tokens"):  # the third token would end the text
        hf.generation_config.eos_token_id = plain(architecture)[2]
    wanted_without = generated(hf)
    setattr(hf.generation_config, attribute, value)
    wanted = generated(hf)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        model = wrap_model(hf)
    (found,) = AutoregressiveDecoder(model, GREEDY).generate([PROMPT], NEW)
    if found.tokens == wanted:
        return
    assert wanted != wanted_without, "the setting changes nothing here"
    (said,) = [str(each.message) for each in heard]
    assert f"{attribute}=" in said


APPLIED = ("suppress_tokens", "bad_words_ids", "forced_eos_token_id")


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "umt5"])
@pytest.mark.parametrize("attribute", APPLIED)
def test_bans_and_a_forced_end_are_applied_without_a_word(architecture: str, attribute: str):
    """By every session: faster passes, drafts and sampled text too."""
    value = settings_of(architecture)[attribute]
    models: list[Any] = []
    for seed in (0, 1):
        hf: Any = tiny_hf(architecture, seed=seed)
        hf.bfloat16().float()  # exact in 16 bits, as compiled passes need
        setattr(hf.generation_config, attribute, value)
        models.append(hf)
    wanted = generated(models[0])
    assert wanted != plain(architecture)
    target, draft = (prepare_for_decoding(wrap_model(hf)) for hf in models)
    decoder = SpeculativeDecoder(target, draft, gamma=3, sampling=GREEDY)
    assert decoder.generate([PROMPT, [5]], NEW)[0].tokens == wanted
    if attribute != "forced_eos_token_id":
        sampled = AutoregressiveDecoder(target, SamplingParams(temperature=3.0))
        texts = sampled.generate([PROMPT] * 30, NEW, eos_token_ids=[])
        banned = set(target.banned_K.tolist())
        assert banned
        assert not banned & {token for text in texts for token in text.tokens}


def test_neutral_values_and_settings_of_sampling_say_nothing():
    hf: Any = tiny_hf("llama")
    neutral = GenerationConfig._get_default_generation_params()
    hf.generation_config.update(**neutral)
    hf.generation_config.update(temperature=0.6, top_k=20, top_p=0.95, do_sample=True, min_p=0.0)
    wrap_model(hf)  # warnings are errors


def test_a_setting_in_the_file_is_named_once_at_load(model_directory: Path):
    path = model_directory / "generation_config.json"
    path.write_text(json.dumps({"repetition_penalty": 1.3, "no_repeat_ngram_size": 2}))
    said = "sets repetition_penalty=1.3, no_repeat_ngram_size=2; Paceline does not apply"
    with pytest.warns(UserWarning, match=said) as heard:
        load_model(model_directory)
    assert len(heard) == 1
