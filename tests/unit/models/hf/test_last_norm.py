"""States before the last norm become those that the head reads: against whole models."""

from pathlib import Path

import pytest
import torch

from paceline.models import wrap_model
from paceline.models.hf.causal import for_head, last_norm
from paceline.models.loading import load_head
from support.models import save_tiny

TEXT = [5, 9, 3, 7, 12, 4]
NORMS = {
    "llama": "model.norm",
    "gemma3_text": "model.norm",
    "granite": "model.norm",
    "cohere2": "model.norm",
    "gpt2": "transformer.ln_f",
    "gpt_neox": "gpt_neox.final_layer_norm",
    "qwen3_5_text": "model.norm",
    "lfm2": "model.embedding_norm",
    "nemotron_h": "model.norm_f",
}


@pytest.mark.parametrize("kind", NORMS)
def test_the_norm_of_a_checkpoint_without_its_layers_is_found(kind: str, tmp_path: Path):
    hf = save_tiny(tmp_path, kind)
    before: list[torch.Tensor] = []
    norm = hf.get_submodule(NORMS[kind])
    norm.register_forward_pre_hook(lambda _, inputs: before.append(inputs[0]))
    model = wrap_model(hf)
    before.clear()
    with torch.inference_mode():
        wanted_TD = model.hidden(model.trial_batch(TEXT))[0]
    head = load_head(tmp_path, dtype="float32")
    states_TD = next(one[0] for one in before if one.shape[1] == len(TEXT))
    with torch.inference_mode():
        got_TD = for_head(last_norm(head)(states_TD[None])[0], head.hf)
    torch.testing.assert_close(got_TD, wanted_TD, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(states_TD, wanted_TD, atol=1e-2)
