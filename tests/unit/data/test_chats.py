"""Prompts and trained parts of chats."""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from paceline.data.collate import TokenRow
from paceline.data.examples import Lengths, build_examples
from paceline.data.prompts import CorpusConfig, Record, read_records
from paceline.data.tokens import AnswerEnd, encode_prompts
from paceline.errors import PromptError
from support.texts import (
    CALL,
    CALLED,
    CHAT_FAMILIES,
    CHAT_FAMILY_NAMES,
    TOOL,
    TOOLS,
    WEATHER,
    Family,
    byte_tokenizer,
    tokenizer_of,
)


def read(path: Path, row: dict[str, Any]) -> Record:
    path.write_text(json.dumps(row) + "\n")
    (record,) = read_records(path)
    return record


def build(record: Record, tokenizer: Any, stops: str = "") -> list[TokenRow]:
    return build_examples(
        [record],
        tokenizer,
        Lengths(1000, 1000),
        eos_token_ids=tokenizer.convert_tokens_to_ids(stops.split()),
    )


def marked(example: TokenRow, tokenizer: Any) -> str:
    """The text of an example with marks around what is trained."""
    parts = (
        list(example.tokens[: example.trained_from]),
        list(example.tokens[example.trained_from :]),
    )
    return "{}«{}»".format(*(tokenizer.decode(part) for part in parts))


def turns_of(expected: str | tuple[str, ...]) -> list[str]:
    """A text a turn, of which the last part is marked."""
    if isinstance(expected, tuple):
        return list(expected)
    ends = [match.end() for match in re.finditer("»", expected)]
    return [re.sub("«(.*?)»(?=.)", r"\1", expected[:end], flags=re.DOTALL) for end in ends]


@pytest.mark.parametrize("family", CHAT_FAMILIES, ids=CHAT_FAMILY_NAMES)
def test_every_answer_is_trained_behind_its_prompt_up_to_the_end_of_the_turn(
    tmp_path: Path, family: Family
):
    tokenizer = tokenizer_of(family)
    row = {"messages": family.messages, "chat_template_kwargs": dict(family.arguments)}
    examples = build(read(tmp_path / "a.jsonl", row), tokenizer, family.stops)
    assert [marked(example, tokenizer) for example in examples] == turns_of(family.talk)
    for index, example in zip((2, 4), examples, strict=True):
        before, until = (family.messages[:count] for count in (index, index + 1))
        made = partial(tokenizer.apply_chat_template, return_dict=False, **family.arguments)
        prompt, whole = made(before, add_generation_prompt=True), made(until)
        assert example.prompt == prompt
        if whole[: len(prompt)] == prompt:
            assert list(example.tokens) == whole[: len(example.tokens)]


@pytest.mark.parametrize("family", CHAT_FAMILIES, ids=CHAT_FAMILY_NAMES)
def test_the_end_of_an_answer_is_that_of_the_family_s_chats(family: Family):
    tokenizer = tokenizer_of(family)
    prompt = tokenizer.apply_chat_template(
        family.messages[:-1], add_generation_prompt=True, return_dict=False, **family.arguments
    )
    talk = family.talk if isinstance(family.talk, str) else family.talk[-1]
    whole = tokenizer(re.sub("[«»]", "", talk), add_special_tokens=False)["input_ids"]
    end = AnswerEnd(tokenizer)
    assert end.behind(prompt) == whole[-1]
    plain = tokenizer("hi", add_special_tokens=False)["input_ids"]
    assert end.behind(plain) == tokenizer.convert_tokens_to_ids(family.special.split()[1])


@pytest.mark.parametrize("family", [f for f in CHAT_FAMILIES if f.weather], ids=lambda f: f.name)
@pytest.mark.parametrize("as_text", [False, True])
def test_tools_and_calls_are_rendered_as_they_are_served(
    tmp_path: Path, family: Family, *, as_text: bool
):
    tokenizer = tokenizer_of(family)
    row = {
        "messages": WEATHER,
        "tools": TOOLS if as_text else [TOOL],
        "chat_template_kwargs": dict(family.arguments),
    }
    examples = build(read(tmp_path / "a.jsonl", row), tokenizer, family.stops)
    assert [marked(example, tokenizer) for example in examples] == turns_of(family.weather)


BY_NAME = {family.name: family for family in CHAT_FAMILIES}
USER = {"role": "user", "content": "hi"}
BEGUN = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
DROPPED = "(m.content.split('</think>') | last).lstrip('\\n')"
PLAIN, OPENS = "'<|im_start|>assistant\\n'", "'<|im_start|>assistant\\n<think>\\n'"


def chatml(body: str, opening: str) -> str:
    """ChatML with what it makes of a message, and with a generation prompt."""
    turn = f"'<|im_start|>' + m.role + '\\n' + {body} + '<|im_end|>\\n'"
    return (
        f"{{%- for m in messages %}}{{{{- {turn} }}}}{{%- endfor %}}"
        f"{{%- if add_generation_prompt %}}{{{{- {opening} }}}}{{%- endif %}}"
    )


