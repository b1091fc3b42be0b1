from collections import Counter

import pytest
import torch

from paceline.core.sampling import SamplingParams
from paceline.data.collate import TokenRow
from paceline.data.sources import (
    BlendedText,
    ExampleStream,
    FixedText,
    MixedText,
    Origin,
    Origins,
    SampledText,
    Shard,
    TextBatch,
)
from paceline.errors import PromptError
from support.fakes import TableModel

VOCABULARY = 40


def repeats(token: int) -> TableModel:
    """A model that writes one token for ever."""
    return TableModel(torch.eye(VOCABULARY, dtype=torch.float64)[[token] * VOCABULARY])


def examples(count: int) -> list[TokenRow]:
    return [TokenRow([number, number, 30], 2, prompt_length=2) for number in range(count)]


def sampled(stream: ExampleStream, model: TableModel, origin: Origin = "draft") -> SampledText:
    assert origin != "fixed"
    return SampledText(
        stream, model, origin, sampling=SamplingParams(), max_new_tokens=3, eos_token_ids=()
    )


def mix(stream: ExampleStream, fixed_fraction: float, draft_fraction: float) -> MixedText:
    """The draft writes 31, the target 32, the corpus says 30."""
    return MixedText(
        Origins(stream, fixed_fraction=fixed_fraction, draft_fraction=draft_fraction),
        FixedText(stream),
        sampled(stream, repeats(31), "draft"),
        sampled(stream, repeats(32), "target"),
    )


class Stub:
    """Moves the stream and says who it is, without writing."""

    def __init__(self, stream: ExampleStream, origin: Origin) -> None:
        self.stream = stream
        self.origin: Origin = origin

    def next_batch(self) -> TextBatch:
        self.stream.take_batch()
        return TextBatch([], self.origin)


def first_tokens(batch: TextBatch) -> list[int]:
    return [row.tokens[0] for row in batch.rows]


def test_an_epoch_shows_every_example_once_and_the_next_in_another_order():
    source = FixedText(ExampleStream(examples(12), 4, seed=0))
    seen = [token for _ in range(6) for token in first_tokens(source.next_batch())]
    assert sorted(seen[:12]) == sorted(seen[12:]) == list(range(12))
    assert seen[:12] != seen[12:]
    assert seen[:12] != list(range(12))


def test_a_batch_may_reach_over_the_end_of_an_epoch():
    source = FixedText(ExampleStream(examples(3), 8, seed=0))
    assert Counter(first_tokens(source.next_batch())).most_common(1)[0][1] == 3


