"""Tasks as choices, their examples as files to train on, and texts of their answers."""

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.make import task as task_command
from paceline.data import read_records
from paceline.data.prompts import CorpusConfig, Record
from paceline.data.tokens import thoughts_end
from paceline.errors import ConfigError
from paceline.tasks import (
    Arithmetic,
    Code,
    Math,
    Pairs,
    PlainText,
    Questions,
    Task,
    build_task,
    write_examples,
)
from paceline.tasks.base import ExamplePrompts, TaskExample, example_prompts
from support.texts import CHAT_FAMILIES, TOKENIZER_FAMILIES, tokenizer_of, wrapped


@pytest.mark.parametrize(
    ("chosen", "task"),
    [
        ({"task": "arithmetic", "max_terms": 4}, Arithmetic(max_terms=4)),
        (
            {"task": "pairs", "corpus": "a.jsonl", "metric": "chrf"},
            Pairs(corpus=CorpusConfig(path="a.jsonl"), metric="chrf"),
        ),
        ("code", Code()),
    ],
)
def test_a_task_is_built_from_its_name_or_its_values(chosen: Any, task: Task):
    assert build_task(chosen) == task


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        ("poetry", ["poetry", "arithmetic", "code", "text", "pairs"]),
        ("pairs", ["corpus", "missing"]),
        ({"task": "summarization", "corpus": "a", "metric": "bleu"}, ["metric", "rougeL", "bleu"]),
        ({"task": "pairs", "corpus": "a.jsonl", "metric": "bleu"}, ["metric", "chrf"]),
        ({"task": "translation", "corpus": "a", "tokenize": "words"}, ["tokenize", "13a"]),
        ({"task": "arithmetic", "min_terms": 9}, ["min_terms is 9, above max_terms 5"]),
        ({"task": "arithmetic", "terms": 3}, ["terms"]),
        ({}, ["task"]),
    ],
)
def test_a_task_that_does_not_exist_or_is_wrong_is_one_line(chosen: Any, words: list[str]):
    with pytest.raises(ConfigError) as caught:
        build_task(chosen)
    message = str(caught.value)
    assert [word for word in words if word not in message] == []


def questions(folder: Path, *, chat: bool) -> Questions:
    """Nine questions to train on, and another to test."""
    rows = [json.dumps({"prompt": f"Which is {n}?", "completion": f"{n}."}) for n in range(10)]
    (folder / "rows.jsonl").write_text("\n".join(rows[:9]))
    (folder / "test.jsonl").write_text(rows[9])
    test, train = (CorpusConfig(path=str(folder / f"{name}.jsonl")) for name in ("test", "rows"))
    return Questions(corpus=test, train_corpus=train, chat=chat)


@pytest.mark.parametrize("chat", [None, True, False], ids=["sums", "chat", "prompt"])
def test_a_file_of_examples_reads_back_to_the_same_records(chat: bool | None, tmp_path: Path):
    task = Arithmetic() if chat is None else questions(tmp_path, chat=chat)
    path = tmp_path / "deep" / "train.jsonl"
    write_examples(task, "train", 5, path, seed=3)
    examples = task.examples("train", 5, 3)
    read = read_records(path)
    assert len(read) == 5
    for found, example in zip(read, examples, strict=True):
        wanted = example.record
        assert found.kind == wanted.kind
        assert (found.text, found.completion) == (wanted.text, wanted.completion)
        assert found.messages == wanted.messages
    pairs = Pairs(corpus=CorpusConfig(path=str(path)), metric="rougeL")
    assert len(pairs.examples("test", 5)) == 5


def test_every_kind_of_record_is_written_as_it_was_read(tmp_path: Path):
    rows = [
        {"text": "a document"},
        {"tokens": [1, 2]},
        {"prompt": "asked"},
        {"prompt": [3], "completion": [4]},
        {"messages": [{"role": "user", "content": "hällo"}]},
    ]
    source = tmp_path / "a.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    copy = tmp_path / "b.jsonl"
    write_examples(PlainText(corpus=CorpusConfig(path=str(source))), "test", 5, copy)
    lines = copy.read_text().splitlines()
    assert sorted(lines) == sorted(map(json.dumps, rows))


def test_examples_that_repeat_are_counted_and_said(tmp_path: Path, capsys: Any):
    """Sums of two digits: 200 expressions, of which the training split has at most 9 in 10."""
    path = tmp_path / "train.jsonl"
    terms = ["min_terms=2", "max_terms=2", "max_digits=1"]
    task_command("arithmetic", path, count=1000, overrides=terms)
    lines = path.read_text().splitlines()
    num_distinct = len(set(lines))
    assert len(lines) == 1000
    assert num_distinct < 200
    said = capsys.readouterr()
    assert f"1000 examples, {num_distinct} distinct" in said.out


def test_a_task_without_corpus_figures_adds_the_version_of_its_scorer_to_a_row():
    assert Arithmetic().corpus_scores([], []) == {}
    found = Arithmetic().versions()["reasoning-gym"]
    assert found == importlib.metadata.version("reasoning-gym")


