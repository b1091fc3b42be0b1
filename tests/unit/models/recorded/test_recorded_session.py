"""Sessions in rooms of fixed size: the text of any other, no question to the device, rooms reused.

No GPU here: what a GPU would replay is done anew each time. A meta device stands for it where only
shapes count: it has no numbers, so whoever asks for one fails. Where a recorder works, stand-ins of
functions of torch.cuda note in which state the work is called.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from paceline.core.block import DrawPlan
from paceline.core.rule_base import with_bonus
from paceline.core.rules import BiLDRule, Diff, Lenient, Lossless, Lossy, Opt, TokenV3
from paceline.core.sampling import SamplingParams
from paceline.decode import AutoregressiveDecoder, SpeculativeDecoder
from paceline.decode.draft_policies import Confident
from paceline.errors import SlowerWarning
from paceline.models import CausalModel, wrap_model
from paceline.models.prepare import with_cuda_graphs
from paceline.models.recorded.fixed_pass import FixedPass
from paceline.models.recorded.recorder import Recorder, Recording, Recordings
from paceline.models.recorded.session import _draw, _judge
from support.models import generated, tiny_hf, tiny_model, tiny_pair

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.core.rules import Rule

PROMPTS = [[3, 4, 5], [7], [9, 8, 7, 6, 5, 4]]
RULES = [
    Lossless(),
    Lenient("linear", 0.3),
    Lossy(0.3),
    Lossy(0.3, "tuned"),  # its work hangs on what it finds
    BiLDRule(1.2),
    Diff(0.1),
    Opt(0.2),
    TokenV3(0.3),
    with_bonus(TokenV3(0.3), "target"),
]
SAMPLINGS = [
    SamplingParams(temperature=0),
    SamplingParams(),
    SamplingParams(temperature=0.7, top_k=9, top_p=0.9),
    SamplingParams(repetition_penalty=1.3),
]
samplings = pytest.mark.parametrize("sampling", SAMPLINGS, ids=repr)
# a penalty is applied pass by pass, as elsewhere, whatever the rule
IN_ONE_PASS = SAMPLINGS[:3]


@functools.cache
def both_kinds(architecture: str = "llama") -> list[tuple[CausalModel, CausalModel]]:
    """A pair as transformers reads it, and in rooms of a fixed size; tests leave them alone."""
    plain = tiny_pair(architecture)
    target, draft = tiny_pair(architecture)
    return [plain, (with_cuda_graphs(target), with_cuda_graphs(draft))]


def compare(decoder_of: Callable[..., Any], architecture: str = "llama") -> None:
    """The decoder of both kinds of the pair writes the same texts."""
    texts = [decoder_of(*pair).generate(PROMPTS, 17, seed=1) for pair in both_kinds(architecture)]
    assert texts[0] == texts[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "settings", "sampling"),
    [
        *(("llama", {"rule": rule}, IN_ONE_PASS[2]) for rule in RULES),
        *(
            ("llama", {"rule": rule}, sampling)
            for rule in RULES[:2]
            for sampling in IN_ONE_PASS[:2]
        ),
        *(
            (name, {"policy": Confident(0.2)}, sampling)
            for name, sampling in zip(("mistral", "qwen2", "qwen3"), IN_ONE_PASS, strict=True)
        ),
        *(
            ("llama", {"rule": rule, "draft_sampling": SamplingParams(temperature=at, top_k=20)}, s)
            for rule, s in ((Lossless(), IN_ONE_PASS[2]), (Lossy(0.3, "tuned"), IN_ONE_PASS[1]))
            for at in (0.0, 0.5)
        ),
    ],
    ids=repr,
)
def test_blocks_give_the_text_that_they_give_elsewhere(
    architecture: str, settings: dict[str, Any], sampling: SamplingParams
):
    compare(
        functools.partial(SpeculativeDecoder, gamma=3, sampling=sampling, **settings), architecture
    )


@pytest.mark.slow
def test_so_do_blocks_with_a_penalty():
    compare(functools.partial(SpeculativeDecoder, gamma=3, sampling=SAMPLINGS[3]))


@samplings
def test_the_baseline_gives_the_same_text(sampling: SamplingParams):
    compare(lambda target, _draft: AutoregressiveDecoder(target, sampling))


def test_a_text_that_outgrows_its_room_moves_to_a_larger_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("paceline.models.recorded.session._FEWEST_COLUMNS", 4)
    monkeypatch.setattr("paceline.models.recorded.session.SPARE", 0)
    compare(functools.partial(SpeculativeDecoder, gamma=2, sampling=SAMPLINGS[0]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "kept", "sampling"),
    [
        *(("llama", None, sampling) for sampling in IN_ONE_PASS),
        *(
            (name, None, IN_ONE_PASS[2])
            for name in ("gemma3_text", "bloom", "qwen3_moe", "gpt_oss")
        ),
        ("gpt2", 20, IN_ONE_PASS[2]),
    ],
    ids=repr,
)
def test_neither_half_of_a_block_asks_the_device(
    monkeypatch: pytest.MonkeyPatch, sampling: SamplingParams, architecture: str, kept: int | None
):
    ignored = contextlib.nullcontext()
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: ignored)  # does not know the device
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    tokens = None if kept is None else torch.arange(kept, device="meta")
    with torch.inference_mode(), torch.device("meta"):
        hf = tiny_hf(architecture).to("meta")
        passes = FixedPass(CausalModel(hf, None, tokens), compiled=False)
        if passes.reads_counts:  # the model's own pass is not recorded
            hf.set_experts_implementation("batched_mm")
        recordings = Recordings(Recorder(passes.device, architecture))
        cache = passes.new_cache(2, 256, recordings)
        read = functools.partial(passes.logits, cache)
        lengths, numbers = torch.zeros(2, dtype=torch.int64), torch.rand(2, 3, dtype=torch.float64)
        plan = DrawPlan(3, sampling, after_last=True, raw=True)
        unread = torch.zeros(2, 1, dtype=torch.int64)
        chosen = () if sampling.greedy else (numbers,)
        drawn = _draw(read, plan, 60, unread, lengths, *chosen)
        assert drawn[0].shape == (2, 3)
        if not passes.reads_counts:
            prompts = torch.zeros(2, 16, dtype=torch.int64)
            after = passes.logits_of_prompts(cache, prompts, lengths, torch.arange(2))
            assert after.shape == (2, 61)
        drafted = torch.zeros(2, 3, dtype=torch.int64)
        for rule in (rule for rule in RULES if rule != Lossy(0.3, "tuned")):
            places = 3 + rule.needs_draft_at_bonus
            given = numbers, numbers[:, 0], torch.rand(2, places, 60)
            given = () if sampling.greedy and rule.exact else given
            verdict = _judge(read, rule, sampling, 60, lengths, lengths, drafted, lengths, *given)
            assert verdict[0].shape == (2, 2)


def test_rooms_and_recordings_are_used_again():
    target = with_cuda_graphs(tiny_model())
    decoder = AutoregressiveDecoder(target, SamplingParams(temperature=0))
    decoder.generate([[1, 2, 3]], 5)
    gc.collect()
    caches = target.start_session()._caches  # pyright: ignore[reportAttributeAccessIssue]
    (cache,) = caches._idle
    recorded = dict(cache.recordings._made)
    assert recorded
    decoder.generate([[4, 5]], 9)
    gc.collect()
    assert caches._idle == [cache]
    assert cache.recordings._made == recorded


def test_two_sessions_at_a_time_have_rooms_of_their_own():
    model = with_cuda_graphs(tiny_model())
    one, other = model.start_session(), model.start_session()
    one.prefill([[1, 2, 3]])
    other.prefill([[4, 5, 6]])
    alone = model.start_session()
    alone.prefill([[1, 2, 3]])
    token = torch.tensor([[7]])
    torch.testing.assert_close(one.extend(token), alone.extend(token), rtol=0, atol=0)


def test_merged_weights_stay_the_models_own():
    hf = tiny_hf("llama")
    tokens = torch.tensor([[1, 2, 3]])
    with torch.inference_mode():
        before = hf(input_ids=tokens).logits
        with_cuda_graphs(wrap_model(hf))
        torch.testing.assert_close(hf(input_ids=tokens).logits, before, rtol=0, atol=0)
    attention = hf.base_model.layers[0].self_attn
    beginnings = {
        layer.weight.untyped_storage().data_ptr() for layer in (attention.q_proj, attention.v_proj)
    }
    assert len(beginnings) == 1, "one matrix holds them all"


def test_what_cannot_be_recorded_is_left_as_it_is():
    scaled = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    others = {"mamba": {}, "t5": {}, "bart": {}, "llama": {"rope_parameters": scaled}}
    for architecture, changed in others.items():
        model = tiny_model(architecture, **changed)
        assert with_cuda_graphs(model) is model


def test_a_pass_that_counts_columns_from_the_end_is_not_used():
    settings = {"attention_types": [[["local"], 2]], "window_size": 4, "vocab_size": 61}
    sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 64}
    config = AutoConfig.for_model("gpt_neo", **settings, **sizes, initializer_range=0.3)
    model = wrap_model(AutoModelForCausalLM.from_config(config).eval())
    with pytest.warns(SlowerWarning, match="the recorded pass failed .* for this gpt_neo"):
        assert with_cuda_graphs(model) is model


in_use = pytest.mark.filterwarnings("error::paceline.errors.SlowerWarning")
"""The recorded passes are used, and nothing else in their place."""


@pytest.mark.cuda
@in_use
@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=repr)
def test_recorded_passes_give_the_text_of_plain_ones(rule: Rule, sampling: SamplingParams):
    pairs = both_kinds.__wrapped__()
    for model in (*pairs[0], *pairs[1]):
        model.hf.to("cuda")
    target, draft = (with_cuda_graphs(model) for model in pairs[1])
    texts = [
        SpeculativeDecoder(*pair, rule, gamma=3, sampling=sampling).generate(PROMPTS, 17, seed=1)
        for pair in (pairs[0], (target, draft))
    ]
    assert texts[0] == texts[1]


@pytest.mark.cuda
@in_use
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:dynamo_pgo")  # from torch
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "gpt2", "bloom", "gpt_oss"])
def test_compiled_and_recorded_passes_give_the_text_of_generate(architecture: str):
    model = wrap_model(tiny_hf(architecture).to("cuda"))
    ready = with_cuda_graphs(model, compiled=True)
    assert ready is not model
    greedy = SamplingParams(temperature=0)
    texts = SpeculativeDecoder(ready, ready, gamma=3, sampling=greedy).generate(PROMPTS, 17, seed=1)
    for prompt, text in zip(PROMPTS, texts, strict=True):
        tokens = torch.tensor([prompt], device="cuda")
        wanted = model.hf.generate(tokens, max_new_tokens=17, do_sample=False)[0]
        assert text.tokens == wanted[len(prompt) :].tolist()


@pytest.mark.cuda
def test_work_that_cannot_be_recorded_leaves_the_process_as_it_was():
    recorder = Recorder(torch.device("cuda"), "llama")
    with pytest.warns(SlowerWarning, match="cannot be recorded"):
        asking = Recording(recorder, lambda x: [x * x.sum().item()], [torch.ones(3, device="cuda")])
    assert asking([torch.full((3,), 2.0)])[0].tolist() == [12, 12, 12]
    torch.randn(1, device="cuda")  # a failed capture would leave the generator in it
    model = wrap_model(tiny_hf("llama").to("cuda"))
    assert with_cuda_graphs(model) is not model


if TYPE_CHECKING:
    from collections.abc import Generator


class FakeGraph:
    def replay(self) -> None:
        """The results are there already."""


class FakeStream:
    def wait_stream(self, _other: FakeStream) -> None:
        """There is one."""


class Card:
    """The state of a card: its stream, the debug mode, and whether a capture is under way."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.own = self.stream = FakeStream()
        self.mode: int | str = 0
        self.captures = self.has_warned = False
        self.seen: list[tuple[bool, int | str, bool]] = []
        for name, function in {
            "Stream": FakeStream,
            "CUDAGraph": FakeGraph,
            "graph": self.graph,
            "graph_pool_handle": object,
            "device": lambda _device: contextlib.nullcontext(),
            "stream": lambda _stream: contextlib.nullcontext(),
            "current_stream": lambda: self.stream,
            "set_stream": functools.partial(setattr, self, "stream"),
            "get_sync_debug_mode": lambda: self.mode,
            "set_sync_debug_mode": self.set_mode,
            "is_current_stream_capturing": lambda: self.captures,
        }.items():
            monkeypatch.setattr(torch.cuda, name, function)

    @contextlib.contextmanager
    def graph(self, _graph: FakeGraph, *, stream: FakeStream, **_: Any) -> Generator[None]:
        """As torch's: after an error, the capture's stream stays the current one."""
        self.stream, self.captures = stream, True
        yield
        self.stream, self.captures = self.own, False

    def set_mode(self, mode: int | str) -> None:
        """As torch's, which warns once per process."""
        if not self.has_warned:
            self.has_warned = True
            warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=2)
        self.mode = mode

    def note(self) -> None:
        self.seen.append((torch.cuda.is_current_stream_capturing(), self.mode, self.captures))

    def recorder(self, *, falls_back: bool = True) -> Recorder:
        return Recorder(torch.device("cuda"), "llama", falls_back=falls_back)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    return Card(monkeypatch)


