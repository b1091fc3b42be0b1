"""A model that is larger than a GPU: when it is spread, and that it reads as on one device.

`NamedDevices` pretends that there are several; the last tests use real ones.
"""

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import accelerate
import pytest
import torch

from paceline.core.sampling import SamplingParams
from paceline.decode import SpeculativeDecoder
from paceline.errors import UnsupportedModelError, UsageError
from paceline.models import HfModel, load_model, loading, prepare_for_decoding, wrap_model
from paceline.models.admission.trial import play
from paceline.models.drafts.layers import subset_layers
from paceline.models.hf.base import recorded_hidden_states
from paceline.models.hf.spreading import SHARE, num_bytes
from paceline.models.prepare import training_writer, with_cuda_graphs
from paceline.models.recorded.fixed_pass import can_record
from support.devices import NamedDevices, device_of, halves, spread
from support.models import tiny_hf, tiny_model

if TYPE_CHECKING:
    from collections.abc import Callable

SOURCE = [20, 21, 22]

pytestmark = [
    pytest.mark.filterwarnings("ignore:User provided device_type of 'cuda'"),  # autocast, off
    pytest.mark.filterwarnings("ignore:The following device_map keys"),  # a buffer of BART
]


# what is spread


@pytest.fixture(autouse=True)
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs that are not there have a name, too."""
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "pretended")


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Free bytes of GPUs that are not there; models are loaded to named devices instead."""
    free: list[float] = []
    plain = loading.with_weights

    def placed(location: Any, config: Any, dtype: torch.dtype, place: Any) -> Any:
        hf, info = plain(location, config, dtype)
        return (spread(hf, halves(hf)) if place == "auto" else hf), info

    monkeypatch.setattr("torch.cuda.device_count", lambda: len(free))
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda card: (free[card] - 1000, 1 << 40))
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda _: 1500)
    monkeypatch.setattr("torch.cuda.memory_allocated", lambda _: 500)
    monkeypatch.setattr(loading, "find_device", lambda _: torch.device("cpu"))
    monkeypatch.setattr(loading, "with_weights", placed)
    return free


SIZE = num_bytes(tiny_hf("llama", vocab_size=266), torch.float32)
"""Of the model in `model_directory`."""


def test_a_model_is_spread_if_the_first_card_cannot_hold_it(
    model_directory: Path, cards: list[float]
):
    cards += [0.7 * SIZE, 0.7 * SIZE]
    with NamedDevices():
        model = load_model(model_directory, dtype="float32")
        devices = [str(weight.device) for weight in model.hf.parameters()]
    assert set(devices) == {"cuda:0", "cuda:1"}
    assert devices[0] == devices[-1] == "cuda:0", "embeddings and head"


