"""Docstrings and pairs of text: what is kept, which split it is in, how it is scored."""

import json
from pathlib import Path

import pytest

from paceline.data import python_docs
from paceline.data.python_docs import is_held_out, write_python_docs
from paceline.errors import UsageError
from paceline.tasks import Docstrings, Split, TaskExample, docstrings

BODY = "It reads the file from its beginning to its end, and does so once for every caller it has."
SPLITS: tuple[Split, Split] = ("train", "test")


def module(*texts: str) -> str:
    return "\n".join(
        f"def f{number}():\n    {json.dumps(text)}\n" for number, text in enumerate(texts)
    )


def text(number: int) -> str:
    return f"Return what number {number} stands for.\n\n{BODY} Number {number}."


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A standard library of a hundred docstrings, of which some are held out."""
    folder = tmp_path / "library"
    (folder / "test").mkdir(parents=True)
    (folder / "one.py").write_text(module(*map(text, range(100))))
    (folder / "test" / "two.py").write_text(module(text(1000)))
    for place in (docstrings, python_docs):
        monkeypatch.setattr(place, "standard_library", lambda: folder)
    return folder


def everything(task: Docstrings, split: Split) -> list[TaskExample]:
    """All that there are: their number is in the refusal of more."""
    with pytest.raises(UsageError) as caught:
        task.examples(split, 10**6)
    count = int(str(caught.value).split(" has ")[1].split()[0])
    return task.examples(split, count) if count else []


def references(task: Docstrings, *splits: Split) -> set[str]:
    return {example.reference for split in splits for example in everything(task, split)}


def test_every_docstring_of_the_library_but_those_of_its_tests_is_in_one_split(library: Path):
    held_out = {n for n in range(100) if is_held_out(text(n))}
    assert 2 <= len(held_out) <= 20
    sentence = "Return what number {} stands for."
    assert references(Docstrings(), "test") == {sentence.format(n) for n in held_out}
    assert references(Docstrings(), "train") == {
        sentence.format(n) for n in set(range(100)) - held_out
    }


def test_what_is_tested_is_in_no_training_document_of_the_corpus(library: Path, tmp_path: Path):
    trained = write_python_docs(tmp_path / "corpus").train.read_text(encoding="utf-8")
    assert BODY in trained
    task = Docstrings(chat=False)
    for example in everything(task, "test"):
        assert json.dumps(example.reference)[1:-1] not in trained
    for example in everything(task, "train"):
        assert json.dumps(example.reference)[1:-1] in trained


@pytest.mark.parametrize(
    ("docstring", "sentence"),
    [
        (f"Return the  name.  \n\n{BODY}", None),  # 16 characters
        (f"Return the name it has.\n\n{BODY}", "Return the name it has."),
        (f"Return the name that\nit has got.\n\n{BODY}", "Return the name that it has got."),
        (f"{'x' * 99}.\n\n{BODY}", f"{'x' * 99}."),
        (f"{'x' * 100}.\n\n{BODY}", None),
        (f"Return the name it has\n\n{BODY}", None),
        (f"Return the name. It has one.\n\n{BODY}", None),
        (f"Has it a name? It has one.\n\n{BODY}", None),
        ("Return the name it has.", None),
        (f"Return the name it has.\n\n{'x' * 79}", None),
        (f"Return the name it has.\n\n{'x' * 80}", "Return the name it has."),
        (f"Return the name it has.\n\n{'x' * 400}\n\n", "Return the name it has."),
        (f"Return the name it has.\n\n{'x' * 401}", None),
        ("Return the name \ud800 it has.\n\n" + BODY, None),
    ],
)
def test_one_sentence_and_a_body_of_some_length_make_a_pair(
    library: Path, docstring: str, sentence: str | None
):
    (library / "one.py").write_text(module(docstring))
    assert references(Docstrings(), *SPLITS) == ({sentence} if sentence else set())


def test_a_body_that_two_docstrings_share_is_one_example_or_none(library: Path):
    def twins(held_out: tuple[bool, bool]) -> tuple[str, str]:
        found = (f"Return the twin of number {n}.\n\n{BODY}" for n in range(1000))
        first = next(t for t in found if is_held_out(t) == held_out[0])
        return first, next(t for t in found if is_held_out(t) == held_out[1])

    for held_out in ((True, True), (False, False)):
        pair = twins(held_out)
        (library / "one.py").write_text(module(*pair))
        docstrings._pairs.cache_clear()
        assert references(Docstrings(), *SPLITS) == {pair[0].partition("\n")[0]}
    for held_out in ((True, False), (False, True)):
        (library / "one.py").write_text(module(*twins(held_out)))
        docstrings._pairs.cache_clear()
        assert references(Docstrings(), *SPLITS) == set()


def test_a_chat_asks_for_one_sentence_and_is_answered_by_it(library: Path):
    record = Docstrings().examples("test", 1)[0].record
    question, answer = record.messages
    assert record.kind == "chat"
    assert question["role"] == "user"
    head, _, body = question["content"].partition("\n\n")
    assert head == (
        "Summarize what the following Python documentation describes, in one short sentence."
    )
    number = body.split()[-1]
    assert body == f"{BODY} Number {number}"
    assert answer == {
        "role": "assistant",
        "content": f"Return what number {number[:-1]} stands for.",
    }


def test_a_plain_prompt_is_continued_by_the_sentence(library: Path):
    example = Docstrings(chat=False).examples("test", 1)[0]
    assert example.record.kind == "prompt"
    assert str(example.record.text).startswith(BODY)
    assert str(example.record.text).endswith("\n\nIn one sentence:")
    assert example.record.completion == f" {example.reference}"


def test_the_first_line_that_is_not_blank_is_scored(library: Path):
    example = Docstrings().examples("test", 1)[0]
    for task in (Docstrings(), Docstrings(metric="rouge1"), Docstrings(metric="rouge2")):
        assert task.metric in {"rouge1", "rouge2", "rougeL"}
        assert task.score(example, f"\n  \n {example.reference} \nIt is a number.") == 1.0
        assert task.score(example, "") == 0.0
        assert task.score(example, f"xyz\n{example.reference}") == 0.0


def test_more_than_there_are_is_refused_with_their_number(library: Path):
    held_out = sum(is_held_out(text(n)) for n in range(100))
    with pytest.raises(UsageError, match=f"has {held_out} distinct examples, 99 were requested"):
        Docstrings().examples("test", 99)


@pytest.mark.slow
def test_the_real_library_has_enough_for_a_benchmark():
    task = Docstrings(chat=False)
    train, test = task.examples("train", 1000), task.examples("test", 64)
    bodies = [{str(example.record.text) for example in split} for split in (train, test)]
    assert not bodies[0] & bodies[1]
    assert len(bodies[0]) == 1000
    for example in test:
        assert 20 <= len(example.reference) <= 100
        body = str(example.record.text).removesuffix("\n\nIn one sentence:")
        assert 80 <= len(body) <= 400
