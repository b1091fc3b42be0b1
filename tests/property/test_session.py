"""Whatever a session read and forgot, its logits are those of a plain pass over what it kept.

The plain pass is the reference: one row alone, no cache, no padding, no mask.
"""

import hashlib
from functools import cache
from itertools import product
from typing import Any, Literal, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from paceline.errors import ContextLengthError, PromptError
from paceline.models import HfModel, prepare_for_decoding, wrap_model
from paceline.models.prepare import with_cuda_graphs
from paceline.models.recorded.session import GraphSession
from paceline.native import compiled
from support.fakes import TableModel
from support.models import CONFIGS, EXPERTS, reader, tiny_hf, tiny_model

VOCABULARY = 61

# one step of a session, on rows that the test draws to fit
prompt = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=9)
step = st.tuples(
    st.sampled_from(["extend", "rollback", "keep_rows", "refill"]), st.integers(0, 2**32 - 1)
)


@cache
def model_of(architecture: str) -> HfModel:
    """In float64: in float32, a text may multiply the rounding of both sides by a hundred."""
    return wrap_model(tiny_hf(architecture).double())


@cache
def native_model_of(architecture: str, weights: Literal["auto", "int8"]) -> HfModel:
    """Weights that bfloat16 holds exactly, or rounded to 8 bits, read by transformer.c."""
    prepared = prepare_for_decoding(wrap_model(tiny_hf(architecture).bfloat16().float()), weights)
    assert reader(prepared) is not None
    return prepared


class Row(NamedTuple):
    """What a row holds: tokens, and for an encoder-decoder the source that they are read beside."""

    tokens: list[int]
    source: list[int] | None = None


def row_of(model: HfModel | TableModel, prompt: list[int]) -> Row:
    start = model.decoder_prompt
    return Row(list(prompt)) if start is None else Row(list(start), list(prompt))


def plain_logits(model: HfModel | TableModel, row: Row) -> torch.Tensor:
    """After every token of one row, [N, V]."""
    tokens, source = row
    if isinstance(model, TableModel):
        return torch.stack([model.log_probs(tokens[: end + 1]) for end in range(len(tokens))])
    known, key = passes_of(model.hf), (tuple(tokens), tuple(source or ()))
    if key not in known:
        text = {"input_ids": torch.tensor([tokens])}
        if source is not None:
            text = {"input_ids": torch.tensor([source])}
            text["decoder_input_ids"] = torch.tensor([tokens])
        with torch.inference_mode():
            known[key] = model.hf(**text, use_cache=False).logits[0]
    return known[key]


_PASSES: dict[str, dict[tuple[tuple[int, ...], ...], torch.Tensor]] = {}


@cache
def passes_of(hf: torch.nn.Module) -> dict[tuple[tuple[int, ...], ...], torch.Tensor]:
    """The plain passes so far: what holds the same weights, however it reads them, shares them."""
    config: Any = hf.config
    found = hashlib.sha256(config.to_json_string().encode())
    for name, weight in hf.state_dict().items():
        found.update(name.encode() + weight.numpy().tobytes())
    return _PASSES.setdefault(found.hexdigest(), {})


def assert_same(got: torch.Tensor, wanted: torch.Tensor) -> None:
    # norms of some models, and the logits of sessions, are float32 in any dtype
    relative, absolute = (1e-6, 2e-6) if wanted.dtype == torch.float64 else (1e-4, 3e-5)
    torch.testing.assert_close(got.float(), wanted.float(), rtol=relative, atol=absolute)