def answer(content: Any, template: str, tmp_path: Path, **extra: Any) -> str:
    """The marked text of an answer to "hi"."""
    messages = [USER, {"role": "assistant", "content": content, **extra}]
    tokenizer = byte_tokenizer(template)
    record = read(tmp_path / "a.jsonl", {"messages": messages})
    (example,) = build(record, tokenizer, "<|im_end|> <|endoftext|>")
    return marked(example, tokenizer)


@pytest.mark.parametrize(
    ("drops", "opens", "content", "expected"),
    [
        (True, True, "<think>\nabc\n</think>\n\nfour", "<think>\n«abc\n</think>\n\nfour"),
        (True, True, "<think>abc</think>four", "<think>\n«abc</think>four"),
        (True, True, "abc\n</think>\n\nfour", "<think>\n«abc\n</think>\n\nfour"),
        (True, True, "<think>\n\n</think>\n\n<b>four", "<think>\n«\n</think>\n\n<b>four"),
        (True, False, "<think>\nabc\n</think>\n\nfour", "«<think>\nabc\n</think>\n\nfour"),
        (True, False, "four", "«four"),
        (False, True, "<think>\nabc\n</think>\n\nfour", "<think>\n«abc\n</think>\n\nfour"),
        (False, True, "abc\n</think>\n\nfour", "<think>\n«abc\n</think>\n\nfour"),
        (False, False, "<think>\nabc\n</think>\n\nfour", "«<think>\nabc\n</think>\n\nfour"),
    ],
)
@pytest.mark.parametrize("tag", ["<think> </think>", "[THINK] [/THINK]", "<seed:x> </seed:x>"])
def test_an_answer_goes_on_where_its_prompt_ends_whatever_opens_the_thoughts(
    tmp_path: Path, drops: bool, opens: bool, content: str, expected: str, tag: str
):
    def named(text: str) -> str:
        start, end = tag.split()
        return text.replace("<think>", start).replace("</think>", end)

    template = chatml(DROPPED if drops else "m.content", OPENS if opens else PLAIN)
    found = answer(named(content), named(template), tmp_path)
    assert found == f"{BEGUN}{named(expected)}<|im_end|>»"


@pytest.mark.parametrize("extra", [{}, {"reasoning_content": "abc"}])
def test_an_answer_without_the_thoughts_that_its_prompt_opens_is_refused(
    tmp_path: Path, extra: dict[str, str]
):
    for body in (DROPPED, "m.content"):
        with pytest.raises(PromptError, match=r"line 1: the prompt .* '.*<think>', .* 'four' does"):
            answer("four", chatml(body, OPENS), tmp_path, **extra)


@pytest.mark.parametrize("content", ["a<|im_end|>b", "a <|endoftext|>", "m", "<|im_end|>", "|>"])
@pytest.mark.parametrize("end", ["", r"\n", r"\n<|endoftext|>", r"\n---\n"])
def test_only_the_template_ends_an_answer_and_nothing_follows(
    tmp_path: Path, content: str, end: str
):
    template = chatml("m.content", PLAIN).replace(r"<|im_end|>\n", "<|im_end|>" + end)
    found = answer(content, template, tmp_path)
    assert found.endswith(f"assistant\n«{content}<|im_end|>»")


@pytest.mark.parametrize(
    ("template", "stops", "expected"),
    [
        (
            "{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}",
            "",
            "yo<|im_end|>",
        ),
        ("{% for m in messages %}{{ m.content }}<|im_start|>\n{% endfor %}", "", "yo<|im_start|>"),
        (
            "{% for m in messages %}{{ m.content }}<|im_end|>\n<|endoftext|>{% endfor %}",
            "<|endoftext|>",
            "yo<|im_end|>\n<|endoftext|>",
        ),
    ],
)
def test_without_a_stop_token_of_the_model_the_template_or_the_end_of_text_ends_an_answer(
    tmp_path: Path, template: str, stops: str, expected: str
):
    tokenizer = byte_tokenizer(template)
    row = {"messages": [USER, {"role": "assistant", "content": "yo"}]}
    (example,) = build(read(tmp_path / "a.jsonl", row), tokenizer, stops)
    assert marked(example, tokenizer).partition("«")[2].endswith(expected + "»")


@pytest.mark.parametrize(("family", "joined"), [("llama4", "ab"), ("gemma", "ab"), ("qwq", "a\nb")])
def test_parts_of_text_are_joined_as_the_template_or_vllm_joins_them(
    tmp_path: Path, family: str, joined: str
):
    parts = [{"type": "text", "text": "a"}, "b"]
    row = {"messages": [{"role": "user", "content": parts}]}
    (prompt,) = encode_prompts(
        [read(tmp_path / "a.jsonl", row)], tokenizer := tokenizer_of(BY_NAME[family])
    )
    assert joined in tokenizer.decode(prompt)


