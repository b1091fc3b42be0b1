"""Text that the target writes a round at a time: whole, scored, and each used so many times."""

from collections import Counter

import pytest
import torch

from paceline.core.sampling import SamplingParams
from paceline.data.collate import TokenRow
from paceline.data.replay import Rounds, TargetRounds
from paceline.data.sources import (
    ExampleStream,
    MixedText,
    Origins,
    SampledText,
    Shard,
    TextBatch,
)
from paceline.models.contract import Texts
from paceline.models.hf.base import HfModel, Sessions
from support.models import tiny_model

_LENGTHS = (2, 5, 3, 7, 4, 6, 2, 3)


def examples() -> list[TokenRow]:
    """Eight prompts of unequal lengths, each with a first token of its own."""
    texts = [[index + 3, *range(20, 20 + length)] for index, length in enumerate(_LENGTHS)]
    return [TokenRow(text, len(text), prompt_length=len(text)) for text in texts]


def rounds(
    model: HfModel | None = None,
    *,
    batch_size: int = 2,
    shard: Shard | None = None,
    eos_token_ids: tuple[int, ...] = (),
    origins: Origins | None = None,
    **settings: int,
) -> TargetRounds:
    shard = shard or Shard()
    stream = ExampleStream(examples(), batch_size, seed=0, shard=shard)
    return TargetRounds(
        stream if origins is None else origins.stream,
        model or tiny_model(),
        Rounds.model_validate({"rows": 4, **settings}),
        sampling=SamplingParams(),
        max_new_tokens=6,
        eos_token_ids=eos_token_ids,
        shard=shard,
        origins=origins,
    )


def texts(batches: list[TextBatch]) -> list[tuple[int, ...]]:
    return [tuple(row.tokens) for batch in batches for row in batch.rows]


@pytest.mark.parametrize(
    ("architecture", "train_prompts", "sessions"),
    [
        ("llama", False, "batch"),
        ("llama", True, "rows"),
        ("llama", True, "recurrent"),
        ("gpt2", True, "batch"),
        ("gpt2", False, "rows"),
        ("gpt2", False, "recurrent"),
    ],
)
def test_the_states_are_those_of_a_pass_over_the_whole_text(
    architecture: str, train_prompts: bool, sessions: Sessions
):
    model = tiny_model(architecture)
    model.sessions = sessions
    source = rounds(model, rows=8, train_prompts=train_prompts, eos_token_ids=tuple(range(30, 40)))
    lengths = set()
    for row in (row for _ in range(4) for row in source.next_batch().rows):
        lengths.add(len(row.tokens))
        assert row.target_hidden_TD is not None
        with torch.no_grad():
            wanted_TD = model.hidden(Texts(torch.tensor([list(row.tokens)])))[
                0, row.trained_from - 1 : -1
            ]
        torch.testing.assert_close(row.target_hidden_TD, wanted_TD, rtol=1e-3, atol=1e-3)
        prompt = next(e for e in examples() if e.tokens[0] == row.tokens[0])
        assert row.trained_from == (1 if train_prompts else len(prompt.tokens))
    assert len(lengths) > 3, "some texts ended early"


def test_a_round_that_is_written_in_parts_is_the_same_round(monkeypatch: pytest.MonkeyPatch):
    whole = rounds(rows=8).next_batch()
    monkeypatch.setattr("paceline.data.replay._BATCH_ROWS", 3)
    in_parts = rounds(rows=8).next_batch()
    assert texts([in_parts]) == texts([whole])
    for one, other in zip(in_parts.rows, whole.rows, strict=True):
        assert one.target_hidden_TD is not None
        torch.testing.assert_close(one.target_hidden_TD, other.target_hidden_TD)


def test_every_text_is_used_so_often_in_a_new_order_each_time():
    source = rounds(uses=3)
    batches = [source.next_batch() for _ in range(6)]
    assert set(Counter(texts(batches)).values()) == {3}
    uses = [texts(batches[start : start + 2]) for start in (0, 2, 4)]
    assert len({frozenset(use) for use in uses}) == 1
    assert len({tuple(use) for use in uses}) > 1
    assert not set(texts([source.next_batch()])) & set(uses[0])


@pytest.mark.parametrize("done", [0, 5, 11])
def test_in_a_mixture_too_every_text_is_used_so_often(done: int):
    """Half of the batches are given text; also in a run that goes on after `done` batches."""

    def mixed(num_drawn: int) -> list[TextBatch]:
        stream = ExampleStream(examples(), 2, seed=0)
        origins = Origins(stream, fixed_fraction=0.5, draft_fraction=0)
        source = rounds(origins=origins, uses=3)
        fixed = SampledText(
            source.stream,
            source.model,
            "draft",
            sampling=SamplingParams(),
            max_new_tokens=1,
            eos_token_ids=(),
        )
        mixture = MixedText(origins, fixed, fixed, source)
        source.stream.num_drawn = 2 * num_drawn
        return [mixture.next_batch() for _ in range(40 - num_drawn)]

    found = mixed(0)
    written = [batch for batch in found if batch.origin == "target"]
    assert 12 <= len(written) <= 28
    whole_rounds = len(written) // 6 * 6  # a round of two batches, each three times
    counts = Counter(texts(written[:whole_rounds]))
    assert set(counts.values()) == {3}
    assert len(counts) == 4 * whole_rounds // 6
    assert texts(mixed(done)) == texts(found[done:])


@pytest.mark.parametrize("done", [0, 1, 3, 4, 7])
def test_a_source_that_is_restored_goes_on_with_the_same_text(done: int):
    whole, resumed = rounds(), rounds()
    expected = [whole.next_batch() for _ in range(10)][done:]
    resumed.stream.num_drawn = 2 * done
    assert texts([resumed.next_batch() for _ in range(10 - done)]) == texts(expected)


def test_two_processes_write_what_one_writes():
    whole = rounds(batch_size=4)
    shards = [rounds(batch_size=4, shard=Shard(rank, 2)) for rank in range(2)]
    for _ in range(2):  # a use each: orders differ within a use, texts do not
        one = texts([whole.next_batch()])
        halves = [texts([part.next_batch()]) for part in shards]
        assert [len(half) for half in halves] == [2, 2]
        assert sorted(halves[0] + halves[1]) == sorted(one)


def test_other_seeds_and_other_rounds_write_other_text():
    source = rounds(uses=1)
    first = texts([source.next_batch() for _ in range(2)])
    source.next_batch(), source.next_batch()
    again = texts([source.next_batch() for _ in range(2)])
    # eight prompts in rounds of four: the third round has prompts of an earlier one
    assert not set(first) & set(again)


def test_progress_is_told_batch_by_batch():
    told: list[tuple[float, float]] = []

    def listen(stage: str, done: float, total: float, note: str = "") -> None:
        told.append((done, total))

    source = rounds()
    source.progress = listen
    source.next_batch()
    assert told == [(4, 4)]
