"""The requests of a plan, and tokens of answers that a server gives as text alone."""

from pathlib import Path
from typing import Any

import pytest

from paceline.config import validate
from paceline.data.requests import GenerateDataConfig, Request, plan_shards
from paceline.errors import ConfigError, PromptError
from support.data import write_lines
from support.models import tiny_tokenizer
from support.texts import CHAT_FAMILIES, TOOL, tokenizer_of

_TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"


def planned(tmp_path: Path, rows: list[dict[str, Any]], **changes: Any) -> list[list[Request]]:
    """The requests of each shard."""
    corpus = write_lines(tmp_path / "prompts.jsonl", *rows)
    values = {"target": "t", "output": str(tmp_path / "out"), "prompts": str(corpus)} | changes
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = _TEMPLATE
    shards = plan_shards(validate(GenerateDataConfig, values), tokenizer)
    assert [shard.name for shard in shards] == [
        f"{index:05d}-of-{len(shards):05d}.parquet" for index in range(len(shards))
    ]
    return [list(shard.requests) for shard in shards]


def asked(request: Request) -> str:
    text = tiny_tokenizer().decode(list(request.tokens))
    assert isinstance(text, str)
    return text


PROMPTS = [{"prompt": f"say {word}"} for word in ("one", "two", "three", "four", "five")]


def test_temperatures_are_taken_in_turn_and_beginnings_move_on(tmp_path: Path):
    shards = planned(tmp_path, PROMPTS, num_per_prompt=2, temperatures=[0, 0.5, 1])
    got = {request.id: request.temperature for shard in shards for request in shard}
    # prompt i, answer j: temperature (i + j) mod 3
    by_hand = [("0/0", 0), ("0/1", 0.5), ("1/0", 0.5), ("1/1", 1), ("2/0", 1), ("2/1", 0)]
    assert got == dict(by_hand) | {"3/0": 0, "3/1": 0.5, "4/0": 0.5, "4/1": 1}


def test_a_file_has_one_temperature_and_its_size(tmp_path: Path):
    shards = planned(tmp_path, PROMPTS, temperatures=[0, 1], num_per_prompt=2, shard_size=2)
    assert [len(shard) for shard in shards] == [2, 2, 1, 2, 2, 1]
    temperatures = [{request.temperature for request in shard} for shard in shards]
    assert temperatures == [{0}, {0}, {0}, {1}, {1}, {1}]


def test_every_request_has_a_seed_of_its_own_that_no_other_request_moves(tmp_path: Path):
    def seeds(rows: list[dict[str, Any]], **changes: Any) -> dict[str, int]:
        shards = planned(tmp_path, rows, num_per_prompt=3, **changes)
        return {request.id: request.seed for shard in shards for request in shard}

    whole = seeds(PROMPTS)
    assert len(set(whole.values())) == 15
    assert seeds(PROMPTS[:2]).items() <= whole.items()
    assert not set(seeds(PROMPTS, seed=1).values()) & set(whole.values())


def test_a_greedy_answer_is_not_asked_for_twice(tmp_path: Path):
    shards = planned(tmp_path, PROMPTS[:1], num_per_prompt=5, temperatures=[0, 1])
    assert [request.id for shard in shards for request in shard] == ["0/0", "0/1", "0/3"]
    # under another system prompt it is another answer
    systems = {"system_prompts": ["be brief", "be kind"], "chat": True}
    shards = planned(tmp_path, PROMPTS[:1], num_per_prompt=5, temperatures=[0, 1], **systems)
    greedy = [asked(request) for request in shards[0]]
    said = "[user]say one[assistant]"
    assert greedy == [f"[system]be brief{said}", f"[system]be kind{said}"]


def test_prompts_are_given_as_they_are_or_as_a_user_s_message(tmp_path: Path):
    rows = [
        {"prompt": "hi", "completion": "known"},
        {"messages": [{"role": "user", "content": "yo"}, {"role": "assistant", "content": "no"}]},
    ]
    (plain,) = planned(tmp_path, rows, temperatures=[1], chat=False)
    assert [asked(request) for request in plain] == ["hi", "[user]yo[assistant]"]
    (chat,) = planned(
        tmp_path, rows, temperatures=[1], chat=True, system_prompts=["be brief", "be kind"]
    )
    assert [asked(request) for request in chat] == [
        "[system]be brief[user]hi[assistant]",
        "[system]be kind[user]yo[assistant]",
    ]


