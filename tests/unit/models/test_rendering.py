"""A chat template that would never end or fill the memory is one line; others render as before."""

import os
import time
from typing import Any

import pytest

from paceline.data.chats import chat_answer
from paceline.data.prompts import Record
from paceline.environment import begin
from paceline.errors import InputNote, PromptError
from paceline.models import rendering
from paceline.models.chat_text import chat_prompt
from support.models import tiny_tokenizer

GOOD = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
SLOW = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
DOUBLES = (
    "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}"
)


def chat(*contents: str) -> Record:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]
    return Record("row 1", "chat", messages=tuple(messages))


def with_template(template: str) -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (SLOW, "rendering takes more than 0 s"),
        ("{{ ((10 ** 4000) ** 300) ** 300 }}", "rendering takes more than 0 s"),
        ("{{ 'a' * 3000000000 }}", "takes more than 1 GiB of memory"),
        ("{{ [0] * 10000000000 }}", "takes more than 1 GiB of memory"),
        ("{{ 'a'.center(10000000000) }}", "takes more than 1 GiB of memory"),
        ("{{ '%10000000000d' % 1 }}", "takes more than 1 GiB of memory"),
        (DOUBLES, "takes more than 1 GiB of memory"),
        ("{{ 'a' * 70000000 }}", "it gives more than 67,108,864 characters"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "maximum recursion depth"),
        ("{{ " + "(" * 5000 + "1", "maximum recursion depth"),
        ("{% if messages|length > 1 %}" + SLOW + "{% endif %}", "rendering takes more than 0 s"),
    ],
    ids=range(11),
)
def test_a_template_has_limits(template: str, said: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rendering, "SECONDS", 0.1 if "more than 0 s" in said else 10.0)
    with pytest.raises(PromptError, match="row 1 does not fit the chat template") as caught:
        chat_prompt(chat("hi", "ho", "hu"), with_template(template))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_template_renders_again_after_a_pause_and_after_it_was_changed(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(rendering, "_IDLE_S", 0.1)
    tokenizer = with_template(GOOD)
    assert chat_prompt(chat("hi"), tokenizer) == "<user>hi"
    time.sleep(0.4)  # the process that rendered it has ended
    assert chat_prompt(chat("hi"), tokenizer) == "<user>hi"
    tokenizer.chat_template = "{{ bos_token }}"
    tokenizer.bos_token = "<pad>"
    assert chat_prompt(chat("hi"), tokenizer) == "<pad>"


def test_a_generation_block_is_rendered_with_the_same_limits(monkeypatch: pytest.MonkeyPatch):
    block = "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    good = "{% for m in messages %}" + block + "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    assert chat_answer(chat("hi", "ho"), with_template(good), 1, "hi", ()).text == "ho"
    monkeypatch.setattr(rendering, "SECONDS", 0.1)
    with pytest.raises(PromptError, match="rendering takes more than 0 s"):
        chat_answer(chat("hi", "ho"), with_template(good + SLOW), 1, "hi", ())


def test_the_process_that_renders_is_no_longer_there_once_it_is_replaced():
    chat_prompt(chat("hi"), with_template(GOOD))
    first = rendering._copies[0].pid
    chat_prompt(chat("hi"), with_template(GOOD + " "))
    assert rendering._copies[0].pid != first
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)


def test_a_system_with_a_lower_limit_of_memory_renders(monkeypatch: pytest.MonkeyPatch):
    def refused(*_: object) -> None:
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(rendering.resource, "setrlimit", refused)
    found = with_template("{{ messages[0].content }}")
    assert rendering.apply(found, [{"role": "user", "content": "hi"}]) == "hi"


def test_an_interrupted_chat_is_not_the_answer_to_the_next_one(monkeypatch: pytest.MonkeyPatch):
    found = with_template("{{ messages[0].content }}")
    assert rendering.apply(found, [{"role": "user", "content": "first"}]) == "first"
    pipe = rendering._copies[0].pipe

    def interrupted(_: float) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(pipe), "poll", lambda _, seconds: interrupted(seconds))
        with pytest.raises(KeyboardInterrupt):
            rendering.apply(found, [{"role": "user", "content": "second"}])
    assert rendering.apply(found, [{"role": "user", "content": "third"}]) == "third"


def test_a_template_gets_the_day_of_the_run_or_the_one_that_is_given():
    """What transformers makes of the same day as a text, as templates of Llama 3.2 take it."""
    unset = "{% set date_string = strftime_now('%d %b %Y') %}"
    tokenizer = with_template("{% if not date_string is defined %}" + unset + "{% endif %}")
    tokenizer.chat_template += "Today Date: {{ date_string }}"
    messages = [{"role": "user", "content": "hi"}]

    def told(**day: str) -> str:
        return tokenizer.apply_chat_template(messages, tokenize=False, **day)

    with begin({"environment": {"began": "2025-02-03 23:59:59"}}):
        with pytest.warns(InputNote, match="2025-02-03 23:59; set chat_template_kwargs"):
            assert chat_prompt(chat("hi"), tokenizer) == told(date_string="03 Feb 2025")
        with begin():  # a run in a run; what was said is not said again
            assert chat_prompt(chat("hi"), tokenizer) == told(date_string="03 Feb 2025")
        given = rendering.apply(tokenizer, messages, strftime_now="2024-07-26")
        assert given == told(date_string="26 Jul 2024")
    assert chat_prompt(chat("hi"), tokenizer) == told()


def test_a_template_that_draws_draws_the_same_each_time():
    found = {chat_prompt(chat("hi"), with_template("{{ range(99999) | random }}")) for _ in "ab"}
    assert len(found) == 1