def test_work_branches_before_the_capture_as_within(card: Card):
    elsewhere: list[bool] = []

    def work(values: torch.Tensor) -> list[torch.Tensor]:
        card.note()
        with ThreadPoolExecutor(1) as other:
            elsewhere.append(other.submit(torch.cuda.is_current_stream_capturing).result())
        return [values + 1]

    recording = Recording(card.recorder(), work, [torch.tensor([1, 2])])
    assert card.seen == [(True, 0, False), (True, "error", False), (True, 0, True)]
    assert elsewhere[:2] == [False, False], "of another thread"
    assert (card.mode, card.stream) == (0, card.own)
    assert not torch.cuda.is_current_stream_capturing()
    assert recording([torch.tensor([1, 2])])[0].tolist() == [2, 3]
    assert len(card.seen) == 3, "replayed"


@pytest.mark.parametrize("late", [False, True], ids=["found before", "in the capture"])
def test_work_that_cannot_be_recorded_is_called_anew(card: Card, late: bool):
    def work(values: torch.Tensor) -> list[torch.Tensor]:
        if card.captures if late else card.mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        return [2 * values]

    recorder = card.recorder()
    with pytest.warns(SlowerWarning, match=r"cannot be recorded \(called a .*\) for this llama"):
        recording = Recording(recorder, work, [torch.tensor([1, 2])])
    card.captures = False  # what a failed capture leaves in torch is not ours to mend
    assert (card.mode, card.stream) == (0, card.own)
    assert gc.isenabled()
    for value in (5, 7):
        assert recording([torch.tensor([value, 1])])[0].tolist() == [2 * value, 2]
    Recording(recorder, work, [torch.tensor([1])])  # without a second warning
    card.captures = False
    trial = card.recorder(falls_back=False)
    with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
        Recording(trial, work, [torch.tensor([1])])
    card.captures = False
    assert (card.mode, card.stream) == (0, card.own)
    assert not torch.cuda.is_current_stream_capturing()


