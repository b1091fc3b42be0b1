"""Pairs of a dictionary and of docstrings: what is kept of an entry, and which split it is in."""

import json
from collections import Counter
from pathlib import Path

import pytest

from paceline.data.python_docs import is_held_out
from paceline.errors import UsageError
from paceline.tasks.docstrings import read_dictionary, write_pairs

LINES = [
    "# a comment :: not an entry",
    "Haus {n}; Heim {n} | ein altes Haus :: house; home | an old house",
    "voreingenommen {adj} [psych.] | Er ist (sehr) voreingenommen. :: biased | He is prejudiced.",
    "zwei | drei Teile :: two parts",
    *(f"Das ist der Satz {number}. :: This is sentence {number}." for number in range(60)),
]


@pytest.fixture
def dictionary(tmp_path: Path) -> Path:
    path = tmp_path / "de-en"
    path.write_text("\n".join(LINES) + "\n", "utf-8")
    return path


def test_entries_lose_notes_and_synonyms_and_single_words(dictionary: Path):
    assert list(read_dictionary(dictionary))[:3] == [
        ("ein altes Haus", "an old house"),
        ("Er ist voreingenommen.", "He is prejudiced."),
        ("Das ist der Satz 0.", "This is sentence 0."),
    ]


def test_test_pairs_are_in_no_training_file(dictionary: Path, tmp_path: Path):
    files = write_pairs(tmp_path / "pairs", dictionary)
    rows = {
        name: [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        for name, path in files._asdict().items()
    }
    trained = {row["prompt"]: row["completion"] for row in rows["pairs_train"]}
    for name in ("translation", "summaries"):
        tested = {row["prompt"] for row in rows[f"{name}_test"]}
        assert tested
        assert all(map(is_held_out, tested))
        assert not tested & set(trained)
        assert {row["prompt"] for row in rows[f"{name}_train"]} <= set(trained)
    assert trained["translate German to English: ein altes Haus"] == "an old house"
    times = Counter(row["prompt"] for row in rows["pairs_train"])
    assert times["translate German to English: ein altes Haus"] == 1
    assert {times[row["prompt"]] for row in rows["translation_train"]} == {3}
    assert all(row["prompt"].startswith("summarize: ") for row in rows["summaries_test"])


def test_a_document_is_a_name_and_the_beginning_of_a_docstring(dictionary: Path, tmp_path: Path):
    files = write_pairs(tmp_path / "pairs", dictionary)
    texts = (files.summaries_train.read_text("utf-8"), files.summaries_test.read_text("utf-8"))
    lines = "".join(texts).splitlines()
    rows = {row["completion"]: row["prompt"] for row in map(json.loads, lines)}
    # json.JSONEncoder.iterencode, whose docstring has an example after its first sentence
    prompt = rows["Encode the given object and yield each string representation as available."]
    assert prompt == (
        "summarize: JSONEncoder.iterencode: For example:: "
        "for chunk in JSONEncoder().iterencode(bigobject): mysocket.write(chunk)"
    )
    documents = [prompt.split(": ", 2)[2] for prompt in rows.values()]
    assert 190 <= max(map(len, documents)) <= 200
    assert len(set(documents)) == len(documents), "or both splits could have the same one"


def test_a_file_that_is_no_dictionary_is_one_line(tmp_path: Path):
    with pytest.raises(UsageError, match=r"cannot be read .*; install Debian's trans-de-en"):
        list(read_dictionary(tmp_path / "missing"))
    (tmp_path / "text").write_text("no entries\n")
    with pytest.raises(UsageError, match="has no lines of the form"):
        list(read_dictionary(tmp_path / "text"))
