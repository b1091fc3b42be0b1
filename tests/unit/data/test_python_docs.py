"""Python's own documentation as a corpus."""

import json

import pytest

from paceline.data.python_docs import write_python_docs

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_python_docs(tmp_path_factory.mktemp("docs"))


def _texts(path):
    return [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]


def test_no_document_is_both_trained_on_and_held_out(files):
    train, held_out = set(_texts(files.train)), set(_texts(files.held_out))
    assert train
    assert held_out
    assert not train & held_out


def test_prompts_are_held_out_documents(files):
    assert set(_texts(files.prompts)) < set(_texts(files.held_out))


def test_beginnings_are_those_of_training_documents_as_long_as_a_prompt_is(files):
    train = _texts(files.train)
    beginnings = _texts(files.beginnings)
    assert all(len(beginning) >= 300 for beginning in beginnings)
    assert len(beginnings) == sum(len(text) >= 300 for text in train)
    starts = {text[:400] for text in train}
    assert all(beginning in starts for beginning in beginnings)


def test_there_is_enough_text_for_the_demo(files):
    assert sum(map(len, _texts(files.train))) > 1_000_000
    assert len(_texts(files.prompts)) >= 64
    assert len(_texts(files.beginnings)) >= 1000


def test_writing_twice_gives_the_same_files(files, tmp_path):
    again = write_python_docs(tmp_path)
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in files]