def play(
    model: HfModel | TableModel, prompts: list[list[int]], steps: list[tuple[str, int]]
) -> None:
    """Run the steps on a session and, in parallel, on plain lists of tokens."""
    session, rows = model.start_session(), [row_of(model, prompt) for prompt in prompts]
    logits_BV = session.prefill(prompts)
    for row, got in zip(rows, logits_BV, strict=True):
        assert_same(got, plain_logits(model, row)[-1])
    for kind, seed in steps:
        rng = torch.Generator().manual_seed(seed)

        def draw(high: int, count: int, rng: torch.Generator = rng) -> list[int]:
            return torch.randint(high, (count,), generator=rng).tolist()

        match kind:
            case "extend":
                count = draw(4, 1)[0] + 1
                new = [draw(VOCABULARY, count) for _ in rows]
                logits_BNV = session.extend(torch.tensor(new))
                rows = [
                    row._replace(tokens=row.tokens + added)
                    for row, added in zip(rows, new, strict=True)
                ]
                for row, got in zip(rows, logits_BNV, strict=True):
                    assert_same(got, plain_logits(model, row)[-count:])
            case "rollback":
                counts = [draw(len(row.tokens) + 1, 1)[0] for row in rows]
                session.rollback(counts)
                rows = [
                    row._replace(tokens=row.tokens[: len(row.tokens) - gone])
                    for row, gone in zip(rows, counts, strict=True)
                ]
            case "refill":
                order = torch.randperm(len(rows), generator=rng).tolist()
                chosen = order[: draw(len(rows), 1)[0] + 1]
                new = [draw(VOCABULARY, draw(9, 1)[0] + 1) for _ in chosen]
                logits_RV = session.refill(chosen, new)
                for index, prompt, got in zip(chosen, new, logits_RV, strict=True):
                    rows[index] = row_of(model, prompt)
                    assert_same(got, plain_logits(model, rows[index])[-1])
            case "keep_rows":
                order = torch.randperm(len(rows), generator=rng).tolist()
                kept = order[: draw(len(rows), 1)[0] + 1]
                session.keep_rows(kept)
                rows = [rows[index] for index in kept]
        assert session.lengths == [len(row.tokens) for row in rows]


few = settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
# holes, an empty row, rows that leave in another order, a text longer than every window
hard = example(
    prompts=[[5], [1, 2, 3, 4, 5, 6, 7, 8, 9], [7, 7]],
    steps=[
        ("extend", 3),
        ("rollback", 11),
        ("extend", 5),
        ("refill", 7),
        ("keep_rows", 2),
        ("rollback", 4),
        ("refill", 1),
    ]
    * 2,
)
runs = given(prompts=st.lists(prompt, min_size=1, max_size=4), steps=st.lists(step, max_size=8))


STATEFUL = ["lfm2", "mamba"]  # with states as precise as their weights


@pytest.mark.parametrize("architecture", [*CONFIGS, "t5_v1_1", "umt5", "bart", "marian", *STATEFUL])
@few
@hard
@runs
def test_any_session_equals_a_plain_pass_over_what_it_kept(
    architecture: str, prompts: list[list[int]], steps: list[tuple[str, int]]
):
    play(model_of(architecture), prompts, steps)


@pytest.mark.skipif(compiled() is None, reason="no C compiler with OpenMP")
@pytest.mark.parametrize(
    ("architecture", "weights"),
    [
        *product(["mistral", "qwen2", "qwen3"], ["auto"]),
        ("llama", "int8"),
    ],
)
@few
@hard
@runs
def test_the_compiled_pass_changes_nothing(
    architecture: str,
    weights: Literal["auto", "int8"],
    prompts: list[list[int]],
    steps: list[tuple[str, int]],
):
    play(native_model_of(architecture, weights), prompts, steps)


# of Llama-like ones, blocks in rooms are compared in unit/models/recorded/test_recorded_session.py
ROOMS = [name for name in CONFIGS if name not in ("qwen2", "qwen3", "opt")]


@cache
def fixed_model_of(architecture: str) -> HfModel:
    """As a GPU reads it, but nothing is recorded here."""
    prepared = with_cuda_graphs(tiny_model(architecture))
    assert isinstance(prepared.start_session(), GraphSession)
    return prepared


