"""Who may speculate with whom."""

import pytest

from paceline.errors import VocabularyMismatchError
from paceline.models import wrap_model
from paceline.models.compatibility import check_same_tokenizer, check_same_vocabulary
from support.fakes import TableModel
from support.models import tiny_hf, tiny_model, tiny_tokenizer


def test_one_tokenizer_and_one_width_pass():
    tokenizer = tiny_tokenizer()
    models = [wrap_model(tiny_hf(vocab_size=266, seed=seed), tokenizer) for seed in (0, 1)]
    assert check_same_vocabulary(*models) == 266


def test_padded_logits_pass_and_are_sliced_to_what_the_tokenizer_names():
    target = wrap_model(tiny_hf(vocab_size=320), tiny_tokenizer())
    draft = wrap_model(tiny_hf(vocab_size=288), tiny_tokenizer())
    assert check_same_vocabulary(target, draft) == 266


def test_other_numbers_for_the_same_tokens_are_counted_and_shown():
    target = wrap_model(tiny_hf(vocab_size=300), tiny_tokenizer(extra_tokens=("cat", "dog")))
    draft = wrap_model(tiny_hf(vocab_size=300), tiny_tokenizer(extra_tokens=("dog", "cow")))
    with pytest.raises(VocabularyMismatchError) as caught:
        check_same_vocabulary(target, draft)
    assert str(caught.value) == (
        "the tokenizers of target and draft differ in 3 of 269 entries, for example 'cat' is token "
        "266 in the target and missing in the draft; choose or build a draft with the target's own "
        "tokenizer"
    )


def test_logits_too_narrow_for_the_tokenizer_are_refused():
    target = wrap_model(tiny_hf(vocab_size=266), tiny_tokenizer())
    draft = wrap_model(tiny_hf(vocab_size=200), tiny_tokenizer())
    with pytest.raises(VocabularyMismatchError, match="266 tokens and the draft for 200"):
        check_same_vocabulary(target, draft)
    with pytest.raises(VocabularyMismatchError, match="200 tokens and the draft for 266"):
        check_same_vocabulary(draft, target)


def test_a_token_beyond_the_logits_is_the_same_in_one_tokenizer():
    tokenizer = tiny_tokenizer(extra_tokens=("<padding>",))
    draft = wrap_model(tiny_hf(vocab_size=266), tokenizer)
    assert check_same_tokenizer(tokenizer, draft) == check_same_vocabulary(draft, draft) == 266
    with pytest.raises(VocabularyMismatchError, match="differ in 1 of 267 entries"):
        check_same_tokenizer(tiny_tokenizer(), draft)


def test_without_tokenizers_only_equal_widths_pass():
    assert check_same_vocabulary(TableModel.random(5), TableModel.random(5, seed=1)) == 5
    with pytest.raises(VocabularyMismatchError, match="5 tokens and the draft for 6"):
        check_same_vocabulary(TableModel.random(5), TableModel.random(6))


def test_one_tokenizer_decides_for_a_model_without():
    named = wrap_model(tiny_hf(vocab_size=320), tiny_tokenizer())
    assert check_same_vocabulary(named, tiny_model(vocab_size=320)) == 266
    assert check_same_vocabulary(tiny_model(vocab_size=320), named) == 266
    with pytest.raises(VocabularyMismatchError):
        check_same_vocabulary(named, tiny_model(vocab_size=61))