def test_the_processes_together_see_what_one_sees():
    def stream(shard: Shard | None) -> ExampleStream:
        return ExampleStream(examples(9), 6, seed=5, shard=shard)

    def rows(shard: Shard | None) -> list[list[int]]:
        # A table without certainty, so that the uniforms matter.
        source = sampled(stream(shard), TableModel.random(VOCABULARY, seed=1))
        return [list(row.tokens) for _ in range(3) for row in source.next_batch().rows]

    alone = rows(None)
    parts = [rows(Shard(rank, 2)) for rank in range(2)]
    # six rows a batch, dealt out in turn: 0 2 4 and 1 3 5
    dealt = [parts[index % 2][index // 2] for index in range(len(alone))]
    assert dealt == alone


def test_a_restored_stream_gives_the_same_batches():
    def source() -> tuple[ExampleStream, MixedText]:
        stream = ExampleStream(examples(7), 3, seed=2)
        texts = TableModel.random(VOCABULARY, seed=0), TableModel.random(VOCABULARY, seed=1)
        drafted, written = sampled(stream, texts[0]), sampled(stream, texts[1], "target")
        origins = Origins(stream, fixed_fraction=0.4, draft_fraction=0.5)
        return stream, MixedText(origins, FixedText(stream), drafted, written)

    stream, whole = source()
    batches = [whole.next_batch() for _ in range(20)]
    assert len({batch.origin for batch in batches}) == 3
    for cut in (1, 9):
        stream, rest = source()
        stream.num_drawn = 3 * cut
        again = [rest.next_batch() for _ in range(20 - cut)]
        assert [(b.origin, [list(r.tokens) for r in b.rows]) for b in again] == [
            (b.origin, [list(r.tokens) for r in b.rows]) for b in batches[cut:]
        ]


@pytest.mark.parametrize(
    ("fixed_fraction", "draft_fraction", "origin", "token"),
    [
        (1.0, 0.0, "fixed", 30),
        (1.0, 1.0, "fixed", 30),
        (0.0, 1.0, "draft", 31),
        (0.0, 0.0, "target", 32),
    ],
)
def test_fractions_of_0_and_1_are_never_and_always(
    fixed_fraction: float, draft_fraction: float, origin: str, token: int
):
    # trl#5726: text of the target was overwritten with text of the draft
    source = mix(ExampleStream(examples(5), 2, seed=0), fixed_fraction, draft_fraction)
    for _ in range(30):
        batch = source.next_batch()
        assert batch.origin == origin
        assert {row.tokens[-1] for row in batch.rows} == {token}


def test_a_mix_follows_its_coins():
    """n = 4000 batches; the binomial 5-sigma bound: false alarm below 1e-6 a count."""
    stream = ExampleStream(examples(5), 1, seed=0)
    source = mix(stream, 0.3, 0.6)
    origins: tuple[Origin, ...] = ("fixed", "draft", "target")
    source.sources = {origin: Stub(stream, origin) for origin in origins}
    counts = Counter(source.next_batch().origin for _ in range(4000))
    for origin, share in (("fixed", 0.3), ("draft", 0.7 * 0.6), ("target", 0.7 * 0.4)):
        assert abs(counts[origin] - 4000 * share) < 5 * (4000 * share * (1 - share)) ** 0.5


def test_drafted_text_is_that_of_the_draft_as_it_is_now():
    stream = ExampleStream(examples(5), 2, seed=0)
    source = sampled(stream, repeats(31))
    source.next_batch()
    source.model = repeats(33)  # what an update of the weights does
    batch = source.next_batch()
    assert all(list(row.tokens[2:]) == [33, 33, 33] for row in batch.rows)


def test_the_prompt_of_written_text_carries_no_loss_and_the_old_completion_is_gone():
    row = sampled(ExampleStream(examples(1), 1, seed=0), repeats(31)).next_batch().rows[0]
    assert list(row.tokens) == [0, 0, 31, 31, 31]
    assert row.trained_from == 2


def test_draft_and_target_do_not_share_random_numbers():
    model = TableModel.random(VOCABULARY, seed=0)
    texts = []
    for origin in ("draft", "target"):
        stream = ExampleStream(examples(30), 30, seed=0)
        texts.append([list(row.tokens) for row in sampled(stream, model, origin).next_batch().rows])
    assert texts[0] != texts[1]


def test_fixed_text_without_a_completion_is_refused_by_its_line():
    lone = TokenRow([3, 4], 2, where="prompts.jsonl line 8")
    source = FixedText(ExampleStream([lone], 1, seed=0))
    with pytest.raises(PromptError, match=r"prompts\.jsonl line 8 has a prompt but no completion"):
        source.next_batch()


class KnownText:
    """Rows that count from 50 on."""

    batch_size = 1
    num_drawn = 0

    def next_batch(self) -> TextBatch:
        self.num_drawn += 1
        return TextBatch([TokenRow([49 + self.num_drawn, 7, 8], 1)], "fixed")


def test_every_batch_has_its_rows_of_the_second_corpus():
    def batches(first: int = 0) -> list[list[int]]:
        stream = ExampleStream(examples(10), 3, seed=0)
        blended = BlendedText(mix(stream, 0.5, 0.5), stream, KnownText())
        stream.num_drawn = first
        return [first_tokens(blended.next_batch()) for _ in range(8)]

    whole = batches()
    assert [sum(token >= 50 for token in row) for row in whole] == [1] * 8
    assert [row[-1] for row in whole] == list(range(50, 58))
    assert batches(first=9)[:5] == whole[3:]
