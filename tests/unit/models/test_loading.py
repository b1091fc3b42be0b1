"""Loading: what works, and one clear line for each thing that can be wrong with the place."""

import json
import shutil
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.errors import ModelLoadError, UsageError
from paceline.models import load_model, precision, wrap_model
from paceline.models.inspection import inspect_model
from paceline.models.loading import fingerprint, load_tokenizer
from paceline.models.precision import choose_precision
from paceline.train import align
from support.checkpoints import edit, fails
from support.models import save_tiny, tiny_hf
from support.runs import align_config, write_pair


def test_a_directory_gives_the_model_and_its_tokenizer(model_directory: Path):
    model = load_model(model_directory, dtype="float32", device="cpu")
    assert model.vocab_size == 266
    assert model.max_length == 64
    assert model.eos_token_ids == (1,)
    assert model.num_parameters == sum(weight.numel() for weight in model.hf.parameters())
    assert (model.dtype, model.device.type) == (torch.float32, "cpu")
    assert model.tokenizer is not None
    assert model.tokenizer.decode(model.tokenizer.encode("the cat, ünïcode")) == "the cat, ünïcode"
    assert not model.hf.training


def test_embedding_rows_beyond_the_tokenizer_do_not_count(model_directory: Path):
    tiny_hf("llama", vocab_size=320).save_pretrained(model_directory)
    model = load_model(model_directory)
    assert model.head_weight.shape[0] == 320
    assert model.start_session().prefill([[5]]).shape == (1, 266)


def test_a_directory_without_tokenizer_files_gives_a_model_without_one(model_directory: Path):
    for path in model_directory.glob("tokenizer*"):
        path.unlink()
    assert load_model(model_directory).tokenizer is None
    fails(model_directory, "has no tokenizer files", load=load_tokenizer)


def test_tied_embeddings_are_no_missing_weights(tmp_path: Path):
    tiny_hf("qwen2", tie_word_embeddings=True).save_pretrained(tmp_path / "tied")
    model = load_model(tmp_path / "tied")
    assert model.head_weight is model.hf.get_input_embeddings().weight


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_dtype_is_the_asked_one_or_the_precision_that_was_chosen(
    model_directory: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
):
    assert load_model(model_directory, dtype=dtype).dtype == getattr(torch, dtype)  # pyright: ignore
    if dtype != "float16":
        monkeypatch.setenv("PACELINE_PRECISION", dtype)
        assert load_model(model_directory, device="cpu").dtype == getattr(torch, dtype)


def lie_about_a_shape(data: bytes) -> bytes:
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    name = "model.norm.weight"
    header[name]["shape"] = [size * 2 for size in header[name]["shape"]]
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data[8 + length :]


def file(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """Change the bytes of a file."""
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes())) and None


