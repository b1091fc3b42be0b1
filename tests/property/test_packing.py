"""Packed text: every token of every document once an epoch, in order; it resumes at any row."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data.prompts import CorpusConfig
from paceline.data.sources import PackedText, Shard
from paceline.data.tokens import last_turn
from paceline.errors import PromptError
from support.models import tiny_tokenizer

EOS = 1
TOKENIZER = tiny_tokenizer()
documents = st.lists(st.lists(st.integers(3, 60), min_size=1, max_size=9), min_size=1, max_size=12)


class Corpus:
    """Documents of tokens in a file, and streams over it."""

    def __init__(self, folder: str, texts: list[list[int]]) -> None:
        self.path = Path(folder) / "corpus.jsonl"
        self.path.write_text("".join(json.dumps({"tokens": text}) + "\n" for text in texts))

    def stream(self, length: int, **changes: Any) -> PackedText:
        values = {"batch_size": 1, "seed": 3, "block_size": 4} | changes
        return PackedText(CorpusConfig(path=str(self.path)), TOKENIZER, length, **values)


def rows(stream: PackedText, count: int) -> list[list[int]]:
    return [list(row.tokens) for _ in range(count) for row in stream.next_batch().rows]


@settings(max_examples=60, deadline=None)
@given(documents, st.integers(2, 11))
def test_an_epoch_holds_every_document_once_whole_and_ended(texts: list[list[int]], length: int):
    with TemporaryDirectory() as folder:
        total = sum(len(text) + 1 for text in texts)
        got = rows(Corpus(folder, texts).stream(length), -(-2 * total // length))
    assert {len(row) for row in got} == {length}
    joined = [token for row in got for token in row]
    assert split(joined[:total]) == sorted(texts)
    assert split(joined[total : 2 * total]) == sorted(texts)


def split(tokens: list[int]) -> list[list[int]]:
    """Documents, in an order that shuffling does not change."""
    texts: list[list[int]] = [[]]
    for token in tokens:
        if token == EOS:
            texts.append([])
        else:
            texts[-1].append(token)
    assert texts.pop() == [], "the last document has ended"
    return sorted(texts)


@settings(max_examples=40, deadline=None)
@given(documents, st.integers(2, 7), st.integers(0, 20), st.booleans())
def test_every_row_can_be_gone_on_from(
    texts: list[list[int]], length: int, start: int, marked: bool
):
    with TemporaryDirectory() as folder:
        corpus = Corpus(folder, texts)
        marks = Path(folder) / "marks.jsonl" if marked else None
        whole = rows(corpus.stream(length, marks=marks), 25)
        again = corpus.stream(length, marks=marks)
        again.num_drawn = start
        assert rows(again, 5) == whole[start : start + 5]
        # and back, as a run is whose last steps were lost
        again.num_drawn = start // 2
        assert rows(again, 5) == whole[start // 2 : start // 2 + 5]


@settings(max_examples=20, deadline=None)
@given(documents, st.integers(2, 7))
def test_processes_share_the_rows_of_one(texts: list[list[int]], length: int):
    with TemporaryDirectory() as folder:
        corpus = Corpus(folder, texts)
        whole = rows(corpus.stream(length, batch_size=4), 3)
        parts = [
            rows(corpus.stream(length, batch_size=4, shard=Shard(rank, 2)), 3) for rank in (0, 1)
        ]
    for step in range(3):
        mine = [part[2 * step : 2 * step + 2] for part in parts]
        assert [row for pair in zip(*mine, strict=True) for row in pair] == whole[
            4 * step : 4 * step + 4
        ]


def test_a_resumed_stream_reads_one_block_again_and_not_all(tmp_path: Path):
    texts = [[token] for token in range(3, 43)]
    corpus = Corpus(str(tmp_path), texts)
    marks = tmp_path / "marks.jsonl"
    rows(corpus.stream(2, marks=marks), 40)
    again = corpus.stream(2, marks=marks)
    again.num_drawn = 30
    with patch("paceline.data.sources.last_turn", side_effect=last_turn) as read:
        rows(again, 1)
    assert read.call_count <= 4


def test_documents_are_shuffled_anew_every_epoch(tmp_path: Path):
    texts = [[token, token] for token in range(3, 23)]
    got = rows(Corpus(str(tmp_path), texts).stream(3, block_size=20), 40)
    first, second = (sorted(got[start : start + 20]) for start in (0, 20))
    assert first == second == [[*text, EOS] for text in texts]
    assert got[:20] != got[20:] != sorted(got[20:])


def test_a_chat_that_ends_with_its_user_is_refused_and_no_end_is_taught(tmp_path: Path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    asked = [{"role": "user", "content": "hi"}]
    answered = [*asked, {"role": "assistant", "content": "yo"}]
    path = tmp_path / "chats.jsonl"
    whole = [*tokenizer("[user]hi[assistant]yo")["input_ids"], EOS]

    def packed(messages: list[dict[str, str]]) -> list[int]:
        path.write_text(json.dumps({"messages": messages}) + "\n")
        corpus = CorpusConfig(path=str(path))
        return rows(PackedText(corpus, tokenizer, len(whole), batch_size=1, seed=0), 1)[0]

    assert packed(answered) == whole
    with pytest.raises(PromptError, match="line 1 is a chat without a last answer; add it"):
        packed(asked)
