"""Checkpoints that are damaged, incomplete or of another kind: right, or one line that says why.

Constants of older ones are no weights; weights without a layer are an error; weights are counted.
"""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    CLIPConfig,
    CodeGenConfig,
    GPTBigCodeConfig,
    GPTNeoConfig,
    LEDConfig,
    LlamaConfig,
    MptConfig,
    PreTrainedModel,
    WhisperConfig,
)

from paceline.core.sampling import SamplingParams
from paceline.decode import AutoregressiveDecoder
from paceline.errors import ModelLoadError, UnsupportedModelError
from paceline.models import CausalModel, load_model, prepare_for_decoding, wrap_model
from paceline.models.checkpoint_files import refuse_not_finite
from paceline.models.drafts.layers import subset_layers
from paceline.models.drafts.save import save_draft
from paceline.models.hf.architectures import context_length, source_length
from paceline.models.inspection import inspect_model
from paceline.models.loading import load_head
from support.checkpoints import edit, fails
from support.models import LLAMA_LIKE, generated, tiny_hf, tiny_tokenizer


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_a_config_that_asks_for_tuples_gives_the_logits_of_transformers(tmp_path: Path, kind: str):
    hf = tiny_hf(kind)
    hf.save_pretrained(tmp_path)
    edit(tmp_path / "config.json", return_dict=False)
    source = [[5, 6, 7]]
    inputs = {"input_ids": torch.tensor(source)}
    if kind == "t5":
        inputs["decoder_input_ids"] = torch.tensor([[2]])
    with torch.inference_mode():
        wanted = hf(**inputs).logits[:, -1]
    found = load_model(tmp_path, "float32").start_session().prefill(source)
    torch.testing.assert_close(found, wanted)


def fp8(folder: Path, others: torch.dtype) -> torch.nn.Module:
    """A directory with layers in 8 bits, one scale for each matrix; the model of their values.

    `others`: how the other weights are stored.
    """
    hf: Any = tiny_hf("llama", vocab_size=266)
    hf.to(others).float()
    hf.save_pretrained(folder)
    stored: dict[str, torch.Tensor] = {}
    for key, weight in hf.state_dict().items():
        stored[key] = weight.to(others)
        if "_proj" in key:
            scale = weight.abs().max() / 448
            stored[key] = (weight / scale).to(torch.float8_e4m3fn)
            stored[f"{key}_scale_inv"] = scale.reshape(1, 1)
            weight.copy_(stored[key].float() * scale)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    edit(folder / "config.json", quantization_config=settings)
    return hf