def weights(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return file("model.safetensors", change)


def gone(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def config(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: edit(folder / "config.json", **changes)


WEIGHT = "model.layers.3.mlp.up_proj.weight"


def one(value: float, kind: torch.dtype = torch.float32) -> Callable[[Path], None]:
    """Set one value of a weight."""

    def change(folder: Path) -> None:
        path = folder / "model.safetensors"
        found = load_file(path)
        found[WEIGHT][5, 7] = value
        save_file({name: weight.to(kind) for name, weight in found.items()}, path, {"format": "pt"})

    return change


DAMAGED = ("cannot be read", "download it again")
WRONG: dict[str, tuple[Any, ...]] = {  # what is changed in a good directory, and words of the error
    "no config": (gone("config.json"), "does not hold config.json"),
    "no weights": (gone("model.safetensors"), "does not hold", "model.safetensors"),
    "cut weights": (weights(lambda data: data[: len(data) // 2]), *DAMAGED),
    "weights cut in the header": (weights(lambda data: data[:40]), *DAMAGED),
    "empty weights": (weights(lambda _: b""), *DAMAGED),
    "another header": (weights(lambda data: b"\xff" * 16 + data[16:]), *DAMAGED),
    "another shape": (weights(lie_about_a_shape), *DAMAGED),
    "cut config": (file("config.json", lambda data: data[:50]), *DAMAGED),
    "cut tokenizer": (file("tokenizer.json", lambda _: b"{"), *DAMAGED),
    "a layer too few": (config(num_hidden_layers=5), "9 weights are missing", "model.layers.4."),
    "narrower": (config(intermediate_size=40), "12 weights have a different size", "down_proj"),
    "unknown kind": (config(model_type="llama9"), "`llama9`", "does not recognize"),
    "no kind": (file("config.json", lambda _: b'{"learning_rate": 0.1}'), "model_type"),
    "not a number": (one(float("nan")), f"holds NaN in {WEIGHT} (1 of 1,536 values)"),
    "infinite": (one(float("inf"), torch.bfloat16), f"infinite values in {WEIGHT} (1 of 1,536"),
}


@pytest.mark.filterwarnings("ignore")  # of the quantizers
@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_with_a_directory_is_said(model_directory: Path, case: str):
    change, *words = WRONG[case]
    change(model_directory)
    fails(model_directory, *words)


def test_a_name_of_nothing_says_what_to_name():
    fails("nothing/at/all", "does not exist", "hub id")
    fails("nobody/nothing", "is not a local path or a hub id", "check the spelling")


@pytest.mark.parametrize("architecture", ["t5_v1_1", "marian"])
def test_an_encoder_decoder_comes_back_from_its_directory(tmp_path: Path, architecture: str):
    hf = save_tiny(tmp_path, architecture)
    model = load_model(tmp_path, dtype="float32", device="cpu")
    assert model.decoder_prompt == (2,)
    batch = model.trial_batch([5, 6], source=[7, 8, 9])
    with torch.inference_mode():
        torch.testing.assert_close(model.plain_logits(batch), wrap_model(hf).plain_logits(batch))


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The snapshot of someone/tiny in a cache of the hub, without files."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    place = tmp_path / "hub" / "models--someone--tiny"
    for folder in ("snapshots", "refs"):
        (place / folder).mkdir(parents=True)
    (place / "refs" / "main").write_text("0" * 40)
    return place / "snapshots" / ("0" * 40)


def test_a_hub_model_is_found_in_the_hub_cache_without_a_network_and_without_a_word(
    model_directory: Path,
    hub_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    shutil.copytree(model_directory, hub_cache)
    (hub_cache / "draft_vocabulary.json").write_text('{"tokens": [5, 9]}')
    model = load_model("someone/tiny")
    assert model.vocab_size == 266
    assert model.draft_vocabulary is not None
    assert model.draft_vocabulary.tolist() == [5, 9]
    assert model.tokenizer is not None
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("beside", ["a model", "nothing", "another base"])
def test_an_adapter_of_the_hub_is_refused_before_transformers_attaches_it(
    beside: str, model_directory: Path, hub_cache: Path, monkeypatch: pytest.MonkeyPatch
):
    """Its settings may name modules; those of a local directory are checked."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    shutil.copytree(model_directory, hub_cache)
    name = "someone/other" if beside == "another base" else None
    settings = {"peft_type": "LORA", "base_model_name_or_path": name, "megatron_core": "this"}
    (hub_cache / "adapter_config.json").write_text(json.dumps(settings))
    if beside == "nothing":
        (hub_cache / "model.safetensors").unlink()
    for read in (load_model, inspect_model):
        with pytest.raises(ModelLoadError, match=r"someone/tiny holds an adapter.* hf download it"):
            read("someone/tiny")


def test_a_hub_model_without_its_weights_is_known_by_its_configuration(
    model_directory: Path, hub_cache: Path
):
    """As after its tokenizer was read: a list of the weights, and none of them."""
    shutil.copytree(model_directory, hub_cache)
    (hub_cache / "model.safetensors").unlink()
    hf = tiny_hf("llama", vocab_size=266)
    hf.save_pretrained(hub_cache, max_shard_size="40KB")
    first, *others = sorted(hub_cache.glob("*.safetensors"))
    for gone in ([], others, [first]):  # others: a download that was interrupted
        for shard in gone:
            shard.unlink()
        assert inspect_model("someone/tiny").num_layers == hf.config.num_hidden_layers


def test_a_model_of_the_hub_is_known_by_its_commit_whatever_has_come_of_it(tmp_path: Path):
    snapshot = tmp_path / "models--a--b" / "snapshots" / ("0f" * 20)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    with patch("paceline.models.loading.model_directory", return_value=snapshot):
        before = fingerprint("a/b")
        (snapshot / "model.safetensors").write_bytes(b"weights")
        assert fingerprint("a/b") == before == ("0f" * 20)[:16]
    own = snapshot.rename(snapshot.with_name("mine"))
    with patch("paceline.models.loading.model_directory", return_value=own):
        before = fingerprint(own)
        (own / "model.safetensors").write_bytes(b"other weights")
        assert fingerprint(own) != before, "a place that is only called like the hub's"


@pytest.mark.parametrize("device", ["banana", "", "meta", "cuda:99"])
def test_a_device_that_does_not_work_is_named(model_directory: Path, device: str):
    load = partial(load_model, device=device)
    said = f"device {device!r} cannot be used", "auto, cpu"
    fails(model_directory, *said, error=UsageError, load=load)


@pytest.mark.parametrize("dtype", ["float8", "int8", torch.float8_e4m3fn, torch.int8])
def test_a_type_that_no_model_computes_in_is_named(model_directory: Path, dtype: Any):
    load = partial(load_model, dtype=dtype)
    fails(model_directory, "got dtype ", ", wanted auto, float32", error=UsageError, load=load)


def test_a_model_whose_logits_overflow_is_refused_and_one_of_large_finite_weights_is_not(
    model_directory: Path,
):
    path = model_directory / "model.safetensors"
    weights = {name: weight.half() for name, weight in load_file(path).items()}
    rows = weights["model.embed_tokens.weight"]
    large = rows.clone().index_fill_(1, torch.tensor([0]), 60000.0)  # their sum overflows
    save_file(weights | {"model.embed_tokens.weight": large}, path, {"format": "pt"})
    assert load_model(model_directory, dtype="float16").dtype == torch.float16
    weights["model.layers.3.mlp.up_proj.weight"].fill_(60000.0)
    save_file(weights, path, {"format": "pt"})
    said = "logits of this llama are NaN or infinite in float16"
    fails(model_directory, said, load=partial(load_model, dtype="float16"))
    assert load_model(model_directory, dtype="float32").dtype == torch.float32


CPU = torch.device("cpu")


def test_bfloat16_needs_amx_or_a_card_with_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(precision.VARIABLE)
    for level, wanted in (("avx2", "float32"), ("avx512_bf16", "float32"), ("amx", "bfloat16")):
        monkeypatch.setattr(precision, "level", lambda level=level: level)
        assert choose_precision(CPU) == (wanted, f"the faster precision of processor level {level}")
    for native, wanted in ((False, "float32"), (True, "bfloat16")):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda native=native, **_: native)
        assert choose_precision(torch.device("cuda")).precision == wanted


def test_the_variable_overrides_and_a_wrong_one_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(precision.VARIABLE, "float32")
    assert choose_precision(CPU) == ("float32", "PACELINE_PRECISION is set")
    monkeypatch.setenv(precision.VARIABLE, "int4")
    with pytest.raises(UsageError, match="'int4', wanted float32 or bfloat16"):
        choose_precision(CPU)


def test_a_run_says_what_it_chose_and_keeps_it_when_it_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = write_pair(tmp_path / "pair")
    monkeypatch.setenv(precision.VARIABLE, "bfloat16")
    recipe = {"draft_fraction": 1.0, "fixed_fraction": 0.0, "precision": "auto"}
    config = align_config(folder, tmp_path / "run", **recipe)
    run = align(config)
    chosen = {"precision": "bfloat16", "reason": "PACELINE_PRECISION is set"}
    choices = json.loads((run / "manifest.json").read_text())["choices"]
    assert choices == {"precision": chosen}
    monkeypatch.setenv(precision.VARIABLE, "float32")
    longer = config.model_copy(update={"num_steps": (config.num_steps or 0) + 1})
    align(longer, resume=True)
    assert json.loads((run / "manifest.json").read_text())["choices"] == choices