@pytest.mark.parametrize(
    ("shares", "device", "parent"),
    [
        ([1.01, 0.1], "auto", None),
        ([0.5], "auto", None),
        ([0.6, 0.6], "cpu", None),
        ([0.6, 0.6], "auto", "the process that started this one"),
    ],
    ids=["it fits the first", "there is one", "a device is named", "a worker has one"],
)
def test_else_it_is_on_one_device(
    shares: list[float],
    device: str,
    parent: str | None,
    model_directory: Path,
    cards: list[float],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(loading, "parent_process", lambda: parent)
    cards += [share * SIZE / SHARE for share in shares]
    with NamedDevices():
        model = load_model(model_directory, dtype="float32", device=device)
        assert {str(weight.device) for weight in model.hf.parameters()} == {"cpu"}


# it reads as on one device


def check(model: HfModel, plain: Any, first: str = "cuda:0") -> None:
    """Sessions, hidden states and head give the logits of the plain pass, on the first device."""
    source = [] if model.decoder_prompt is None else SOURCE
    text = [*(model.decoder_prompt or ()), 3, 4, 5, 6, 7]
    encoded = {"input_ids": torch.tensor([source])} if source else {}
    name = "decoder_input_ids" if source else "input_ids"
    with torch.no_grad():
        wanted_TV = plain(**encoded, **{name: torch.tensor([text])}, use_cache=False).logits[0]

    def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
        assert str(device_of(got) if hasattr(got, "_named") else got.device) == first
        torch.testing.assert_close(got.cpu(), wanted, rtol=1e-4, atol=3e-5)

    assert str(model.hf.device) == first
    assert model.sessions == "batch"
    assert play(model).largest < 1e-3
    head = model.head
    session, batch = model.start_session(), model.trial_batch(text[1:] if source else text, source)
    with torch.inference_mode(), recorded_hidden_states(model) as seen:
        if source:
            session.prefill([SOURCE[::-1], SOURCE])
        else:
            session.prefill([[9, 8, 7], text[:1]])
        session.extend(torch.tensor([[9, 9, 9], text[1:4]]))
        session.rollback([2, 1])
        session.keep_rows([1])
        close(session.extend(torch.tensor([text[3:]]))[0], wanted_TV[3:])
        close(head.logits(seen[-1][0]), wanted_TV[3:])
        close(head.logits(model.hidden(batch))[0], wanted_TV)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gpt2", "gemma2", "t5", "bart"])
def test_a_spread_model_gives_the_logits_of_a_plain_one_and_no_faster_pass(architecture: str):
    hf = tiny_hf(architecture)
    plain = copy.deepcopy(hf)
    with NamedDevices():
        model = wrap_model(spread(hf, halves(hf)))
        check(model, plain)
        check_unprepared(model)


@pytest.mark.parametrize("architecture", ["llama", "t5"])
def test_hooks_without_several_devices_are_left_alone(architecture: str):
    hf = tiny_hf(architecture)
    plain = copy.deepcopy(hf)
    accelerate.dispatch_model(hf, {"": "cpu"}, force_hooks=True)
    model = wrap_model(hf)
    check(model, plain, "cpu")
    check_unprepared(model)


def check_unprepared(model: HfModel) -> None:
    """No faster pass is made of the model, and no draft of its layers."""
    prepare: list[Callable[[HfModel], HfModel]] = [
        *(prepare_for_decoding, training_writer, with_cuda_graphs)
    ]
    assert all(make(model) is model for make in prepare)
    assert not can_record(model)
    with pytest.raises(UsageError, match="int8 weights need"):
        prepare_for_decoding(model, "int8")
    with pytest.raises(UnsupportedModelError, match="spread over several devices"):
        subset_layers(model, [0])


def test_a_draft_decodes_with_a_spread_target():
    def texts(target: Any) -> list[list[int]]:
        draft = wrap_model(tiny_hf("llama", seed=1, num_hidden_layers=1))
        decoder = SpeculativeDecoder(target, draft, gamma=3, sampling=SamplingParams())
        return [each.tokens for each in decoder.generate([[3, 4, 5], [6, 7]], 12, seed=1)]

    hf = tiny_hf("llama")
    with NamedDevices():
        got = texts(wrap_model(spread(hf, halves(hf))))
    assert got == texts(tiny_model("llama"))


@pytest.mark.parametrize("part", ["model.layers", "lm_head"])
def test_a_part_on_disk_is_one_line(part: str, tmp_path: Path):
    hf = tiny_hf("llama")
    cards = dict.fromkeys(("model.embed_tokens", "model.rotary_emb", "model.norm"), "cpu")
    cards |= {"model.layers": "cpu", "lm_head": "cpu", part: "disk"}
    accelerate.dispatch_model(hf, cast("Any", cards), cast("Any", "cpu"), offload_dir=tmp_path)
    with pytest.raises(UnsupportedModelError, match="weights in host memory or on disk"):
        wrap_model(hf)


# real devices


@pytest.mark.cuda
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "t5", "bart"])
def test_layers_on_a_gpu_and_on_the_cpu_give_the_logits_of_a_plain_model(architecture: str):
    hf = tiny_hf(architecture)
    plain, cards = copy.deepcopy(hf), halves(hf)
    devices: Any = {name: 0 if card else "cpu" for name, card in cards.items()}
    skipped = hf._skip_keys_device_placement
    accelerate.dispatch_model(hf, devices, cast("Any", "cpu"), skip_keys=skipped)
    assert {weight.device.type for weight in hf.parameters()} == {"cpu", "cuda"}
    check(wrap_model(hf), plain, "cpu")


@pytest.mark.cuda(cards=2)
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "t5", "bart"])
def test_two_gpus_give_the_logits_of_a_plain_model(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    hf = tiny_hf(architecture)
    hf.save_pretrained(tmp_path)
    size = num_bytes(hf, torch.float32)
    monkeypatch.setattr(loading, "_free_bytes", lambda _card: 0.75 * size / SHARE)
    model = load_model(tmp_path, dtype="float32")
    assert {str(weight.device) for weight in model.hf.parameters()} == {"cuda:0", "cuda:1"}
    check(model, hf, "cuda:0")