@pytest.mark.parametrize("others", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_of_8_bits_are_unpacked_where_there_is_no_gpu(tmp_path: Path, others: torch.dtype):
    wanted = fp8(tmp_path / "model", others)
    for dtype in (torch.float16, torch.bfloat16):
        rounded = {key: weight.to(dtype) for key, weight in wanted.state_dict().items()}
        found = load_model(tmp_path / "model", dtype=dtype).hf
        torch.testing.assert_close(found.state_dict(), rounded, rtol=0, atol=0)
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    target = load_model(tmp_path / "model", dtype="float32")
    torch.testing.assert_close(target.hf.state_dict(), wanted.state_dict())
    save_draft(subset_layers(target, [0, 3]), tmp_path / "model", tmp_path / "draft")
    found = load_file(tmp_path / "draft" / "model.safetensors")
    assert {weight.dtype for weight in found.values()} == {torch.float32}
    assert "quantization_config" not in (tmp_path / "draft" / "config.json").read_text()
    assert load_model(tmp_path / "draft").hf.config.num_hidden_layers == 2


def test_a_product_that_needs_a_missing_package_is_one_line(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch
):
    """As those of 8 bits on a GPU, which transformers loads at their first use."""

    def without_kernels(*_: Any, **__: Any) -> Any:
        raise ImportError("finegrained-fp8 kernels need the `kernels` package")

    monkeypatch.setattr("paceline.models.admission.model.recall", lambda _key: None)
    monkeypatch.setattr(
        "transformers.models.llama.modeling_llama.LlamaMLP.forward", without_kernels
    )
    fails(model_directory, "need the `kernels` package")


def test_scales_and_not_numbers_of_8_bits_are_added_up():
    hf: Any = tiny_hf("llama")
    layer = hf.model.layers[0].mlp.up_proj
    layer.weight = torch.nn.Parameter(layer.weight.detach().to(torch.float8_e4m3fn), False)
    layer.scale = torch.nn.Parameter(torch.ones(1))
    refuse_not_finite("m", hf)
    layer.scale.data.fill_(float("nan"))
    with pytest.raises(ModelLoadError, match=r"m holds NaN in .*\.up_proj\.scale "):
        refuse_not_finite("m", hf)


QUANTIZED: dict[str, dict[str, Any]] = {
    "awq": {"bits": 4, "group_size": 128, "zero_point": True},
    "gptq": {"bits": 4, "group_size": 128},
    "bitsandbytes": {"load_in_4bit": True},
    "of_tomorrow": {},
}


@pytest.mark.parametrize("method", QUANTIZED)
def test_weights_of_a_quantizer_that_is_not_here_name_it_and_what_to_do(
    method: str, model_directory: Path
):
    settings = {"quant_method": method} | QUANTIZED[method]
    edit(model_directory / "config.json", quantization_config=settings)
    said = f"is quantized by {method}, which cannot be read here", "let vLLM serve it"
    fails(model_directory, *said, error=UnsupportedModelError)
    assert load_head(model_directory).head_weight.ndim == 2, "the head alone is not quantized"


def test_models_of_images_or_sound_and_code_that_comes_along_are_not_damage(model_directory: Path):
    for kind in (WhisperConfig, CLIPConfig):
        kind().save_pretrained(model_directory)
        said = f"{kind.model_type} is no language model"
        for read in (load_model, inspect_model):
            fails(model_directory, said, error=UnsupportedModelError, load=read)
    code = {"AutoConfig": "configuration_x.C", "AutoModelForCausalLM": "modeling_x.M"}
    marker = model_directory / "marker"
    for name in ("configuration_x", "modeling_x"):
        (model_directory / f"{name}.py").write_text(f"open({str(marker)!r}, 'w')")
    for kind in ("clip", "glm9"):  # transformers would ask whether to run it
        edit(model_directory / "config.json", model_type=kind, auto_map=code)
        said = "needs Python code that comes with it", "paceline.wrap_model"
        fails(model_directory, *said, error=UnsupportedModelError)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("key", "asked"),
    [
        ("attn_implementation", "flash_attention_2"),
        ("attn_implementation", "a/kernel"),
        ("attn_implementation", {"": "flash_attention_2"}),
        ("experts_implementation", "a/kernel"),
    ],
)
def test_code_of_the_hub_or_of_a_package_gives_way_to_that_of_pytorch(
    tmp_path: Path, key: str, asked: Any
):
    hf = tiny_hf()
    hf.save_pretrained(tmp_path)
    edit(tmp_path / "config.json", **{key: asked})
    with torch.inference_mode():
        wanted = hf(torch.tensor([[5, 6, 7]])).logits[:, -1]
    with pytest.warns(UserWarning, match=r"asks for (attn|experts)_implementation '.*PyTorch"):
        found = load_model(tmp_path, "float32")
    assert found.hf.config._attn_implementation in ("sdpa", "eager")
    torch.testing.assert_close(found.start_session().prefill([[5, 6, 7]]), wanted)


def test_the_context_has_other_names_in_some_architectures():
    assert context_length(MptConfig(max_seq_len=96)) == 96
    led = LEDConfig(max_decoder_position_embeddings=48, max_encoder_position_embeddings=80)
    assert (context_length(led), source_length(led)) == (48, 80)
    stale: Any = {"max_seq_len": 7}
    assert context_length(LlamaConfig(max_position_embeddings=64, **stale)) == 64


LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ORIGINAL = {"original_max_position_embeddings": 32}
LONG = {"short_factor": [1.0] * 48, "long_factor": [1.0] * 48}


@pytest.mark.parametrize(
    ("kind", "configured", "rope", "context"),
    [  # max_model_len of vLLM, by hand from `_get_and_verify_max_len`
        ("qwen2", 32, {"rope_type": "yarn", "factor": 4.0, **ORIGINAL}, 128),
        ("qwen2", 128, {"rope_type": "yarn", "factor": 4.0, **ORIGINAL}, 128),
        ("llama", 32, {"type": "yarn", "factor": 4.0}, 128),
        ("llama", 32, {"rope_type": "linear", "factor": 2.5}, 80),
        ("llama", 128, {"rope_type": "llama3", **LLAMA3, **ORIGINAL}, 128),
        ("phi3", 128, {"rope_type": "longrope", **LONG}, 32),
        ("gemma3_text", 128, {"full_attention": {"rope_type": "linear", "factor": 8.0}}, 128),
        ("olmo3", 32, {"full_attention": {"rope_type": "yarn", "factor": 4.0, **ORIGINAL}}, 128),
        # of vLLM 128: transformers rescales all positions behind 32
        ("llama", 32, {"rope_type": "dynamic", "factor": 4.0}, 32),
    ],
)
def test_the_context_of_scaled_positions_is_that_of_vllm(
    kind: str, configured: int, rope: dict[str, Any], context: int
):
    given: dict[str, Any] = {"rope_scaling": rope, **(ORIGINAL if kind == "phi3" else {})}
    if layers := rope.get("full_attention"):
        plain = {"rope_type": "default", "rope_theta": 1e4}
        given = {"rope_parameters": {"sliding_attention": plain, "full_attention": plain | layers}}
    config = AutoConfig.for_model(kind, max_position_embeddings=configured, **given)
    assert context_length(config) == context


