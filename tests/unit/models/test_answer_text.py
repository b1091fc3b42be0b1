"""Texts of answers, against plain `tokenizers`: decode(prompt + answer)[len(decode(prompt)):]."""

import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from paceline.models.answer_text import AnswerStream, answer_text
from support.texts import TOKENIZER_FAMILIES, spaces, unigram, wrapped

PROMPT, ANSWER = "def f(x):\n", "    y = x\n    return y"
EMOJI = "a🎉é한b"
WITH_BYTES = [name for name in TOKENIZER_FAMILIES if name not in ("unigram", "pieces of words")]


def _wanted(plain: Tokenizer, prompt: list[int], answer: list[int]) -> str:
    before, whole = plain.decode(prompt), plain.decode(prompt + answer)
    assert whole.startswith(before)
    return whole[len(before) :]


@pytest.mark.parametrize("family", TOKENIZER_FAMILIES)
@pytest.mark.parametrize("bos", [False, True])
def test_an_answer_has_the_text_that_it_adds_to_the_prompt(family: str, bos: bool):
    plain = TOKENIZER_FAMILIES[family]()
    whole = plain.encode(PROMPT + ANSWER).ids
    tokenizer, front = wrapped(plain), [plain.token_to_id("<s>")] * bos
    for cut in range(1, len(whole)):
        prompt, answer = front + whole[:cut], whole[cut:]
        wanted = _wanted(plain, prompt, answer)
        assert answer_text(tokenizer, answer, prompt) == wanted
        stream = AnswerStream(tokenizer, prompt)
        assert "".join(map(stream.add, answer)) == wanted


@pytest.mark.parametrize("family", WITH_BYTES)
def test_an_answer_keeps_the_spaces_that_it_loses_if_it_is_decoded_alone(family: str):
    plain = TOKENIZER_FAMILIES[family]()
    cut, ids = len(plain.encode(PROMPT).ids), plain.encode(PROMPT + ANSWER).ids
    assert ids[:cut] == plain.encode(PROMPT).ids
    assert answer_text(wrapped(plain), ids[cut:], ids[:cut]) == ANSWER
    stripped = plain.decode(ids[cut:]) != ANSWER
    assert stripped == family.startswith("a space")


@pytest.mark.parametrize("family", WITH_BYTES)
def test_characters_of_several_tokens_stream_when_they_are_complete(family: str):
    plain = TOKENIZER_FAMILIES[family]()
    prompt = plain.encode("the cat").ids
    answer = plain.encode("the cat" + EMOJI).ids[len(prompt) :]
    assert plain.decode(prompt + answer) == plain.decode(prompt) + EMOJI
    ours, theirs = AnswerStream(wrapped(plain), prompt), DecodeStream(ids=prompt)
    pieces = [ours.add(token) for token in answer]
    assert pieces == [theirs.step(plain, token) or "" for token in answer]
    assert [piece for piece in pieces if piece] == list(EMOJI)
    at = pieces.index("🎉")
    assert pieces[at - 3 : at] == ["", "", ""]


@pytest.mark.parametrize("family", WITH_BYTES)
def test_a_prompt_that_ends_within_a_character_gives_the_whole_character(family: str):
    plain = TOKENIZER_FAMILIES[family]()
    ids = plain.encode("the cat" + EMOJI).ids
    cut = ids.index(plain.encode("the cata").ids[-1]) + 3
    assert plain.decode(ids[:cut]).endswith("\N{REPLACEMENT CHARACTER}")
    assert answer_text(wrapped(plain), ids[cut:], ids[:cut]) == EMOJI[1:]
    stream = AnswerStream(wrapped(plain), ids[:cut])
    assert "".join(map(stream.add, ids[cut:])) == EMOJI[1:]


def test_special_tokens_are_left_out_and_keep_the_spaces_around_them():
    plain = spaces("first", 1)
    mark = plain.token_to_id("<s>")
    sat = next(
        n for token, n in plain.get_vocab().items() if token.startswith("▁") and len(token) > 1
    )
    word = " " + plain.decode([sat])
    tokenizer = wrapped(plain)
    prompt, answer = plain.encode("the cat").ids, [mark, sat, mark, sat]
    assert answer_text(tokenizer, answer, prompt) == word * 2
    stream = AnswerStream(tokenizer, prompt)
    assert [stream.add(token) for token in answer] == ["", word, "", word]
    assert (
        answer_text(tokenizer, answer, prompt, skip_special_tokens=False) == f"<s>{word}<s>{word}"
    )


def test_nothing_is_cleaned_up():
    plain = unigram()
    prompt = plain.encode("x").ids
    answer = plain.encode("x y , y").ids[len(prompt) :]
    tokenizer = wrapped(plain, clean_up_tokenization_spaces=True)
    assert tokenizer.decode(prompt + answer) == "x y, y"
    assert answer_text(tokenizer, answer, prompt) == " y , y"


def test_an_answer_behind_nothing_is_a_text_of_its_own():
    plain = spaces("first", 1)
    ids = plain.encode("the cat").ids
    assert answer_text(wrapped(plain), ids, []) == "the cat"
    assert answer_text(wrapped(plain), ids, [plain.token_to_id("<s>")]) == "the cat"
