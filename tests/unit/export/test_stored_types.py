"""An export is run in the type that it is stored in; heads with a bias; drafts of few positions."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPTJConfig

from paceline.config import validate
from paceline.errors import ExportError
from paceline.export import ExportConfig, Exported, export
from paceline.models import load_model
from support.models import tiny_hf, tiny_tokenizer
from support.runs import write_pair

TOKENS = torch.tensor([[5, 60, 261, 7, 200, 31, 262, 90]])


def run(folder: Path, **values: Any) -> Exported:
    given = {"model": folder / "draft", "out": folder / "out", "to": "vllm"} | values
    return export(validate(ExportConfig, {key: str(value) for key, value in given.items()}))


def saved(folder: Path, hf: Any) -> None:
    hf.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


def large(*, up: float, down: float) -> Any:
    """A model with large values between two matrices; RMS norms make the others small again."""
    hf: Any = tiny_hf("llama", vocab_size=266)
    layer = hf.model.layers[0].mlp
    layer.up_proj.weight.data *= up
    layer.down_proj.weight.data *= down
    return hf.to(torch.bfloat16)


def finite(hf: Any) -> bool:
    with torch.inference_mode():
        return bool(hf(TOKENS).logits.isfinite().all())


def test_activations_beyond_float16_are_an_error(tmp_path: Path):
    hf = large(up=300, down=3000)
    saved(tmp_path / "draft", hf)
    assert finite(hf)
    assert not finite(hf.half())
    with pytest.raises(ExportError, match=r"run in float16.*NaN or infinite.*--dtype: bfloat16"):
        run(tmp_path, dtype="float16")
    assert not (tmp_path / "out").exists()
    found = run(tmp_path)  # bfloat16, as it is stored
    assert found.checks.stored == "bfloat16"
    assert found.checks.stored_agreement is not None
    card = (tmp_path / "out" / "README.md").read_text()
    assert "Run in bfloat16, its logits are finite" in card


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_only_16_bits_are_run_once_more(tmp_path: Path, dtype: str):
    saved(tmp_path / "draft", tiny_hf("llama", vocab_size=266))
    found = run(tmp_path, dtype=dtype)
    assert found.checks.stored == (None if dtype == "float32" else dtype)


def test_an_encoder_decoder_is_run_in_float16_too(tmp_path: Path):
    hf: Any = tiny_hf("bart", vocab_size=266, max_position_embeddings=128)
    hf.model.decoder.layers[0].fc2.weight.data *= 5e4
    saved(tmp_path / "draft", hf.to(torch.bfloat16))
    with pytest.raises(ExportError, match="run in float16"):
        run(tmp_path, dtype="float16", to="transformers")
    assert run(tmp_path, to="transformers").checks.stored == "bfloat16"


@pytest.mark.parametrize("bake", [False, True])
def test_a_head_with_a_bias_gets_the_targets_rows(tmp_path: Path, *, bake: bool):
    torch.manual_seed(0)
    shape = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 4}
    shape |= {"bos_token_id": 0, "eos_token_id": 1}
    models = []
    for rows, name in ((280, "target"), (270, "draft")):
        hf: Any = AutoModelForCausalLM.from_config(GPTJConfig(vocab_size=rows, **shape))
        hf.lm_head.bias.data.normal_()
        hf.lm_head.weight.data.normal_()
        saved(tmp_path / name, hf)
        models.append(hf)
    options: dict[str, Any] = {"target": tmp_path / "target"}
    only = torch.tensor([5, 9, 77, 140])
    if bake:
        (tmp_path / "draft" / "draft_vocabulary.json").write_text('{"tokens": [5, 9, 77, 140]}')
        options["draft_vocabulary"] = "bake"
    run(tmp_path, **options)
    with torch.inference_mode():
        before = models[1].eval()(TOKENS).logits[0, :, :266]
        after = load_model(tmp_path / "out", dtype="float32").hf(TOKENS).logits[0]
    assert after.shape[-1] == 280
    kept = only if bake else torch.arange(266)
    torch.testing.assert_close(after[:, kept], before[:, kept], atol=1e-5, rtol=1e-5)
    others = torch.ones(280, dtype=torch.bool).index_fill(0, kept, value=False)
    mean = before[:, kept].mean(-1, keepdim=True).expand(-1, int(others.sum()))
    torch.testing.assert_close(after[:, others], mean, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("architecture", "positions"), [("gpt2", 64), ("llama", 64)])
def test_a_draft_with_fewer_learned_positions_is_noted(
    tmp_path: Path, architecture: str, positions: int
):
    write_pair(tmp_path, architecture=architecture)
    limit = "n_positions" if architecture == "gpt2" else "max_position_embeddings"
    wide = tiny_hf(architecture, vocab_size=266, **{limit: 128})
    saved(tmp_path / "target", wide)
    notes = run(tmp_path, target=tmp_path / "target").notes
    said = [note for note in notes if "limit the served context to 64" in note]
    assert len(said) == (1 if architecture == "gpt2" else 0), "rotary positions are extended"
