"""Text of every origin: given, written, read once for its states, or written in rounds."""

from collections import Counter

import pytest
import torch

from paceline.core.sampling import SamplingParams
from paceline.data.collate import TokenRow
from paceline.data.replay import Rounds, TargetRounds
from paceline.data.sources import (
    BlendedText,
    ExampleStream,
    FixedText,
    MixedText,
    Origin,
    Origins,
    ReadText,
    SampledText,
    Shard,
    TextBatch,
)
from paceline.errors import ConfigError, PromptError
from paceline.models.contract import Batch, Texts
from paceline.models.hf.base import HfModel, Sessions
from paceline.models.hf.causal import CausalModel
from support.fakes import TableModel
from support.models import tiny_model

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

    def next_batch(self, seconds_left: float = 0.0) -> TextBatch:
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


class KnownText:
    """Rows that count from 50 on."""

    batch_size = 1
    num_drawn = 0

    def next_batch(self, seconds_left: float = 0.0) -> TextBatch:
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


_LENGTHS = (2, 5, 3, 7, 4, 6, 2, 3)


def prompts() -> list[TokenRow]:
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
    stream = ExampleStream(prompts(), batch_size, seed=0, shard=shard)
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
        prompt = next(e for e in prompts() if e.tokens[0] == row.tokens[0])
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
        stream = ExampleStream(prompts(), 2, seed=0)
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


@pytest.fixture(autouse=True)
def _in_threes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.data.sources._GROUP_SIZE", 3)


def known() -> list[TokenRow]:
    texts = [[index + 3, *range(20, 20 + length)] for index, length in enumerate(_LENGTHS)]
    return [TokenRow(text, 1 + n % 2, prompt_length=1) for n, text in enumerate(texts, start=1)]


def source(
    model: CausalModel | None = None, batch_size: int = 2, shard: Shard | None = None
) -> ReadText:
    stream = ExampleStream(known(), batch_size, seed=0, shard=shard)
    return ReadText(stream, model or tiny_model(), limit_gb=1)


def test_rows_are_those_of_fixed_text_with_the_states_of_a_pass_of_their_own():
    model = tiny_model()
    read = source(model)
    plain = FixedText(ExampleStream(known(), 2, seed=0))
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
    stream = ExampleStream(known(), 2, seed=0)
    num_states = sum(len(e.tokens) - e.trained_from for e in stream.examples)
    needed = num_states * 32 * 4 / 1e9
    ReadText(stream, tiny_model(), limit_gb=needed)
    with pytest.raises(ConfigError, match=rf"of {num_states} tokens take 0.00; raise it"):
        ReadText(stream, tiny_model(), limit_gb=needed * 0.99)


def test_a_prompt_alone_is_refused_before_anything_is_read():
    stream = ExampleStream([TokenRow([3, 4], 2, prompt_length=2, where="line 7")], 1, seed=0)
    with pytest.raises(PromptError, match="line 7 has a prompt but no completion"):
        ReadText(stream, tiny_model(), limit_gb=1)


def test_when_no_round_is_begun_any_more_the_latest_ones_are_used_together(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("paceline.data.replay._KEPT_ROUNDS", 2)
    source = rounds(uses=1)
    written = [texts([source.next_batch() for _ in range(2)]) for _ in range(3)]
    again = [texts([source.next_batch(1e-6) for _ in range(4)]) for _ in range(2)]
    for use in again:
        assert sorted(use) == sorted(written[1] + written[2])
    assert again[0] != again[1]