@pytest.mark.parametrize("architecture", [*ROOMS, "gemma2", "cohere2", *EXPERTS])
@few
@hard
@runs
def test_rooms_of_a_fixed_size_change_nothing(
    architecture: str, prompts: list[list[int]], steps: list[tuple[str, int]]
):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paceline.models.recorded.session._FEWEST_COLUMNS", 4)  # they are left
        patch.setattr("paceline.models.recorded.session.SPARE", 0)
        play(fixed_model_of(architecture), prompts, steps)


@few
@hard
@runs
def test_the_fake_keeps_the_same_contract(prompts: list[list[int]], steps: list[tuple[str, int]]):
    play(TableModel.random(VOCABULARY, order=2, seed=3), prompts, steps)


# What sessions do besides.

PROMPTS = [[3, 4, 5, 6, 7, 8], [9], [10, 11, 12]]


@pytest.mark.parametrize("architecture", ["qwen3", "t5", "bart"])
def test_rows_may_be_repeated_and_reordered(architecture: str):
    model = tiny_model(architecture)
    session = model.start_session()
    session.prefill(PROMPTS)
    session.keep_rows([2, 1, 2])
    logits_BNV = session.extend(torch.tensor([[1], [2], [3]]))
    lengths: list[int] = []
    for row, (prompt, token) in enumerate((([10, 11, 12], 1), ([9], 2), ([10, 11, 12], 3))):
        alone = model.start_session()
        alone.prefill([prompt])
        assert_same(logits_BNV[row], alone.extend(torch.tensor([[token]]))[0])
        lengths += alone.lengths
    assert session.lengths == lengths


def test_a_text_longer_than_the_context_is_refused_with_both_numbers():
    session = tiny_model("llama", max_position_embeddings=8).start_session()
    with pytest.raises(ContextLengthError, match="9 tokens, but the model's context holds 8"):
        session.prefill([[1], list(range(9))])
    session = tiny_model("llama", max_position_embeddings=8).start_session()
    session.prefill([[1] * 7])
    with pytest.raises(ContextLengthError, match="9 tokens"):
        session.extend(torch.tensor([[1, 2]]))
    session.extend(torch.tensor([[1]]))
    assert session.lengths == [8]


def test_an_empty_prompt_is_refused():
    with pytest.raises(PromptError, match="at least one token"):
        tiny_model("llama").start_session().prefill([[1], []])


def test_a_session_reads_without_dropout_while_the_model_trains():
    hf = tiny_hf("gpt2", resid_pdrop=0.5, embd_pdrop=0.5).train()
    model = wrap_model(hf)
    first, second = (model.start_session().prefill([[1, 2, 3]]) for _ in range(2))
    assert torch.equal(first, second)
    assert hf.training


def test_logits_are_float32_and_as_wide_as_the_vocabulary_whatever_the_model_computes_in():
    model = wrap_model(tiny_hf("llama").to(torch.bfloat16))
    logits_BV = model.start_session().prefill([[1, 2]])
    assert (logits_BV.dtype, logits_BV.shape) == (torch.float32, (1, 61))


def test_prepared_models_read_what_the_library_reads_through_windows_biases_and_norms():
    layers = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 4}
    text = list(range(3, 40))
    for architecture, overrides in (
        ("qwen2", {"use_sliding_window": True, **layers}),
        ("qwen3", {"use_sliding_window": True, "attention_bias": True, **layers}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}),
    ):
        hf = tiny_hf(architecture, **overrides).bfloat16().float()
        for name, weight in hf.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(weight)
        prepared = prepare_for_decoding(wrap_model(hf))
        compilable = "attention_bias" not in overrides
        assert (reader(prepared) is not None) == (compilable and compiled() is not None)
        with torch.inference_mode():
            wanted = hf(input_ids=torch.tensor([text])).logits[0]
        session = prepared.start_session()
        assert_same(session.prefill([text[:20]])[0], wanted[19])
        assert_same(session.extend(torch.tensor([text[20:32]]))[0], wanted[20:32])
        assert_same(session.extend(torch.tensor([text[32:]]))[0], wanted[32:])
