"""Fixed text whose states the target tells once: the right ones, the same whenever asked for."""

import pytest
import torch

from paceline.data.collate import TokenRow
from paceline.data.sources import ExampleStream, FixedText, ReadText, Shard
from paceline.errors import ConfigError, PromptError
from paceline.models.contract import Batch, Texts
from paceline.models.hf.causal import CausalModel
from support.models import tiny_model

_LENGTHS = (2, 9, 3, 7, 4, 6, 2, 3)


@pytest.fixture(autouse=True)
def _in_threes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.data.sources._GROUP_SIZE", 3)


def examples() -> list[TokenRow]:
    texts = [[index + 3, *range(20, 20 + length)] for index, length in enumerate(_LENGTHS)]
    return [TokenRow(text, 1 + n % 2, prompt_length=1) for n, text in enumerate(texts, start=1)]


def source(
    model: CausalModel | None = None, batch_size: int = 2, shard: Shard | None = None
) -> ReadText:
    stream = ExampleStream(examples(), batch_size, seed=0, shard=shard)
    return ReadText(stream, model or tiny_model(), limit_gb=1)


def test_rows_are_those_of_fixed_text_with_the_states_of_a_pass_of_their_own():
    model = tiny_model()
    read = source(model)
    plain = FixedText(ExampleStream(examples(), 2, seed=0))
    for _ in range(8):  # two epochs
        batch = read.next_batch()
        for row, expected in zip(batch.rows, plain.next_batch().rows, strict=True):
            assert (row.tokens, row.trained_from) == (expected.tokens, expected.trained_from)
            with torch.no_grad():
                wanted_TD = model.hidden(Texts(torch.tensor([list(row.tokens)])))[
                    0, row.trained_from - 1 : -1
                ]
            assert row.target_hidden_TD is not None
            torch.testing.assert_close(row.target_hidden_TD, wanted_TD, rtol=1e-4, atol=1e-5)


def test_every_text_is_read_once_and_its_states_lie_by_themselves(monkeypatch: pytest.MonkeyPatch):
    model = tiny_model()
    widths: list[int] = []
    hidden = model.hidden

    def counted(batch: Batch) -> torch.Tensor:
        widths.append(len(batch.tokens_BT))
        return hidden(batch)

    read = source(model)
    monkeypatch.setattr(model, "hidden", counted)
    rows = [row for _ in range(12) for row in read.next_batch().rows]
    assert sorted(widths) == [2, 3, 3]
    for row in rows:
        assert row.target_hidden_TD is not None
        storage = row.target_hidden_TD.untyped_storage()
        assert storage.nbytes() == row.target_hidden_TD.nbytes


def assert_same(row: TokenRow, other: TokenRow) -> None:
    assert row.tokens == other.tokens
    assert row.target_hidden_TD is not None
    assert other.target_hidden_TD is not None
    assert torch.equal(row.target_hidden_TD, other.target_hidden_TD)


@pytest.mark.parametrize("done", [1, 3, 5])
def test_a_source_that_is_restored_goes_on_with_the_same_numbers(done: int):
    model = tiny_model()
    whole, resumed = source(model), source(model)
    expected = [whole.next_batch() for _ in range(9)][done:]
    resumed.text.stream.num_drawn = 2 * done
    for batch in expected:
        for row, other in zip(batch.rows, resumed.next_batch().rows, strict=True):
            assert_same(row, other)


def test_two_processes_read_what_one_reads():
    model = tiny_model()
    whole = source(model, 4).next_batch().rows
    halves = [source(model, 4, Shard(rank, 2)).next_batch().rows for rank in (0, 1)]
    dealt_out = [row for pair in zip(*halves, strict=True) for row in pair]
    for row, other in zip(whole, dealt_out, strict=True):
        assert_same(row, other)


def test_what_does_not_fit_is_refused_with_what_it_takes():
    stream = ExampleStream(examples(), 2, seed=0)
    num_states = sum(len(e.tokens) - e.trained_from for e in stream.examples)
    needed = num_states * 32 * 4 / 1e9
    ReadText(stream, tiny_model(), limit_gb=needed)
    with pytest.raises(ConfigError, match=rf"of {num_states} tokens take 0.00; raise it"):
        ReadText(stream, tiny_model(), limit_gb=needed * 0.99)


def test_a_prompt_alone_is_refused_before_anything_is_read():
    stream = ExampleStream([TokenRow([3, 4], 2, prompt_length=2, where="line 7")], 1, seed=0)
    with pytest.raises(PromptError, match="line 7 has a prompt but no completion"):
        ReadText(stream, tiny_model(), limit_gb=1)
