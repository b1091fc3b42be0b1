"""Texts of answers, against plain `tokenizers`; chat templates render the same in each run."""

from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from paceline.data.prompts import Record
from paceline.data.tokens import chat_answer
from paceline.environment import begin
from paceline.errors import PromptError
from paceline.models.answer_text import AnswerStream, answer_text
from paceline.models.chat_text import chat_prompt
from support.models import tiny_tokenizer
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


def chat(*contents: str, **arguments: Any) -> Record:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]
    return Record("row 1", "chat", messages=tuple(messages), template_kwargs=arguments)


def with_template(template: str) -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "maximum recursion depth"),
        ("{{ " + "(" * 5000 + "1", "maximum recursion depth"),
        ("{{ 'a' * 10 ** 18 }}", "MemoryError"),
        ("{{ raise_exception('no\nsystem message') }}", "no system message"),
    ],
    ids=range(4),
)
def test_a_template_that_fails_is_one_line(template: str, said: str):
    with pytest.raises(PromptError, match=f"row 1 does not fit the chat template.*{said}"):
        chat_prompt(chat("hi", "ho", "hu"), with_template(template))


def test_a_template_that_was_changed_renders_as_it_is_now():
    tokenizer = with_template("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    assert chat_prompt(chat("hi"), tokenizer) == "<user>hi"
    tokenizer.chat_template = "{{ bos_token }}"
    tokenizer.bos_token = "<pad>"
    assert chat_prompt(chat("hi"), tokenizer) == "<pad>"


def test_a_generation_block_is_rendered():
    block = "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    good = "{% for m in messages %}" + block + "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    assert chat_answer(chat("hi", "ho"), with_template(good), 1, "hi", ())[0] == "ho"


def test_a_template_gets_the_day_of_the_run_or_the_one_that_is_given():
    """What transformers makes of the same day as a text, as templates of Llama 3.2 take it."""
    unset = "{% set date_string = strftime_now('%d %b %Y') %}"
    tokenizer = with_template("{% if not date_string is defined %}" + unset + "{% endif %}")
    tokenizer.chat_template += "Today Date: {{ date_string }}"
    messages = [{"role": "user", "content": "hi"}]

    def told(**day: str) -> str:
        return tokenizer.apply_chat_template(messages, tokenize=False, **day)

    with begin({"environment": {"began": "2025-02-03 23:59:59"}}):
        with begin():  # a run in a run
            assert chat_prompt(chat("hi"), tokenizer) == told(date_string="03 Feb 2025")
        given = chat_prompt(chat("hi", strftime_now="2024-07-26"), tokenizer)
        assert given == told(date_string="26 Jul 2024")
    assert chat_prompt(chat("hi"), tokenizer) == told()
