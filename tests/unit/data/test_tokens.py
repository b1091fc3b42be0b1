"""Completions have the tokens that `tokenizers` gives to prompt and completion together."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from paceline.data import read_prompts, read_records
from paceline.data.prompts import Record
from paceline.data.tokens import asked, last_turn, truncated
from paceline.errors import PromptError
from paceline.models.token_text import following_tokens
from support.data import write_lines
from support.models import tiny_tokenizer
from support.texts import TOKENIZER_FAMILIES, wrapped

BOS, EOS = 0, 1


def test_a_document_keeps_its_head_and_a_prompt_its_tail(tmp_path: Path, tokenizer: Any):
    rows = {"text": "abcdef"}, {"prompt": "abcdef"}, {"tokens": [7, 8]}
    path = write_lines(tmp_path / "a.jsonl", *rows)
    with pytest.warns(UserWarning, match="1 of 3 prompts are longer than 4 tokens"):
        prompts = read_prompts(path, tokenizer, max_tokens=4)
    assert [tokenizer.decode(prompt) for prompt in prompts[:2]] == ["abcd", "cdef"]
    assert prompts[2] == [7, 8]


def test_a_token_that_the_tokenizer_does_not_have_is_refused(tmp_path: Path, tokenizer: Any):
    path = write_lines(tmp_path / "a.jsonl", {"tokens": [1, 266]})
    with pytest.raises(PromptError, match="has the token 266, but the tokenizer's last is 265"):
        read_prompts(path, tokenizer)


def test_given_tokens_may_be_any_of_a_vocabulary_with_gaps(tmp_path: Path):
    vocabulary = {"a": 0, "b": 1, "z": 9}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocabulary)))
    path = write_lines(tmp_path / "a.jsonl", {"tokens": [1, max(vocabulary.values())]})
    assert read_prompts(path, tokenizer) == [[1, 9]]


def test_given_tokens_are_taken_without_asking_for_the_vocabulary(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
):
    path = write_lines(tmp_path / "a.jsonl", *[{"tokens": [1, 265]}] * 3)
    # it takes 25 ms for 49,152 tokens, and a run reads thousands of texts
    monkeypatch.setattr(type(tokenizer), "get_vocab", lambda _: pytest.fail("asked"))
    assert read_prompts(path, tokenizer) == [[1, 265]] * 3


def test_a_template_that_rewrites_earlier_turns_still_gives_the_answer(tmp_path: Path):
    chatty = tiny_tokenizer()
    chatty.chat_template = "{{ messages | length }}{{ messages[-1]['content'] }}"
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    record = read_records(write_lines(tmp_path / "a.jsonl", {"messages": messages}))[0]
    prompt, completion, _ = last_turn(record, chatty)
    assert (chatty.decode(prompt), chatty.decode(completion)) == ("1hi", "yo")


@pytest.mark.parametrize("chat", [True, False, None])
@pytest.mark.parametrize("template", [True, False])
def test_texts_are_asked_as_an_engine_would(tokenizer: Any, chat: bool | None, template: bool):
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}" * template
    rows = [
        Record("a", "prompt", "why", "so"),
        Record("b", "prompt", [5, 6], [7]),
        Record("c", "document", "a text"),
        Record("d", "chat", messages=({"role": "user", "content": "hi"},)),
    ]
    if chat:
        with pytest.raises(PromptError, match="b has tokens"):
            asked(rows, tokenizer, chat)
        rows = [row for row in rows if row.where != "b"]
    found = asked(rows, tokenizer, chat)
    kinds = {row.where: row.kind == "chat" for row in found}
    wraps = chat or (chat is None and template)
    expected = {"a": wraps, "b": False, "c": bool(chat), "d": True}
    assert kinds == {row.where: expected[row.where] for row in rows}
    if wraps:
        assert [m["content"] for m in found[0].messages] == ["why", "so"]


def test_messages_without_a_template_or_against_it_are_refused(tmp_path: Path):
    chatty = tiny_tokenizer()
    record = read_records(
        write_lines(tmp_path / "a.jsonl", {"messages": [{"role": "user", "content": "hi"}]})
    )[0]
    with pytest.raises(PromptError, match="line 1 is a chat, but the tokenizer has no chat"):
        last_turn(record, chatty)
    chatty.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(PromptError, match=r"line 1 does not fit the chat template: roles must"):
        last_turn(record, chatty)


@pytest.mark.parametrize(
    ("tokens", "limit", "kept"),
    [
        ([10, 11, 12, 13, EOS], 3, [10, 11, EOS]),
        ([10, 11, 12, EOS, BOS], 4, [10, 11, EOS, BOS]),  # as mBART: end of text and language
        ([10, 11, 12, 13, 14], 3, [10, 11, 12]),
        ([10, EOS], 2, [10, EOS]),
        ([10, 11, EOS, BOS], 1, [EOS]),
    ],
)
def test_a_truncated_source_keeps_what_the_tokenizer_appends(
    tokens: list[int], limit: int, kept: list[int]
):
    record = Record("line 1", "prompt")
    assert truncated(tokens, limit, record, tiny_tokenizer(), encoder=True) == kept


def with_bos(*, template: str | None = None) -> PreTrainedTokenizerFast:
    """A tokenizer that puts its BOS in front of a text."""
    tokenizer = tiny_tokenizer()
    bos = tokenizer.bos_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, BOS)]
    )
    tokenizer.chat_template = template
    return tokenizer


def test_a_prompt_that_is_cut_keeps_the_bos_that_its_tokenizer_adds(tmp_path: Path):
    tokenizer = with_bos()
    path = write_lines(tmp_path / "a.jsonl", {"prompt": "abcdef"}, {"text": "abcdef"})
    with pytest.warns(UserWarning, match=r"raise max_prompt_tokens .* \(the longest has 7\)"):
        prompts = read_prompts(path, tokenizer, max_tokens=3)
    assert [tokenizer.decode(prompt) for prompt in prompts] == ["<bos>ef", "<bos>ab"]
    with pytest.warns(UserWarning, match="1 of 2 prompts"):
        assert [len(prompt) for prompt in read_prompts(path, tokenizer, max_tokens=1)] == [1, 1]


@pytest.mark.parametrize(
    ("template", "cut"),
    [
        ("{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}", "<bos>ef"),
        # a token in front of every turn, such as SmolLM2's <|im_start|>, is no start of a text
        ("{% for m in messages %}{{ bos_token + m.content }}{% endfor %}", "def"),
    ],
)
@pytest.mark.filterwarnings("ignore:1 of 1 prompts")
def test_a_chat_that_is_cut_keeps_the_bos_that_starts_the_text(
    tmp_path: Path, template: str, cut: str
):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    messages = [{"role": "user", "content": text} for text in ("abc", "def")]
    path = write_lines(tmp_path / "a.jsonl", {"messages": messages})
    assert tokenizer.decode(read_prompts(path, tokenizer, max_tokens=3)[0]) == cut


def test_a_text_has_one_bos(tmp_path: Path):
    tokenizer = with_bos(template="{{ bos_token }}{{ messages[0].content }}")
    messages = [{"role": "user", "content": "hi"}]
    path = write_lines(tmp_path / "a.jsonl", {"prompt": "<bos>hi"}, {"prompt": "hi"})
    chat = write_lines(tmp_path / "b.jsonl", {"messages": messages})
    (prompt,) = read_prompts(chat, tokenizer)
    assert tokenizer.decode(prompt) == "<bos>hi"
    assert read_prompts(path, tokenizer) == [prompt, prompt]


@pytest.mark.parametrize(
    ("completion", "tokens"),
    [
        ("b <eos> c", "b <eos> c"),  # spelled, so not its end
        ("b<eos>\n", "b<eos>"),
        ("b<pad>\n<eos>", "b<pad>"),  # the first stop token of the model
        ("b\n", "b\n"),
    ],
)
def test_a_completion_ends_with_the_stop_token_that_ends_it(completion: str, tokens: str):
    tokenizer = tiny_tokenizer()
    record = Record("row", "prompt", text="a", completion=completion)
    found = last_turn(record, tokenizer, eos_token_ids=(2, EOS)).completion
    assert tokenizer.decode(found) == tokens


def test_tokens_end_with_the_first_end_of_text(tokenizer: Any):
    record = Record("row", "prompt", text=[5], completion=[7, EOS, EOS, 8])
    assert last_turn(record, tokenizer)[:2] == ([5], [7, EOS])


@pytest.mark.parametrize("family", TOKENIZER_FAMILIES)
@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        *(("2+2=", "4 cats"), ("the cat", " sat"), ("the cat ", "sat"), ("the c", "at sat")),
        *(("x\n", "\ny"), ("e", "\u0301 b"), ("don", "'t"), ("🙂", "👍🏽"), ("a", "\ufffd b")),
    ],
)
def test_a_completion_has_the_tokens_of_the_whole_behind_those_of_the_prompt(
    family: str, prompt: str, text: str
):
    plain = TOKENIZER_FAMILIES[family]()
    own, whole, alone = (plain.encode(part).ids for part in (prompt, prompt + text, text))
    found = following_tokens(prompt, own, text, wrapped(plain))
    crossed = whole[: len(own)] != own  # a token crosses the border
    assert found == (alone if crossed else whole[len(own) :])


def test_text_behind_tokens_gets_no_space_of_its_own():
    plain = TOKENIZER_FAMILIES["a space in front of the first word"]()
    prompt = plain.encode("f(x):").ids
    record = Record("row", "prompt", text=prompt, completion="y")
    completion = last_turn(record, wrapped(plain)).completion
    assert completion == plain.encode("f(x):y").ids[len(prompt) :] != plain.encode("y").ids