def test_the_command_writes_a_task_of_rows(tmp_path: Path, capsys: Any):
    """A text of three columns, two of them nested, and one answer out of two."""
    row = {"text": {"a": "Paris.", "b": "Where?"}, "answers": ["Paris", "here"], "id": "x"}
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps(row) + "\n")
    settings = [
        f"corpus.path={source}",
        "corpus.prompt_field=text.b",
        "corpus.completion_field=answers",
        "prompt='{text.a} {source}'",
    ]
    task_command("questions", out, split="test", count=1, overrides=settings)
    assert json.loads(out.read_text()) == {"prompt": "Paris. Where?", "completion": " Paris"}
    assert capsys.readouterr().out.endswith("out.jsonl: 1 examples\n")


PROMPT, ANSWER = "def f(x):\n", "    y = x\n    return y"


class _Compiles:
    task, metric = "compiles", "compiles"

    def score(self, example: TaskExample, answer: str) -> float:
        try:
            compile(example.record.text + answer, "answer", "exec")
        except SyntaxError:
            return 0.0
        return 1.0


@pytest.mark.parametrize(
    "family", [name for name in TOKENIZER_FAMILIES if name not in ("unigram", "pieces of words")]
)
def test_a_body_of_python_keeps_its_first_space(family: str):
    plain = TOKENIZER_FAMILIES[family]()
    first, whole = plain.encode(PROMPT).ids, plain.encode(PROMPT + ANSWER).ids
    answer = whole[len(first) :]
    assert plain.decode(first + answer).lstrip() == PROMPT + ANSWER
    example: Any = TaskExample(Record("1", "prompt", text=PROMPT), "")
    task: Any = _Compiles()
    found = ExamplePrompts(task, wrapped(plain), [example], [first])
    assert found.answer(0, answer) == found.answer(0, ANSWER) == ("", ANSWER)
    assert found.score(0, answer) == found.score(0, ANSWER) == 1.0
    if family.startswith("a space"):  # what the same tokens are alone
        assert found.score(0, plain.decode(answer)) == 0.0


def test_an_answer_of_a_decoder_with_an_encoder_begins_a_text():
    plain = TOKENIZER_FAMILIES["unigram"]()
    prompt, answer = plain.encode("the cat").ids, plain.encode("the cat sat").ids
    task: Any = _Compiles()
    found = ExamplePrompts(task, wrapped(plain), [], [prompt], encoder=True)
    assert found.answer(0, answer) == ("", "the cat sat")


HARMONY = "<|channel|>analysis<|message|>{}<|end|><|start|>assistant<|channel|>final<|message|>{}"


# A family, what it writes behind its prompt, and the arguments of its template. `*` is a thought
# with a wrong answer, `+` the right answer; without `+` there is none.
@pytest.mark.parametrize(
    ("name", "written", "arguments"),
    [
        ("qwen3", "<think>\n*\n</think>\n\n+<|im_end|>", {}),
        ("qwen3", "<think>\n* and", {}),
        ("qwen3", "+<|im_end|>", {"enable_thinking": False}),
        ("qwq", "*\n</think>\n\n+<|im_end|>", {}),
        ("qwq", "* and", {}),
        ("deepseek_r1", "*</think>no *</think>+", {}),
        ("gpt_oss", HARMONY.format("*", "+<|return|>"), {}),
        ("gpt_oss", "<|channel|>analysis<|message|>*<|end|><|start|>assistant", {}),
        ("llama3", "<think>*</think>+<|eot_id|>", {}),
        ("llama3", "+<|eot_id|>", {}),
    ],
)
def test_what_a_model_thinks_is_not_scored(
    name: str, written: str, arguments: dict[str, Any], tmp_path: Path
):
    tokenizer = tokenizer_of(next(one for one in CHAT_FAMILIES if one.name == name))
    (tmp_path / "a.jsonl").write_text('{"prompt": "2 + 4?", "completion": "#### 6"}\n')
    corpus = CorpusConfig(path=str(tmp_path / "a.jsonl"), chat_template_kwargs=arguments)
    found = example_prompts(Math(corpus=corpus, chat=True), tokenizer, 1)
    text = written.replace("*", "#### 5").replace("+", "so #### 6")
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    thoughts, scored = found.answer(0, tokens)
    assert scored.strip() == "so #### 6" * ("+" in written)
    assert ("#### 5" in thoughts) is ("*" in written)
    assert found.score(0, tokens) == found.score(0, text) == float("+" in written)


def test_thoughts_are_marked_by_whatever_tag_the_prompt_opens():
    tokenizer = tokenizer_of(next(one for one in CHAT_FAMILIES if one.name == "qwq"))
    tokenizer.chat_template = str(tokenizer.chat_template).replace("<think>", "◁think▷")
    prompt = "<|im_start|>assistant\n◁think▷\n"
    assert thoughts_end("5\n◁/think▷6", prompt, tokenizer) == len("5\n◁/think▷")
    assert thoughts_end("5 or", prompt, tokenizer) == len("5 or")
    assert thoughts_end("6", "<|im_start|>assistant\n", tokenizer) == 0