def test_idle_buffers_make_room_for_another(monkeypatch: pytest.MonkeyPatch):
    hf = tiny_hf("llama")
    model: Any = with_cuda_graphs(wrap_model(hf))
    decoder = SpeculativeDecoder(model, model, gamma=3, sampling=SAMPLINGS[0])
    decoder.generate(PROMPTS, 5, seed=1)
    gc.collect()
    caches = model.start_session()._caches
    assert caches._idle
    make, refused = model.decoder.new_cache, []

    def new_cache(*sizes: Any) -> Any:
        if caches._idle:
            refused.append(sizes)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return make(*sizes)

    monkeypatch.setattr(model.decoder, "new_cache", new_cache)
    texts = decoder.generate([PROMPTS[2]] * 8, 9, seed=1)
    assert refused
    assert [text.tokens for text in texts] == [generated(hf, PROMPTS[2], 9)] * 8


def test_experts_of_many_tokens_are_not_copied_for_each():
    """Products of experts in a batch need no host, and memory for each token."""
    model: Any = with_cuda_graphs(tiny_model("qwen3_moe"))
    copied = model.decoder._copy
    seen: list[str] = []
    forward = copied.forward

    def noted(*given: Any, **named: Any) -> Any:
        seen.append(copied.config._experts_implementation)
        return forward(*given, **named)

    copied.forward = noted
    for rows, count in ((1, 4), (1, 17), (8, 2), (8, 3)):
        held = model.start_session()
        held.prefill([[3, 4, 5]] * rows)
        held.extend(torch.full((rows, count), 7))
    assert seen == ["batched_mm", "grouped_mm", "batched_mm", "grouped_mm"]


def test_many_short_prompts_take_no_logits_of_each_other():
    """A recorded pass gives logits at the end of every row in each row."""
    hf = tiny_hf("llama")
    model = with_cuda_graphs(wrap_model(hf))
    counted: list[int] = []
    head = hf.get_output_embeddings()
    head.register_forward_hook(lambda _m, _in, out: counted.append(out.shape[0] * out.shape[1]))
    session_ = model.start_session()
    got = session_.prefill([[3, 4, 5]] * 64)
    assert max(counted) <= 1024
    plain = wrap_model(tiny_hf("llama")).start_session().prefill([[3, 4, 5]])
    torch.testing.assert_close(got, plain.expand(64, -1), rtol=1e-4, atol=1e-4)
