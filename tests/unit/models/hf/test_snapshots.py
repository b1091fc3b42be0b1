"""What a session with snapshots reads and copies: by hooks on the model of transformers."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from paceline.models import wrap_model
from paceline.models.hf import row_session
from paceline.train.initial_draft import DraftConfig, kept_layers
from support.models import tiny_hf

PROMPT = [3, 5, 8, 4, 11]


@contextmanager
def counted(hf: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[list[int], list[int]]]:
    """Tokens of each pass, and the text's length at each copy of the cache."""
    passes: list[int] = []
    copies: list[int] = []
    copied = row_session._copied

    def count(kwargs: dict[str, Any]) -> dict[str, Any]:
        copies.append(kwargs["attention_mask"].shape[1] - 1)
        return copied(kwargs)

    monkeypatch.setattr(row_session, "_copied", count)
    embeddings = hf.get_input_embeddings()
    hook = embeddings.register_forward_hook(lambda _, given, __: passes.append(given[0].shape[1]))
    yield passes, copies
    hook.remove()


def block(session: Any, count: int, taken_back: int) -> None:
    session.extend(torch.tensor([[7] * count]))
    session.rollback([taken_back])


def test_kept_tokens_are_read_with_the_next_block_until_they_are_many(
    monkeypatch: pytest.MonkeyPatch,
):
    hf = tiny_hf("qwen3_5_text")
    session = wrap_model(hf).start_session()
    with counted(hf, monkeypatch) as (passes, copies):
        session.prefill([PROMPT])
        for _ in range(3):
            block(session, 4, 1)
        # each block keeps 3 tokens behind the copy of the prompt; more than 4 have their own pass
        assert passes == [5, 4, 7, 6, 4]
        assert copies == [5, 5, 5, 11]
        block(session, 4, 0)
        block(session, 4, 4)
        assert passes[5:] == [7, 4]
        assert copies[4:] == [11, 18]


def test_a_draft_goes_on_from_the_copy_behind_the_last_kept_token(monkeypatch: pytest.MonkeyPatch):
    hf = tiny_hf("qwen3_5_text")
    session = wrap_model(hf).start_session()
    with counted(hf, monkeypatch) as (passes, copies):
        session.prefill([PROMPT])
        session.rollback([0])
        for token in (7, 8, 9):
            session.extend(torch.tensor([[token]]))
        session.rollback([1])
        session.extend(torch.tensor([[10]]))
        assert passes == [5, 1, 1, 1, 1]
        assert copies == [5, 6, 7, 7]


def test_a_token_more_may_be_taken_back_after_a_rejection(monkeypatch: pytest.MonkeyPatch):
    """As rows of a draft that read again, beside one whose block was accepted as a whole."""
    hf = tiny_hf("qwen3_5_text")
    session = wrap_model(hf).start_session()
    with counted(hf, monkeypatch) as (passes, _):
        session.prefill([PROMPT])
        for _ in range(3):
            for token in (7, 8, 9):
                session.extend(torch.tensor([[token]]))
            session.rollback([2])
            session.rollback([1])
        assert max(passes[1:]) < len(PROMPT), "no text is read again"


def test_plain_decoding_copies_once(monkeypatch: pytest.MonkeyPatch):
    hf = tiny_hf("lfm2")
    session = wrap_model(hf).start_session()
    with counted(hf, monkeypatch) as (passes, copies):
        session.prefill([PROMPT])
        for token in range(9):
            session.extend(torch.tensor([[token]]))
        assert passes == [5, *[1] * 9]
        assert copies == [5]


def test_a_text_without_a_copy_is_read_again(monkeypatch: pytest.MonkeyPatch):
    hf = tiny_hf("mamba")
    session = wrap_model(hf).start_session()
    with counted(hf, monkeypatch) as (passes, _):
        session.prefill([PROMPT])
        session.rollback([2])
        session.extend(torch.tensor([[7, 7]]))
        assert passes == [5, 3, 1, 1]


def test_a_copy_shares_keys_and_values_and_no_state():
    hf = tiny_hf("qwen3_5_text")
    session: Any = wrap_model(hf).start_session()
    session.prefill([PROMPT])
    (row,) = session._rows
    cache = row._state.kwargs["past_key_values"]
    copy = row_session._copied(row._state.kwargs)["past_key_values"]
    kinds = hf.config.layer_types
    for kind, old, new in zip(kinds, cache.layers, copy.layers, strict=True):
        assert old is not new
        if kind == "full_attention":
            assert (old.keys is new.keys, old.values is new.values) == (True, True)
        else:
            assert old.recurrent_states[0].data_ptr() != new.recurrent_states[0].data_ptr()
            assert torch.equal(old.recurrent_states[0], new.recurrent_states[0])


def test_a_draft_of_a_hybrid_has_every_kind_of_layers():
    config = DraftConfig(target="t", out="d")  # pyright: ignore[reportArgumentType]
    linear, full = "linear_attention", "full_attention"
    for kinds, kept in (
        ([linear, linear, linear, full, linear, linear], [0, 1, 2, 3, 5]),
        ([linear, linear, linear, full], [0, 1, 2, 3]),
        ([full] * 6, [0, 1, 2, 5]),
    ):
        hf = tiny_hf("qwen3_5_text", num_hidden_layers=len(kinds), layer_types=kinds)
        assert kept_layers(config, wrap_model(hf)) == kept
