"""Chat templates render the same in each run, whatever the day."""

from typing import Any

import pytest

from paceline.data.prompts import Record
from paceline.data.tokens import chat_answer
from paceline.environment import begin
from paceline.errors import PromptError
from paceline.models.chat_text import chat_prompt
from support.models import tiny_tokenizer


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