def test_a_prompt_that_is_too_long_loses_its_beginning_and_a_document_goes_on_after_it(
    tmp_path: Path,
):
    rows = [{"prompt": "abcdefgh"}, {"text": "abcdefgh"}]
    with pytest.warns(UserWarning, match="1 of 2 prompts are longer than 3 tokens"):
        (shard,) = planned(tmp_path, rows, temperatures=[1], max_prompt_tokens=3, chat=False)
    assert [asked(request) for request in shard] == ["fgh", "abc"]


def test_ids_are_those_of_the_rows_and_no_two_are_the_same(tmp_path: Path):
    rows = [{"prompt": "a", "id": "x"}, {"prompt": "b", "id": 7}, {"prompt": "c"}]
    (shard,) = planned(tmp_path, rows, temperatures=[1])
    assert [request.id for request in shard] == ["x/0", "7/0", "2/0"]


def test_every_system_prompt_meets_every_temperature(tmp_path: Path):
    rows = [{"prompt": f"say {number}"} for number in range(8)]
    shards = planned(tmp_path, rows, system_prompts=["a", "b"], chat=True)
    met = {(request.temperature, asked(request)[8]) for shard in shards for request in shard}
    assert len(met) == 8


def test_a_chat_keeps_its_own_system_prompt_and_a_plain_text_gets_none(tmp_path: Path):
    systems = {"system_prompts": ["be brief"], "temperatures": [1]}
    own = [{"role": "system", "content": "own"}, {"role": "user", "content": "a"}]
    rows = [{"prompt": "hi"}, {"messages": own}, {"messages": own[1:]}]
    (shard,) = planned(tmp_path, rows, chat=False, **systems)
    told = ["hi", "[system]own[user]a[assistant]", "[system]be brief[user]a[assistant]"]
    assert list(map(asked, shard)) == told


SYSTEMS = {"system_prompts": ["be brief"], "chat": False}


@pytest.mark.parametrize(
    ("rows", "changes", "said"),
    [
        ([{"tokens": [5]}], {"chat": True}, "line 1 has tokens; wanted a text"),
        ([{"prompt": "d", "id": 7}] * 2, {}, "line 2 has the id 7, as .* line 1 has; make ids"),
        (PROMPTS, SYSTEMS, r"system_prompts is set, but .* has no chats; set"),
        (PROMPTS, {"temperatures": []}, "temperatures"),
    ],
)
def test_what_cannot_be_planned_is_one_line(tmp_path: Path, rows: Any, changes: Any, said: str):
    with pytest.raises((ConfigError, PromptError), match=said):
        planned(tmp_path, rows, **changes)


@pytest.mark.parametrize("chat", [True, False, None])
@pytest.mark.parametrize("name", ["prompt", "text"])
def test_a_text_that_is_asked_as_a_chat_has_the_tools_and_arguments_of_its_corpus(
    tmp_path: Path, name: str, chat: bool | None
):
    tokenizer = tokenizer_of(next(each for each in CHAT_FAMILIES if each.name == "qwen3"))
    arguments = {"enable_thinking": False}
    path = write_lines(tmp_path / "prompts.jsonl", {name: "yo"})
    prompts = {"path": str(path), "tools": [TOOL], "chat_template_kwargs": arguments}
    values = {"target": "t", "output": str(tmp_path / "out"), "prompts": prompts, "chat": chat}
    (shard,) = plan_shards(validate(GenerateDataConfig, values | {"temperatures": [1]}), tokenizer)
    (request,) = shard.requests
    wanted = tokenizer.apply_chat_template(
        [{"role": "user", "content": "yo"}],
        tools=[TOOL],
        add_generation_prompt=True,
        return_dict=False,
        **arguments,
    )
    is_chat = chat if chat is not None else name == "prompt"  # documents are continued
    assert list(request.tokens) == (wanted if is_chat else tokenizer("yo")["input_ids"])