def test_text_fills_the_context_of_scaled_positions_as_generate_does():
    rope = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, **ORIGINAL}
    hf = tiny_hf("llama", max_position_embeddings=32, rope_parameters=rope)
    hf.generation_config.eos_token_id = None
    prompt = [5, 9, 23, 8]
    for model in (wrap_model(hf), prepare_for_decoding(wrap_model(hf))):
        decoder = AutoregressiveDecoder(model, SamplingParams(temperature=0))
        (found,) = decoder.generate([prompt], 500, eos_token_ids=[])
        assert (len(found.tokens), found.stop_reason) == (124, "context")
        assert found.tokens == generated(hf, prompt, 124)


@pytest.mark.parametrize("zipped", [True, False])
def test_no_error_advises_to_run_the_code_in_pickled_weights(zipped: bool, tmp_path: Path):
    hf = tiny_hf()
    hf.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    stored = {**hf.state_dict(), "code": Path()}
    torch.save(stored, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    fails(tmp_path, "(pickled code is not run)")


@pytest.mark.parametrize(
    "settings",
    [
        {"architectures": ["LlamaForCausalLMEagle3"]},
        {"architectures": ["EagleLlamaForCausalLM"], "model_type": "eagle"},
        {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"},
        {"model_type": "medusa"},
        {"model_type": None, "medusa_num_heads": 3, "base_model_name_or_path": "a/b"},
        {"model_type": "mlp_speculator"},
    ],
    ids=str,
)
def test_a_head_in_place_of_a_draft_is_called_so(model_directory: Path, settings: dict[str, Any]):
    edit(model_directory / "config.json", **settings)
    fails(model_directory, "is a head that drafts", "paceline draft", error=UnsupportedModelError)
    fails(model_directory, "a head", error=UnsupportedModelError, load=inspect_model)


def test_weights_of_an_eagle_head_are_called_so_under_the_config_of_a_llama(model_directory: Path):
    """The first published ones have one layer, no head and no norm, and config.json of a Llama."""
    file = model_directory / "model.safetensors"
    whole = load_file(file)
    starts = ("model.layers.0.self_attn", "model.layers.0.mlp", "model.embed_tokens")
    kept = {key.removeprefix("model."): whole[key] for key in whole if key.startswith(starts)}
    kept["fc.weight"] = torch.ones(32, 64)
    save_file(kept, file, metadata={"format": "pt"})
    edit(model_directory / "config.json", num_hidden_layers=1)
    fails(model_directory, "is a head", "fc.weight", error=UnsupportedModelError)


_GPT = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
_GPT |= {"bos_token_id": 0, "eos_token_id": 1}
_NEO = {"vocab_size": 61, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "window_size": 4}
_NEO |= {"max_position_embeddings": 64, "attention_types": [[["global", "local"], 1]]}
_CAUSAL = torch.ones(1, 1, 64, 64, dtype=torch.bool).tril()


def extended(folder: Path, hf: PreTrainedModel, tensors: dict[str, torch.Tensor]) -> Path:
    """The model's directory, with more tensors in its file."""
    hf.save_pretrained(folder)
    file = folder / "model.safetensors"
    save_file(load_file(file) | tensors, file, metadata={"format": "pt"})
    return folder


def made(config: Any) -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(config).eval()


OLD: dict[str, tuple[Any, dict[str, torch.Tensor]]] = {
    "GPT-2": (lambda: tiny_hf("gpt2"), {"h.0.attn.masked_bias": torch.tensor(-1e4)}),
    "GPT-Neo": (
        lambda: made(GPTNeoConfig(**_NEO, eos_token_id=1)),
        {
            "transformer.h.0.attn.attention.bias": _CAUSAL,
            "transformer.h.1.attn.attention.bias": _CAUSAL & ~_CAUSAL.tril(-4),  # of a local layer
        },
    ),
    "CodeGen": (
        lambda: made(CodeGenConfig(**_GPT, rotary_dim=4)),
        {"transformer.h.0.attn.causal_mask": _CAUSAL},
    ),
    "StarCoder": (
        lambda: made(GPTBigCodeConfig(**_GPT)),
        {"transformer.h.0.attn.bias": _CAUSAL[0, 0]},
    ),
    "Llama 2": (
        lambda: tiny_hf("llama"),
        {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)},
    ),
    "an FP8 cache": (
        lambda: tiny_hf("qwen2"),
        {
            "model.layers.0.self_attn.k_scale": torch.tensor(1.0),
            "model.layers.0.self_attn.v_proj.output_scale": torch.tensor([1.0]),
        },
    ),
}


@pytest.mark.parametrize("name", OLD)
def test_constants_of_older_checkpoints_are_no_reason_to_refuse(tmp_path: Path, name: str):
    make, tensors = OLD[name]
    hf = make()
    model = load_model(extended(tmp_path / "m", hf, tensors), dtype="float32")
    batch = model.trial_batch([5, 6, 7])
    with torch.inference_mode():
        options: dict[str, Any] = {"decoder_input_ids": batch.tokens_BT} if batch.source else {}
        given = batch.source.tokens_BT if batch.source else batch.tokens_BT
        wanted = hf(input_ids=given, **options).logits
        torch.testing.assert_close(model.plain_logits(batch), wanted)


@pytest.mark.parametrize(
    ("key", "shape"),
    [
        ("model.layers.0.self_attn.q_proj.bias", (32,)),
        ("model.layers.0.self_attn.q_proj.weight_scale", (1,)),
        ("model.layers.4.mlp.up_proj.weight", (48, 32)),
        ("vision_tower.layers.0.mlp.up_proj.weight", (48, 32)),
    ],
)
def test_weights_that_a_config_has_no_layer_for_are_an_error(
    tmp_path: Path, key: str, shape: tuple[int, ...]
):
    folder = extended(tmp_path / "m", tiny_hf("llama"), {key: torch.zeros(shape)})
    fails(folder, "1 weights are in the file but not in the model, for example", key)


def by_hand(vocab: int = 61, *, heads: int = 2) -> int:
    """Weights of `LLAMA_LIKE`: embedding and head, four layers, norms."""
    layer = 32 * 32 * 2 + 2 * 16 * 32 + 3 * 48 * 32 + 2 * 32
    return heads * vocab * 32 + 4 * layer + 32


def test_parameters_of_shards_in_a_snapshot_are_those_that_the_index_names(tmp_path: Path):
    """A file of an earlier save lies beside them; files of the hub's cache are links."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots/1"
    snapshot.mkdir(parents=True)
    tiny_hf("llama").save_pretrained(blobs, max_shard_size="40KB")
    assert len(list(blobs.glob("model-*.safetensors"))) > 1
    tiny_hf("llama").save_pretrained(tmp_path / "older")
    (tmp_path / "older" / "model.safetensors").rename(blobs / "model-00001-of-00009.safetensors")
    for number, file in enumerate(sorted(blobs.iterdir())):
        file.rename(blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    assert inspect_model(snapshot).num_parameters == by_hand()
    assert load_model(snapshot).num_parameters == by_hand()


@pytest.mark.parametrize("own_head", [False, True])
def test_a_stored_head_counts_if_it_is_not_the_embedding(tmp_path: Path, *, own_head: bool):
    """As transformers, which ties two stored tensors only if they are equal.

    Facts without weights are those of the configuration.
    """
    hf: Any = made(LlamaConfig(vocab_size=61, **LLAMA_LIKE, tie_word_embeddings=True))
    head = torch.randn(61, 32) if own_head else hf.get_input_embeddings().weight.detach().clone()
    extended(tmp_path, hf, {"lm_head.weight": head})
    assert inspect_model(tmp_path).num_parameters == by_hand(heads=1)
    assert load_model(tmp_path).num_parameters == by_hand(heads=1 + own_head)


def test_parameters_of_a_bin_file_and_buffers_are_counted_right(tmp_path: Path):
    hf = tiny_hf("llama")
    hf.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    weights = hf.state_dict() | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    torch.save(weights, tmp_path / "pytorch_model.bin")
    counts = [read(tmp_path).num_parameters for read in (inspect_model, load_model)]
    assert counts == [by_hand()] * 2


@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16])
def test_weights_that_are_packed_in_4_bits_count_as_what_they_stand_for(
    monkeypatch: pytest.MonkeyPatch, storage: torch.dtype
):
    """bitsandbytes keeps two weights in a byte, whatever the type of the bytes."""
    packed: Any = type("Params4bit", (torch.nn.Parameter,), {})
    bitsandbytes: Any = ModuleType("bitsandbytes")
    bitsandbytes.nn = SimpleNamespace(Params4bit=packed)
    monkeypatch.setitem(sys.modules, "bitsandbytes", bitsandbytes)
    hf: Any = tiny_hf("llama")
    for layer in hf.model.modules():
        if isinstance(layer, torch.nn.Linear):
            count = layer.weight.numel() // (2 * storage.itemsize)
            layer.weight = packed(torch.zeros(count, 1, dtype=storage), requires_grad=False)
    hf.is_loaded_in_4bit = True
    assert CausalModel(hf).num_parameters == by_hand()