# as those of Idefics, LLaVA and SmolVLM, whose content is a list
OF_PARTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for part in m.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_template_that_reads_parts_alone_renders_content_that_is_a_string(tmp_path: Path):
    """It would render a turn without its text, and no error."""
    tokenizer, said = byte_tokenizer(OF_PARTS), [USER, {"role": "assistant", "content": "yo"}]
    listed = [m | {"content": [{"type": "text", "text": m["content"]}]} for m in said]
    wanted = tokenizer.apply_chat_template(listed, tokenize=False)
    (example,) = build(read(tmp_path / "a.jsonl", {"messages": said}), tokenizer, "<|im_end|>")
    assert marked(example, tokenizer) == wanted.strip().replace("yo<|im_end|>", "«yo<|im_end|>»")
    (prompt,) = encode_prompts([read(tmp_path / "b.jsonl", {"messages": said[:1]})], tokenizer)
    opened = tokenizer.apply_chat_template(listed[:1], tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(prompt) == opened


def test_prompt_and_completion_may_be_messages_and_a_weight_of_0_is_context(tmp_path: Path):
    tokenizer = tokenizer_of(BY_NAME["chatml"])
    asked, told = [USER], [{"role": "assistant", "content": "yo"}]
    row = {"prompt": [*asked, *told, *asked], "completion": told}
    weighted = {"messages": [*asked, told[0] | {"weight": 0}, *asked, *told]}
    for each in (row, row | {"completion": "yo"}, weighted):
        (example,) = build(read(tmp_path / "a.jsonl", each), tokenizer)
        assert marked(example, tokenizer) == f"{BEGUN}yo<|im_end|>\n{BEGUN}«yo<|im_end|>»"


def test_a_truncated_answer_has_no_end(tmp_path: Path):
    tokenizer = tokenizer_of(BY_NAME["chatml"])
    row = {"messages": [USER, {"role": "assistant", "content": "yo"}], "stop_reason": "length"}
    (example,) = build(read(tmp_path / "a.jsonl", row), tokenizer)
    assert marked(example, tokenizer) == f"{BEGUN}«yo»"


def test_a_last_question_is_a_prompt_without_a_completion(tmp_path: Path):
    tokenizer = tokenizer_of(BY_NAME["chatml"])
    row = {"messages": [USER, {"role": "assistant", "content": "yo"}, USER]}
    record = read(tmp_path / "a.jsonl", row)
    first, second = build(record, tokenizer)
    assert (first.trained_from, second.trained_from) == (first.prompt_length, len(second.tokens))
    assert tokenizer.decode(second.prompt) == f"{BEGUN}yo<|im_end|>\n{BEGUN}"


def test_tools_and_arguments_come_from_the_row_or_from_the_configuration(tmp_path: Path):
    tokenizer = tokenizer_of(BY_NAME["qwen3"])
    path = tmp_path / "a.jsonl"
    rows = [{"messages": [USER]}, {"messages": [USER], "chat_template_kwargs": '{"length": 1}'}]
    rows.append({"messages": [USER], "chat_template_kwargs": {"enable_thinking": True}})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = {"enable_thinking": False}
    corpus = CorpusConfig(path=str(path), tools=[TOOL], chat_template_kwargs=arguments)
    records = read_records(corpus)
    prompts = encode_prompts(records, tokenizer)
    for prompt, thinking in zip(prompts, (False, False, True), strict=True):
        assert prompt == tokenizer.apply_chat_template(
            [USER],
            tools=[TOOL],
            add_generation_prompt=True,
            return_dict=False,
            enable_thinking=thinking,
        )


def test_calls_that_a_template_does_not_read_are_refused(tmp_path: Path):
    tokenizer = tokenizer_of(BY_NAME["gemma"])
    called = {"messages": [USER, {"role": "assistant", "tool_calls": [CALL]}]}
    with pytest.raises(PromptError, match="line 1 has tool_calls, which the chat template does"):
        build(read(tmp_path / "a.jsonl", called), tokenizer)


def test_calls_whose_thoughts_a_template_leaves_out_are_refused(tmp_path: Path):
    template = chatml(DROPPED + " + (m.tool_calls | tojson if m.tool_calls else '')", OPENS)
    with pytest.raises(PromptError, match="line 1 has an answer with tool_calls whose thoughts"):
        answer("<think>\nabc\n</think>", template, tmp_path, tool_calls=[CALL])


def test_calls_behind_thoughts_are_trained_where_the_template_renders_both(tmp_path: Path):
    tokenizer = tokenizer_of(BY_NAME["qwen3"])
    called = {
        "role": "assistant",
        "content": "<think>\nabc\n</think>\n\nCalling.",
        "tool_calls": [CALL],
    }
    (example,) = build(read(tmp_path / "a.jsonl", {"messages": [USER, called]}), tokenizer)
    assert marked(example, tokenizer) == (
        f"{BEGUN}«<think>\nabc\n</think>\n\nCalling.\n<tool_call>{CALLED}</tool_call><|im_end|>»"
    )
